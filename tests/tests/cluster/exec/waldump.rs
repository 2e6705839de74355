//! `pg_waldump` and `pg_receivewal`: each reads what the other writes.

use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::wal::{Segment, WalPage};
use pagevault_tests::{Settings, StopMode};
use rustix::fs::{CWD, Mode};

use super::{assert_nowhere, count, directory, exec, exec_with_keystore, failure, insert, sealing};

/// Sealed WAL, read through exec, has the same records as the same WAL received in plaintext.
#[test]
fn pg_waldump_shows_the_records_of_plaintext_wal() -> Result<()> {
    let settings = Settings::default().wal_segment_size(1).conf("wal_keep_size = 1GB");
    let (mut cluster, _keys) = sealing(&settings)?;
    cluster.allow_log("connection to client lost");
    cluster.allow_log("could not send data to client");
    cluster.sql("SELECT pg_create_physical_replication_slot('slot', true)")?;
    let start = cluster.text("SELECT pg_switch_wal()")?;
    insert(&cluster, "drossel", 3000)?;
    cluster.sql("SELECT pagevault.rotate_wal_key()")?;
    insert(&cluster, "fink", 20_000)?;
    // Includes some plaintext WAL.
    super::switch(&cluster, false)?;
    insert(&cluster, "meise", 3000)?;
    super::switch(&cluster, true)?;
    insert(&cluster, "amsel", 3000)?;
    let end = cluster.text("SELECT pg_current_wal_insert_lsn()")?;
    cluster.sql("SELECT pg_switch_wal()")?;
    // Switch segments, so that the one with `end` is complete and is received completely.
    let switched = cluster.text("SELECT pg_current_wal_lsn()")?;

    let plain = directory(&cluster, "plain")?;
    let mut receive = cluster.program("pg_receivewal");
    run(receive.args(["--slot=slot", "--no-loop", "--endpos", &switched, "-D"]).arg(&plain))?;
    let range = ["--start", &start, "--end", &end];
    let mut dump = cluster.program("pg_waldump");
    let expected = run(dump.arg("-p").arg(&plain).args(range))?;
    ensure!(expected.lines().count() > 20_000, "only {} records", expected.lines().count());

    let sealed = cluster.data_directory().join("pg_wal");
    let mut dump = exec_with_keystore(&cluster, "pg_waldump");
    let shown = run(dump.arg("-p").arg(&sealed).args(range))?;
    ensure!(shown == expected, "the records differ");
    // Also while the server is down, and for a segment by its name.
    cluster.stop(StopMode::Fast)?;
    let first = Segment::all(&sealed)?.remove(0).path;
    let mut dump = exec_with_keystore(&cluster, "pg_waldump");
    ensure!(run(dump.arg("--limit=5").arg(first))?.lines().count() == 5);
    cluster.finish()
}

/// `pg_waldump` takes the size of all segments from the first that it finds. That may be one which
/// was renamed for later, and begins with a page of its former use.
#[test]
fn the_first_segment_found_may_be_one_for_later() -> Result<()> {
    let settings = Settings::default().wal_segment_size(1);
    let (cluster, _keys) = sealing(&settings)?;
    cluster.sql("SELECT pg_switch_wal()")?;
    let start = cluster.text("SELECT pg_current_wal_insert_lsn()")?;
    insert(&cluster, "drossel", 300)?;
    let end = cluster.text("SELECT pg_switch_wal()")?;
    let segment = cluster.text(&format!("SELECT pg_walfile_name('{end}')"))?;
    cluster.stop(StopMode::Fast)?;
    let segments = Segment::all(&cluster.data_directory().join("pg_wal"))?;
    let is_it = |path: &std::path::Path| path.file_name().is_some_and(|name| *name == *segment);
    let own = segments.iter().find(|own| is_it(&own.path)).context("no segment")?;
    let archive = directory(&cluster, "archive")?;
    std::fs::copy(&own.path, archive.join(&segment))?;
    for number in 0..40 {
        std::fs::copy(&own.path, archive.join(format!("0000000100000007000000{number:02X}")))?;
    }
    for entry in std::fs::read_dir(&archive)? {
        cluster.installation().give(&entry?.path())?;
    }
    let mut dump = exec_with_keystore(&cluster, "pg_waldump");
    dump.arg("-p").arg(&archive).args(["--start", &start, "--end", &end]);
    ensure!(run(&mut dump)?.lines().count() > 300);
    cluster.finish()
}

/// Nothing waits for the writer of a FIFO that is named like the history of a segment's timeline.
#[test]
fn a_history_that_is_a_fifo_is_passed_over() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default())?;
    insert(&cluster, "drossel", 100)?;
    let archive = directory(&cluster, "archive")?;
    let segment = Segment::all(&cluster.data_directory().join("pg_wal"))?.remove(0).path;
    let name = segment.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let later = archive.join(format!("00000002{}", &name[8..]));
    std::fs::copy(&segment, &later)?;
    let fifo = archive.join("00000002.history");
    rustix::fs::mkfifoat(CWD, &fifo, Mode::RUSR | Mode::WUSR)?;
    for path in [&later, &fifo] {
        cluster.installation().give(path)?;
    }
    let dump = exec_with_keystore(&cluster, "pg_waldump").arg("--limit=5").arg(later).spawn()?;
    let dump = Mutex::new(dump);
    cluster.eventually_that("its end", || {
        let mut dump = dump.lock().unwrap_or_else(PoisonError::into_inner);
        dump.try_wait()?.context("it runs").map(drop)
    })?;
    cluster.finish()
}

