//! `pagevault-keyring verify`: whether WAL that a server needs is what PostgreSQL would read, and
//! whether nothing is missed in what it would.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use pagevault_tests::backup::Backup;
use pagevault_tests::cluster::run_sql;
use pagevault_tests::installation::run;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::wal::{PAGE, Segment};
use pagevault_tests::{Cluster, Settings, StopMode};

use crate::wal::{count, insert, sealing};

fn expect(cluster: &Cluster, of: &Path, line: &[&str], code: i32, words: &[&str]) -> Result<()> {
    let output = cluster.program("pagevault-keyring").arg("verify").args(line).arg(of).output()?;
    let said = String::from_utf8([output.stdout, output.stderr].concat())?;
    ensure!(output.status.code() == Some(code), "{:?} instead of {code}: {said}", output.status);
    for word in words {
        ensure!(said.contains(word), "{word}: {said}");
    }
    Ok(())
}

const EMIT: &str = "SELECT pg_logical_emit_message(false, 'x', repeat('x', 200000))";

/// A base backup of a busy server: its WAL has records that continue over many pages.
fn busy_backup(cluster: &Cluster, to: &Path) -> Result<()> {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| -> Result<()> {
            let mut client = cluster.client()?;
            while !done.load(Ordering::Relaxed) {
                run_sql(&mut client, EMIT)?;
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
            Ok(())
        });
        let backup = cluster.base_backup_with(to, &["-X", "fetch", "--max-rate=20M"]);
        done.store(true, Ordering::Relaxed);
        writer.join().map_err(|_| anyhow::anyhow!("the writer failed"))?.and(backup)
    })
}

/// An LSN in a backup's manifest.
fn lsn(backup: &Path, field: &str) -> Result<String> {
    let text = fs::read_to_string(backup.join("backup_manifest"))?;
    let value = text.split(&format!("\"{field}\": \"")).nth(1);
    let value = value.and_then(|rest| rest.split('"').next());
    Ok(value.with_context(|| field.to_owned())?.to_owned())
}

/// They have no checksum: PostgreSQL compares them with what it expects, and does not restore a
/// backup with a wrong one.
#[test]
fn headers_of_wal_pages_are_as_postgresql_requires() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("SELECT pg_switch_wal()")?;
    let backup = cluster.directory().join("backup");
    busy_backup(&cluster, &backup)?;
    let (start, end) = (lsn(&backup, "Start-LSN")?, lsn(&backup, "End-LSN")?);
    let pages = cluster.text(&format!("SELECT ('{end}'::pg_lsn - '{start}')::bigint / {PAGE}"))?;
    ensure!(pages.parse::<u64>()? > 100, "only {pages} pages of WAL");
    let name = cluster.text(&format!("SELECT pg_walfile_name('{start}')"))?;
    let path = backup.join("pg_wal").join(name);
    let whole = fs::read(&path)?;
    let at = u64::from_str_radix(start.split('/').nth(1).context("an LSN")?, 16)?;
    let at = at as usize % whole.len() / PAGE * PAGE;
    let continues = |page: &usize| whole[page + 2] & 1 != 0 && whole[page + 16..][..4] != [0; 4];
    let later = (at + 5 * PAGE..).step_by(PAGE).find(continues).context("a long record")?;
    expect(&cluster, &backup, &[], 0, &["No damage found."])?;
    // xlp_magic, xlp_sysid, xlp_seg_size, xlp_xlog_blcksz; xlp_magic, xlp_info, xlp_tli,
    // xlp_rem_len.
    let places = [(0, 0), (0, 24), (0, 34), (0, 37)].map(|(page, byte)| (page, byte, 1));
    let later = [(0, 1), (2, 1), (2, 2), (4, 2), (17, 1)].map(|(at, bit)| (later, at, bit));
    for (page, byte, bit) in places.into_iter().chain(later) {
        let mut changed = whole.clone();
        changed[page + byte] ^= bit;
        fs::write(&path, &changed)?;
        let words = ["WAL of timeline 1", "the backup needs it up to"];
        let found = expect(&cluster, &backup, &[], 2, &words);
        found.with_context(|| format!("byte {byte} of the page at {page}"))?;
    }
    fs::write(&path, &whole)?;

    // A segment of another timeline with the same content.
    let renamed = path.with_file_name(name_on(&path, 9)?);
    fs::rename(&path, &renamed)?;
    expect(&cluster, &backup, &[], 2, &["WAL of timeline 1"])?;
    fs::rename(&renamed, &path)?;

    // Nothing follows the last address.
    let mut last = vec![0; whole.len()];
    last[..40].copy_from_slice(&whole[..40]);
    for (index, page) in last.chunks_exact_mut(PAGE).enumerate() {
        let address = u64::MAX - (whole.len() - 1) as u64 + (index * PAGE) as u64;
        let header = [&whole[..2], &[if index == 0 { 2 } else { 0 }, 0, 1, 0, 0, 0]].concat();
        page[..8].copy_from_slice(&header);
        page[8..16].copy_from_slice(&address.to_le_bytes());
    }
    fs::write(path.with_file_name("00000001FFFFFFFF000000FF"), &last)?;
    expect(&cluster, &backup, &[], 0, &["No damage found."])?;
    cluster.finish()
}

