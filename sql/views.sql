-- Views, all comments, and all grants.

CREATE VIEW pagevault.status AS
    SELECT * FROM pagevault.status_rows();
COMMENT ON VIEW pagevault.status IS 'state of pagevault in this server';

CREATE VIEW pagevault.providers AS
    SELECT * FROM pagevault.provider_rows();
COMMENT ON VIEW pagevault.providers IS 'key providers, their options, and how they answered when they were last asked';

CREATE VIEW pagevault.database_keys AS
    SELECT CASE WHEN k.scope IS NULL THEN 'cluster' ELSE 'database' END AS scope,
           d.datname AS database,
           k.version, k.provider, k.master_key, k.master_key_version, k.state, k.wrapped_at
      FROM pagevault.database_key_rows() k
      LEFT JOIN pg_catalog.pg_database d ON d.oid = k.scope;
COMMENT ON VIEW pagevault.database_keys IS 'database keys and the master keys that wrap them';

CREATE VIEW pagevault.data_keys AS
    SELECT pg_catalog.pg_filenode_relation(
               CASE WHEN k.tablespace = d.dattablespace THEN 0 ELSE k.tablespace END, k.filenode
           )::pg_catalog.regclass AS relation,
           k.filenode, k.version, k.cipher, k.is_current,
           CASE WHEN k.scope IS NULL THEN 'cluster' ELSE 'database' END AS scope,
           k.database_key_version
      FROM pagevault.data_key_rows() k
      JOIN pg_catalog.pg_database d ON d.datname = pg_catalog.current_database();
COMMENT ON VIEW pagevault.data_keys IS 'wrapped data keys of this database; relation is null for files that are gone';

CREATE VIEW pagevault.relations AS
    SELECT c.oid::pg_catalog.regclass AS relation,
           c.relkind AS kind,
           l.label,
           r.data_key_version IS NOT NULL AS encrypted,
           r.data_key_version, r.cipher, r.bytes
      FROM pg_catalog.pg_class c
      JOIN pagevault.relation_rows() r ON r.relation = c.oid
      LEFT JOIN pg_catalog.pg_seclabel l
             ON l.objoid = c.oid AND l.classoid = 'pg_catalog.pg_class'::pg_catalog.regclass
            AND l.objsubid = 0 AND l.provider = 'pagevault'
     WHERE r.data_key_version IS NOT NULL OR c.oid >= 16384;
COMMENT ON VIEW pagevault.relations IS 'relations with storage, and under which key new pages are written';

CREATE VIEW pagevault.drift AS
    SELECT * FROM pagevault.drift(false);
COMMENT ON VIEW pagevault.drift IS 'relations that are not as labels and settings want them, and what fixes that';

CREATE VIEW pagevault.stats AS
    SELECT * FROM pagevault.stats_rows();
COMMENT ON VIEW pagevault.stats IS 'pages that were encrypted and decrypted since the server started, and how long that took';

-- Comments. docs/reference.md is generated from these and from the descriptions of settings.

COMMENT ON COLUMN pagevault.status.loaded IS 'the server has loaded pagevault at its start';
COMMENT ON COLUMN pagevault.status.state IS 'no_master_key, unlocked, locked or not_loaded';
COMMENT ON COLUMN pagevault.status.locked_database_keys IS 'database keys that are not unwrapped, or whose use is refused because their master key was revoked';
COMMENT ON COLUMN pagevault.status.unlock_error IS 'why the last attempt to unlock failed; null if it did not (for pagevault_admin and pg_monitor)';
COMMENT ON COLUMN pagevault.status.relation_files IS 'relation files that have a data key';
COMMENT ON COLUMN pagevault.status.data_keys IS 'data keys, those that are no longer in use included';
COMMENT ON COLUMN pagevault.status.max_data_keys IS 'how many there may be (pagevault.max_data_keys)';
COMMENT ON COLUMN pagevault.status.keyring_command IS 'the program that talks to providers (for pagevault_admin and pg_monitor)';
COMMENT ON COLUMN pagevault.status.unreachable_providers IS 'providers that did not answer when they were last asked (for pagevault_admin and pg_monitor)';
COMMENT ON COLUMN pagevault.status.last_revalidation_at IS 'when the providers were last asked whether they would still unwrap the keys in use';
COMMENT ON COLUMN pagevault.status.wal_encrypted IS 'WAL is written encrypted now';
COMMENT ON COLUMN pagevault.status.wal_key_version IS 'version of the key that WAL is encrypted with; null if it is not';
COMMENT ON COLUMN pagevault.status.wal_error IS 'why WAL is not as pagevault.wal_encryption wants it (for pagevault_admin and pg_monitor)';
COMMENT ON COLUMN pagevault.status.last_escrow_at IS 'when the newest bundle of escrow was made; null: never';
COMMENT ON COLUMN pagevault.status.database_keys_not_in_escrow IS 'database keys that it does not hold, all if there is none; see pagevault-keyring escrow export';
COMMENT ON COLUMN pagevault.status.audit_error IS 'why the newest line of the audit trail could not be noted, or written where pagevault.audit_destination says; null if it was (for pagevault_admin and pg_monitor)';

