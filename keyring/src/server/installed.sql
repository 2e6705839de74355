-- SHA-256 of the files that pagevault consists of on the server; null if they may not be read. No
-- object of the database is read: it may be anybody's. The setting is the server's own; without the
-- library there is none, and what a database says in its place is not shown here.
BEGIN TRANSACTION READ ONLY;
SET LOCAL search_path = pg_catalog, pg_temp;
SELECT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) AS superuser \gset
\if :superuser
    SELECT jsonb_object_agg(what, CASE WHEN size > 0 THEN
               encode(sha256(pg_read_binary_file(path, 0, size, true)), 'hex') END)
      FROM (SELECT what, path, (pg_stat_file(path, true)).size
              FROM (SELECT 'library' AS what, setting || '/pagevault.so' AS path
                      FROM pg_config() WHERE name = 'PKGLIBDIR'
                    UNION ALL
                    SELECT 'helper', CASE s.setting WHEN '' THEN c.setting || '/pagevault-keyring'
                                     ELSE s.setting END
                      FROM pg_settings s, pg_config() c
                     WHERE s.name = 'pagevault.keyring_command' AND s.context = 'sighup'
                       AND c.name = 'BINDIR') f) f;
\else
    SELECT '{}';
\endif
COMMIT;
