//! Logical replication: its workers create and replace files too.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::{Cluster, DataFile, Settings};
use postgres::Client;

use crate::{assert_plain, assert_sealed};

const TABLES: &str = "CREATE TABLE secret (id serial PRIMARY KEY, name text);
    CREATE TABLE open (id serial PRIMARY KEY, name text);";

fn files(cluster: &Cluster, client: &mut Client, table: &str) -> Result<Vec<DataFile>> {
    let mut files = Vec::new();
    for member in [table.to_owned(), format!("{table}_pkey")] {
        let path = text(client, &format!("SELECT pg_relation_filepath('{member}')"))?;
        files.extend(DataFile::find(&cluster.data_directory().join(path))?);
    }
    Ok(files)
}

/// The subscriber is another database of the same server.
#[test]
fn a_subscriber_follows_its_own_policy() -> Result<()> {
    let settings = Settings::default().conf("wal_level = logical");
    let (mut cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.allow_log("terminating logical replication worker");
    cluster.sql(TABLES)?;
    cluster.sql(
        "INSERT INTO secret (name) SELECT 'kanarienvogel' FROM generate_series(1, 1000);
         INSERT INTO open (name) SELECT 'kanarienvogel' FROM generate_series(1, 1000);
         CREATE PUBLICATION everything FOR ALL TABLES;",
    )?;
    cluster.sql("SELECT pg_create_logical_replication_slot('stream', 'pgoutput')")?;
    cluster.sql("CREATE DATABASE subscriber")?;
    let mut subscriber = cluster.client_to("subscriber")?;
    run_sql(&mut subscriber, "CREATE EXTENSION pagevault")?;
    run_sql(&mut subscriber, TABLES)?;
    run_sql(&mut subscriber, "SELECT pagevault.encrypt('secret')")?;
    run_sql(
        &mut subscriber,
        &format!(
            "CREATE SUBSCRIPTION follows
             CONNECTION 'host={} user=postgres dbname=postgres' PUBLICATION everything
             WITH (create_slot = false, slot_name = stream)",
            cluster.directory().display()
        ),
    )?;
    let mut check = |rows: &str, step: &str| -> Result<()> {
        for table in ["secret", "open"] {
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
            while text(&mut subscriber, &format!("SELECT count(*) FROM {table}"))? != rows {
                ensure!(std::time::Instant::now() < deadline, "{step}: {table} does not follow");
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
        }
        cluster.sql("CHECKPOINT")?;
        assert_sealed(&files(&cluster, &mut subscriber, "secret")?)
            .with_context(|| step.to_owned())?;
        assert_plain(&files(&cluster, &mut subscriber, "open")?).with_context(|| step.to_owned())
    };
    check("1000", "initial copy")?;
    // No utility hook is called for changes by the worker.
    let mut careless = cluster.client_to("subscriber")?;
    run_sql(&mut careless, "SET pagevault.data_catalog_encryption = off")?;
    run_sql(&mut careless, "SELECT pagevault.decrypt('pg_statistic')")?;
    run_sql(&mut careless, "SELECT pagevault.wait_for_rekey('pg_statistic'::regclass, '60 s')")?;
    for table in ["secret", "open"] {
        cluster.sql(&format!(
            "TRUNCATE {table} RESTART IDENTITY; INSERT INTO {table} (name) VALUES ('kanarienvogel')"
        ))?;
    }
    check("1", "TRUNCATE by the apply worker")?;
    let protected = text(&mut careless, "SELECT pagevault.is_encrypted('pg_statistic')")?;
    ensure!(protected == "t", "the apply worker has not protected statistics");
    run_sql(
        &mut subscriber,
        "ALTER SUBSCRIPTION follows DISABLE;
         ALTER SUBSCRIPTION follows SET (slot_name = NONE);
         DROP SUBSCRIPTION follows",
    )?;
    drop(subscriber);
    cluster.finish()
}
