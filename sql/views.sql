-- Views, all comments, and all grants.

CREATE VIEW pagevault.status AS
    SELECT * FROM pagevault.status_rows();
COMMENT ON VIEW pagevault.status IS 'state of pagevault in this server';

CREATE VIEW pagevault.providers AS
    SELECT * FROM pagevault.provider_rows();
COMMENT ON VIEW pagevault.providers IS 'key providers, their options, and the results of the latest requests to them';

CREATE VIEW pagevault.database_keys AS
    SELECT CASE WHEN k.scope IS NULL THEN 'cluster'
                WHEN k.scope::pg_catalog.int8 BETWEEN 100 AND 11999 THEN 'key group'
                ELSE 'database' END AS scope,
           d.datname AS database,
           k.version, k.provider, k.master_key, k.master_key_version, k.state, k.wrapped_at,
           k.preference, g.key_group
      FROM pagevault.database_key_rows() k
      LEFT JOIN pagevault.key_group_names() g ON g.number = k.scope
      LEFT JOIN pg_catalog.pg_database d ON d.oid = k.scope;
COMMENT ON VIEW pagevault.database_keys IS 'database keys and the master keys that wrap them';

CREATE VIEW pagevault.data_keys AS
    SELECT pg_catalog.pg_filenode_relation(
               CASE WHEN k.tablespace = d.dattablespace THEN 0 ELSE k.tablespace END, k.filenode
           )::pg_catalog.regclass AS relation,
           k.filenode, k.version, k.cipher, k.is_current,
           CASE WHEN k.scope IS NULL THEN 'cluster'
                WHEN k.scope::pg_catalog.int8 BETWEEN 100 AND 11999 THEN 'key group'
                ELSE 'database' END AS scope,
           k.database_key_version, g.key_group
      FROM pagevault.data_key_rows() k
      LEFT JOIN pagevault.key_group_names() g ON g.number = k.scope
      JOIN pg_catalog.pg_database d ON d.datname = pg_catalog.current_database();
COMMENT ON VIEW pagevault.data_keys IS 'wrapped data keys of the current database; relation is null if the file no longer exists';

CREATE VIEW pagevault.key_ages AS
    SELECT k.kind,
           CASE WHEN k.scope IS NULL THEN 'cluster'
                WHEN k.scope::pg_catalog.int8 BETWEEN 100 AND 11999 THEN 'key group'
                ELSE 'database' END AS scope,
           d.datname AS database,
           r.relation, k.version, k.since,
           pg_catalog.now() - k.since AS age,
           k.due_at - k.since AS rotate_after,
           k.due_at,
           coalesce(k.due_at <= pg_catalog.now(), false) AS is_due,
           g.key_group
      FROM pagevault.key_age_rows() k
      LEFT JOIN pagevault.key_group_names() g ON g.number = k.scope
      JOIN pg_catalog.pg_database here ON here.datname = pg_catalog.current_database()
      LEFT JOIN pg_catalog.pg_database d ON d.oid = k.scope
     CROSS JOIN LATERAL (
        SELECT pg_catalog.pg_filenode_relation(
                   CASE WHEN k.tablespace = here.dattablespace THEN 0 ELSE k.tablespace END, k.filenode
               )::pg_catalog.regclass) r (relation)
     WHERE k.filenode IS NULL OR r.relation IS NOT NULL;
COMMENT ON VIEW pagevault.key_ages IS 'keys in use, and when the server rotates them by itself; data keys of the current database only';

CREATE VIEW pagevault.former_keys AS
    SELECT k.kind,
           CASE WHEN k.scope IS NULL THEN 'cluster'
                WHEN k.scope::pg_catalog.int8 BETWEEN 100 AND 11999 THEN 'key group'
                ELSE 'database' END AS scope,
           d.datname AS database,
           k.first_version, k.last_version, k.keys, k.needed_for, g.key_group
      FROM pagevault.former_key_rows() k
      LEFT JOIN pagevault.key_group_names() g ON g.number = k.scope
      LEFT JOIN pg_catalog.pg_database d ON d.oid = k.scope;
COMMENT ON VIEW pagevault.former_keys IS 'keys that were replaced by later ones, and why this server still has them';

CREATE VIEW pagevault.key_groups AS
    SELECT k.key_group, k.created_at, k.state, k.key_version,
           ARRAY(SELECT d.datname::pg_catalog.text FROM pg_catalog.pg_database d
                  WHERE d.oid = ANY (k.databases) ORDER BY 1) AS databases,
           k.relation_files, k.data_keys
      FROM pagevault.key_group_rows() k;
COMMENT ON VIEW pagevault.key_groups IS 'key groups: relations under a key of their own';

CREATE VIEW pagevault.encrypted_databases AS
    SELECT d.datname AS database,
           k.encrypted_files
      FROM pagevault.encrypted_database_rows() k
      LEFT JOIN pg_catalog.pg_database d ON d.oid = k.database
     WHERE d.oid IS NOT NULL OR k.database = 0;
COMMENT ON VIEW pagevault.encrypted_databases IS 'databases that have encrypted files, with or without the extension';

