//! Data protected by a revoked key cannot be read from the server's memory by any statement once
//! the key is locked.

use std::cell::RefCell;
use std::process::Stdio;
use std::thread;

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{expect_error, run_sql, text};
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, KeyFile, Settings, SqlError};
use rustix::process::Pid;

use crate::former_keys::TWO_ROUNDS;
use crate::revalidate::{STATE, put_back, replace, strict, watchful};

const OBJECTS: &str =
    "CREATE EXTENSION pageinspect; CREATE EXTENSION amcheck; CREATE EXTENSION pg_prewarm;
    CREATE EXTENSION pg_buffercache;
    CREATE TABLE open (id int PRIMARY KEY);
    INSERT INTO open VALUES (1);
    CREATE FUNCTION leak(value text) RETURNS boolean IMMUTABLE LANGUAGE plpgsql
        AS $$ BEGIN RAISE NOTICE '%', value; RETURN true; END $$;
    SET pagevault.default_encryption = on;
    CREATE TABLE secret (id int PRIMARY KEY, name text);
    INSERT INTO secret SELECT i, md5(i::text) FROM generate_series(1, 1000) i;
    CREATE MATERIALIZED VIEW derived AS SELECT * FROM secret;
    CREATE TABLE referring (id int REFERENCES secret);
    CREATE SEQUENCE numbers;
    SELECT nextval('numbers'), lo_from_bytea(4711, 'a large object');
    ANALYZE secret";

/// Reads every page, so that all are in shared buffers.
const USE: &str = "SELECT count(*) FROM secret; SELECT count(*) FROM derived; SELECT lo_get(4711);
    SELECT nextval('numbers'); SELECT count(*) FROM pg_stats;
    SET enable_seqscan = off; SELECT name FROM secret WHERE id = 7";

/// Accesses that do not pass the check at the start of a query that names the relation.
const WAYS: [&str; 23] = [
    "ALTER TABLE secret ADD CHECK (leak(name))",
    "ALTER TABLE secret ALTER name SET NOT NULL",
    "ALTER TABLE open ADD FOREIGN KEY (id) REFERENCES secret",
    "INSERT INTO referring VALUES (1)",
    "CREATE INDEX ON secret (leak(name))",
    "CLUSTER secret USING secret_pkey",
    "REINDEX TABLE secret",
    "REFRESH MATERIALIZED VIEW derived",
    "ANALYZE secret",
    "VACUUM (DISABLE_PAGE_SKIPPING) secret",
    "COPY secret TO STDOUT",
    "SELECT lo_get(4711)",
    "SELECT lo_put(4711, 0, 'another')",
    "DO $$ BEGIN PERFORM lo_get(4711); END $$",
    "SELECT nextval('numbers')",
    "SELECT setval('numbers', 4)",
    "SELECT pg_sequence_last_value('numbers')",
    "DO $$ BEGIN PERFORM nextval('numbers'); END $$",
    "SELECT * FROM heap_page_items(get_raw_page('secret', 0))",
    "SELECT * FROM bt_page_items('secret_pkey', 1)",
    "SELECT pg_prewarm('secret')",
    "SELECT bt_index_check('secret_pkey', true)",
    "SELECT * FROM pg_stats WHERE tablename = 'secret'",
];