COMMENT ON COLUMN pagevault.providers.provider IS 'its name';
COMMENT ON COLUMN pagevault.providers.kind IS 'file, vault, aws_kms or command';
COMMENT ON COLUMN pagevault.providers.options IS 'as given to add_provider() or alter_provider()';
COMMENT ON COLUMN pagevault.providers.in_use IS 'it wraps a database key';
COMMENT ON COLUMN pagevault.providers.reachable IS 'it answered when it was last asked, be it with a refusal; false also while it is sealed or throttles requests; null: not asked since the server started';
COMMENT ON COLUMN pagevault.providers.last_success_at IS 'when it last did what it was asked for';
COMMENT ON COLUMN pagevault.providers.last_error_at IS 'when it last did not';
COMMENT ON COLUMN pagevault.providers.last_error_class IS 'why, in one word';
COMMENT ON COLUMN pagevault.providers.last_error IS 'why';
COMMENT ON COLUMN pagevault.providers.consecutive_failures IS 'operations that failed since the last success';
COMMENT ON COLUMN pagevault.providers.latency_ms IS 'how long its last answer took, in milliseconds';
COMMENT ON COLUMN pagevault.providers.master_key_versions IS 'its master keys in use, each with the newest version that wraps';

COMMENT ON COLUMN pagevault.database_keys.scope IS 'whose key it is: cluster or database';
COMMENT ON COLUMN pagevault.database_keys.database IS 'name of the database; null for the cluster';
COMMENT ON COLUMN pagevault.database_keys.version IS 'version of the database key';
COMMENT ON COLUMN pagevault.database_keys.provider IS 'where the master key is that wraps it';
COMMENT ON COLUMN pagevault.database_keys.master_key IS 'its name there';
COMMENT ON COLUMN pagevault.database_keys.master_key_version IS 'version of the master key that wraps';
COMMENT ON COLUMN pagevault.database_keys.state IS 'unlocked; revoked: the provider would not unwrap it any more, it is still usable; locked';
COMMENT ON COLUMN pagevault.database_keys.wrapped_at IS 'when it was wrapped';

COMMENT ON COLUMN pagevault.data_keys.relation IS 'whose key it is; null for files that are gone';
COMMENT ON COLUMN pagevault.data_keys.filenode IS 'number of the relation''s file';
COMMENT ON COLUMN pagevault.data_keys.version IS 'version of the file''s key, 1 to 8191; each page names the one that it is encrypted with';
COMMENT ON COLUMN pagevault.data_keys.cipher IS 'the cipher that it is used with';
COMMENT ON COLUMN pagevault.data_keys.is_current IS 'pages are written with it now';
COMMENT ON COLUMN pagevault.data_keys.scope IS 'whose database key wraps it: cluster or database';
COMMENT ON COLUMN pagevault.data_keys.database_key_version IS 'version of that database key';

COMMENT ON COLUMN pagevault.relations.relation IS 'its name';
COMMENT ON COLUMN pagevault.relations.kind IS 'r table, i index, t TOAST, m materialized view, S sequence';
COMMENT ON COLUMN pagevault.relations.label IS 'its own security label';
COMMENT ON COLUMN pagevault.relations.encrypted IS 'pages are encrypted when they are written from now on';
COMMENT ON COLUMN pagevault.relations.data_key_version IS 'version of the data key that they are encrypted with';
COMMENT ON COLUMN pagevault.relations.cipher IS 'and the cipher';
COMMENT ON COLUMN pagevault.relations.bytes IS 'size of its main fork';

COMMENT ON COLUMN pagevault.drift.relation IS 'its name';
COMMENT ON COLUMN pagevault.drift.expected IS 'encrypted, with the cipher if the label names one, or plaintext';
COMMENT ON COLUMN pagevault.drift.reason IS 'what decides: schema app, table t (its own label, or that of a table it belongs to), setting pagevault.default_encryption (of this session), ...';
COMMENT ON COLUMN pagevault.drift.actual IS 'plaintext, or encrypted and the cipher, for new pages; from drift(true) also the number of pages on disk that are otherwise';
COMMENT ON COLUMN pagevault.drift.fix IS 'the command that fixes it; for what follows a table, that of the table often does';