CREATE VIEW pagevault.relations AS
    SELECT c.oid::pg_catalog.regclass AS relation,
           c.relkind AS kind,
           l.label,
           r.data_key_version IS NOT NULL AS encrypted,
           r.data_key_version, r.cipher, r.sealed_only, r.authenticated, r.bytes,
           r.key_group
      FROM pg_catalog.pg_class c
      JOIN pagevault.relation_rows() r ON r.relation = c.oid
      LEFT JOIN pg_catalog.pg_seclabel l
             ON l.objoid = c.oid AND l.classoid = 'pg_catalog.pg_class'::pg_catalog.regclass
            AND l.objsubid = 0 AND l.provider = 'pagevault'
     WHERE r.data_key_version IS NOT NULL OR c.oid >= 16384;
COMMENT ON VIEW pagevault.relations IS 'relations with storage, and the key under which their pages are written';

-- With what belongs to a table: its indexes, its TOAST table with that one's index, and owned sequences.
CREATE VIEW pagevault.tables AS
    SELECT t.oid::pg_catalog.regclass AS relation,
           t.relkind AS kind,
           CASE WHEN pg_catalog.bool_and(f.encrypted) THEN 'yes'
                WHEN pg_catalog.bool_or(f.encrypted) THEN 'partly'
                ELSE 'no' END AS encrypted,
           CASE WHEN pg_catalog.bool_and(f.authenticated) THEN 'yes'
                WHEN pg_catalog.bool_or(f.authenticated) THEN 'partly'
                ELSE 'no' END AS authenticated,
           pg_catalog.string_agg(DISTINCT f.cipher, ', ') AS ciphers,
           pg_catalog.string_agg(DISTINCT f.key_group, ', ') AS key_group,
           pg_catalog.pg_size_pretty(pg_catalog.sum(f.bytes)) AS size,
           CASE WHEN pg_catalog.bool_or(f.encrypted) THEN
                pg_catalog.array_agg(f.relation ORDER BY f.relation::pg_catalog.text)
                FILTER (WHERE NOT f.encrypted) END AS plaintext
      FROM pagevault.relations f
      LEFT JOIN pg_catalog.pg_index i ON i.indexrelid = f.relation
      LEFT JOIN pg_catalog.pg_depend d
             ON f.kind = 'S' AND d.objid = f.relation AND d.deptype IN ('a', 'i')
            AND d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass
            AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass
     CROSS JOIN LATERAL (SELECT coalesce(i.indrelid, d.refobjid, f.relation)) o (owner)
      LEFT JOIN pg_catalog.pg_class w ON w.reltoastrelid = o.owner
      JOIN pg_catalog.pg_class t ON t.oid = coalesce(w.oid, o.owner)
     GROUP BY t.oid, t.relkind
     ORDER BY t.oid::pg_catalog.regclass::pg_catalog.text;
COMMENT ON VIEW pagevault.tables IS 'tables with all that belongs to them, for people: what is encrypted, and how much it is';

CREATE VIEW pagevault.drift AS
    SELECT * FROM pagevault.drift(false);
COMMENT ON VIEW pagevault.drift IS 'relations that differ from what labels and settings require, and the command that fixes each';

CREATE VIEW pagevault.stats AS
    SELECT * FROM pagevault.stats_rows();
COMMENT ON VIEW pagevault.stats IS 'pages encrypted and decrypted since the server started, and the time this took';

-- Everything that the views show, as one document; pagevault-keyring makes its reports of it.
CREATE FUNCTION pagevault.report(check_files boolean DEFAULT false) RETURNS jsonb
STABLE
SET search_path = pg_catalog
RETURN pg_catalog.jsonb_build_object(
    'format', 1,
    'made_at', pg_catalog.now(),
    'cluster', pg_catalog.jsonb_build_object(
        'status', (SELECT pg_catalog.to_jsonb(s) || pg_catalog.jsonb_build_object(
                              'last_revalidation_seconds_ago',
                              EXTRACT(epoch FROM pg_catalog.now() - s.last_revalidation_at)::pg_catalog.int8)
                     FROM pagevault.status s),
        'settings', (SELECT pg_catalog.jsonb_object_agg(s.name, pg_catalog.current_setting(s.name))
                       FROM pg_catalog.pg_settings s WHERE s.name LIKE 'pagevault.%'),
        'providers', (SELECT coalesce(pg_catalog.jsonb_agg(pg_catalog.to_jsonb(p) ORDER BY p.provider), '[]')
                        FROM pagevault.providers p),
        'database_keys', (SELECT coalesce(pg_catalog.jsonb_agg(pg_catalog.to_jsonb(k)
                                              ORDER BY k.scope, k.database, k.key_group, k.version, k.preference), '[]')
                            FROM pagevault.database_keys k),
        'key_groups', (SELECT coalesce(pg_catalog.jsonb_agg(pg_catalog.to_jsonb(g) ORDER BY g.key_group), '[]')
                         FROM pagevault.key_groups g),
        'stats', (SELECT coalesce(pg_catalog.jsonb_agg(pg_catalog.to_jsonb(t) ORDER BY t.kind), '[]')
                    FROM pagevault.stats t)),
    'database', pg_catalog.jsonb_build_object(
        'name', pg_catalog.current_database(),
        'extension_version', (SELECT e.extversion FROM pg_catalog.pg_extension e WHERE e.extname = 'pagevault'),
        'relations', (SELECT coalesce(pg_catalog.jsonb_agg(pg_catalog.to_jsonb(r) ORDER BY r.relation::pg_catalog.text), '[]')
                        FROM pagevault.relations r),
        'drift', (SELECT coalesce(pg_catalog.jsonb_agg(pg_catalog.to_jsonb(d) ORDER BY d.relation::pg_catalog.text), '[]')
                    FROM pagevault.drift(check_files) d),
        'rekey_jobs', (SELECT coalesce(pg_catalog.jsonb_agg(pg_catalog.to_jsonb(j) ORDER BY j.job), '[]')
                         FROM pagevault.rekey_jobs j),
        'key_ages', (SELECT coalesce(pg_catalog.jsonb_agg(pg_catalog.to_jsonb(a) || pg_catalog.jsonb_build_object(
                                'age_seconds', EXTRACT(epoch FROM a.age)::pg_catalog.int8,
                                'rotate_after_seconds', EXTRACT(epoch FROM a.rotate_after)::pg_catalog.int8)
                                         ORDER BY a.kind, a.scope, a.database, a.key_group, a.relation::pg_catalog.text), '[]')
                       FROM pagevault.key_ages a),
        'former_keys', (SELECT coalesce(pg_catalog.jsonb_agg(pg_catalog.to_jsonb(f) ORDER BY f.kind, f.first_version), '[]')
                          FROM pagevault.former_keys f),
        -- A sequence of a table is in the rows of both.
        'pages', CASE WHEN check_files THEN (
            SELECT coalesce(pg_catalog.jsonb_agg(pg_catalog.to_jsonb(p) ORDER BY p.state), '[]')
              FROM (SELECT v.state, pg_catalog.sum(v.pages) AS pages
                      FROM (SELECT DISTINCT v.*
                              FROM pagevault.relations r, pagevault.verify(r.relation) v
                             WHERE r.kind IN ('r', 'm', 'S')) v
                     GROUP BY v.state) p) END));

