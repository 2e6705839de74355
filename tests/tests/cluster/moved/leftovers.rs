//! Copies of databases that are left where a move has failed, or where a crash has ended it.

use std::thread;

use super::*;

const SHRED: &str = "SELECT * FROM pagevault.shred_former_files('app')";

/// What the copying has left in the other tablespace is no file of a relation.
#[test]
fn what_a_crash_leaves_of_a_move_keeps_no_keys() -> Result<()> {
    let (cluster, _keys) = with_app(&["there"])?;
    let in_app = |statement: &str| run_sql(&mut cluster.client_to("app")?, statement);
    for table in ["t", "dropped", "forgotten"] {
        in_app(&format!("CREATE TABLE {table} AS SELECT generate_series(1, 1000) AS id"))?;
        in_app(&format!("SELECT pagevault.encrypt('{table}')"))?;
    }
    cluster.sql("CHECKPOINT")?;
    cluster.stop_at("keys.in_file")?;
    let mut client = cluster.client()?;
    let moving = thread::spawn(move || {
        client.batch_execute("ALTER DATABASE app SET TABLESPACE there").is_err()
    });
    cluster.stopped_at("keys.in_file")?;
    cluster.kill()?;
    cluster.resume();
    ensure!(moving.join().is_ok_and(|failed| failed), "the database was moved");
    cluster.start_server()?;
    let app = cluster.text("SELECT oid FROM pg_database WHERE datname = 'app'")?;
    let left = inside(&cluster, "there")?.join(app);
    ensure!(left.exists(), "nothing is left");

    in_app("DROP TABLE dropped")?;
    cluster.sql("CHECKPOINT")?;
    let destroyed = format!("{SHRED} WHERE item = 'destroyed'").replace('*', "file");
    let files = column(&mut cluster.client_to("app")?, &destroyed)?;
    ensure!(files.len() == 1 && files[0].starts_with("base/"), "{files:?}");
    cluster.sql("CREATE DATABASE copied TEMPLATE app STRATEGY file_copy")?;
    cluster.set(&[("pagevault.keep_former_keys", "0")])?;
    let keys = || cluster.text("SELECT data_keys FROM pagevault.status");
    let before = keys()?;
    in_app("DROP TABLE forgotten")?;
    cluster.eventually_that("the key of the dropped table is forgotten", || {
        cluster.sql("CHECKPOINT")?;
        ensure!(keys()? != before, "{before} keys");
        Ok(())
    })?;
    cluster.sql("DROP DATABASE copied")?;

    // As documented.
    cluster.stop(StopMode::Fast)?;
    fs::remove_dir_all(&left)?;
    cluster.start_server()?;
    move_app(&cluster, "there")?;
    let count = text(&mut cluster.client_to("app")?, "SELECT count(*) FROM t")?;
    ensure!(count == "1000", "{count} rows");
    let log = cluster.log();
    ensure!(!log.contains("lacks its keys"), "{log}");
    cluster.finish()
}

/// Standbys would keep the copied files.
#[test]
fn a_move_for_whose_keys_there_is_no_room_copies_nothing() -> Result<()> {
    let conf = [
        "pagevault.keep_former_keys = -1",
        "pagevault.max_data_keys = 1000",
        "max_locks_per_transaction = 1000",
        "autovacuum = off",
    ];
    let (cluster, _keys) = with_app_and(&conf, &[])?;
    let mut client = cluster.client_to("app")?;
    run_sql(&mut client, "SET pagevault.default_encryption = on")?;
    let tables = "DO $$ BEGIN FOR i IN 1..600 LOOP EXECUTE 'CREATE TABLE t' || i || ' (id int)';
        END LOOP; END $$";
    run_sql(&mut client, tables)?;
    drop(client);
    let standby = standby_of(&cluster, &[])?;
    cluster.sql("CREATE TABLESPACE there LOCATION ''")?;
    let error = cluster.error("ALTER DATABASE app SET TABLESPACE there")?;
    ensure!(error.message == "all 1000 data keys are in use", "{error}");
    ensure!(error.sqlstate == "54000", "{error}");
    cluster.sql("CHECKPOINT")?;
    wait_for(&standby, &cluster)?;
    let app = cluster.text("SELECT oid FROM pg_database WHERE datname = 'app'")?;
    for server in [&cluster, &standby] {
        ensure!(!inside(server, "there")?.join(&app).exists(), "files were copied");
    }
    standby.promote()?;
    run_sql(&mut standby.client_to("app")?, "DROP TABLE t1")?;
    standby.sql("CHECKPOINT")?;
    run_sql(&mut standby.client_to("app")?, SHRED)?;
    standby.finish()?;
    cluster.finish()
}
