-- What pagevault tells in one database; one JSON document. Only a function of the extension is
-- called: others of its name may belong to anybody.
BEGIN TRANSACTION READ ONLY;
SET LOCAL search_path = pg_catalog;
SET LOCAL lock_timeout = '30s';
SET LOCAL timezone = 'UTC';
SELECT EXISTS (
    SELECT FROM pg_extension e JOIN pg_depend d ON d.refclassid = 'pg_extension'::regclass
       AND d.refobjid = e.oid AND d.classid = 'pg_proc'::regclass AND d.deptype = 'e'
     WHERE e.extname = 'pagevault' AND d.objid = to_regprocedure('pagevault.report(boolean)')
) AS report \gset
\if :report
    SELECT loaded AS report FROM pagevault.status \gset
\endif
\if :report
    SELECT pagevault.report(:check_files);
\else
    SELECT jsonb_build_object('database', jsonb_build_object(
        'name', current_database(),
        'extension_version', (SELECT extversion FROM pg_extension WHERE extname = 'pagevault'),
        'labels', (SELECT count(*) FROM pg_seclabel WHERE provider = 'pagevault')
                + (SELECT count(*) FROM pg_shseclabel s JOIN pg_database d ON d.oid = s.objoid
                    WHERE s.provider = 'pagevault' AND d.datname = current_database()
                      AND s.classoid = 'pg_database'::regclass)));
\endif
COMMIT;