-- Comments. docs/reference.md is generated from these and from the descriptions of settings.

COMMENT ON COLUMN pagevault.status.loaded IS 'true if the server loaded pagevault at its start';
COMMENT ON COLUMN pagevault.status.state IS 'no_master_key, unlocked, locked or not_loaded';
COMMENT ON COLUMN pagevault.status.locked_database_keys IS 'number of database keys that are not unwrapped, or that may not be used because their master key was revoked';
COMMENT ON COLUMN pagevault.status.unlock_error IS 'error of the last attempt to unlock; null if it succeeded (visible to pagevault_admin and pg_monitor)';
COMMENT ON COLUMN pagevault.status.relation_files IS 'number of relation files that have a data key';
COMMENT ON COLUMN pagevault.status.data_keys IS 'number of data keys, including those no longer in use';
COMMENT ON COLUMN pagevault.status.max_data_keys IS 'maximum number of data keys (pagevault.max_data_keys)';
COMMENT ON COLUMN pagevault.status.keyring_command IS 'program that talks to key providers (visible to pagevault_admin and pg_monitor)';
COMMENT ON COLUMN pagevault.status.unreachable_providers IS 'providers that did not answer their latest request (visible to pagevault_admin and pg_monitor)';
COMMENT ON COLUMN pagevault.status.last_revalidation_at IS 'time of the last revalidation: providers were asked whether they still unwrap the keys in use';
COMMENT ON COLUMN pagevault.status.wal_encrypted IS 'true if WAL is currently written encrypted';
COMMENT ON COLUMN pagevault.status.wal_key_version IS 'version of the current WAL key; null if WAL is not encrypted';
COMMENT ON COLUMN pagevault.status.wal_error IS 'why WAL encryption differs from pagevault.wal_encryption; null if it does not (visible to pagevault_admin and pg_monitor)';
COMMENT ON COLUMN pagevault.status.last_escrow_at IS 'time of the newest escrow bundle; null if there is none';
COMMENT ON COLUMN pagevault.status.one_master_key_left IS 'databases (or cluster, for the cluster''s key) with several master keys, of which no more than one has answered at the latest request (visible to pagevault_admin and pg_monitor)';
COMMENT ON COLUMN pagevault.status.database_keys_not_in_escrow IS 'number of database keys that the newest escrow bundle does not contain; see pagevault-keyring escrow export';
COMMENT ON COLUMN pagevault.status.audit_error IS 'why the newest line of the audit trail could not be stored, or not be written to pagevault.audit_destination; null if it was written (visible to pagevault_admin and pg_monitor)';
COMMENT ON COLUMN pagevault.status.cryptographic_module IS 'name and version of the validated cryptographic module that this server encrypts by; null if it has none';
COMMENT ON COLUMN pagevault.status.fips_certificate IS 'number of the module''s certificate (CMVP); null without such a module';
COMMENT ON COLUMN pagevault.status.fips_mode IS 'true if the module is in FIPS mode; null without such a module';
COMMENT ON COLUMN pagevault.status.version IS 'version of the library that the server has loaded';

