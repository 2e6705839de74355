//! Logical decoding does not show rows whose keys were destroyed.

use std::cell::RefCell;
use std::process::Stdio;

use super::*;

/// A slot is made before the rows are.
fn with_slot(conf: &str) -> Result<(Cluster, pagevault_tests::KeyFile)> {
    let (cluster, keys) = cluster(&format!("wal_level = logical\n{conf}"))?;
    cluster.sql("CREATE TABLE open (id int)")?;
    slot(&cluster, "slot")?;
    Ok((cluster, keys))
}

fn slot(cluster: &Cluster, name: &str) -> Result<()> {
    cluster.sql(&format!("SELECT pg_create_logical_replication_slot('{name}', 'test_decoding')"))
}

fn changes(slot: &str) -> String {
    format!("SELECT string_agg(data, ' ') FROM pg_logical_slot_get_changes('{slot}', NULL, NULL)")
}

/// The slot does not show its next transaction, and goes on behind it as the HINT says.
fn is_refused(cluster: &Cluster, slot: &str) -> Result<()> {
    let error = cluster.error(&changes(slot))?;
    let is_right = error.sqlstate == "55000"
        && error.message.contains("cannot be decoded: data keys of relation file base/")
        && error.message.ends_with("were destroyed");
    ensure!(is_right && !error.text().contains("kanarien"), "{error}");
    let (_, call) = error.hint.split_once("call ").context("a hint")?;
    let (call, _) = call.split_once(". ").context("a call")?;
    cluster.sql(&format!("SELECT {call}"))
}

#[test]
fn rows_of_shredded_relations_are_not_decoded() -> Result<()> {
    let (cluster, _keys) = with_slot("")?;
    cluster.sql("BEGIN; INSERT INTO open VALUES (1); SAVEPOINT s; INSERT INTO t (name, long) VALUES ('kanarienvogel', 'x'); COMMIT")?;
    cluster.sql("INSERT INTO open VALUES (2)")?;
    // Its reader has had the rows, and asks for nothing again.
    slot(&cluster, "ahead")?;
    cluster.sql("UPDATE t SET name = 'kanarienvogel' WHERE id = 7")?;
    ensure!(cluster.text(&changes("ahead"))?.contains("kanarien"), "the row before");
    cluster.sql(SHRED)?;
    for _ in 0..2 {
        cluster.sql("INSERT INTO open VALUES (3)")?;
        let data = cluster.text(&changes("ahead"))?;
        ensure!(data.contains("id[integer]:3") && !data.contains("kanarien"), "{data}");
        cluster.restart()?;
    }
    is_refused(&cluster, "slot")?;
    is_refused(&cluster, "slot")?;
    let data = cluster.text(&changes("slot"))?;
    ensure!(data.contains("id[integer]:3") && !data.contains("kanarien"), "{data}");
    cluster.finish()
}

#[test]
fn rows_of_shredded_former_files_are_not_decoded() -> Result<()> {
    let (cluster, _keys) = with_slot("pagevault.keep_former_keys = 0")?;
    // Of files that were rewritten, removed, decrypted.
    cluster.sql("INSERT INTO t (name) VALUES ('kanarienvogel')")?;
    cluster.sql("VACUUM FULL t")?;
    cluster.sql("UPDATE u SET name = 'kanarienvogel' WHERE id = 7")?;
    cluster.sql("SELECT pagevault.decrypt('u')")?;
    cluster.sql("SELECT pagevault.wait_for_rekey('u'::regclass)")?;
    cluster.sql("DROP TABLE u")?;
    cluster.sql("INSERT INTO open VALUES (2); CHECKPOINT")?;
    cluster.sql("SELECT * FROM pagevault.shred_former_files(confirm => 'postgres')")?;
    // What is known of the files must not be forgotten either.
    for _ in 0..2 {
        cluster.sql("CHECKPOINT")?;
        std::thread::sleep(std::time::Duration::from_secs(2));
    }
    is_refused(&cluster, "slot")?;
    cluster.restart()?;
    is_refused(&cluster, "slot")?;
    // Those of the new file are decoded.
    cluster.sql("INSERT INTO t (name) VALUES ('new')")?;
    let data = cluster.text(&changes("slot"))?;
    ensure!(data.contains("id[integer]:2") && data.contains("'new'"), "{data}");
    cluster.finish()
}

/// Nor are those sent that were collected before.
#[test]
fn streams_end_when_keys_are_destroyed() -> Result<()> {
    let (mut cluster, _keys) = with_slot("")?;
    cluster.allow_log("terminating connection due to administrator command");
    let out = cluster.directory().join("changes");
    let receiver = cluster
        .program("pg_recvlogical")
        .args(["--slot=slot", "--start", "--no-loop", "--fsync-interval=0", "-d", "postgres"])
        .arg("-f")
        .arg(&out)
        .stderr(Stdio::null())
        .spawn()?;
    cluster.sql("INSERT INTO open VALUES (2)")?;
    let received = || std::fs::read_to_string(&out).unwrap_or_default();
    cluster.eventually_that("a row is received", || {
        ensure!(received().contains("id[integer]:2"), "{}", received());
        Ok(())
    })?;
    // A session that has a slot of its own is not disturbed by what it does.
    let mut session = cluster.client()?;
    let own = "SELECT pg_create_logical_replication_slot('own', 'test_decoding', true)";
    run_sql(&mut session, own)?;
    run_sql(&mut session, SHRED)?;
    let receiver = RefCell::new(receiver);
    cluster.eventually_that("the end of the stream", || {
        ensure!(receiver.borrow_mut().try_wait()?.is_some(), "{}", received());
        Ok(())
    })?;
    cluster.finish()
}