fn cluster(settings: &Settings) -> Result<(Cluster, KeyFile)> {
    // No background process uses the relations.
    let settings = settings.clone().conf("autovacuum = off");
    let (mut cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.allow_log("was revoked");
    cluster.sql(OBJECTS)?;
    Ok((cluster, keys))
}

/// Waits until the key is locked, and the server's memory contains nothing that it protects.
fn locked(cluster: &Cluster) -> Result<()> {
    cluster.eventually(STATE, "locked")?;
    cluster.eventually_logs("None is left.")
}

fn is_refused(error: &SqlError, statement: &str) -> Result<()> {
    let about = error.message.contains("locked") && error.detail.contains("\"local\"");
    ensure!(error.sqlstate == "55000" && about, "{statement}: {error}");
    // If a command names the relation, the error contains its name.
    let commands = ["ALTER TABLE secret", "ANALYZE", "VACUUM"];
    let is_named = error.message == "relation \"secret\" is locked";
    ensure!(
        is_named || !commands.iter().any(|command| statement.starts_with(command)),
        "{statement}: {error}"
    );
    Ok(())
}

#[test]
fn no_statement_reads_pages_that_were_in_shared_buffers() -> Result<()> {
    let (cluster, keys) = cluster(&strict())?;
    let mut session = cluster.client()?;
    run_sql(&mut session, USE)?;
    run_sql(&mut session, "UPDATE secret SET name = 'changed' WHERE id = 7")?;
    replace(&cluster, &keys, "main")?;
    locked(&cluster)?;
    // An older session with everything in its caches, and new ones.
    let mut ways = Vec::new();
    for statement in WAYS {
        let refused = |error: Result<SqlError>| is_refused(&error?, statement);
        ways.extend(refused(expect_error(&mut session, statement)).err());
        ways.extend(refused(cluster.error(statement)).err());
    }
    ensure!(ways.is_empty(), "{ways:#?}");
    // Plaintext relations are not affected.
    cluster.sql("INSERT INTO open VALUES (2); CHECKPOINT")?;
    cluster.sql("VACUUM open")?;
    put_back(&keys)?;
    cluster.eventually(STATE, "unlocked")?;
    let name = "SELECT name FROM secret WHERE id = 7";
    ensure!(cluster.text(name)? == "changed", "a change is lost");
    ensure!(cluster.text("SELECT nextval('numbers')")? == "3", "the sequence");
    run_sql(&mut session, "SELECT lo_get(4711); ANALYZE secret; REINDEX TABLE secret")?;
    drop(session);
    cluster.restart()?;
    ensure!(cluster.text(name)? == "changed", "a change is lost");
    cluster.sql("SELECT bt_index_check('secret_pkey', true)")?;
    cluster.finish()
}

/// Number of pages of a table, its index and the large objects in shared buffers.
const IN_BUFFERS: &str = "SELECT count(*) FROM pg_buffercache WHERE reldatabase <> 0 AND relfilenode IN
    (pg_relation_filenode('secret'), pg_relation_filenode('secret_pkey'), pg_relation_filenode('pg_largeobject'))";

#[test]
fn a_page_in_use_is_evicted_at_the_end_of_its_statement() -> Result<()> {
    let (cluster, keys) = cluster(&strict())?;
    // More pages than a scan reads ahead (18).
    cluster
        .sql("INSERT INTO secret SELECT i, repeat('x', 500) FROM generate_series(2001, 20000) i")?;
    let mut session = cluster.client()?;
    run_sql(&mut session, "BEGIN; DECLARE c CURSOR FOR SELECT * FROM secret; FETCH 1 FROM c")?;
    replace(&cluster, &keys, "main")?;
    cluster.eventually_logs(" in use, ")?;
    let left: i64 = cluster.text(IN_BUFFERS)?.parse()?;
    ensure!((1..200).contains(&left), "{left} pages are left");
    // It continues as long as it has pages.
    run_sql(&mut session, "FETCH 1 FROM c")?;
    is_refused(&expect_error(&mut session, "FETCH ALL FROM c")?, "FETCH ALL")?;
    run_sql(&mut session, "ROLLBACK")?;
    cluster.eventually_logs("None is left.")?;
    cluster.eventually(IN_BUFFERS, "0")?;
    put_back(&keys)?;
    cluster.eventually(STATE, "unlocked")?;
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "19000", "rows are missing");
    cluster.finish()
}

/// Replay continues and has to read pages, which are evicted again.
#[test]
fn pages_replayed_by_a_locked_standby_are_evicted() -> Result<()> {
    let (primary, keys) = cluster(&watchful().conf("pagevault.revalidate_interval = 0"))?;
    let conf = [
        "pagevault.revalidate_interval = 1s",
        "pagevault.revoked_key_action = lock",
        "pagevault.revoked_key_grace = 0",
    ];
    let mut standby = standby_of(&primary, &conf)?;
    standby.allow_log("was revoked");
    standby.sql("SELECT lo_get(4711), pg_sequence_last_value('numbers')")?;
    replace(&primary, &keys, "main")?;
    locked(&standby)?;
    primary.sql("CHECKPOINT; UPDATE secret SET name = name || 'x'; SELECT lo_put(4711, 0, 'another'), nextval('numbers')")?;
    wait_for(&standby, &primary)?;
    standby.eventually(IN_BUFFERS, "0")?;
    for statement in ["SELECT lo_get(4711)", "SELECT pg_sequence_last_value('numbers')"] {
        is_refused(&standby.error(statement)?, statement)?;
    }
    standby.sql("CHECKPOINT")?;
    put_back(&keys)?;
    standby.eventually(STATE, "unlocked")?;
    let count = "SELECT count(*) FROM secret WHERE name LIKE '%x'";
    ensure!(standby.text(count)? == "1000", "rows are missing");
    standby.finish()?;
    primary.finish()
}

