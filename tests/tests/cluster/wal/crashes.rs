//! kill -9 with sealed WAL, in several sizes and modes of writing WAL.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use pagevault_tests::datafile::holds;
use pagevault_tests::wal::{PAGE, WalPage};
use pagevault_tests::witnesses::Witnesses;
use pagevault_tests::{Settings, StopMode};

use super::{STATE, assert_hidden, count, insert, last_page, marks, sealing, segments, state_at};

const ROWS: &str = "SELECT concat_ws(' ', count(*), min(name), max(name)) FROM t";

fn survives(settings: Settings) -> Result<()> {
    let (cluster, _keys) = sealing(&settings.conf("wal_keep_size = 1GB"))?;
    cluster.pgbench(&["-i", "-q", "-s", "1"])?;
    let mut witnesses = Witnesses::of(&cluster)?;
    for round in 1..=3_u64 {
        let mut load = cluster.pgbench_in_background(&["-n", "-c", "4", "-j", "2", "-T", "60"])?;
        sleep(Duration::from_millis(500 * round));
        insert(&cluster, "drossel", 1000)?;
        if round == 2 {
            cluster.sql("CHECKPOINT; SELECT pg_switch_wal()")?;
            witnesses.back_up(&cluster, "pgbench")?;
            insert(&cluster, "drossel", 1000)?;
        }
        cluster.kill()?;
        load.wait()?;
        cluster.start_server()?;
        let balanced = "SELECT (SELECT sum(abalance) FROM pgbench_accounts)
            = (SELECT coalesce(sum(delta), 0) FROM pgbench_history)";
        ensure!(cluster.text(balanced)? == "t", "round {round}: balances differ");
    }
    ensure!(count(&cluster, "drossel")? == "4000", "{} rows", count(&cluster, "drossel")?);
    assert_hidden(&cluster, "drossel")?;
    ensure!(marks(&segments(&cluster)?)? == [1], "not all is sealed with the one key");
    let sums =
        "SELECT concat_ws(' ', (SELECT sum(abalance) FROM pgbench_accounts), count(*), sum(delta))
        FROM pgbench_history";
    witnesses
        .judge_and(&cluster, &[ROWS, sums], &[], |witness| assert_hidden(witness, "drossel"))?;
    cluster.finish()
}

#[test]
fn committed_rows_survive() -> Result<()> {
    survives(Settings::default())
}

#[test]
fn with_full_page_writes_off_and_compression() -> Result<()> {
    survives(Settings::default().conf("full_page_writes = off").conf("wal_compression = on"))
}

#[test]
fn with_open_datasync() -> Result<()> {
    let settings = Settings::default().conf("fsync = on").conf("wal_sync_method = open_datasync");
    survives(settings)
}

#[test]
fn with_direct_io() -> Result<()> {
    if pagevault_tests::Installation::get()?.major < 16 {
        return Ok(());
    }
    survives(Settings::default().conf("debug_io_direct = wal"))
}

#[test]
fn with_minimal_wal_and_recycled_segments() -> Result<()> {
    let settings = Settings::default()
        .conf("wal_level = minimal")
        .conf("max_wal_senders = 0")
        .conf("max_wal_size = 64MB")
        .conf("min_wal_size = 64MB");
    let (cluster, _keys) = sealing(&settings)?;
    for round in 0..6 {
        insert(&cluster, "drossel", 100_000)?;
        cluster.sql("CHECKPOINT")?;
        insert(&cluster, "zaunkoenig", 10)?;
        // A table that is synced instead of logged.
        cluster.sql(&format!(
            "BEGIN; CREATE TABLE t_{round} (id int); COPY t_{round} FROM PROGRAM 'seq 1000'; COMMIT"
        ))?;
        cluster.crash()?;
        let rows = cluster.text(&format!("SELECT count(*) FROM t_{round}"))?;
        ensure!(rows == "1000", "round {round}: {rows} rows");
        ensure!(count(&cluster, "zaunkoenig")? == (10 * (round + 1)).to_string(), "round {round}");
    }
    ensure!(count(&cluster, "drossel")? == "600000", "{} rows", count(&cluster, "drossel")?);
    assert_hidden(&cluster, "drossel")?;
    assert_hidden(&cluster, "zaunkoenig")?;
    cluster.finish()
}

