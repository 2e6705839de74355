-- Jobs of the rekey engine. Its functions and workers write here as the bootstrap superuser; nobody else may.

CREATE TABLE pagevault.rekey_jobs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    relation oid NOT NULL,
    relation_name text NOT NULL, -- for when it is gone
    kind text NOT NULL CHECK (kind IN ('encrypt', 'rotate', 'decrypt')),
    cipher text,
    state text NOT NULL DEFAULT 'waiting'
        CHECK (state IN ('waiting', 'running', 'paused', 'done', 'cancelled', 'failed')),
    begun pg_catalog.jsonb NOT NULL DEFAULT '{}', -- relation OID: number of the file whose key was changed
    pages_done bigint NOT NULL DEFAULT 0,
    pages_total bigint NOT NULL DEFAULT 0,
    bytes_per_second double precision,
    requested_by text NOT NULL DEFAULT session_user,
    requested_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    started_at timestamptz,
    finished_at timestamptz,
    error text
);

CREATE UNIQUE INDEX rekey_jobs_unfinished ON pagevault.rekey_jobs (relation)
    WHERE state IN ('waiting', 'running', 'paused');

CREATE VIEW pagevault.rekey_progress AS
    SELECT j.id AS job,
           CASE WHEN c.oid IS NULL THEN j.relation_name ELSE c.oid::pg_catalog.regclass::text END AS relation,
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
           j.requested_by, j.requested_at, j.started_at, j.finished_at, j.error
      FROM pagevault.rekey_jobs j
      LEFT JOIN pg_catalog.pg_class c ON c.oid = j.relation;
COMMENT ON VIEW pagevault.rekey_progress IS 'relations that are being encrypted, decrypted or given new data keys, and how far that is';