/// Crash recovery reads pages into shared buffers too.
#[test]
fn recovery_leaves_no_pages_of_locked_relations_in_buffers() -> Result<()> {
    let (mut cluster, keys) = cluster(&strict())?;
    cluster.allow_log("terminating connection because of crash of another server process");
    cluster.sql("CHECKPOINT; UPDATE secret SET name = 'redone' WHERE id = 7; SELECT lo_put(4711, 0, 'another')")?;
    replace(&cluster, &keys, "main")?;
    locked(&cluster)?;
    let mut client = cluster.client()?;
    let pid = Pid::from_raw(text(&mut client, "SELECT pg_backend_pid()")?.parse()?);
    cluster.crash_process(pid.context("no process id")?)?;
    drop(client);
    ensure!(cluster.text("SELECT id FROM open")? == "1", "a plaintext table");
    cluster.eventually(IN_BUFFERS, "0")?;
    is_refused(&cluster.error("SELECT lo_get(4711)")?, "lo_get")?;
    put_back(&keys)?;
    cluster.eventually(STATE, "unlocked")?;
    ensure!(cluster.text("SELECT name FROM secret WHERE id = 7")? == "redone", "an update is lost");
    cluster.finish()
}

/// Rows can also come from WAL, without reading any page.
#[test]
fn changes_of_locked_relations_are_not_decoded() -> Result<()> {
    let (mut cluster, keys) = cluster(&strict().conf("wal_level = logical"))?;
    cluster.allow_log("server starts with encrypted relations locked");
    for slot in ["all", "plain"] {
        cluster.sql(&format!(
            "SELECT pg_create_logical_replication_slot('of_{slot}', 'test_decoding')"
        ))?;
    }
    // Catalogs are encrypted, too, and get numbers like those of tables.
    cluster.sql("VACUUM FULL pg_statistic")?;
    cluster.sql("ANALYZE open; INSERT INTO open VALUES (2)")?;
    let before = cluster.text("SELECT pg_current_wal_lsn()")?;
    cluster.sql("UPDATE secret SET name = 'decoded' WHERE id = 7; ANALYZE secret; INSERT INTO open VALUES (3)")?;
    replace(&cluster, &keys, "main")?;
    locked(&cluster)?;
    let changes = |slot: &str, end: &str| {
        format!(
            "SELECT string_agg(data, ' ') FROM pg_logical_slot_get_changes('{slot}', {end}, NULL)"
        )
    };
    let of_all = changes("of_all", "NULL");
    is_refused(&cluster.error(&of_all)?, &of_all)?;
    // Concurrent changes of locked relations, including statistics, do not hide changes of others.
    let data = cluster.text(&changes("of_plain", &format!("'{before}'")))?;
    ensure!(data.contains("id[integer]:2"), "{data}");
    // A slot created now begins after these changes.
    cluster.sql("SELECT pg_create_logical_replication_slot('later', 'test_decoding')")?;
    cluster.sql("INSERT INTO open VALUES (4)")?;
    let data = cluster.text(&changes("later", "NULL"))?;
    ensure!(data.contains("id[integer]:4"), "{data}");
    // Nor where the key is not known.
    cluster.restart()?;
    let error = cluster.error(&of_all)?;
    ensure!(error.sqlstate == "55000" && error.message.contains("is locked"), "{error}");
    // Changes after it are not lost for a slot that is advanced, which returns no rows.
    cluster.sql("SELECT pg_replication_slot_advance('of_plain', pg_current_wal_lsn())")?;
    put_back(&keys)?;
    cluster.eventually(STATE, "unlocked")?;
    let data = cluster.text(&of_all)?;
    ensure!(data.contains("decoded") && data.contains("id[integer]:4"), "{data}");
    cluster.finish()
}