COMMENT ON COLUMN pagevault.providers.provider IS 'name of the provider';
COMMENT ON COLUMN pagevault.providers.kind IS 'file, vault, aws_kms, gcp_kms, azure_key_vault, pkcs11, kmip or command';
COMMENT ON COLUMN pagevault.providers.options IS 'options given to add_provider() or alter_provider()';
COMMENT ON COLUMN pagevault.providers.in_use IS 'true if the provider wraps a database key';
COMMENT ON COLUMN pagevault.providers.reachable IS 'true if the provider answered its latest request, even with a refusal; false also if it is sealed or throttles requests; null if it was not asked since the server started';
COMMENT ON COLUMN pagevault.providers.last_success_at IS 'time of the last successful request';
COMMENT ON COLUMN pagevault.providers.last_error_at IS 'time of the last failed request';
COMMENT ON COLUMN pagevault.providers.last_error_class IS 'class of the last error, in one word';
COMMENT ON COLUMN pagevault.providers.last_error IS 'message of the last error';
COMMENT ON COLUMN pagevault.providers.consecutive_failures IS 'number of failed requests since the last success';
COMMENT ON COLUMN pagevault.providers.latency_ms IS 'duration of the last request, in milliseconds';
COMMENT ON COLUMN pagevault.providers.master_key_versions IS 'master keys in use, each with the newest version that wraps a key';

COMMENT ON COLUMN pagevault.database_keys.key_group IS 'name of the key group, if the scope is one';
COMMENT ON COLUMN pagevault.database_keys.scope IS 'owner of the key: cluster, database or key group';
COMMENT ON COLUMN pagevault.database_keys.database IS 'name of the database; null for the cluster';
COMMENT ON COLUMN pagevault.database_keys.version IS 'version of the database key';
COMMENT ON COLUMN pagevault.database_keys.provider IS 'provider that holds the master key';
COMMENT ON COLUMN pagevault.database_keys.master_key IS 'name of the master key at its provider';
COMMENT ON COLUMN pagevault.database_keys.master_key_version IS 'version of the master key that wraps this key';
COMMENT ON COLUMN pagevault.database_keys.state IS 'unlocked; revoked (still usable, but the provider would no longer unwrap it); or locked';
COMMENT ON COLUMN pagevault.database_keys.wrapped_at IS 'time when the key was wrapped';
COMMENT ON COLUMN pagevault.database_keys.preference IS 'order in which the master keys that wrap this key are asked for it: the first is 1';

COMMENT ON COLUMN pagevault.data_keys.relation IS 'relation to which the file belongs; null if the file no longer exists';
COMMENT ON COLUMN pagevault.data_keys.filenode IS 'file number of the relation';
COMMENT ON COLUMN pagevault.data_keys.version IS 'version of the data key, 1 to 7167; each page contains the version under which it is encrypted';
COMMENT ON COLUMN pagevault.data_keys.cipher IS 'cipher of the data key';
COMMENT ON COLUMN pagevault.data_keys.is_current IS 'true if new pages are encrypted with this key';
COMMENT ON COLUMN pagevault.data_keys.key_group IS 'name of the key group, if the scope is one';
COMMENT ON COLUMN pagevault.data_keys.scope IS 'owner of the database key that wraps this key: cluster, database or key group';
COMMENT ON COLUMN pagevault.data_keys.database_key_version IS 'version of that database key';

COMMENT ON COLUMN pagevault.key_groups.key_group IS 'name of the key group';
COMMENT ON COLUMN pagevault.key_groups.created_at IS 'time when it was created';
COMMENT ON COLUMN pagevault.key_groups.state IS 'no_master_key; unlocked; revoked (still usable, but its provider would no longer unwrap its key); or locked: its relations cannot be read or written';
COMMENT ON COLUMN pagevault.key_groups.key_version IS 'version of its key; null if it has no master key yet';
COMMENT ON COLUMN pagevault.key_groups.databases IS 'databases with relations in it';
COMMENT ON COLUMN pagevault.key_groups.relation_files IS 'number of relation files that are written under its key; files that are gone count until their keys are forgotten';
COMMENT ON COLUMN pagevault.key_groups.data_keys IS 'number of data keys under its key, former ones included';

COMMENT ON COLUMN pagevault.encrypted_databases.database IS 'name of the database; null for shared catalogs';
COMMENT ON COLUMN pagevault.encrypted_databases.encrypted_files IS 'number of files whose new pages are encrypted';
COMMENT ON COLUMN pagevault.former_keys.kind IS 'database, wal or data; data keys are those of files in use';
COMMENT ON COLUMN pagevault.former_keys.key_group IS 'name of the key group, if the scope is one';
COMMENT ON COLUMN pagevault.former_keys.scope IS 'owner of a database key, or of the file of a data key: cluster, database or key group';
COMMENT ON COLUMN pagevault.former_keys.database IS 'name of the database; null for the cluster, and if the database was dropped';
COMMENT ON COLUMN pagevault.former_keys.first_version IS 'lowest version of these keys';
COMMENT ON COLUMN pagevault.former_keys.last_version IS 'highest version of these keys';
COMMENT ON COLUMN pagevault.former_keys.keys IS 'number of keys';
COMMENT ON COLUMN pagevault.former_keys.needed_for IS 'what needs them; null if nothing does: the server forgets them after pagevault.keep_former_keys (WAL keys: pagevault.keep_former_wal_keys) and a checkpoint';
COMMENT ON COLUMN pagevault.key_ages.kind IS 'master, database, wal or data';
COMMENT ON COLUMN pagevault.key_ages.key_group IS 'name of the key group, if the scope is one';
COMMENT ON COLUMN pagevault.key_ages.scope IS 'owner of a master key or database key, or of the database key that wraps a data key: cluster, database or key group';
COMMENT ON COLUMN pagevault.key_ages.database IS 'name of the database; null for the cluster';
COMMENT ON COLUMN pagevault.key_ages.relation IS 'relation of a data key';
COMMENT ON COLUMN pagevault.key_ages.version IS 'version of the key in use';
COMMENT ON COLUMN pagevault.key_ages.since IS 'since when it is in use: of a master key, the time when it first wrapped a key of this scope under this version';
COMMENT ON COLUMN pagevault.key_ages.age IS 'time since then';
COMMENT ON COLUMN pagevault.key_ages.rotate_after IS 'age at which the server rotates it (pagevault.rotate_master_key_after and so on); null if it does not';
COMMENT ON COLUMN pagevault.key_ages.due_at IS 'when it reaches that age';
COMMENT ON COLUMN pagevault.key_ages.is_due IS 'true if it has reached that age: it is rotated as soon as pagevault.rotation_window and its provider permit';