/// The name of a segment on another timeline.
fn name_on(segment: &Path, timeline: u32) -> Result<String> {
    let name = segment.file_name().and_then(|name| name.to_str()).context("a name")?;
    Ok(format!("{timeline:08X}{}", &name[8..]))
}

/// After a failover the segment in which the new timeline began is on that only.
#[test]
fn wal_of_a_backup_continues_on_the_timeline_of_the_new_primary() -> Result<()> {
    let (mut cluster, _keys) = sealing(&Settings::default().wal_segment_size(1))?;
    cluster.allow_log("not properly shut down");
    let mut standby = standby_of(&cluster, &["wal_keep_size = 100MB"])?;
    cluster.sql("CHECKPOINT")?;
    wait_for(&standby, &cluster)?;
    standby.sql("CHECKPOINT")?;
    for _ in 0..8 {
        cluster.sql(EMIT)?;
    }
    insert(&cluster, "drossel", 100)?;
    wait_for(&standby, &cluster)?;
    let backup = standby.directory().join("backup");
    standby.base_backup_with(&backup, &["-X", "none"])?;
    let end = lsn(&backup, "End-LSN")?;
    cluster.stop(StopMode::Immediate)?;
    standby.promote()?;
    // No checkpoint was made since.
    standby.stop(StopMode::Immediate)?;
    standby.allow_log("not properly shut down");
    expect(&standby, &standby.data_directory(), &[], 0, &["No damage found."])?;
    standby.start_server()?;
    standby.sql("CHECKPOINT")?;
    insert(&standby, "fink", 100)?;

    let archive = standby.directory().join("archive");
    fs::create_dir(&archive)?;
    standby.installation().give(&archive)?;
    let pg_wal = standby.data_directory().join("pg_wal");
    let add = |path: &Path| run(Command::new("cp").arg("-p").arg(path).arg(&archive));
    let segments = Segment::all(&pg_wal)?;
    let is_on =
        |path: &Path, timeline| name_on(path, timeline).is_ok_and(|name| path.ends_with(name));
    let fork = segments.iter().find(|segment| is_on(&segment.path, 2)).context("timeline 2")?;
    let parent = fork.path.with_file_name(name_on(&fork.path, 1)?);
    for segment in &segments {
        if is_on(&segment.path, 2) || segment.path < parent {
            add(&segment.path)?;
        }
    }
    add(&pg_wal.join("00000002.history"))?;
    let from = ["--wal-directory", archive.to_str().context("a path")?];
    expect(&standby, &backup, &from, 0, &["No damage found.", "1 ranges of WAL"])?;

    // Timeline 2 of another cluster, or one that left timeline 1 before the end of the backup.
    let history = archive.join("00000002.history");
    let text = fs::read_to_string(&history)?;
    fs::remove_file(&history)?;
    let words = ["WAL of timeline 1 ends or is broken at", &format!("up to {end}")];
    expect(&standby, &backup, &from, 2, &words)?;
    fs::write(&history, text.replace("1\t0/", "1\t0/0"))?;
    expect(&standby, &backup, &from, 0, &["No damage found."])?;
    fs::write(&history, "1\t0/1000\tno recovery target specified\n")?;
    expect(&standby, &backup, &from, 2, &["WAL of timeline 1"])?;
    standby.stop(StopMode::Fast)?;
    expect(&standby, &standby.data_directory(), &[], 0, &["No damage found."])?;
    standby.finish()?;
    cluster.start_server()?;
    cluster.finish()
}

