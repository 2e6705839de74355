//! Recovery and standbys that begin before the destruction of keys, or are killed during it.

use pagevault_tests::witnesses::Witnesses;

use super::*;

/// All of `t`.
const T: &str = "SELECT count(*) || ' ' || sum(hashtext(name)) FROM t";

/// Changes of every kind, by WAL records whose redo needs the previous page.
const CHANGES: &str = "UPDATE t SET name = name || '!' WHERE id % 2 = 0;
    DELETE FROM t WHERE id % 3 = 0;
    INSERT INTO t (name, long) SELECT 'neu ' || i, repeat(md5(i::text), 100) FROM generate_series(1, 500) i;
    UPDATE u SET name = name || '!' WHERE id % 2 = 0;
    INSERT INTO u SELECT i, 'zeisig ' || i FROM generate_series(1001, 1500) i";

/// Without a checkpoint since the changes, recovery begins before them and replays changes of pages
/// that it cannot open.
fn killed_before_the_checkpoint(conf: &str) -> Result<()> {
    let (cluster, _keys) = cluster(conf)?;
    cluster.sql("CHECKPOINT")?;
    let witnesses = match cluster.text("SHOW wal_level")?.as_str() {
        "minimal" => None,
        _ => Some(Witnesses::of(&cluster)?),
    };
    cluster.sql(CHANGES)?;
    cluster.sql("VACUUM t")?;
    cluster.sql("VACUUM u")?;
    let mut keys = family_keys(&cluster)?;
    // WAL records with wrapped keys of both tables. Replayed to a keystore that contains the
    // second, the first changes the keys of the other table.
    for _ in 0..2 {
        cluster.sql("SELECT pagevault.rotate_database_key()")?;
        keys.extend(family_keys(&cluster)?);
    }
    cluster.sql(CHANGES)?;
    let u = cluster.text(U)?;
    cluster.sql(SHRED)?;
    ensure_gone(&cluster, &keys)?;
    cluster.kill()?;
    for round in 0..2 {
        cluster.start_server().with_context(|| format!("recovery {round}"))?;
        ensure_shredded(&cluster, &u)?;
        ensure_gone(&cluster, &keys)?;
        cluster.sql("INSERT INTO u VALUES (0, 'A'); DELETE FROM u WHERE id = 0; CHECKPOINT")?;
        cluster.kill()?;
    }
    cluster.start_server()?;
    if let Some(witnesses) = witnesses {
        witnesses.judge_and(&cluster, &[U], &["t", "u"], |witness| {
            ensure_shredded(witness, &u)?;
            ensure_gone(witness, &keys)
        })?;
    }
    cluster.sql("DROP TABLE t CASCADE")?;
    cluster.sql("CHECKPOINT")?;
    cluster.finish()
}

#[test]
fn recovery_from_before_shredding_succeeds() -> Result<()> {
    // Too few buffers to keep all pages restored by full-page images.
    killed_before_the_checkpoint("shared_buffers = 512kB")
}

#[test]
fn recovery_from_before_shredding_succeeds_without_full_page_writes() -> Result<()> {
    killed_before_the_checkpoint("full_page_writes = off")
}

#[test]
fn recovery_from_before_shredding_succeeds_with_minimal_wal() -> Result<()> {
    killed_before_the_checkpoint("wal_level = minimal\nmax_wal_senders = 0")
}

#[test]
fn standbys_follow_and_survive_a_restart_from_before_shredding() -> Result<()> {
    let (primary, _keys) = cluster("max_wal_size = 4GB")?;
    primary.sql("CHECKPOINT")?;
    let mut standby = standby_of(&primary, &["shared_buffers = 512kB"])?;
    standby.allow_log("canceling statement due to conflict with recovery");
    primary.sql(CHANGES)?;
    primary.sql("VACUUM t")?;
    primary.sql(CHANGES)?;
    wait_for(&standby, &primary)?;
    let keys = family_keys(&standby)?;
    standby.text("SELECT sum(length(long)) FROM t")?;
    let u = primary.text(U)?;
    primary.sql(SHRED)?;
    wait_for(&standby, &primary)?;
    ensure_gone(&standby, &keys)?;
    let unreadable = |standby: &Cluster| -> Result<()> {
        for statement in ["SELECT sum(length(long)) FROM t", "SELECT last_value FROM t_id_seq"] {
            let error = standby.error(statement)?;
            ensure!(error.text().contains("were destroyed"), "{error}");
        }
        ensure!(standby.text(U)? == u, "the other table is not as it was");
        Ok(())
    };
    unreadable(&standby)?;
    // Its last restart point is that of the backup.
    standby.kill()?;
    standby.start_server()?;
    unreadable(&standby)?;
    wait_for(&standby, &primary)?;
    ensure_gone(&standby, &keys)?;
    standby.stop(StopMode::Fast)?;
    standby.start_server()?;
    unreadable(&standby)?;
    primary.sql("INSERT INTO u VALUES (5000, 'later')")?;
    wait_for(&standby, &primary)?;
    ensure!(standby.text("SELECT count(*) FROM u WHERE id = 5000")? == "1", "it does not follow");
    standby.sql("CHECKPOINT")?;
    standby.sql("SELECT pg_promote()")?;
    standby.sql("DELETE FROM u WHERE id = 5000; CHECKPOINT")?;
    ensure_shredded(&standby, &u)?;
    standby.sql("DROP TABLE t CASCADE")?;
    standby.sql("CHECKPOINT")?;
    standby.crash()?;
    ensure!(standby.text(U)? == u, "the other table is not as it was");
    standby.finish()?;
    primary.finish()
}