/// A slot is read from before rows that its reader has had.
#[test]
fn changes_of_locked_relations_that_were_received_do_not_stop_decoding() -> Result<()> {
    let (cluster, keys) = cluster(&strict().conf("wal_level = logical"))?;
    for slot in ["received", "not"] {
        let create = "SELECT pg_create_logical_replication_slot";
        cluster.sql(&format!("{create}('{slot}', 'test_decoding')"))?;
    }
    let changes = |slot: &str| {
        format!(
            "SELECT string_agg(data, ' ') FROM pg_logical_slot_get_changes('{slot}', NULL, NULL)"
        )
    };
    let mut open = cluster.client()?;
    run_sql(&mut open, "BEGIN; INSERT INTO open VALUES (2)")?;
    cluster.sql("BEGIN; INSERT INTO open VALUES (3); SAVEPOINT s; UPDATE secret SET name = 'decoded' WHERE id = 7; COMMIT")?;
    // Nobody misses what is rolled back.
    cluster.sql("BEGIN; SAVEPOINT s; UPDATE secret SET name = 'never' WHERE id = 8; ROLLBACK TO s; INSERT INTO open VALUES (4); COMMIT")?;
    ensure!(cluster.text(&changes("received"))?.contains("decoded"), "the row before");
    cluster.sql("INSERT INTO secret VALUES (9000, 'decoded later')")?;
    replace(&cluster, &keys, "main")?;
    locked(&cluster)?;
    let mut session = cluster.client()?;
    let error = expect_error(&mut session, &changes("received"))?;
    is_refused(&error, "received")?;
    is_refused(&expect_error(&mut session, &changes("not"))?, "not")?;
    // It can be passed over, without those before.
    let (_, call) = error.hint.split_once("call ").context("a hint")?;
    let (call, _) = call.split_once(". ").context("a call")?;
    cluster.sql("INSERT INTO open VALUES (5)")?;
    cluster.sql(&format!("SELECT {call}"))?;
    run_sql(&mut open, "COMMIT")?;
    let data = text(&mut session, &changes("received"))?;
    let is_right = ["id[integer]:5", "id[integer]:2"].iter().all(|row| data.contains(row));
    ensure!(is_right && !data.contains("decoded"), "{data}");
    // What a session did not show before is not held against it later.
    put_back(&keys)?;
    cluster.eventually(STATE, "unlocked")?;
    let data = text(&mut session, &changes("not"))?;
    let rows = ["id[integer]:3", "'decoded'", "id[integer]:4", "'decoded later'", "id[integer]:2"];
    let places = rows.map(|row| data.find(row));
    ensure!(places.is_sorted() && places[0].is_some(), "{places:?} {data}");
    cluster.finish()
}

/// Nor are those sent that were collected before, of a transaction that ends later.
#[test]
fn changes_that_were_collected_before_are_not_sent() -> Result<()> {
    let settings = strict().conf("wal_level = logical").conf("max_prepared_transactions = 1");
    let (mut cluster, keys) = cluster(&settings)?;
    cluster.allow_log("terminating connection due to administrator command");
    cluster.sql("SELECT pg_create_logical_replication_slot('slot', 'test_decoding')")?;
    let out = cluster.directory().join("changes");
    let receiver = cluster
        .program("pg_recvlogical")
        .args(["--slot=slot", "--start", "--no-loop", "--fsync-interval=0", "-d", "postgres"])
        .arg("-f")
        .arg(&out)
        .stderr(Stdio::null())
        .spawn()?;
    let update = "UPDATE secret SET name = 'decoded' WHERE id = 7";
    cluster.sql(&format!("BEGIN; {update}; PREPARE TRANSACTION 'later'"))?;
    cluster.sql("INSERT INTO open VALUES (2)")?;
    let received = || std::fs::read_to_string(&out).unwrap_or_default();
    cluster.eventually_that("what comes later is received", || {
        ensure!(received().contains("id[integer]:2"), "{}", received());
        Ok(())
    })?;
    replace(&cluster, &keys, "main")?;
    locked(&cluster)?;
    for statement in ["COMMIT PREPARED 'later'", "INSERT INTO open VALUES (3)"] {
        cluster.sql(statement)?;
    }
    let receiver = RefCell::new(receiver);
    cluster.eventually_that("the end of the stream", || {
        ensure!(receiver.borrow_mut().try_wait()?.is_some(), "{}", received());
        Ok(())
    })?;
    ensure!(!received().contains("decoded"), "{}", received());
    cluster.finish()
}

