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

/// What the slot shows before a transaction that it does not show. It goes on behind that, as the
/// HINT says.
fn before_refused(cluster: &Cluster, slot: &str) -> Result<String> {
    let error = cluster.error(&changes(slot))?;
    let is_right = error.sqlstate == "55000"
        && error.message.contains("cannot be decoded: data keys of relation file base/")
        && error.message.ends_with("were destroyed");
    ensure!(is_right && !error.text().contains("kanarien"), "{error}");
    let data = cluster.text(&format!(
        "SELECT string_agg(data, ' ') FROM {}",
        call(&error.hint, "get_changes")?
    ))?;
    ensure!(!data.contains("kanarien"), "{data}");
    cluster.sql(&format!("SELECT {}", call(&error.hint, "advance")?))?;
    Ok(data)
}

/// The call of a function in a HINT.
fn call<'a>(hint: &'a str, function: &str) -> Result<&'a str> {
    let calls = hint.split_inclusive(')').filter_map(|part| Some(&part[part.find("pg_")?..]));
    let mut found = calls.filter(|call| call.contains(&format!("_slot_{function}(")));
    found.next().with_context(|| format!("{function}: {hint}"))
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
    before_refused(&cluster, "slot")?;
    let data = before_refused(&cluster, "slot")?;
    ensure!(data.contains("id[integer]:2") && !data.contains("id[integer]:1"), "{data}");
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
    before_refused(&cluster, "slot")?;
    cluster.restart()?;
    before_refused(&cluster, "slot")?;
    // Those of the new file are decoded.
    cluster.sql("INSERT INTO t (name) VALUES ('new')")?;
    let data = cluster.text(&changes("slot"))?;
    ensure!(data.contains("id[integer]:2") && data.contains("'new'"), "{data}");
    cluster.finish()
}

/// Nothing of the transactions before is lost, whichever way the slot is read.
/// As long as nobody calls `shred_former_files()`, their rows are shown, and the result says so.
#[test]
fn slots_that_may_show_former_files_are_named() -> Result<()> {
    let (cluster, _keys) = with_slot("")?;
    let named = "SELECT string_agg(object, ' ') FROM pagevault.shred('t', 'public.t') WHERE item = 'logical slot'";
    cluster.sql("INSERT INTO t (name) VALUES ('kanarienvogel')")?;
    cluster.sql("VACUUM FULL t")?;
    let found = cluster.text(named)?;
    ensure!(found == "slot", "slots: {found}");
    cluster.sql("SELECT * FROM pagevault.shred_former_files(confirm => 'postgres')")?;
    before_refused(&cluster, "slot")?;
    let found = cluster.text(named)?;
    ensure!(found.is_empty(), "slots: {found}");
    cluster.finish()
}

#[test]
fn hints_lead_around_transactions_with_shredded_rows_only() -> Result<()> {
    let (mut cluster, _keys) = with_slot("")?;
    slot(&cluster, "sent")?;
    let update = "UPDATE t SET name = 'kanarienvogel' WHERE id";
    let mut session = cluster.client()?;
    cluster.sql("INSERT INTO open VALUES (2)")?;
    cluster.sql(&format!("{update} = 7"))?;
    run_sql(&mut session, &format!("BEGIN; {update} = 8"))?;
    cluster.sql("INSERT INTO open VALUES (3)")?;
    // The record of this COMMIT begins behind the header of a page of WAL.
    cluster.sql("SELECT pg_switch_wal()")?;
    run_sql(&mut session, "COMMIT")?;
    cluster.sql("INSERT INTO open VALUES (4)")?;
    cluster.sql(SHRED)?;
    let data = before_refused(&cluster, "slot")?;
    ensure!(data.contains("id[integer]:2") && !data.contains("id[integer]:3"), "{data}");
    let data = before_refused(&cluster, "slot")?;
    ensure!(data.contains("id[integer]:3") && !data.contains("id[integer]:4"), "{data}");
    let data = cluster.text(&changes("slot"))?;
    ensure!(data.contains("id[integer]:4"), "{data}");
    // A WAL sender has shown them when it comes to the transaction.
    cluster.allow_log("cannot be decoded");
    let out = cluster
        .program("pg_recvlogical")
        .args(["--slot=sent", "--start", "--no-loop", "-d", "postgres", "-f", "-"])
        .output()?;
    let error = String::from_utf8_lossy(&out.stderr);
    ensure!(String::from_utf8_lossy(&out.stdout).contains("id[integer]:2"), "{error}");
    ensure!(error.contains("_slot_advance(") && !error.contains("_slot_get_changes"), "{error}");
    cluster.finish()
}