COMMENT ON COLUMN pagevault.rekey_jobs.job IS 'its number, for wait_for_rekey(), pause_rekey() and the like';
COMMENT ON COLUMN pagevault.rekey_jobs.relation IS 'its name; null if it is gone';
COMMENT ON COLUMN pagevault.rekey_jobs.kind IS 'encrypt, rotate or decrypt';
COMMENT ON COLUMN pagevault.rekey_jobs.state IS 'waiting, running, paused, done, cancelled or failed';
COMMENT ON COLUMN pagevault.rekey_jobs.pages_done IS 'pages of the relation, its indexes, TOAST table and owned sequences that are as they should be';
COMMENT ON COLUMN pagevault.rekey_jobs.pages_total IS 'how many pages there are';
COMMENT ON COLUMN pagevault.rekey_jobs.percent IS 'pages_done of pages_total';
COMMENT ON COLUMN pagevault.rekey_jobs.mb_per_second IS 'how fast it is at present; null if it does not run';
COMMENT ON COLUMN pagevault.rekey_jobs.eta IS 'how long it will take at this speed';
COMMENT ON COLUMN pagevault.rekey_jobs.requested_by IS 'the session user who asked for it';
COMMENT ON COLUMN pagevault.rekey_jobs.requested_at IS 'when that was';
COMMENT ON COLUMN pagevault.rekey_jobs.started_at IS 'when a worker began; of an unfinished job, since the server was started';
COMMENT ON COLUMN pagevault.rekey_jobs.finished_at IS 'when it was done, cancelled or failed';
COMMENT ON COLUMN pagevault.rekey_jobs.error IS 'why it has failed, or was cancelled by something else than cancel_rekey()';

COMMENT ON COLUMN pagevault.stats.kind IS 'relation; wal; temporary: temporary relations and files';
COMMENT ON COLUMN pagevault.stats.pages_encrypted IS 'pages of 8 kB that were encrypted when they were written; pages in plaintext, and empty ones, do not count. A temporary file is written in pieces: each counts as the pages it comes to, at least one';
COMMENT ON COLUMN pagevault.stats.pages_decrypted IS 'pages that were decrypted when they were read';
COMMENT ON COLUMN pagevault.stats.bytes_encrypted IS 'the same in bytes';
COMMENT ON COLUMN pagevault.stats.bytes_decrypted IS 'the same in bytes';
COMMENT ON COLUMN pagevault.stats.encrypt_time_ms IS 'how long that took, in milliseconds: the cipher, the checksum of the encrypted page, and copying where that is needed; not the I/O. It is time on the clock: if the machine has more to do than cores, waiting for one is in it';
COMMENT ON COLUMN pagevault.stats.decrypt_time_ms IS 'the same for decrypting, in milliseconds';
COMMENT ON COLUMN pagevault.stats.decrypt_failures IS 'reads that were refused because the key was locked, refused, lost or destroyed';

COMMENT ON FUNCTION pagevault.add_provider(text, text, jsonb) IS 'Makes a key provider known. Its options are checked; it is not asked for anything yet. The kind command also needs superuser or pg_execute_server_program.';
COMMENT ON FUNCTION pagevault.alter_provider(text, jsonb) IS 'Gives a provider other options, after proving that all that it wrapped still unwraps, but for databases that were dropped.';
COMMENT ON FUNCTION pagevault.drop_provider(text) IS 'Forgets a provider that wraps nothing.';
COMMENT ON FUNCTION pagevault.check_provider(text, text) IS 'Looks at everything from the options to a round trip with each master key in use, or with the one named. What is wrong is a row in which ok is false, not an error. Also during recovery.';
COMMENT ON FUNCTION pagevault.set_cluster_master_key(text, text) IS 'Sets the master key of the cluster, or changes it: to another key of the same provider, which itself wraps again, or to another provider, for which the one that is left need not be there. The key must exist.';
COMMENT ON FUNCTION pagevault.set_database_master_key(text, text) IS 'The same for the current database, which otherwise uses the cluster''s.';
COMMENT ON FUNCTION pagevault.rotate_cluster_master_key() IS 'Takes a newer version of the cluster''s master key, made by the provider unless it has one already. Returns the version that wraps now, a number that grows, not always by one.';
COMMENT ON FUNCTION pagevault.rotate_database_master_key() IS 'The same for a database that has a master key of its own.';
COMMENT ON FUNCTION pagevault.rotate_database_key() IS 'Makes a new database key, for the current database if it has its own master key, else for the cluster, and wraps all its data keys with it. No page is touched. Returns its version.';
COMMENT ON FUNCTION pagevault.rotate_wal_key() IS 'Has WAL encrypted with a new key from the next page on. Returns its version.';
COMMENT ON FUNCTION pagevault.unlock() IS 'Asks now for keys that are locked or were revoked. An error says why they are not there. Also during recovery.';