COMMENT ON COLUMN pagevault.relations.relation IS 'name of the relation';
COMMENT ON COLUMN pagevault.relations.kind IS 'r table, i index, t TOAST table, m materialized view, S sequence';
COMMENT ON COLUMN pagevault.relations.label IS 'security label of the relation itself';
COMMENT ON COLUMN pagevault.relations.encrypted IS 'true if pages are encrypted when they are written';
COMMENT ON COLUMN pagevault.relations.data_key_version IS 'version of the data key used for writing';
COMMENT ON COLUMN pagevault.relations.cipher IS 'cipher used for writing';
COMMENT ON COLUMN pagevault.relations.sealed_only IS 'true if the file is known to have no plaintext page, on any server: it was created encrypted, or a job has proven it. Such a page is refused in it, and so is one under a key from before the last such job';
COMMENT ON COLUMN pagevault.relations.authenticated IS 'true if every page must have a tag, so that a changed or moved page is refused: sealed_only, and all keys under which pages are accepted are of ciphers that authenticate pages';
COMMENT ON COLUMN pagevault.relations.bytes IS 'size of the main fork';
COMMENT ON COLUMN pagevault.relations.key_group IS 'key group whose key wraps the data key used for writing; null if it is in none';

COMMENT ON COLUMN pagevault.tables.relation IS 'name of the table, or of a materialized view, or of a sequence that no table owns';
COMMENT ON COLUMN pagevault.tables.kind IS 'r table, m materialized view, S sequence; p partitioned table, if it owns a sequence';
COMMENT ON COLUMN pagevault.tables.encrypted IS 'yes if pages of the table, its indexes, its TOAST table and owned sequences are encrypted when they are written; no if none are; else partly';
COMMENT ON COLUMN pagevault.tables.authenticated IS 'the same for pages with a tag, so that a changed or moved page is refused';
COMMENT ON COLUMN pagevault.tables.ciphers IS 'ciphers used for writing';
COMMENT ON COLUMN pagevault.tables.key_group IS 'key group whose key wraps the data keys used for writing; null if they are in none';
COMMENT ON COLUMN pagevault.tables.size IS 'size of the main forks of all of these, in a readable unit';
COMMENT ON COLUMN pagevault.tables.plaintext IS 'which of these are not encrypted, if others are';

COMMENT ON COLUMN pagevault.drift.relation IS 'name of the relation';
COMMENT ON COLUMN pagevault.drift.expected IS 'encrypted, with the cipher if the label names one, or plaintext';
COMMENT ON COLUMN pagevault.drift.reason IS 'the label or setting that decides, such as: schema app; table t (its own label, or that of a table it belongs to); setting pagevault.default_encryption (of this session)';
COMMENT ON COLUMN pagevault.drift.actual IS 'state of new pages: plaintext, or encrypted and the cipher; whether earlier pages were not all rewritten; drift(true) adds the number of pages on disk in another state';
COMMENT ON COLUMN pagevault.drift.fix IS 'command that fixes it; an index or TOAST table is often fixed together with its table';

COMMENT ON COLUMN pagevault.rekey_jobs.job IS 'number of the job, for wait_for_rekey(), pause_rekey() and so on';
COMMENT ON COLUMN pagevault.rekey_jobs.relation IS 'name of the relation; null if it no longer exists';
COMMENT ON COLUMN pagevault.rekey_jobs.kind IS 'encrypt, rotate or decrypt';
COMMENT ON COLUMN pagevault.rekey_jobs.state IS 'waiting, running, paused, done, cancelled or failed';
COMMENT ON COLUMN pagevault.rekey_jobs.pages_done IS 'pages of the relation, its indexes, TOAST table and owned sequences that are in the requested state';
COMMENT ON COLUMN pagevault.rekey_jobs.pages_total IS 'total number of these pages';
COMMENT ON COLUMN pagevault.rekey_jobs.percent IS 'pages_done as a percentage of pages_total';
COMMENT ON COLUMN pagevault.rekey_jobs.mb_per_second IS 'current speed; null if the job is not running';
COMMENT ON COLUMN pagevault.rekey_jobs.eta IS 'estimated remaining time at this speed';
COMMENT ON COLUMN pagevault.rekey_jobs.requested_by IS 'session user who requested the job; if the server itself did: pagevault.rotate_data_key_after, or interim keys, when a key group is unlocked';
COMMENT ON COLUMN pagevault.rekey_jobs.requested_at IS 'time of the request';
COMMENT ON COLUMN pagevault.rekey_jobs.started_at IS 'time when a worker started the job; for an unfinished job, since the last server start';
COMMENT ON COLUMN pagevault.rekey_jobs.finished_at IS 'time when the job was done, cancelled, or failed';
COMMENT ON COLUMN pagevault.rekey_jobs.waits_for IS 'processes that hold up the job by a lock on the relation; 0 is a prepared transaction';
COMMENT ON COLUMN pagevault.rekey_jobs.waits_since IS 'begin of the oldest of their transactions; null if it may not be seen (pg_read_all_stats)';
COMMENT ON COLUMN pagevault.rekey_jobs.error IS 'why the job failed, why it was cancelled other than by cancel_rekey(), or what it waits for';

