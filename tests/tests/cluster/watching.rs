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
const LOOKS: [&str; 15] = [
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