COMMENT ON FUNCTION pagevault.encrypt(regclass, text) IS 'Labels a relation encrypted, and encrypts it and what follows it, online: up to pagevault.rekey_threshold at once, else by a job. With another cipher than the present one: under a new data key. Returns the number of the job, or null if none was needed. For its owner, who may also use SECURITY LABEL, which does the same; system catalogs for superuser or pagevault_admin.';
COMMENT ON FUNCTION pagevault.decrypt(regclass) IS 'Labels a relation plaintext, and decrypts it. Returns the number of the job, or null if none was needed. For pagevault_admin who owns it. Of a system catalog: if no label and no setting wants it encrypted.';
COMMENT ON FUNCTION pagevault.encrypt_database() IS 'Labels the current database encrypted, and encrypts everything in it of which that is wanted. One row for each relation that was not; without a job where it was done at once. For pagevault_admin who owns the database.';
COMMENT ON FUNCTION pagevault.decrypt_database() IS 'Removes all labels that say encrypted from the current database and what is in it, and decrypts by jobs. One row for each. For pagevault_admin who owns the database and what is labelled.';
COMMENT ON FUNCTION pagevault.encrypt_catalogs() IS 'Encrypts every catalog of this database, and every shared one, of which a label or setting wants it. One row for each that was not.';
COMMENT ON FUNCTION pagevault.reconcile(regclass) IS 'Has a relation, and what follows it (of an index: its table), written as labels and settings want it, online. Returns the number of the job, or null if none was needed. [Drift](policy.md#what-differs-from-the-policy).';
COMMENT ON FUNCTION pagevault.rotate_data_key(regclass) IS 'Makes new data keys for a relation and what follows it, and rewrites it under them, online. Returns the number of the job.';
COMMENT ON FUNCTION pagevault.rotate_all_data_keys() IS 'The same for everything in the current database. One row for each job.';
COMMENT ON FUNCTION pagevault.pause_rekey(bigint) IS 'Stops a job for now.';
COMMENT ON FUNCTION pagevault.resume_rekey(bigint) IS 'Lets a job that was paused or cancelled, or has failed, go on.';
COMMENT ON FUNCTION pagevault.cancel_rekey(bigint) IS 'Gives a job up. The relation stays readable, as a mixture of pages.';
COMMENT ON FUNCTION pagevault.wait_for_rekey(bigint, interval) IS 'Waits until a job is done: true. False when the time is up, or it is paused or cancelled; an error if it has failed. For the relation''s owner and pagevault_admin.';
COMMENT ON FUNCTION pagevault.wait_for_rekey(integer, interval) IS 'The same, so that a number needs no cast.';
COMMENT ON FUNCTION pagevault.wait_for_rekey(regclass, interval) IS 'The same for the job of a relation.';

COMMENT ON FUNCTION pagevault.is_encrypted(regclass) IS 'True only if every page on disk of a relation and of what follows it is encrypted, and new ones will be. False for what has no storage, such as partitioned tables. Reads the files. For who may SELECT it, pagevault_admin and pg_monitor.';
COMMENT ON FUNCTION pagevault.verify(regclass) IS 'Counts pages on disk by fork and state: encrypted (with the version of the data key), destroyed (encrypted under a key that was shredded), plaintext, empty (all zero). Reads the files.';
COMMENT ON FUNCTION pagevault.drift(boolean) IS 'The view drift; with check_files all files are read as well.';

COMMENT ON FUNCTION pagevault.shred(regclass, text) IS 'Destroys the data keys of a relation, its partitions, and all that follows them. confirm is its name with the schema.';
COMMENT ON FUNCTION pagevault.shred_schema(regnamespace, text) IS 'Destroys the data keys of every relation in a schema.';
COMMENT ON FUNCTION pagevault.shred_database(text, text) IS 'Destroys every data key of another database, to which nobody is connected.';
COMMENT ON FUNCTION pagevault.shred_former_files(text) IS 'Destroys the data keys of files of this database that are gone: of dropped relations, and of others from before TRUNCATE, VACUUM FULL, REINDEX and the like. Makes a checkpoint first. confirm is the name of the database.';