COMMENT ON COLUMN pagevault.stats.kind IS 'relation; wal; or temporary (temporary relations and files)';
COMMENT ON COLUMN pagevault.stats.pages_encrypted IS 'number of 8 kB pages encrypted for writing; plaintext and empty pages do not count. Temporary files are written in pieces; each counts as its size in pages, at least one';
COMMENT ON COLUMN pagevault.stats.pages_decrypted IS 'number of pages decrypted after reading';
COMMENT ON COLUMN pagevault.stats.bytes_encrypted IS 'bytes encrypted for writing';
COMMENT ON COLUMN pagevault.stats.bytes_decrypted IS 'bytes decrypted after reading';
COMMENT ON COLUMN pagevault.stats.encrypt_time_ms IS 'time spent on encryption, in milliseconds: cipher, checksum of the encrypted page, and copying where needed, but not I/O. It is elapsed time, so on an overloaded machine it includes waiting for a processor';
COMMENT ON COLUMN pagevault.stats.decrypt_time_ms IS 'time spent on decryption, in milliseconds';
COMMENT ON COLUMN pagevault.stats.decrypt_failures IS 'number of reads refused because the key was locked, revoked, lost, or destroyed, and of pages that were not accepted: not as they were encrypted, in plaintext, or under a former key. Also of pages of free space and visibility maps, which are read as empty without a line in the log; a crash may have torn these';

COMMENT ON FUNCTION pagevault.add_provider(text, text, jsonb) IS 'Adds a key provider. Its options are checked, but no request is sent to it yet. The kinds command and pkcs11 also require superuser or pg_execute_server_program.';
COMMENT ON FUNCTION pagevault.alter_provider(text, jsonb) IS 'Changes the options of a provider, after checking that every key it wraps can still be unwrapped. Keys of dropped databases are not checked.';
COMMENT ON FUNCTION pagevault.drop_provider(text) IS 'Removes a provider that wraps no key.';
COMMENT ON FUNCTION pagevault.check_provider(text, text) IS 'Checks a provider: its options, the connection, and a round trip with each master key in use, or with the given one. A failed check is a row in which ok is false, not an error. Available during recovery.';
COMMENT ON FUNCTION pagevault.set_cluster_master_key(text, text) IS 'Sets or changes the master key of the cluster. The key must exist. To change to another key of the same provider, the provider rewraps; to change to another provider, the former one need not be reachable.';
COMMENT ON FUNCTION pagevault.set_database_master_key(text, text) IS 'Sets or changes the master key of the current database, which otherwise uses that of the cluster.';
COMMENT ON FUNCTION pagevault.rotate_cluster_master_key() IS 'Moves to a newer version of the cluster''s master key. The provider creates one unless it already has one. Returns the version that now wraps; versions increase, but not always by one.';
COMMENT ON FUNCTION pagevault.rotate_database_master_key() IS 'Moves to a newer version of the current database''s own master key. Returns the version that now wraps.';
COMMENT ON FUNCTION pagevault.add_database_master_key(text, text) IS 'Wraps the key of the current database with another master key, too; each of them unlocks it. It is asked last.';
COMMENT ON FUNCTION pagevault.add_cluster_master_key(text, text) IS 'Wraps the key of the cluster with another master key, too; each of them unlocks it. It is asked last.';
COMMENT ON FUNCTION pagevault.drop_database_master_key(text, text) IS 'Takes one of several master keys of the current database away. Another one must unlock.';
COMMENT ON FUNCTION pagevault.drop_cluster_master_key(text, text) IS 'Takes one of several master keys of the cluster away. Another one must unlock.';
COMMENT ON FUNCTION pagevault.create_key_group(text) IS 'Creates a key group: relations under a key of their own, whose master key another party may hold. Labels name it: ''encrypted key_group=NAME''. It cannot be rolled back.';
COMMENT ON FUNCTION pagevault.drop_key_group(text) IS 'Drops a key group that nothing is encrypted in any more, with its key.';
COMMENT ON FUNCTION pagevault.set_key_group_master_key(text, text, text) IS 'Sets or changes the master key of a key group.';
COMMENT ON FUNCTION pagevault.add_key_group_master_key(text, text, text) IS 'Wraps the key of a key group with another master key, too; each of them unlocks it. It is asked last.';
COMMENT ON FUNCTION pagevault.drop_key_group_master_key(text, text, text) IS 'Takes one of several master keys of a key group away. Another one must unlock.';
COMMENT ON FUNCTION pagevault.rotate_key_group_master_key(text) IS 'Moves to a newer version of the master key of a key group. Returns the version that now wraps.';
COMMENT ON FUNCTION pagevault.rotate_key_group_key(text) IS 'Creates a new key of a key group, and rewraps the data keys of the group with it. No page is rewritten. Returns the version of the new key.';
COMMENT ON FUNCTION pagevault.rotate_database_key() IS 'Creates a new database key, for the current database if it has its own master key, else for the cluster, and rewraps its data keys with it. No page is rewritten. Returns the version of the new key.';
COMMENT ON FUNCTION pagevault.rotate_wal_key() IS 'Creates a new WAL key, which encrypts WAL from the next page on. Returns its version.';
COMMENT ON FUNCTION pagevault.unlock() IS 'Asks the providers now to unwrap keys that are locked or were revoked. If that fails, the error says why. Available during recovery.';

