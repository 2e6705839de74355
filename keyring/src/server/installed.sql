-- SHA-256 of the files that pagevault consists of on the server; null if they may not be read.
BEGIN TRANSACTION READ ONLY;
SET LOCAL search_path = pg_catalog;
SELECT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) AS superuser \gset
\if :superuser
    SELECT jsonb_object_agg(what, CASE WHEN size > 0 THEN
               encode(sha256(pg_read_binary_file(path, 0, size, true)), 'hex') END)
      FROM (SELECT what, path, (pg_stat_file(path, true)).size
              FROM (SELECT 'library' AS what, setting || '/pagevault.so' AS path
                      FROM pg_config() WHERE name = 'PKGLIBDIR'
                    UNION ALL
                    SELECT 'helper', keyring_command FROM pagevault.status) f) f;
\else
    SELECT '{}';
\endif
COMMIT;