#[test]
fn prepared_transactions_survive() -> Result<()> {
    let settings =
        Settings::default().conf("max_prepared_transactions = 10").conf("wal_keep_size = 1GB");
    let (cluster, _keys) = sealing(&settings)?;
    let mut witnesses = Witnesses::of(&cluster)?;
    for name in ["one", "two", "three"] {
        cluster.sql(&format!(
            "BEGIN; INSERT INTO t (name) SELECT '{name}-' || i FROM generate_series(1, 100) i;
             PREPARE TRANSACTION '{name}'"
        ))?;
    }
    cluster.sql("COMMIT PREPARED 'one'")?;
    cluster.crash()?;
    cluster.sql("COMMIT PREPARED 'two'")?;
    cluster.crash()?;
    witnesses.back_up(&cluster, "a prepared transaction")?;
    cluster.sql("ROLLBACK PREPARED 'three'")?;
    cluster.crash()?;
    for (name, rows) in [("one", "100"), ("two", "100"), ("three", "0")] {
        ensure!(count(&cluster, name)? == rows, "{name}: {} rows", count(&cluster, name)?);
    }
    witnesses.judge(&cluster, &[ROWS, "SELECT count(*) FROM pg_prepared_xacts"], &[])?;
    cluster.finish()
}

#[test]
fn a_single_user_server_recovers() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default().conf("wal_keep_size = 1GB"))?;
    let witnesses = Witnesses::of(&cluster)?;
    insert(&cluster, "drossel", 1000)?;
    cluster.kill()?;
    let mut single = cluster.program("postgres");
    single.args(["--single", "-D"]).arg(cluster.data_directory()).arg("postgres");
    single.stdin(std::process::Stdio::null());
    pagevault_tests::installation::run(&mut single)?;
    cluster.start_server()?;
    ensure!(count(&cluster, "drossel")? == "1000", "rows are missing");
    witnesses.judge(&cluster, &[ROWS], &[])?;
    cluster.finish()
}

/// Killed after pages were sealed with a new key and before the switch to it was recorded. The
/// server has the key and reads the pages. It continues the last of them with that key.
#[test]
fn a_lost_switch_is_repeated() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default().conf("wal_keep_size = '1GB'"))?;
    insert(&cluster, "amsel", 100)?;
    cluster.sql("CHECKPOINT")?;
    let witnesses = Witnesses::of(&cluster)?;
    insert(&cluster, "drossel", 1000)?;
    cluster.kill()?;
    let (last, _) = last_page(&segments(&cluster)?)?;
    forget_switches(&cluster.data_directory().join("pagevault/cluster.keys"))?;
    cluster.append_conf("pagevault.wal_encryption = keep")?;
    std::fs::remove_file(cluster.data_directory().join("postgresql.auto.conf"))?;
    cluster.start_server()?;
    ensure!(cluster.text(STATE)? == "f", "the switch is still known");
    ensure!(count(&cluster, "drossel")? == "1000", "rows are missing");
    ensure!(state_at(&segments(&cluster)?, last)? == WalPage::Sealed(1), "another key");
    insert(&cluster, "fink", 1000)?;
    ensure!(state_at(&segments(&cluster)?, last)? == WalPage::Sealed(1), "another key");
    let next = state_at(&segments(&cluster)?, last + PAGE as u64)?;
    ensure!(next == WalPage::Plain, "the next page is {next:?}");
    super::switch(&cluster, true)?;
    insert(&cluster, "gimpel", 1000)?;
    assert_hidden(&cluster, "gimpel")?;
    cluster.crash()?;
    for (canary, rows) in [("drossel", "1000"), ("fink", "1000"), ("gimpel", "1000")] {
        ensure!(count(&cluster, canary)? == rows, "{canary}: {}", count(&cluster, canary)?);
    }
    ensure!(marks(&segments(&cluster)?)? == [1, 2], "keys {:?}", marks(&segments(&cluster)?)?);
    witnesses.judge(&cluster, &[ROWS], &[])?;
    cluster.finish()
}