/// `pg_receivewal` writes sealed segments, which can be read and restored from.
#[test]
fn pg_receivewal_seals() -> Result<()> {
    let (mut cluster, _keys) = sealing(&Settings::default())?;
    cluster.allow_log("connection to client lost");
    cluster.sql("SELECT pg_create_physical_replication_slot('slot', true)")?;
    let backup = cluster.directory().join("backup");
    cluster.base_backup_with(&backup, &["-X", "fetch"])?;
    insert(&cluster, "drossel", 1000)?;
    cluster.sql("SELECT pagevault.rotate_wal_key()")?;
    insert(&cluster, "fink", 1000)?;
    let target = directory(&cluster, "received")?;
    // In several runs: an incomplete segment is received again.
    for round in 0..3 {
        insert(&cluster, "meise", 100)?;
        if round == 2 {
            // Complete the segment.
            cluster.sql("SELECT pg_switch_wal()")?;
            insert(&cluster, "zeisig", 1)?;
        }
        let end = cluster.text("SELECT pg_current_wal_flush_lsn()")?;
        let mut receive = exec_with_keystore(&cluster, "pg_receivewal");
        run(receive.args(["--slot=slot", "--no-loop", "--endpos", &end, "-D"]).arg(&target))?;
    }
    for canary in ["drossel", "fink", "meise"] {
        assert_nowhere(&target, canary)?;
    }
    // The server's own segments are identical, except for what it has not yet written.
    let own = Segment::all(&cluster.data_directory().join("pg_wal"))?;
    let received = Segment::all(&target)?;
    ensure!(!received.is_empty(), "no segment was finished");
    for segment in &received {
        let same = own.iter().find(|own| own.path.file_name() == segment.path.file_name());
        ensure!(same.is_some_and(|own| own.bytes == segment.bytes), "the segments differ");
    }
    let last = received.last().map(Segment::pages).transpose()?.unwrap_or_default();
    let states: std::collections::HashSet<_> =
        last.iter().map(|page| format!("{page:?}")).collect();
    ensure!(
        last.contains(&WalPage::Sealed(2)),
        "not sealed: {states:?}, {} segments",
        received.len()
    );
    let restored =
        pagevault_tests::Cluster::from_files(|data| Ok(std::fs::rename(&backup, data)?))?;
    std::fs::write(restored.data_directory().join("recovery.signal"), "")?;
    restored.append_conf(&format!(
        "restore_command = 'cp {}/%f %p'\nrecovery_target_timeline = current",
        target.display()
    ))?;
    restored.start_server()?;
    restored.eventually("SELECT pg_is_in_recovery()", "f")?;
    for (canary, rows) in [("drossel", "1000"), ("fink", "1000"), ("meise", "300")] {
        ensure!(count(&restored, canary)? == rows, "{canary}: {}", count(&restored, canary)?);
    }
    restored.finish()?;
    cluster.finish()
}

/// Output that cannot be sealed is not written.
#[test]
fn compressed_wal_is_refused() -> Result<()> {
    let (mut cluster, _keys) = sealing(&Settings::default())?;
    cluster.allow_log("connection to client lost");
    cluster.allow_log("unexpected EOF on standby connection");
    cluster.sql("SELECT pg_create_physical_replication_slot('slot', true)")?;
    insert(&cluster, "drossel", 1000)?;
    let end = cluster.text("SELECT pg_switch_wal()")?;
    let target = directory(&cluster, "received")?;
    let mut receive = exec_with_keystore(&cluster, "pg_receivewal");
    receive.args(["--slot=slot", "--no-loop", "--compress=gzip", "--endpos", &end, "-D"]);
    let error = failure(receive.arg(&target))?;
    ensure!(error.contains("compressed WAL cannot be encrypted"), "{error}");
    ensure!(std::fs::read_dir(&target)?.next().is_none(), "something was written");
    cluster.finish()
}

/// Summaries contain block numbers, and reading them needs no keys.
#[test]
fn summaries_of_sealed_wal_are_read() -> Result<()> {
    if pagevault_tests::Installation::get()?.major < 17 {
        return Ok(());
    }
    let (cluster, keys) = sealing(&Settings::default().conf("summarize_wal = on"))?;
    insert(&cluster, "drossel", 1000)?;
    cluster.sql("CHECKPOINT")?;
    let file = cluster.text("SELECT pg_relation_filenode('t')")?;
    let summaries = cluster.data_directory().join("pg_wal/summaries");
    cluster.eventually("SELECT count(*) > 0 FROM pg_available_wal_summaries()", "t")?;
    // WAL before a checkpoint is summarized as soon as the summarizer gets there.
    cluster.eventually(
        "SELECT count(*) > 0 FROM pg_available_wal_summaries() s,
            pg_wal_summary_contents(s.tli, s.start_lsn, s.end_lsn) c
          WHERE c.relfilenode = pg_relation_filenode('t')",
        "t",
    )?;
    keys.take_away()?;
    let mut output = String::new();
    for entry in std::fs::read_dir(&summaries)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "summary") {
            output += &run(exec(&cluster, &[], "pg_walsummary").arg(&path))?;
        }
    }
    keys.bring_back()?;
    ensure!(output.contains(&format!("REL {file}, FORK main")), "{output}");
    assert_nowhere(&summaries, "drossel")?;
    cluster.finish()
}
