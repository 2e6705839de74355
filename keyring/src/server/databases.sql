-- What a server tells from its tables without pagevault, and of all its databases; one JSON document.
BEGIN TRANSACTION READ ONLY;
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL lock_timeout = '30s';
SELECT jsonb_build_object(
    'slots', (
        SELECT coalesce(jsonb_agg(slot_name ORDER BY slot_name), '[]')
          FROM pg_replication_slots WHERE NOT temporary),
    'checkpointer', (SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'),
    'databases', (
        SELECT jsonb_agg(jsonb_build_object(
                   'name', datname,
                   'open', datallowconn AND datconnlimit <> -2,
                   'bytes', CASE WHEN has_database_privilege(oid, 'CONNECT')
                            THEN pg_database_size(oid) END) ORDER BY datname)
          FROM pg_database));
COMMIT;