/// A rotation of the WAL key records the key, writes a barrier to WAL, switches, and records the
/// switch.
#[test]
fn after_a_kill_at_any_step_of_a_rotation_all_servers_agree() -> Result<()> {
    const STEPS: [&str; 6] = [
        "keys.in_file",
        "keys.in_wal",
        "wal_switch.barrier",
        "wal_switch.in_memory",
        "keys.in_file",
        "keys.in_wal",
    ];
    // Key files must be correct at several moments, with fsync and without.
    let (cluster, _keys) =
        sealing(&Settings::default().conf("fsync = on").conf("wal_keep_size = 1GB"))?;
    let mut witnesses = Witnesses::with(&cluster, &["fsync = off"])?;
    for last in 0..STEPS.len() {
        insert(&cluster, "drossel", 100)?;
        let mut client = cluster.client()?;
        cluster.stop_at(STEPS[0])?;
        let session =
            std::thread::spawn(move || client.batch_execute("SELECT pagevault.rotate_wal_key()"));
        // Any process may be at that step: after a start the worker may have records to write.
        for (at, step) in STEPS[..=last].iter().enumerate() {
            if at > 0 {
                cluster.stop_at(step)?;
            }
            cluster.stopped_at(step)?;
        }
        cluster.kill()?;
        cluster.resume();
        ensure!(session.join().is_ok_and(|ended| ended.is_err()), "step {last}: it ended");
        cluster.start_server()?;
        let rows = (100 * (last + 1)).to_string();
        ensure!(count(&cluster, "drossel")? == rows, "step {last}: rows are missing");
        cluster.eventually(STATE, "t")?;
        if STEPS[last] == "wal_switch.in_memory" {
            witnesses.back_up(&cluster, "after a switch that was lost")?;
        }
    }
    cluster.sql("SELECT pagevault.rotate_wal_key()")?;
    insert(&cluster, "drossel", 1000)?;
    cluster.crash()?;
    assert_hidden(&cluster, "drossel")?;
    witnesses.judge_and(&cluster, &[ROWS, STATE], &[], |witness| {
        insert(witness, "drossel", 1000)?;
        assert_hidden(witness, "drossel")
    })?;
    cluster.finish()
}

/// Truncates a key log before its first WAL switch: batches have a header of 36 bytes with the
/// length of the body at 8; the first byte of the body is the type of its first record, 9.
fn forget_switches(log: &std::path::Path) -> Result<()> {
    let bytes = std::fs::read(log)?;
    let mut at = bytes.windows(4).position(|four| four == *b"\xDBpv\xB1").context("no batch")?;
    while let Some(header) = bytes.get(at..at + 36) {
        let length = u32::from_le_bytes([header[8], header[9], header[10], header[11]]) as usize;
        if length > 0 && bytes.get(at + 36) == Some(&9) {
            return Ok(std::fs::OpenOptions::new().write(true).open(log)?.set_len(at as u64)?);
        }
        at += 36 + length;
    }
    bail!("no switch in {}", log.display())
}

/// A WAL page is written repeatedly as it fills. Two copies of it show where it changed, and
/// nothing else.
#[test]
fn two_copies_of_a_live_segment_reveal_no_plaintext() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default())?;
    let mut copies = Vec::new();
    for _ in 0..20 {
        insert(&cluster, "drossel", 1)?;
        copies.push(segments(&cluster)?);
    }
    let mut differing = 0;
    for pair in copies.windows(2) {
        for (before, after) in pair[0].iter().zip(&pair[1]) {
            let mixed: Vec<u8> =
                before.bytes.iter().zip(&after.bytes).map(|(a, b)| a ^ b).collect();
            differing += mixed.chunks(16).filter(|block| block.iter().any(|b| *b != 0)).count();
            // With a stream cipher, this would be the plaintext of the bytes that were zero before.
            ensure!(!holds(&mixed, b"drossel"), "the difference of two copies shows plaintext");
        }
    }
    ensure!(differing > 100, "the copies hardly differ: {differing} blocks");
    cluster.stop(StopMode::Fast)?;
    cluster.finish()
}
