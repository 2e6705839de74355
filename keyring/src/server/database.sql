-- What pagevault tells in one database; one JSON document. Only what belongs to the extension is
-- read or called: a schema of its name, and all that is in it, may be anybody's.
BEGIN TRANSACTION READ ONLY;
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL lock_timeout = '30s';
SET LOCAL timezone = 'UTC';
SELECT count(*) = 2 AS report
  FROM pg_extension e
  JOIN pg_depend d ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
 WHERE e.extname = 'pagevault' AND d.deptype = 'e'
   AND (d.classid, d.objid) IN (
        SELECT 'pg_proc'::regclass, p.oid
          FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
         WHERE n.nspname = 'pagevault' AND p.proname = 'report'
           AND p.proargtypes::text = 'bool'::regtype::oid::text
        UNION ALL
        SELECT 'pg_class'::regclass, c.oid
          FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE n.nspname = 'pagevault' AND c.relname = 'status') \gset
-- Those who can replace them: owners of its objects and of the schema, who were superusers once.
SELECT coalesce(min(rolname), '') AS owner, count(*) > 0 AS owned
  FROM pg_roles
 WHERE NOT rolsuper AND oid IN (
        SELECT unnest(ARRAY[e.extowner, n.nspowner, p.proowner, c.relowner])
          FROM pg_extension e
          LEFT JOIN pg_depend d ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
                               AND d.deptype = 'e'
          LEFT JOIN pg_proc p ON d.classid = 'pg_proc'::regclass AND p.oid = d.objid
          LEFT JOIN pg_class c ON d.classid = 'pg_class'::regclass AND c.oid = d.objid
          LEFT JOIN pg_namespace n ON n.nspname = 'pagevault'
         WHERE e.extname = 'pagevault') \gset
\if :owned
    \set report false
\endif
\if :report
    SELECT loaded AS report FROM pagevault.status \gset
\endif
\if :report
    SELECT pagevault.report(:check_files);
\else
    SELECT jsonb_build_object('database', jsonb_build_object(
        'name', current_database(),
        'extension_version', (SELECT extversion FROM pg_extension WHERE extname = 'pagevault'),
        -- Of a role that may have put something else in the place of an object.
        'extension_owner', CASE WHEN :'owned'::bool THEN :'owner' END,
        -- CREATE EXTENSION would refuse it, and functions in it are not the extension's.
        'foreign_schema', NOT EXISTS (SELECT FROM pg_extension WHERE extname = 'pagevault')
            AND EXISTS (
                SELECT FROM pg_namespace n
                 WHERE n.nspname = 'pagevault'
                   AND (n.nspowner NOT IN (SELECT oid FROM pg_roles WHERE rolsuper)
                        OR EXISTS (SELECT FROM pg_depend d
                                    WHERE d.refclassid = 'pg_namespace'::regclass
                                      AND d.refobjid = n.oid))),
        'labels', (SELECT count(*) FROM pg_seclabel WHERE provider = 'pagevault')
                + (SELECT count(*) FROM pg_shseclabel s JOIN pg_database d ON d.oid = s.objoid
                    WHERE s.provider = 'pagevault' AND d.datname = current_database()
                      AND s.classoid = 'pg_database'::regclass),
        -- Tables and the like that the policy reaches from outside: the label of their tablespace,
        -- else the setting.
        'reached', (
            SELECT count(*)
              FROM pg_class c
              JOIN pg_database d ON d.datname = current_database()
              LEFT JOIN pg_shseclabel s
                     ON s.provider = 'pagevault' AND s.classoid = 'pg_tablespace'::regclass
                    AND s.objoid = CASE c.reltablespace WHEN 0 THEN d.dattablespace
                                   ELSE c.reltablespace END
             WHERE c.oid >= 16384 AND c.relkind IN ('r', 'm', 'S') AND c.relpersistence <> 't'
               AND CASE WHEN s.label IS NULL
                   THEN current_setting('pagevault.default_encryption', true) = 'on'
                   ELSE s.label LIKE 'encrypted%' END)));
\endif
COMMIT;