/// The backup copied the keystore first, as it may.
#[test]
fn keys_that_only_wal_has_open_its_pages() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default())?;
    insert(&cluster, "amsel", 1000)?;
    let backup = Backup::begin(&cluster)?;
    for key in ["wal", "database", "wal"] {
        cluster.sql(&format!("SELECT pagevault.rotate_{key}_key()"))?;
        insert(&cluster, "drossel", 1000)?;
        cluster.sql("SELECT pg_switch_wal()")?;
    }
    let restored = backup.end()?;
    expect(&restored, &restored.data_directory(), &[], 0, &["No damage found."])?;
    restored.start_server()?;
    ensure!(count(&restored, "drossel")? == "3000", "rows are lost");
    restored.stop(StopMode::Fast)?;
    expect(&restored, &restored.data_directory(), &[], 0, &["No damage found."])?;
    restored.finish()?;
    cluster.finish()
}

/// Its pages have no images in WAL, and their keys are not in the copied keystore.
#[test]
fn recovery_replaces_a_database_that_was_copied_during_the_backup() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE DATABASE model")?;
    let mut model = cluster.client_to("model")?;
    run_sql(&mut model, "CREATE EXTENSION pagevault; CREATE TABLE t (id int)")?;
    run_sql(&mut model, "SELECT pagevault.encrypt('t')")?;
    run_sql(&mut model, "INSERT INTO t SELECT generate_series(1, 2000)")?;
    drop(model);
    let backup = Backup::begin(&cluster)?;
    cluster.sql("CREATE DATABASE copy TEMPLATE model STRATEGY file_copy")?;
    let restored = backup.end()?;
    let data = restored.data_directory();
    expect(&restored, &data, &[], 0, &["No damage found.", "torn         "])?;
    restored.start_server()?;
    let mut copy = restored.client_to("copy")?;
    let rows = pagevault_tests::cluster::text(&mut copy, "SELECT count(*) FROM t")?;
    ensure!(rows == "2000", "{rows} rows");
    drop(copy);
    restored.stop(StopMode::Fast)?;
    expect(&restored, &data, &[], 0, &["No damage found."])?;
    restored.finish()?;
    cluster.finish()
}