/// How many data keys the server knows.
const KNOWN: &str = "SELECT data_keys FROM pagevault.status";

/// Waits until it knows another number of them than `before`. `first` precedes each checkpoint.
fn forgets(cluster: &Cluster, before: &str, first: &str) -> Result<()> {
    cluster.eventually_that("the keys of former files are forgotten", || {
        cluster.sql(first)?;
        cluster.sql("CHECKPOINT")?;
        ensure!(cluster.text(KNOWN)? != before, "{before} keys");
        Ok(())
    })
}

/// A slot may need WAL about former files: their keys are kept until then.
#[test]
fn changes_in_former_files_of_locked_relations_are_not_decoded() -> Result<()> {
    let settings = strict().conf("wal_level = logical").conf("pagevault.keep_former_keys = 0");
    let (mut cluster, keys) = cluster(&settings)?;
    cluster.allow_log("server starts with encrypted relations locked");
    cluster.sql("SELECT pg_create_logical_replication_slot('slot', 'test_decoding')")?;
    cluster.sql("UPDATE secret SET name = 'decoded' WHERE id = 7; INSERT INTO open VALUES (2)")?;
    for statement in ["VACUUM FULL secret", "TRUNCATE open"] {
        cluster.sql(statement)?;
    }
    let before = cluster.text(KNOWN)?;
    for _ in 0..3 {
        cluster.sql("CHECKPOINT")?;
        thread::sleep(TWO_ROUNDS);
    }
    ensure!(cluster.text(KNOWN)? == before, "keys are forgotten");
    replace(&cluster, &keys, "main")?;
    locked(&cluster)?;
    let changes =
        "SELECT string_agg(data, ' ') FROM pg_logical_slot_peek_changes('slot', NULL, NULL)";
    for _ in 0..2 {
        let error = cluster.error(changes)?;
        ensure!(error.sqlstate == "55000" && error.message.contains("is locked"), "{error}");
        cluster.restart()?;
    }
    put_back(&keys)?;
    cluster.eventually(STATE, "unlocked")?;
    let data = cluster.text(changes)?;
    ensure!(data.contains("decoded") && data.contains("id[integer]:2"), "{data}");
    forgets(&cluster, &before, "SELECT pg_replication_slot_advance('slot', pg_current_wal_lsn())")?;
    cluster.finish()
}

/// Files in plaintext that are gone have numbers like those of encrypted ones.
#[test]
fn changes_in_former_files_in_plaintext_are_decoded() -> Result<()> {
    let settings = strict().conf("wal_level = logical").conf("pagevault.keep_former_keys = 0");
    let (mut cluster, keys) = cluster(&settings)?;
    cluster.allow_log("server starts with encrypted relations locked");
    cluster.sql("CREATE TABLE truncated (id int)")?;
    cluster.sql("VACUUM FULL secret")?;
    forgets(&cluster, &cluster.text(KNOWN)?, "SELECT 1")?;
    cluster.sql("SELECT pg_create_logical_replication_slot('slot', 'test_decoding')")?;
    cluster.sql("INSERT INTO truncated VALUES (2)")?;
    cluster.sql("TRUNCATE truncated; CHECKPOINT")?;
    replace(&cluster, &keys, "main")?;
    locked(&cluster)?;
    let changes =
        "SELECT string_agg(data, ' ') FROM pg_logical_slot_peek_changes('slot', NULL, NULL)";
    for _ in 0..2 {
        let data = cluster.text(changes)?;
        ensure!(data.contains("id[integer]:2"), "{data}");
        cluster.restart()?;
    }
    cluster.finish()
}

