//! Monitoring neither waits for other sessions, nor delays them, nor accumulates memory.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::{Cluster, Settings};

const TABLES: &str = "CREATE SCHEMA app;
    CREATE TABLE app.plain (id serial PRIMARY KEY, name text);
    INSERT INTO app.plain (name) SELECT repeat(md5(i::text), 100) FROM generate_series(1, 100) i;
    SET pagevault.default_encryption = on;
    CREATE TABLE app.sealed (id serial PRIMARY KEY, name text);
    INSERT INTO app.sealed (name) SELECT repeat(md5(i::text), 100) FROM generate_series(1, 100) i";

/// All monitoring queries.
const LOOKS: [&str; 16] = [
    "SELECT * FROM pagevault.status",
    "SELECT * FROM pagevault.providers",
    "SELECT * FROM pagevault.database_keys",
    "SELECT * FROM pagevault.data_keys",
    "SELECT * FROM pagevault.relations",
    "SELECT * FROM pagevault.drift",
    "SELECT * FROM pagevault.drift(true)",
    "SELECT * FROM pagevault.rekey_jobs",
    "SELECT * FROM pagevault.stats",
    "SELECT * FROM pagevault.verify('app.sealed')",
    "SELECT * FROM pagevault.verify('app.plain')",
    "SELECT pagevault.is_encrypted('app.sealed')",
    "SELECT pagevault.is_encrypted('app.plain')",
    "SELECT pagevault.wait_for_rekey('app.sealed'::regclass)",
    "SELECT pagevault.check_provider('local')",
    "SELECT * FROM pagevault.tables",
];

/// Commands that may lock a table, its index, its TOAST table and its sequence indefinitely.
const HOLDERS: [&str; 6] = [
    "LOCK TABLE app.sealed, app.plain IN ACCESS EXCLUSIVE MODE",
    "TRUNCATE app.sealed, app.plain",
    "ALTER TABLE app.sealed ALTER id TYPE bigint; ALTER TABLE app.plain ALTER id TYPE bigint",
    "DROP INDEX app.no_other; REINDEX TABLE app.sealed; REINDEX TABLE app.plain; ALTER SEQUENCE app.sealed_id_seq RESTART",
    "DROP TABLE app.sealed, app.plain",
    "ALTER SCHEMA app RENAME TO former; LOCK TABLE former.sealed, former.plain IN ACCESS EXCLUSIVE MODE",
];

#[test]
fn locked_tables_do_not_delay_monitoring() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default().conf("autovacuum = off"))?;
    cluster.sql(TABLES)?;
    cluster.sql("CREATE INDEX no_other ON app.sealed (name)")?;
    cluster.sql("CHECKPOINT")?;
    let bytes =
        "SELECT coalesce(sum(bytes), 0) FROM pagevault.relations WHERE relation::text ~ '^app'";
    let sizes = "SELECT sum(pg_relation_size(oid)) FROM pg_class
         WHERE relnamespace = 'app'::regnamespace AND relkind IN ('r', 'i', 'S')";
    ensure!(cluster.text(bytes)? == cluster.text(sizes)?, "sizes");
    let size = cluster.text(sizes)?;
    let pages = "SELECT sum(pages) FROM pagevault.verify('app.sealed')";
    let verified = cluster.text(pages)?;
    for holder in HOLDERS {
        let mut session = cluster.client()?;
        run_sql(&mut session, &format!("BEGIN; {holder}"))?;
        // A new session reads all catalogs; an old one has received no invalidations.
        let mut watcher = cluster.client()?;
        run_sql(&mut watcher, "SET lock_timeout = '5s'; SET statement_timeout = '60s'")?;
        for _ in 0..2 {
            for look in LOOKS {
                run_sql(&mut watcher, look).map_err(|error| error.context(holder))?;
            }
        }
        // Monitoring sees the same as other sessions.
        ensure!(text(&mut watcher, bytes)? == size, "{holder}: sizes");
        ensure!(text(&mut watcher, pages)? == verified, "{holder}: pages");
        ensure!(text(&mut watcher, LOOKS[11])? == "t" && text(&mut watcher, LOOKS[12])? == "f");
        run_sql(&mut session, "ROLLBACK")?;
    }
    cluster.finish()
}

