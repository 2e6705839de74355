-- The view of rekey jobs, which are in the keystore, not in tables.

CREATE VIEW pagevault.rekey_jobs AS
    SELECT j.job,
           (SELECT c.oid::pg_catalog.regclass FROM pg_catalog.pg_class c WHERE c.oid = j.relation) AS relation,
           j.kind, j.state, j.pages_done, j.pages_total,
           CASE WHEN j.state = 'done' THEN 100.0
                WHEN j.pages_total = 0 THEN 0.0
                ELSE pg_catalog.round(least(100.0, 100.0 * j.pages_done / j.pages_total), 1)
           END AS percent,
           CASE WHEN j.state = 'running' THEN pg_catalog.round((j.bytes_per_second / 1048576)::numeric, 1) END AS mb_per_second,
           CASE WHEN j.state = 'running' AND j.bytes_per_second > 0 THEN
                pg_catalog.make_interval(secs => pg_catalog.round((greatest(j.pages_total - j.pages_done, 0)
                    * pg_catalog.current_setting('block_size')::bigint / j.bytes_per_second)::numeric)::double precision)
           END AS eta,
           CASE WHEN j.requested_by IS NULL THEN 'pagevault.rotate_data_key_after'
                WHEN j.requested_by = 1 THEN 'interim keys'
                ELSE pg_catalog.pg_get_userbyid(j.requested_by)::text COLLATE pg_catalog."default"
           END AS requested_by,
           j.requested_at, j.started_at, j.finished_at, j.error,
           w.waits_for, w.waits_since
      FROM pagevault.rekey_job_rows() j
      LEFT JOIN LATERAL (
            -- Who has what the worker waits for or, between two attempts, locks the relation; 0 is a prepared transaction.
            SELECT pg_catalog.array_agg(DISTINCT b.pid) AS waits_for,
                   min(CASE WHEN b.pid = 0 THEN p.prepared ELSE a.xact_start END) AS waits_since
              FROM (SELECT pg_catalog.unnest(pg_catalog.pg_blocking_pids(j.worker)) AS pid
                    UNION ALL
                    SELECT coalesce(l.pid, 0)
                      FROM pg_catalog.pg_locks l
                     WHERE j.worker IS NULL AND j.state = 'waiting' AND l.locktype = 'relation' AND l.mode = 'AccessExclusiveLock' AND l.granted
                       AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())
                       AND l.relation = j.relation) b
              LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = b.pid
              LEFT JOIN pg_catalog.pg_prepared_xacts p ON b.pid = 0 AND p.database = pg_catalog.current_database()
           ) w ON true;
COMMENT ON VIEW pagevault.rekey_jobs IS 'jobs that encrypt, decrypt, or rotate the data keys of relations, and their progress';
