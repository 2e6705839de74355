//! No false alarm: files that are copied below the storage manager, kept under another relation,
//! filled without WAL, or reset after a crash.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::{Cluster, Settings, StopMode};

use super::{HONEST, cluster, is_sealed_only, read_again};

/// Of a copy that the file system made the keystore does not say it. Replay copies the original as
/// it is then, which may be later.
#[test]
fn copies_of_databases_are_read() -> Result<()> {
    let (cluster, _keys) = cluster(&Settings::default())?;
    cluster.sql("CREATE DATABASE model")?;
    let mut model = cluster.client_to("model")?;
    run_sql(&mut model, "CREATE EXTENSION IF NOT EXISTS pagevault")?;
    run_sql(
        &mut model,
        "SET pagevault.default_encryption = on; CREATE TABLE t AS SELECT i AS id FROM generate_series(1, 1000) i",
    )?;
    drop(model);
    cluster.sql("CREATE DATABASE by_wal TEMPLATE model STRATEGY wal_log")?;
    cluster.sql("CREATE DATABASE by_file TEMPLATE model STRATEGY file_copy")?;
    let is = |database: &str| -> Result<String> {
        let mut client = cluster.client_to(database)?;
        let rows = text(&mut client, "SELECT count(*) FROM t")?;
        ensure!(rows == "1000", "{database}: {rows} rows");
        text(
            &mut client,
            "SELECT sealed_only FROM pagevault.relations WHERE relation = 't'::regclass",
        )
    };
    for _ in 0..2 {
        ensure!(is("model")? == "t" && is("by_wal")? == "t" && is("by_file")? == "f");
        read_again(&cluster)?;
    }
    cluster.finish()
}