/// A restart point may be at a checkpoint from before the destruction, although it is made after.
/// Pages that redo had added to the destroyed file, and which were dropped from memory, are zeros
/// on disk then. Redo reads them again where WAL has no image of them.
#[test]
fn standbys_restart_where_pages_of_a_destroyed_file_were_never_written() -> Result<()> {
    let (primary, _keys) = cluster("max_wal_size = 4GB\nfull_page_writes = off")?;
    let mut standby = standby_of(&primary, &[])?;
    standby.allow_log("canceling statement due to conflict with recovery");
    primary.sql(
        "INSERT INTO t (name) SELECT 'new ' || i FROM generate_series(1, 3000) i; CHECKPOINT",
    )?;
    primary.sql("UPDATE t SET name = name || '!'")?;
    primary.sql(SHRED)?;
    let u = primary.text(U)?;
    wait_for(&standby, &primary)?;
    standby.stop(StopMode::Fast)?;
    for _ in 0..2 {
        standby.start_server()?;
        wait_for(&standby, &primary)?;
        ensure!(standby.text(U)? == u, "the other table is not as it was");
        let error = standby.error("SELECT count(*) FROM t")?;
        ensure!(error.text().contains("were destroyed"), "{error}");
        standby.kill()?;
    }
    standby.start_server()?;
    standby.promote()?;
    ensure_shredded(&standby, &u)?;
    standby.sql("DROP TABLE t CASCADE; CHECKPOINT")?;
    standby.finish()?;
    primary.finish()
}

/// The server is killed after the tombstone is in the keystore and before it is in WAL, or a
/// standby ends recovery before it. Data that recovery had in memory is never readable.
#[test]
fn recovery_that_ends_before_the_tombstone_shows_no_data() -> Result<()> {
    let (cluster, _keys) = cluster("")?;
    cluster.sql("CHECKPOINT")?;
    cluster.sql(CHANGES)?;
    let u = cluster.text(U)?;
    let copy = cluster.directory().join("before");
    cluster.kill()?;
    copy_tree(&cluster.data_directory(), &copy)?;
    cluster.start_server()?;
    cluster.sql(SHRED)?;
    cluster.stop(StopMode::Fast)?;
    // The later keystore in the earlier data directory.
    let keystore = copy.join("pagevault");
    std::fs::remove_dir_all(&keystore)?;
    copy_tree(&cluster.data_directory().join("pagevault"), &keystore)?;
    let cut_short = Cluster::from_files(|data| Ok(std::fs::rename(&copy, data)?))?;
    cut_short.start_server()?;
    ensure_shredded(&cut_short, &u)?;
    cut_short.sql("CHECKPOINT")?;
    // Once more, and standbys replay it.
    cut_short.sql(SHRED)?;
    cut_short.restart()?;
    ensure_shredded(&cut_short, &u)?;
    cut_short.finish()?;
    cluster.finish()
}

pub(super) fn copy_tree(from: &std::path::Path, to: &std::path::Path) -> Result<()> {
    let status = std::process::Command::new("cp").arg("-a").arg(from).arg(to).status()?;
    ensure!(status.success(), "cp: {status}");
    Ok(())
}