/// Without a backup's label, a server starts only if the control file and the record of the last
/// checkpoint are there.
#[test]
fn what_a_server_start_needs_is_not_missing() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("not properly shut down");
    cluster.sql("CREATE TABLE t AS SELECT generate_series(1, 1000) AS id")?;
    cluster.sql("SELECT pagevault.encrypt('t'); CHECKPOINT; UPDATE t SET id = id + 1")?;
    let data = cluster.data_directory();
    let pg_wal = data.join("pg_wal");
    let away = cluster.directory().join("away");
    let whole = |code, words: &[&str]| expect(&cluster, &data, &[], code, words);
    for mode in [StopMode::Immediate, StopMode::Fast] {
        cluster.stop(mode)?;
        whole(0, &["No damage found."])?;
        fs::rename(&pg_wal, &away)?;
        fs::create_dir(&pg_wal)?;
        cluster.installation().give(&pg_wal)?;
        whole(2, &["WAL of timeline 1 at", "missing; the server needs it up to"])?;
        // Recovery may fetch it.
        fs::write(data.join("recovery.signal"), "")?;
        whole(0, &["No damage found."])?;
        fs::remove_file(data.join("recovery.signal"))?;
        fs::remove_dir(&pg_wal)?;
        std::os::unix::fs::symlink(&away, &pg_wal)?;
        whole(0, &["No damage found."])?;
        fs::remove_file(&pg_wal)?;
        fs::rename(&away, &pg_wal)?;
        cluster.start_server()?;
    }
    cluster.stop(StopMode::Fast)?;
    let control = data.join("global/pg_control");
    let content = fs::read(&control)?;
    let mut changed = content.clone();
    changed[260] ^= 1;
    fs::write(&control, &changed)?;
    whole(1, &["control file", "is not valid"])?;
    fs::write(&control, &content)?;
    whole(0, &["No damage found."])?;
    // It leaves one segment with one record.
    run(cluster.installation().command("pg_resetwal").arg("-D").arg(&data))?;
    whole(0, &["No damage found."])?;
    cluster.start_server()?;
    cluster.end()
}

/// Recovery ends at the gap: what is behind it is lost, and replaces no torn page.
#[test]
fn a_segment_behind_the_last_checkpoint_is_not_missing() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default().wal_segment_size(1))?;
    cluster.sql("CREATE TABLE t (id int, n int) WITH (autovacuum_enabled = off)")?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    cluster.sql("INSERT INTO t SELECT i, 0 FROM generate_series(1, 1000) i")?;
    cluster.sql("CHECKPOINT")?;
    cluster.sql("SELECT pg_switch_wal()")?;
    cluster.sql("CREATE TABLE paid AS SELECT generate_series(1, 100) AS id")?;
    let middle = cluster.text("SELECT pg_walfile_name(pg_current_wal_insert_lsn())")?;
    cluster.sql("SELECT pg_switch_wal()")?;
    cluster.sql("UPDATE t SET n = 1 WHERE ctid = '(0,1)'")?;
    let data = cluster.data_directory();
    let table = data.join(cluster.text("SELECT pg_relation_filepath('t')")?);
    cluster.kill()?;
    let whole = fs::read(&table)?;
    let mut torn = whole.clone();
    torn[4000] ^= 1;
    fs::write(&table, torn)?;
    expect(&cluster, &data, &[], 0, &["torn         1 pages", "No damage found."])?;
    let (middle, away) = (data.join("pg_wal").join(middle), cluster.directory().join("away"));
    fs::rename(&middle, &away)?;
    let words = ["WAL of timeline 1 ends or is broken at", "and continues at", "block 0:"];
    expect(&cluster, &data, &[], 2, &words)?;
    fs::rename(&away, &middle)?;
    expect(&cluster, &data, &[], 0, &["No damage found."])?;
    // A server that has started without it writes another one there.
    fs::rename(&middle, &away)?;
    fs::write(&table, whole)?;
    cluster.allow_log("not properly shut down");
    cluster.start_server()?;
    cluster.stop(StopMode::Fast)?;
    expect(&cluster, &data, &[], 0, &["No damage found."])?;
    cluster.end()
}