/// A database comes back to where a file with the same number contained encrypted pages only.
#[test]
fn a_database_that_was_moved_and_decrypted_is_read() -> Result<()> {
    let settings = Settings::default().conf("pagevault.rekey_threshold = 0");
    let (cluster, _keys) = cluster(&settings)?;
    cluster.make_tablespace("elsewhere")?;
    cluster.sql("CREATE DATABASE moved")?;
    let run =
        |statements: &str| -> Result<()> { run_sql(&mut cluster.client_to("moved")?, statements) };
    run("CREATE EXTENSION IF NOT EXISTS pagevault")?;
    run("SET pagevault.default_encryption = on;
         CREATE TABLE t AS SELECT i AS id FROM generate_series(1, 1000) i")?;
    cluster.sql("ALTER DATABASE moved SET TABLESPACE elsewhere")?;
    run("SELECT pagevault.decrypt('t')")?;
    run("SELECT pagevault.wait_for_rekey('t'::regclass, '1min')")?;
    // New pages are encrypted, the others are still plaintext.
    run("ALTER SYSTEM SET pagevault.rekey_workers = 0")?;
    read_again(&cluster)?;
    run(
        "SELECT pagevault.encrypt('t'); INSERT INTO t SELECT i FROM generate_series(1001, 2000) i",
    )?;
    cluster.sql("CHECKPOINT")?;
    cluster.sql("ALTER DATABASE moved SET TABLESPACE pg_default")?;
    for _ in 0..2 {
        let mut client = cluster.client_to("moved")?;
        ensure!(text(&mut client, "SELECT count(*) FROM t")? == "2000");
        drop(client);
        read_again(&cluster)?;
    }
    cluster.finish()
}

/// As above, but the file that comes never had a key: its number was that of an encrypted file,
/// which was dropped before the database left. (OIDs begin again after the last one.)
#[test]
fn a_database_that_brings_a_number_back_in_plaintext_is_read() -> Result<()> {
    let (cluster, _keys) = cluster(&Settings::default())?;
    cluster.without_witness("pg_resetwal begins other WAL");
    cluster.make_tablespace("elsewhere")?;
    cluster.sql("CREATE DATABASE moved")?;
    let query =
        |statement: &str| -> Result<String> { text(&mut cluster.client_to("moved")?, statement) };
    let run =
        |statements: &str| -> Result<()> { run_sql(&mut cluster.client_to("moved")?, statements) };
    run("CREATE EXTENSION IF NOT EXISTS pagevault")?;
    run("SET pagevault.default_encryption = on;
         CREATE TABLE gone AS SELECT i AS id FROM generate_series(1, 1000) i")?;
    let number = query("SELECT pg_relation_filenode('gone')")?;
    run("DROP TABLE gone")?;
    run("VACUUM pg_catalog.pg_class")?; // the row has the number, too
    cluster.sql("ALTER DATABASE moved SET TABLESPACE elsewhere")?;
    cluster.stop(StopMode::Fast)?;
    let mut reset = cluster.program("pg_resetwal");
    reset.args(["-o", &number]).arg("-D").arg(cluster.data_directory());
    ensure!(reset.status()?.success());
    cluster.start_server()?;
    run("CREATE TABLE u AS SELECT i AS id FROM generate_series(1, 1000) i")?;
    let again = query("SELECT pg_relation_filenode('u')")?;
    ensure!(again == number, "{again}, not {number}");
    cluster.sql("ALTER DATABASE moved SET TABLESPACE pg_default")?;
    for _ in 0..2 {
        ensure!(query("SELECT count(*) FROM u")? == "1000");
        ensure!(query("SELECT pagevault.is_encrypted('u')")? == "f");
        read_again(&cluster)?;
    }
    cluster.finish()
}

/// ALTER TABLE gives the file of an index to a new index. It has pages, perhaps in plaintext.
#[test]
fn an_index_that_is_kept_is_read() -> Result<()> {
    let settings = Settings::default()
        .conf("pagevault.rekey_threshold = 0")
        .conf("pagevault.rekey_workers = 0");
    let (cluster, _keys) = cluster(&settings)?;
    cluster.sql(
        "CREATE TABLE kept (id int, name varchar(10)); CREATE INDEX kept_name ON kept (name);
         INSERT INTO kept SELECT i, 'name' || i FROM generate_series(1, 1000) i; CHECKPOINT",
    )?;
    let before = cluster.text("SELECT pg_relation_filenode('kept_name')")?;
    // The new index is to be encrypted, and gets the file as it is.
    cluster.sql("SELECT pagevault.encrypt('kept')")?;
    cluster.sql("ALTER TABLE kept ALTER name TYPE varchar(20)")?;
    ensure!(cluster.text("SELECT pg_relation_filenode('kept_name')")? == before, "not kept");
    ensure!(!is_sealed_only(&cluster, "kept_name")?);
    for _ in 0..2 {
        let select = "SET enable_seqscan = off; SET enable_bitmapscan = off;
                      SELECT count(*) FROM kept WHERE name > ''";
        let mut client = cluster.client()?;
        client.batch_execute("SET enable_seqscan = off; SET enable_bitmapscan = off")?;
        let found: i64 = client.query_one("SELECT count(*) FROM kept WHERE name > ''", &[])?.get(0);
        ensure!(found == 1000, "{found}: {select}");
        drop(client);
        read_again(&cluster)?;
    }
    cluster.finish()
}

#[test]
fn files_that_are_filled_without_wal_are_read() -> Result<()> {
    let settings = Settings::default()
        .conf("wal_level = minimal")
        .conf("max_wal_senders = 0")
        .conf("wal_skip_threshold = 0");
    let (cluster, _keys) = cluster(&settings)?;
    cluster.sql(
        "SET pagevault.default_encryption = on;
         BEGIN; CREATE TABLE quick (id int PRIMARY KEY);
         INSERT INTO quick SELECT generate_series(1, 5000); COMMIT;
         BEGIN; TRUNCATE t; INSERT INTO t SELECT i, 'honest' FROM generate_series(1, 1000) i; COMMIT;
         CREATE UNLOGGED TABLE u (id int PRIMARY KEY); INSERT INTO u SELECT generate_series(1, 1000)",
    )?;
    for _ in 0..2 {
        cluster.crash()?;
        ensure!(cluster.text("SELECT count(*) FROM quick")? == "5000");
        ensure!(cluster.text(HONEST)? == "1000");
        ensure!(cluster.text("SELECT count(*) FROM u")? == "0");
        for relation in ["quick", "quick_pkey", "t", "u", "u_pkey"] {
            ensure!(is_sealed_only(&cluster, relation)?, "{relation}");
        }
        ensure!(count_by_index(&cluster, "quick")? == 5000);
        cluster.sql("INSERT INTO u SELECT generate_series(1, 1000)")?;
    }
    cluster.finish()
}

fn count_by_index(cluster: &Cluster, table: &str) -> Result<i64> {
    let mut client = cluster.client()?;
    client.batch_execute("SET enable_seqscan = off; SET enable_bitmapscan = off")?;
    Ok(client.query_one(&format!("SELECT count(*) FROM {table} WHERE id > 0"), &[])?.get(0))
}