/// Standbys and the server itself are killed between any two steps of shredding. Either the keys
/// exist or they are destroyed, and calling shred() again destroys them everywhere.
#[test]
fn killed_at_any_step() -> Result<()> {
    // Key files must be correct at several moments, with fsync and without.
    let (mut cluster, _keys) = cluster("fsync = on")?;
    cluster.allow_log("were destroyed");
    cluster.allow_log("terminating connection because of crash of another server process");
    let u = cluster.text(U)?;
    let t = cluster.text(T)?;
    let mut witnesses = Witnesses::with(&cluster, &["fsync = off"])?;
    let keys = family_keys(&cluster)?;
    for step in [
        "shred.decided",
        "keys.in_file",
        "keys.in_wal",
        "shred.destroyed",
        "keys.compaction",
        "shred.compacted",
    ] {
        // Statistics get keys before that.
        cluster.stop_at("shred.decided")?;
        let mut client = cluster.client()?;
        let session = std::thread::spawn(move || run_sql(&mut client, SHRED));
        let mut stands = cluster.stopped_at("shred.decided")?;
        if step != "shred.decided" {
            cluster.stop_at(step)?;
            stands = cluster.stopped_at(step)?;
        }
        if step == "keys.in_wal" {
            // The server restarts after the crash.
            rustix::process::kill_process(stands, rustix::process::Signal::KILL)?;
            cluster.eventually_logs("all server processes terminated")?;
            cluster.resume();
        } else {
            cluster.kill()?;
            cluster.resume();
            cluster.start_server()?;
        }
        ensure!(session.join().is_ok_and(|ended| ended.is_err()), "{step}: it ended");
        cluster.eventually_that(step, || cluster.text("SELECT 1").map(drop))?;
        ensure!(cluster.text(U)? == u, "{step}: another table");
        // Before the tombstone is in WAL nothing is destroyed. If it is there but not durable, the
        // keys may be destroyed.
        let before = ["shred.decided", "keys.in_file", "keys.in_wal"].contains(&step);
        let after = !["shred.decided", "keys.in_file"].contains(&step);
        match cluster.text(T) {
            Ok(found) => ensure!(found == t && before, "{step}: {found}"),
            Err(error) => ensure!(
                format!("{error:#}").contains("were destroyed") && after,
                "{step}: {error:#}"
            ),
        }
        if step == "keys.in_file" || step == "shred.destroyed" {
            witnesses.back_up(&cluster, step)?;
        }
    }
    cluster.sql(SHRED)?;
    cluster.crash()?;
    ensure!(cluster.text(U)? == u, "another table");
    ensure!(cluster.error(T)?.text().contains("were destroyed"));
    witnesses.judge_and(&cluster, &[U], &["t", "u"], |witness| {
        ensure_shredded(witness, &u)?;
        ensure_gone(witness, &keys)
    })?;
    cluster.sql("DROP TABLE t CASCADE")?;
    cluster.finish()
}

/// A standby has pages on disk that are plaintext, from before the table was encrypted, and has
/// replayed the rest in shared buffers only when the table is shredded.
#[test]
fn a_standby_keeps_no_plaintext_of_what_was_shredded() -> Result<()> {
    for crashes in [false, true] {
        let settings = Settings::default().conf("bgwriter_lru_maxpages = 0");
        let settings = settings.conf("checkpoint_timeout = 1h").conf("autovacuum = off");
        // With data checksums redo writes the pages when it is proven that no server has others.
        let (primary, _keys) = Cluster::with_keys(&settings.without_checksums())?;
        primary.sql("CREATE TABLE first (); SELECT pagevault.encrypt('first')")?;
        let mut standby = standby_of(&primary, &[])?;
        standby.allow_log("could not");
        primary.sql("CREATE TABLE late AS SELECT 'rohrdommel ' || i AS name FROM generate_series(1, 1000) i")?;
        primary.sql("CHECKPOINT")?;
        wait_for(&standby, &primary)?;
        standby.sql("CHECKPOINT")?;
        let is_readable = || -> Result<bool> {
            let mut found = false;
            for file in standby.files("late")? {
                found |= file.contains_text("rohrdommel")?;
            }
            Ok(found)
        };
        ensure!(is_readable()?, "the test shows nothing");
        primary.sql("SELECT pagevault.encrypt('late')")?;
        let done = "SELECT pagevault.wait_for_rekey('late'::regclass, '1min')";
        ensure!(primary.text(done)? == "t", "the job was not done");
        primary.sql("SELECT * FROM pagevault.shred('late', confirm => 'public.late')")?;
        wait_for(&standby, &primary)?;
        if crashes {
            standby.crash()?;
            wait_for(&standby, &primary)?;
        }
        ensure!(!is_readable()?, "there is plaintext");
        for file in standby.files("late")? {
            let states = file.states()?;
            ensure!(!states.contains(&PageState::Plaintext), "{states:?}");
        }
        standby.finish()?;
        primary.finish()?;
    }
    Ok(())
}
