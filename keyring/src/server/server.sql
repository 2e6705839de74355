-- What a server tells without pagevault; one JSON document. No table is read: a server without the
-- library may be unable to read statistics, which the planner asks for.
BEGIN TRANSACTION READ ONLY;
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL lock_timeout = '30s';
SET LOCAL timezone = 'UTC';
-- What the files say for the next start; without the right to see them, nothing.
SELECT has_table_privilege('pg_file_settings', 'SELECT')
   AND has_function_privilege('pg_show_all_file_settings()', 'EXECUTE') AS files \gset
\set next '{}'
\if :files
    SELECT coalesce(jsonb_object_agg(s.name, CASE WHEN s.source = 'command line' THEN s.setting
               ELSE coalesce((SELECT f.setting FROM pg_file_settings f
                               WHERE f.name = s.name ORDER BY f.seqno DESC LIMIT 1), s.boot_val)
               END), '{}') AS next
      FROM pg_settings s
     WHERE s.name IN ('shared_preload_libraries', 'max_worker_processes') \gset
\endif
SELECT jsonb_build_object(
    'made_at', now(),
    'version', current_setting('server_version'),
    'in_recovery', pg_is_in_recovery(),
    'is_local', inet_server_addr() IS NULL,
    'started_at', pg_postmaster_start_time(),
    'up_seconds', extract(epoch FROM now() - pg_postmaster_start_time())::int8,
    'cluster_id', (SELECT system_identifier::text FROM pg_control_system()),
    'database', current_database(),
    'role', current_user,
    'settings', (
        SELECT jsonb_object_agg(name, current_setting(name)) FROM pg_settings
         WHERE name IN ('shared_preload_libraries', 'max_worker_processes', 'max_parallel_workers',
                        'data_checksums', 'full_page_writes', 'archive_mode', 'wal_level',
                        'data_directory', 'block_size', 'pagevault.rekey_workers')),
    'revalidate_seconds', (
        SELECT setting::int8 FROM pg_settings WHERE name = 'pagevault.revalidate_interval'),
    'at_next_start', :'next'::jsonb,
    'installed_version', (
        SELECT default_version FROM pg_available_extensions() WHERE name = 'pagevault'));
COMMIT;