COMMENT ON FUNCTION pagevault.stats_rows() IS 'Serves the view stats.';
COMMENT ON FUNCTION pagevault.status_rows() IS 'Serves the view status.';
COMMENT ON FUNCTION pagevault.provider_rows() IS 'Serves the view providers.';
COMMENT ON FUNCTION pagevault.database_key_rows() IS 'Serves the view database_keys.';
COMMENT ON FUNCTION pagevault.data_key_rows() IS 'Serves the view data_keys.';
COMMENT ON FUNCTION pagevault.relation_rows() IS 'Serves the view relations.';
COMMENT ON FUNCTION pagevault.rekey_job_rows() IS 'Serves the view rekey_jobs.';

-- Revoke everything that default privileges granted (ALTER DEFAULT PRIVILEGES), except the grants
-- below.
DO $$
DECLARE
    command text;
BEGIN
    FOR command IN
        SELECT format('REVOKE ALL ON %s FROM %s CASCADE', o.what,
                      CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END)
          FROM (SELECT 'FUNCTION ' || oid::regprocedure AS what, proowner AS owner,
                       coalesce(proacl, acldefault('f', proowner)) AS acl
                  FROM pg_proc WHERE pronamespace = 'pagevault'::regnamespace
                UNION ALL
                SELECT 'TABLE ' || oid::regclass, relowner, relacl
                  FROM pg_class WHERE relnamespace = 'pagevault'::regnamespace
                UNION ALL
                SELECT 'SCHEMA ' || nspname, nspowner, nspacl
                  FROM pg_namespace WHERE nspname = 'pagevault') o,
               aclexplode(o.acl) a
         WHERE a.grantee <> o.owner
         GROUP BY o.what, a.grantee
    LOOP
        EXECUTE command;
    END LOOP;
END
$$;

-- PUBLIC: reading, without information about keys or providers.
GRANT USAGE ON SCHEMA pagevault TO PUBLIC;
GRANT SELECT ON pagevault.status, pagevault.data_keys, pagevault.relations TO PUBLIC;
GRANT EXECUTE ON FUNCTION
    pagevault.status_rows(), pagevault.data_key_rows(), pagevault.relation_rows(), pagevault.is_encrypted(regclass)
    TO PUBLIC;

-- Monitoring: drift, state on disk, cost.
GRANT SELECT ON pagevault.drift, pagevault.stats TO pg_monitor, pagevault_admin;
GRANT EXECUTE ON FUNCTION pagevault.drift(boolean), pagevault.verify(regclass), pagevault.stats_rows()
    TO pg_monitor, pagevault_admin;

-- Key management. Functions that change something check the role again.
GRANT SELECT ON pagevault.providers, pagevault.database_keys TO pagevault_admin;
GRANT EXECUTE ON FUNCTION
    pagevault.provider_rows(), pagevault.database_key_rows(),
    pagevault.add_provider(text, text, jsonb), pagevault.alter_provider(text, jsonb),
    pagevault.drop_provider(text), pagevault.check_provider(text, text),
    pagevault.set_database_master_key(text, text), pagevault.set_cluster_master_key(text, text),
    pagevault.rotate_database_master_key(), pagevault.rotate_cluster_master_key(),
    pagevault.rotate_database_key(), pagevault.rotate_wal_key(), pagevault.unlock()
    TO pagevault_admin;

-- Not for PUBLIC, because it writes: owners have SECURITY LABEL, or can be granted this.
GRANT EXECUTE ON FUNCTION pagevault.encrypt(regclass, text) TO pagevault_admin;
GRANT EXECUTE ON FUNCTION
    pagevault.decrypt(regclass), pagevault.encrypt_catalogs(),
    pagevault.encrypt_database(), pagevault.decrypt_database(),
    pagevault.reconcile(regclass), pagevault.rotate_data_key(regclass), pagevault.rotate_all_data_keys(),
    pagevault.pause_rekey(bigint), pagevault.resume_rekey(bigint), pagevault.cancel_rekey(bigint),
    pagevault.shred(regclass, text), pagevault.shred_schema(regnamespace, text), pagevault.shred_database(text, text),
    pagevault.shred_former_files(text)
    TO pagevault_admin;

-- Monitoring can see jobs, and owners can wait for them (each function checks the relation's
-- owner).
GRANT SELECT ON pagevault.rekey_jobs TO pg_monitor, pagevault_admin;
GRANT EXECUTE ON FUNCTION pagevault.rekey_job_rows() TO pg_monitor, pagevault_admin;
GRANT EXECUTE ON FUNCTION
    pagevault.wait_for_rekey(bigint, interval), pagevault.wait_for_rekey(integer, interval), pagevault.wait_for_rekey(regclass, interval)
    TO PUBLIC;