/// During decryption, new pages are plaintext, and the others are still under the key.
#[test]
fn a_relation_that_is_being_decrypted_is_locked_with_its_key() -> Result<()> {
    let (cluster, keys) = cluster(&strict().conf("pagevault.rekey_rate = 0"))?;
    cluster.sql("CHECKPOINT")?;
    cluster.stop_at("rekey.barrier_passed")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE secret IS 'plaintext'")?;
    cluster.stopped_at("rekey.barrier_passed")?;
    let new = cluster.text(
        "SELECT NOT encrypted FROM pagevault.relations WHERE relation = 'secret'::regclass",
    )?;
    ensure!(new == "t", "the job has not begun with the table");
    replace(&cluster, &keys, "main")?;
    locked(&cluster)?;
    for statement in [
        "SELECT count(*) FROM secret",
        "INSERT INTO secret VALUES (5000, 'x')",
        "ALTER TABLE secret ADD CHECK (leak(name))",
        "SELECT * FROM heap_page_items(get_raw_page('secret', 0))",
    ] {
        is_refused(&cluster.error(statement)?, statement)?;
    }
    put_back(&keys)?;
    cluster.eventually(STATE, "unlocked")?;
    cluster.resume();
    let done = cluster.text("SELECT pagevault.wait_for_rekey('secret'::regclass, '60s')")?;
    ensure!(done == "t", "the job did not end");
    ensure!(cluster.text("SELECT count(*) FROM secret")? == "1000", "rows are missing");
    cluster.finish()
}

/// Nor does it prevent the server from noticing that the key is valid again.
#[test]
fn a_page_that_cannot_be_written_does_not_prevent_eviction_of_others() -> Result<()> {
    let (mut cluster, keys) = cluster(&strict())?;
    cluster.allow_log("could not open file");
    cluster.allow_log("could not write");
    cluster.allow_log("because it cannot be written");
    cluster.restart()?;
    // Pages get into buffers one after the other.
    cluster.sql("INSERT INTO referring VALUES (NULL)")?;
    cluster.sql(USE)?;
    cluster.sql("UPDATE secret SET name = 'changed' WHERE id = 7")?;
    let file = cluster.text("SELECT pg_relation_filepath('referring')")?;
    let file = cluster.data_directory().join(file);
    let away = file.with_extension("away");
    std::fs::rename(&file, &away)?;
    replace(&cluster, &keys, "main")?;
    cluster.eventually(STATE, "locked")?;
    cluster.eventually(IN_BUFFERS, "0")?;
    is_refused(&cluster.error("SELECT lo_get(4711)")?, "lo_get")?;
    put_back(&keys)?;
    cluster.eventually(STATE, "unlocked")?;
    std::fs::rename(&away, &file)?;
    cluster.restart()?;
    ensure!(cluster.text("SELECT count(*) FROM referring")? == "1", "a row is lost");
    ensure!(cluster.text("SELECT name FROM secret WHERE id = 7")? == "changed", "a change is lost");
    cluster.finish()
}

/// The process that evicts pages has no transactions, whose end would tell that it writes no more.
#[test]
fn rekeying_does_not_wait_for_a_page_that_could_not_be_evicted() -> Result<()> {
    let (mut cluster, keys) = cluster(&strict())?;
    cluster.allow_log("could not open file");
    cluster.allow_log("because it cannot be written");
    // No other page is written.
    cluster.sql("CHECKPOINT")?;
    cluster.sql("INSERT INTO referring VALUES (NULL)")?;
    let file = cluster.text("SELECT pg_relation_filepath('referring')")?;
    let file = cluster.data_directory().join(file);
    let away = file.with_extension("away");
    std::fs::rename(&file, &away)?;
    replace(&cluster, &keys, "main")?;
    cluster.eventually(STATE, "locked")?;
    cluster.eventually_logs("because it cannot be written")?;
    put_back(&keys)?;
    cluster.eventually(STATE, "unlocked")?;
    std::fs::rename(&away, &file)?;
    cluster.sql("SELECT pagevault.rotate_data_key('referring')")?;
    let done = cluster.text("SELECT pagevault.wait_for_rekey('referring'::regclass, '20s')")?;
    let who = "SELECT query FROM pg_stat_activity WHERE query LIKE '%job%waits%'";
    ensure!(done == "t", "{}", cluster.text(who)?);
    cluster.finish()
}
