//! REPACK (CONCURRENTLY), from PostgreSQL 19 on: its worker decodes what other sessions change
//! meanwhile, and stores the changes in files for the session that repacks.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{column, run_sql};
use pagevault_tests::datafile::holds;
use pagevault_tests::{Cluster, Installation, Settings};

use super::{CANARY, LOCK, check, files_below, spilled};
use crate::assert_sealed;

/// A table whose second index cannot be built by REPACK while the lock is taken. Changes of `t`
/// need no new entries in it, because there is room on the page (heap-only tuples).
const TABLE: &str = "
    CREATE FUNCTION hold_repack(id int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS $$
    BEGIN
        IF current_query() LIKE 'REPACK%' THEN
            PERFORM pg_advisory_lock_shared(4711);
            PERFORM pg_advisory_unlock_shared(4711);
        END IF;
        RETURN id;
    END $$;
    CREATE TABLE birds (id int PRIMARY KEY, t text) WITH (fillfactor = 10);
    CREATE INDEX ON birds (hold_repack(id));
    INSERT INTO birds SELECT i, 'egg' FROM generate_series(1, 500) i;";

const ROWS: &str = "SELECT id || t FROM birds ORDER BY id";

#[test]
fn changes_during_repack_are_sealed() -> Result<()> {
    if Installation::get()?.major < 19 {
        eprintln!("skipped: REPACK is new in PostgreSQL 19");
        return Ok(());
    }
    let settings = Settings::default().conf("logical_decoding_work_mem = 64kB");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql(TABLE)?;
    cluster.sql("SELECT pagevault.encrypt('birds')")?;
    for sealed in [false, true] {
        let setting = if sealed { "auto" } else { "off" };
        cluster.set(&[("pagevault.temp_encryption", setting)])?;
        repack_while_rows_change(&cluster, sealed)?;
        let after = column(&mut cluster.client()?, ROWS)?;
        let expected: Vec<_> = (1..=500).map(|id| format!("{id}{CANARY}{id}")).collect();
        ensure!(after == expected, "{setting}: other rows: {after:?}");
        cluster.sql("CHECKPOINT")?;
        assert_sealed(&cluster.family_files("birds")?)?;
        ensure!(spilled(&cluster).is_empty(), "{setting}: files are left");
    }
    cluster.finish()
}

#[test]
fn a_server_killed_during_repack_leaves_no_plaintext() -> Result<()> {
    if Installation::get()?.major < 19 {
        eprintln!("skipped: REPACK is new in PostgreSQL 19");
        return Ok(());
    }
    let settings = Settings::default()
        .conf("logical_decoding_work_mem = 64kB")
        .conf("pagevault.wal_encryption = on");
    let (mut cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.allow_log("cannot encrypt WAL: the cluster has no master key");
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    cluster.sql(TABLE)?;
    cluster.sql("SELECT pagevault.encrypt('birds')")?;
    let mut killed = Ok(());
    let ended = while_repack_waits(&cluster, || {
        killed = change_and_look(&cluster, true)
            .and_then(|()| cluster.sql("CHECKPOINT"))
            .and_then(|()| cluster.kill());
        Ok(())
    });
    killed?;
    ensure!(ended.is_err(), "REPACK survives");
    for file in files_below(&cluster.data_directory()) {
        let shown = holds(&file.bytes, CANARY.as_bytes());
        ensure!(!shown, "{} shows a row", file.path.display());
    }
    cluster.start_after_crash()?;
    let expected: Vec<_> = (1..=500).map(|id| format!("{id}{CANARY}{id}")).collect();
    ensure!(column(&mut cluster.client()?, ROWS)? == expected, "other rows after the crash");
    cluster.sql("REPACK (CONCURRENTLY) birds")?;
    cluster.sql("CHECKPOINT")?;
    ensure!(column(&mut cluster.client()?, ROWS)? == expected, "other rows after REPACK");
    assert_sealed(&cluster.family_files("birds")?)?;
    cluster.finish()
}

/// Updates all rows while REPACK waits for the advisory lock, and looks at the files that its
/// worker has written: those with committed changes, and those of the transaction, which was too
/// large for its memory.
fn repack_while_rows_change(cluster: &Cluster, sealed: bool) -> Result<()> {
    cluster.sql("UPDATE birds SET t = 'egg'")?;
    cluster.sql("VACUUM FULL birds")?;
    while_repack_waits(cluster, || change_and_look(cluster, sealed))
}

/// Calls `act` while REPACK (CONCURRENTLY) waits for the advisory lock, then lets it continue.
fn while_repack_waits(cluster: &Cluster, act: impl FnOnce() -> Result<()>) -> Result<()> {
    let mut lock = cluster.client()?;
    run_sql(&mut lock, &format!("SELECT pg_advisory_lock({LOCK})"))?;
    std::thread::scope(|scope| {
        let repack = scope.spawn(|| cluster.sql("REPACK (CONCURRENTLY) birds"));
        let looked = cluster
            .eventually("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory'", "1")
            .and_then(|()| act());
        // After a kill it is gone, like the server.
        let unlocked = run_sql(&mut lock, &format!("SELECT pg_advisory_unlock({LOCK})"));
        let Ok(repacked) = repack.join() else { anyhow::bail!("the thread of REPACK panicked") };
        looked.and(repacked).and(unlocked)
    })
}

fn change_and_look(cluster: &Cluster, sealed: bool) -> Result<()> {
    let mut client = cluster.client()?;
    run_sql(&mut client, "BEGIN")?;
    run_sql(
        &mut client,
        &format!("UPDATE birds SET t = '{CANARY}' || repeat('{CANARY}', 5) || id"),
    )?;
    cluster.eventually_that("a spilled transaction", || {
        let mut files = files_below(&cluster.data_directory().join("pg_replslot"));
        files.retain(|file| file.path.extension().is_some_and(|extension| extension == "spill"));
        check(&files, sealed)
    })?;
    run_sql(&mut client, &format!("UPDATE birds SET t = '{CANARY}' || id"))?;
    run_sql(&mut client, "COMMIT")?;
    cluster.eventually_that("changes for REPACK", || check(&spilled(cluster), sealed))
}