/// As a snapshot of files, between `pg_backup_start` and `pg_backup_stop`, and its archive.
#[test]
fn a_backup_without_a_manifest_has_its_wal_in_the_archive() -> Result<()> {
    // Without archiving, no backup history file is kept.
    let settings = Settings::default().wal_segment_size(1).conf("archive_mode = on");
    let settings = settings.conf("archive_command = 'true'");
    let (cluster, _keys) = sealing(&settings)?;
    insert(&cluster, "amsel", 1000)?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    let backup = Backup::begin(&cluster)?;
    cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
    cluster.sql("SELECT pagevault.wait_for_rekey('t'::regclass, '60 s')")?;
    cluster.sql("SELECT pg_switch_wal()")?;
    cluster.sql("CHECKPOINT")?;
    let restored = backup.end()?;
    let data = restored.data_directory();
    let (pg_wal, archive) = (data.join("pg_wal"), restored.directory().join("archive"));
    fs::rename(&pg_wal, &archive)?;
    fs::create_dir(&pg_wal)?;
    restored.installation().give(&pg_wal)?;
    let from = ["--wal-directory", archive.to_str().context("a path")?];
    let is_whole = || expect(&restored, &data, &from, 0, &["No damage found.", "torn         "]);
    is_whole()?;
    let empty = ["--wal-directory", pg_wal.to_str().context("a path")?];
    expect(&restored, &data, &empty, 2, &["is missing; the backup needs it up to"])?;

    // The end is in the last segment, which also has WAL behind it.
    let label = fs::read_to_string(data.join("backup_label"))?;
    let first = label.split("(file ").nth(1).and_then(|rest| rest.get(..24)).context("a label")?;
    let mut files = fs::read_dir(&archive)?.filter_map(|entry| Some(entry.ok()?.path()));
    let history = files.find(|path| {
        path.extension().is_some_and(|extension| extension == "backup")
            && path.to_string_lossy().contains(first)
    });
    let history = history.context("a backup history file")?;
    let text = fs::read_to_string(&history)?;
    let stop = text.split("STOP WAL LOCATION: ").nth(1).context("the end")?;
    let (end, rest) = stop.split_once(" (file ").context("its segment")?;
    let (last, away) = (archive.join(&rest[..24]), restored.directory().join("away"));
    // Of another size, behind what is needed.
    let file = fs::OpenOptions::new().write(true).open(&last)?;
    let size = file.metadata()?.len();
    for other in [size - 8192, size + 1] {
        file.set_len(other)?;
        let what = format!("{}: {other} bytes instead of {size}", last.display());
        expect(&restored, &data, &from, 2, &[&what, "Damage found: 1."])?;
    }
    file.set_len(size)?;
    is_whole()?;
    fs::rename(&last, &away)?;
    expect(&restored, &data, &from, 2, &[&format!("the backup needs it up to {end}")])?;
    fs::rename(&away, &last)?;
    // As for the backup of a standby.
    fs::remove_file(&history)?;
    is_whole()?;
    fs::rename(archive.join(first), &away)?;
    expect(&restored, &data, &from, 2, &["is missing; the backup needs it up to"])?;
    cluster.finish()
}

/// Recovery takes a segment from the archive, if it has it there, and else from `pg_wal`
/// (`XLogFileReadAnyTLI`, xlogrecovery.c).
#[test]
fn segments_of_the_archive_are_read_also_if_the_backup_has_them() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default().wal_segment_size(1))?;
    insert(&cluster, "amsel", 1000)?;
    let backup = cluster.directory().join("backup");
    cluster.base_backup_with(&backup, &["-X", "fetch"])?;
    let (pg_wal, archive) = (backup.join("pg_wal"), cluster.directory().join("archive"));
    run(Command::new("cp").arg("-a").arg(&pg_wal).arg(&archive))?;
    let from = ["--wal-directory", archive.to_str().context("a path")?];
    expect(&cluster, &backup, &from, 0, &["No damage found."])?;
    let name =
        cluster.text(&format!("SELECT pg_walfile_name('{}')", lsn(&backup, "Start-LSN")?))?;
    for directory in [&archive, &pg_wal] {
        let path = directory.join(&name);
        let whole = fs::read(&path)?;
        let mut garbage = whole.clone();
        garbage.fill(7);
        for changed in [&whole[..4096], &garbage] {
            fs::write(&path, changed)?;
            expect(&cluster, &backup, &from, 2, &["Damage found: "])?;
        }
        fs::write(&path, &whole)?;
    }
    expect(&cluster, &backup, &from, 0, &["No damage found."])?;
    cluster.finish()
}