/// Rows are shown with PREPARE or with COMMIT PREPARED, but not with both.
#[test]
fn commits_of_prepared_transactions_that_were_shown_are_decoded() -> Result<()> {
    let (cluster, _keys) = with_slot("max_prepared_transactions = 3")?;
    let create = "SELECT pg_create_logical_replication_slot";
    cluster.sql(&format!("{create}('phases', 'test_decoding', false, true)"))?;
    cluster.sql("CREATE PUBLICATION p FOR TABLE open, t")?;
    cluster.sql(&format!("{create}('later', 'pgoutput')"))?;
    let later = |two_phase: &str| {
        let options = "'proto_version', '3', 'publication_names', 'p', 'two_phase'";
        format!(
            "SELECT count(*) FROM pg_logical_slot_get_binary_changes('later', NULL, NULL, {options}, '{two_phase}')"
        )
    };
    let prepare = |name: &str, id: u32| {
        let savepoint = "INSERT INTO open VALUES (2); SAVEPOINT s";
        let update = format!("UPDATE t SET name = 'kanarienvogel' WHERE id = {id}");
        cluster.sql(&format!("BEGIN; {savepoint}; {update}; PREPARE TRANSACTION '{name}'"))
    };
    prepare("shown", 7)?;
    // test_decoding shows such a transaction when it is committed.
    prepare("of_nodecode", 8)?;
    // It has nothing else.
    cluster.sql(
        "BEGIN; UPDATE t SET name = 'kanarienvogel' WHERE id = 9; PREPARE TRANSACTION 'alone'",
    )?;
    let data = cluster.text(&changes("phases"))?;
    let shown = ["shown", "of_nodecode", "alone"]
        .map(|name| data.contains(&format!("PREPARE TRANSACTION '{name}'")));
    ensure!(shown == [true, false, true], "{data}");
    ensure!(cluster.text(&later("off"))? == "0", "they are not committed");
    for name in ["shown", "alone", "of_nodecode"] {
        cluster.sql(&format!("COMMIT PREPARED '{name}'"))?;
    }
    prepare("committed", 10)?;
    cluster.sql("COMMIT PREPARED 'committed'")?;
    prepare("rolled_back", 11)?;
    cluster.sql("ROLLBACK PREPARED 'rolled_back'")?;
    cluster.sql(SHRED)?;
    let data = before_refused(&cluster, "phases")?;
    let commits =
        ["shown", "alone"].map(|name| data.contains(&format!("COMMIT PREPARED '{name}'")));
    ensure!(commits == [true; 2] && !data.contains("id[integer]:2"), "{data}");
    // PREPARE of the others is not shown, but their ends are.
    let error = cluster.error(&changes("phases"))?;
    ensure!(error.hint.contains("Its COMMIT PREPARED will be shown nevertheless"), "{error}");
    ensure!(before_refused(&cluster, "phases")?.is_empty(), "what was read before");
    let data = before_refused(&cluster, "phases")?;
    ensure!(data.contains("COMMIT PREPARED 'committed'"), "{data}");
    let data = cluster.text(&changes("phases"))?;
    ensure!(data.contains("ROLLBACK PREPARED 'rolled_back'"), "{data}");
    // The first three were prepared before this slot was to show that.
    for _ in 0..3 {
        let error = cluster.error(&later("on"))?;
        ensure!(error.message.contains("cannot be decoded"), "{error}");
        ensure!(!error.hint.contains("nevertheless"), "{error}");
        cluster.sql(&format!("SELECT {}", call(&error.hint, "advance")?))?;
    }
    let error = cluster.error(&later("on"))?;
    ensure!(error.hint.contains("nevertheless"), "{error}");
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