COMMENT ON FUNCTION pagevault.encrypt(regclass, text) IS 'Labels a relation encrypted, and encrypts it online with its indexes, TOAST table and owned sequences: at once if it is no larger than pagevault.rekey_threshold, else by a job. If another cipher is given, the relation gets a new data key. Returns the job number, or null if no job was needed. Requires ownership of the relation; SECURITY LABEL has the same effect. System catalogs require superuser or pagevault_admin.';
COMMENT ON FUNCTION pagevault.decrypt(regclass) IS 'Labels a relation plaintext, and decrypts it. Returns the job number, or null if no job was needed. Requires pagevault_admin and ownership. A system catalog is decrypted only if no label or setting requires encryption.';
COMMENT ON FUNCTION pagevault.encrypt_database() IS 'Labels the current database encrypted, and encrypts everything in it that the policy requires to be encrypted. Returns a row for each relation that was not encrypted; job is null if it was encrypted at once. Requires pagevault_admin and ownership of the database.';
COMMENT ON FUNCTION pagevault.decrypt_database() IS 'Removes all labels that say encrypted from the current database and its objects, and decrypts by jobs. Returns a row for each relation. Requires pagevault_admin and ownership of the database and of the labelled objects.';
COMMENT ON FUNCTION pagevault.encrypt_catalogs() IS 'Encrypts every catalog of the current database, and every shared catalog, that labels or settings require to be encrypted. Returns a row for each that was not encrypted.';
COMMENT ON FUNCTION pagevault.reconcile(regclass) IS 'Rewrites a relation online, with its indexes, TOAST table and owned sequences, as labels and settings require. Given an index, it processes its table. Returns the job number, or null if no job was needed. [Drift](policy.md#what-differs-from-the-policy).';
COMMENT ON FUNCTION pagevault.rotate_data_key(regclass) IS 'Creates new data keys for a relation, its indexes, TOAST table and owned sequences, and rewrites their pages under these keys, online. Returns the job number.';
COMMENT ON FUNCTION pagevault.rotate_all_data_keys() IS 'Rotates the data keys of all encrypted relations of the current database. Returns a row for each job.';
COMMENT ON FUNCTION pagevault.pause_rekey(bigint) IS 'Pauses a job.';
COMMENT ON FUNCTION pagevault.resume_rekey(bigint) IS 'Resumes a job that was paused or cancelled, or that failed.';
COMMENT ON FUNCTION pagevault.cancel_rekey(bigint) IS 'Cancels a job. The relation stays readable, with some pages rewritten and others not.';
COMMENT ON FUNCTION pagevault.wait_for_rekey(bigint, interval) IS 'Waits for a job. Returns true when it is done, false after the timeout or if the job is paused or cancelled. Raises an error if the job has failed. Requires ownership of the relation or pagevault_admin.';
COMMENT ON FUNCTION pagevault.wait_for_rekey(integer, interval) IS 'The same, for a number without a cast.';
COMMENT ON FUNCTION pagevault.wait_for_rekey(regclass, interval) IS 'The same, for the job of a relation.';
-- Without this overload, a name without a cast would be ambiguous: a literal could be any of them.
CREATE FUNCTION pagevault.wait_for_rekey(relation text, timeout interval DEFAULT NULL) RETURNS boolean
RETURN pagevault.wait_for_rekey(relation::pg_catalog.regclass, timeout);
COMMENT ON FUNCTION pagevault.wait_for_rekey(text, interval) IS 'The same, for a name without a cast.';

COMMENT ON FUNCTION pagevault.is_encrypted(regclass) IS 'True only if every page on disk of a relation, its indexes, TOAST table and owned sequences is encrypted, and new pages will be. False for relations without storage, such as partitioned tables. Reads the files. Requires SELECT on the relation, pagevault_admin or pg_monitor.';
COMMENT ON FUNCTION pagevault.verify(regclass) IS 'Counts the pages on disk by fork and state: encrypted (with the version of the data key), destroyed (encrypted under a shredded key), plaintext, refused (plaintext, or under a former key, in a file that is known to have no such page; its reads fail), or empty (all zeros). Reads the files.';
COMMENT ON FUNCTION pagevault.report(boolean) IS 'Everything that the views show about the cluster and the current database, as one document. With check_files, all files are read as well, and their pages counted by state.';
COMMENT ON FUNCTION pagevault.drift(boolean) IS 'The rows of the view drift. With check_files, all files are read as well.';

COMMENT ON FUNCTION pagevault.shred(regclass, text) IS 'Destroys the data keys of a relation and its partitions, with their indexes, TOAST tables and owned sequences. confirm is the schema-qualified name of the relation.';
COMMENT ON FUNCTION pagevault.shred_schema(regnamespace, text) IS 'Destroys the data keys of every relation in a schema.';
COMMENT ON FUNCTION pagevault.shred_database(text, text) IS 'Destroys every data key of another database. Nobody may be connected to it.';
COMMENT ON FUNCTION pagevault.shred_key_group(text, text) IS 'Destroys the key of a key group, and the data keys of its relations in the current database and of its former files. It must have no relation in another database. confirm is its name.';
COMMENT ON FUNCTION pagevault.shred_former_files(text) IS 'Destroys the data keys of files of the current database that no longer exist: files of dropped relations, and files replaced by TRUNCATE, VACUUM FULL, REINDEX and similar commands. Makes a checkpoint first. confirm is the name of the database.';