/// The view `tables` counts indexes, TOAST tables and owned sequences with their table.
#[test]
fn tables_are_shown_with_what_belongs_to_them() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default().conf("autovacuum = off"))?;
    cluster.sql(TABLES)?;
    cluster.sql(
        "CREATE SEQUENCE app.alone;
         CREATE MATERIALIZED VIEW app.seen AS SELECT id FROM app.plain;
         SET pagevault.default_encryption = off;
         CREATE TABLE app.parted (id int GENERATED ALWAYS AS IDENTITY, name text) PARTITION BY HASH (id);
         CREATE TABLE app.part PARTITION OF app.parted FOR VALUES WITH (MODULUS 1, REMAINDER 0);
         ALTER INDEX app.sealed_pkey RENAME TO a_key;
         CHECKPOINT",
    )?;
    let shown = |columns: &str| {
        cluster.text(&format!(
            "SELECT string_agg(concat_ws(' ', relation, {columns}), ', ' ORDER BY relation::text)
               FROM pagevault.tables WHERE relation::text LIKE 'app.%'"
        ))
    };
    let is = |columns: &str, expected: &str| -> Result<()> {
        let got = shown(columns)?;
        ensure!(got == expected, "{got}, not {expected}");
        Ok(())
    };
    is(
        "kind, encrypted",
        "app.alone S no, app.part r no, app.parted p no, app.plain r no, app.sealed r yes, app.seen m no",
    )?;
    let sizes = "SELECT string_agg(relation || ' ' || size, ', ' ORDER BY relation::text)
                   FROM pagevault.tables WHERE relation::text IN ('app.plain', 'app.sealed')";
    let counted = "SELECT string_agg(t || ' ' || pg_size_pretty(
                       pg_relation_size(t) + pg_relation_size(t || '_id_seq')
                       + pg_relation_size(key) + pg_relation_size(toast)
                       + (SELECT pg_relation_size(indexrelid) FROM pg_index WHERE indrelid = toast)), ', ' ORDER BY t)
                   FROM (SELECT c.oid::regclass::text AS t, c.reltoastrelid AS toast,
                                (SELECT indexrelid FROM pg_index WHERE indrelid = c.oid) AS key
                           FROM pg_class c
                          WHERE c.oid IN ('app.plain'::regclass, 'app.sealed'::regclass)) _";
    let (size, count) = (cluster.text(sizes)?, cluster.text(counted)?);
    ensure!(size == count, "{size}, not {count}");

    // A setting applies to new files only.
    cluster.sql("SET pagevault.default_encryption = on; REINDEX TABLE app.plain")?;
    let partly = "SELECT encrypted || ' ' || plaintext::text FROM pagevault.tables
                   WHERE relation = 'app.plain'::regclass";
    let got = cluster.text(partly)?;
    ensure!(got.starts_with("partly {app.plain,app.plain_id_seq"), "{got}");

    cluster.sql("SELECT pagevault.encrypt('app.plain'); SELECT pagevault.encrypt('app.part')")?;
    cluster.sql("SELECT pagevault.encrypt('app.alone', 'aes-256-xts')")?;
    is(
        "encrypted, authenticated, ciphers",
        "app.alone yes no aes-256-xts, app.part yes yes aes-256-xts-auth, app.parted no no, \
         app.plain yes yes aes-256-xts-auth, app.sealed yes yes aes-256-xts-auth, app.seen no no",
    )?;
    cluster.finish()
}

/// A monitoring session caches nothing of the relations it reads.
#[test]
fn monitoring_many_relations_accumulates_no_memory() -> Result<()> {
    const TABLES: i64 = 1500;
    let (cluster, _keys) = Cluster::with_keys(&Settings::default().conf("autovacuum = off"))?;
    let used = "SELECT sum(used_bytes)::bigint FROM pg_backend_memory_contexts";
    let looks = [
        "SELECT count(*) FROM pagevault.drift",
        "SELECT sum(bytes), count(*) FILTER (WHERE encrypted) FROM pagevault.relations",
    ];
    cluster.sql("CREATE SCHEMA app")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON SCHEMA app IS 'encrypted'")?;
    for look in looks {
        let mut session = cluster.client()?;
        run_sql(&mut session, look)?;
        let before: i64 = text(&mut session, used)?.parse()?;
        let tables = format!(
            "DO $$ BEGIN FOR i IN 1..{TABLES} LOOP
                 EXECUTE format('CREATE TABLE %s (id int PRIMARY KEY, name text)', 'app.t' || i || '_' || pg_backend_pid());
             END LOOP; END $$"
        );
        // There are not enough locks to create all of them in one transaction.
        cluster.sql(&tables.replace("END LOOP", "COMMIT; END LOOP"))?;
        run_sql(&mut session, look)?;
        run_sql(&mut session, look)?;
        let grown = text(&mut session, used)?.parse::<i64>()? - before;
        ensure!(grown < 100 * TABLES, "{look}: {} bytes per table", grown / TABLES);
    }
    cluster.finish()
}
