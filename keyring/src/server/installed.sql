-- SHA-256 of the files that pagevault consists of on the server; null if they may not be read. No
-- object of the database is read: it may be anybody's. The settings are the server's own, or a
-- superuser's; without the library there is none of pagevault, and what a database says in its place
-- is not shown here.
--
-- The library is looked for as the server does (find_in_dynamic_libpath, dfmgr.c), the helper as
-- the library does, but not in PATH.
BEGIN TRANSACTION READ ONLY;
SET LOCAL search_path = pg_catalog, pg_temp;
SELECT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) AS superuser \gset
\if :superuser
    WITH built AS (
        SELECT name, setting FROM pg_config() WHERE name IN ('PKGLIBDIR', 'BINDIR')
    ), folders AS (
        SELECT f.rank, replace(f.folder, '$libdir', b.setting) AS folder
          FROM string_to_table(current_setting('dynamic_library_path'), ':')
               WITH ORDINALITY f (folder, rank), built b
         WHERE b.name = 'PKGLIBDIR'
    ), named AS (
        SELECT setting AS command FROM pg_settings
         WHERE name = 'pagevault.keyring_command' AND context = 'sighup'
    ), files AS (
        SELECT 'library' AS what, rank, folder || '/pagevault.so' AS path FROM folders
        UNION ALL
        SELECT 'helper', 0, command FROM named WHERE command <> ''
        UNION ALL
        SELECT 'helper', rank, folder || '/../bin/pagevault-keyring'
          FROM folders, named WHERE command = ''
        UNION ALL
        SELECT 'helper', 1000000, setting || '/pagevault-keyring'
          FROM built, named WHERE name = 'BINDIR' AND command = ''
    ), found AS (
        SELECT what, rank, path, (pg_stat_file(path, true)).size FROM files
    ), first AS (
        SELECT DISTINCT ON (what) what,
               CASE WHEN size > 0 THEN
                   encode(sha256(pg_read_binary_file(path, 0, size, true)), 'hex') END AS sum
          FROM found ORDER BY what, size IS NULL, rank
    )
    SELECT jsonb_object_agg(what, sum) FROM first;
\else
    SELECT '{}';
\endif
COMMIT;