COMMENT ON FUNCTION pagevault.stats_rows() IS 'Serves the view stats.';
COMMENT ON FUNCTION pagevault.status_rows() IS 'Serves the view status.';
COMMENT ON FUNCTION pagevault.provider_rows() IS 'Serves the view providers.';
COMMENT ON FUNCTION pagevault.database_key_rows() IS 'Serves the view database_keys.';
COMMENT ON FUNCTION pagevault.data_key_rows() IS 'Serves the view data_keys.';
COMMENT ON FUNCTION pagevault.relation_rows() IS 'Serves the view relations.';
COMMENT ON FUNCTION pagevault.encrypted_database_rows() IS 'Serves the view encrypted_databases.';
COMMENT ON FUNCTION pagevault.former_key_rows() IS 'Serves the view former_keys.';
COMMENT ON FUNCTION pagevault.key_age_rows() IS 'Serves the view key_ages.';
COMMENT ON FUNCTION pagevault.key_group_rows() IS 'Serves the view key_groups.';
COMMENT ON FUNCTION pagevault.key_group_names() IS 'Serves several views.';
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
GRANT SELECT ON pagevault.status, pagevault.data_keys, pagevault.relations, pagevault.tables TO PUBLIC;
GRANT EXECUTE ON FUNCTION
    pagevault.status_rows(), pagevault.data_key_rows(), pagevault.relation_rows(), pagevault.is_encrypted(regclass),
    pagevault.key_group_names()
    TO PUBLIC;

-- Monitoring: drift, state on disk, cost.
GRANT SELECT ON pagevault.drift, pagevault.stats, pagevault.key_ages, pagevault.encrypted_databases,
    pagevault.former_keys, pagevault.key_groups TO pg_monitor, pagevault_admin;
GRANT EXECUTE ON FUNCTION pagevault.drift(boolean), pagevault.verify(regclass), pagevault.stats_rows(),
    pagevault.key_age_rows(), pagevault.former_key_rows(), pagevault.key_group_rows(),
    pagevault.encrypted_database_rows()
    TO pg_monitor, pagevault_admin;

-- Key management. Functions that change something check the role again.
GRANT SELECT ON pagevault.providers, pagevault.database_keys TO pagevault_admin;
GRANT EXECUTE ON FUNCTION
    pagevault.provider_rows(), pagevault.database_key_rows(), pagevault.report(boolean),
    pagevault.add_provider(text, text, jsonb), pagevault.alter_provider(text, jsonb),
    pagevault.drop_provider(text), pagevault.check_provider(text, text),
    pagevault.set_database_master_key(text, text), pagevault.set_cluster_master_key(text, text),
    pagevault.add_database_master_key(text, text), pagevault.add_cluster_master_key(text, text),
    pagevault.drop_database_master_key(text, text), pagevault.drop_cluster_master_key(text, text),
    pagevault.rotate_database_master_key(), pagevault.rotate_cluster_master_key(),
    pagevault.rotate_database_key(), pagevault.rotate_wal_key(), pagevault.unlock(),
    pagevault.create_key_group(text), pagevault.drop_key_group(text),
    pagevault.set_key_group_master_key(text, text, text), pagevault.add_key_group_master_key(text, text, text),
    pagevault.drop_key_group_master_key(text, text, text),
    pagevault.rotate_key_group_master_key(text), pagevault.rotate_key_group_key(text)
    TO pagevault_admin;

-- Not for PUBLIC, because it writes: owners have SECURITY LABEL, or can be granted this.
GRANT EXECUTE ON FUNCTION pagevault.encrypt(regclass, text) TO pagevault_admin;
GRANT EXECUTE ON FUNCTION
    pagevault.decrypt(regclass), pagevault.encrypt_catalogs(),
    pagevault.encrypt_database(), pagevault.decrypt_database(),
    pagevault.reconcile(regclass), pagevault.rotate_data_key(regclass), pagevault.rotate_all_data_keys(),
    pagevault.pause_rekey(bigint), pagevault.resume_rekey(bigint), pagevault.cancel_rekey(bigint),
    pagevault.shred(regclass, text), pagevault.shred_schema(regnamespace, text), pagevault.shred_database(text, text),
    pagevault.shred_former_files(text), pagevault.shred_key_group(text, text)
    TO pagevault_admin;

-- Monitoring can see jobs, and owners can wait for them (each function checks the relation's
-- owner).
GRANT SELECT ON pagevault.rekey_jobs TO pg_monitor, pagevault_admin;
GRANT EXECUTE ON FUNCTION pagevault.rekey_job_rows() TO pg_monitor, pagevault_admin;
GRANT EXECUTE ON FUNCTION
    pagevault.wait_for_rekey(bigint, interval), pagevault.wait_for_rekey(integer, interval), pagevault.wait_for_rekey(regclass, interval),
    pagevault.wait_for_rekey(text, interval)
    TO PUBLIC;
