//! `pg_rewind`: a server that has diverged becomes a standby of the other one.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, KeyFile, Settings, Standby, StopMode};

use super::{count, exec, failure, insert};
use crate::wal::{assert_hidden, sealing};

/// A primary with encrypted tables in two tablespaces and sealed WAL in small segments, and its
/// standby.
pub(super) fn pair() -> Result<(Cluster, Cluster, KeyFile)> {
    pair_with(1)
}

/// The same with segments of this size in MiB.
fn pair_with(segment: u32) -> Result<(Cluster, Cluster, KeyFile)> {
    let settings = Settings::default()
        .wal_segment_size(segment)
        .conf("wal_keep_size = 1GB")
        .conf("allow_in_place_tablespaces = on");
    let (mut primary, keys) = sealing(&settings)?;
    allow(&mut primary);
    primary.sql("CREATE TABLE elsewhere (id int, name text)")?;
    // Before 17, pg_rewind refuses a tablespace without symbolic link.
    if version(&primary)? >= 17 {
        primary.sql("CREATE TABLESPACE place LOCATION ''")?;
        primary.sql("ALTER TABLE elsewhere SET TABLESPACE place")?;
    }
    primary.sql(
        "CREATE TABLE sealed (id serial PRIMARY KEY, name text);
         CREATE UNLOGGED TABLE fleeting (id int)",
    )?;
    for table in ["elsewhere", "sealed", "fleeting"] {
        primary.sql(&format!("SELECT pagevault.encrypt('{table}')"))?;
    }
    change(&primary, "amsel", 20_000)?;
    // Creates free space maps and visibility maps.
    primary.sql("DELETE FROM sealed WHERE id % 7 = 0")?;
    primary.sql("VACUUM sealed")?;
    let mut standby = standby_of(&primary, &[])?;
    allow(&mut standby);
    wait_for(&standby, &primary)?;
    Ok((primary, standby, keys))
}

/// PostgreSQL's major version.
fn version(cluster: &Cluster) -> Result<u32> {
    Ok(cluster.text("SELECT current_setting('server_version_num')::int / 10000")?.parse()?)
}

pub(super) fn allow(cluster: &mut Cluster) {
    for text in [
        "terminating walreceiver process",
        "could not receive data from WAL stream",
        "could not connect to the primary server",
        "could not send data to client",
        "connection to client lost",
        "could not send end-of-streaming message",
        "not properly shut down",
        // Tablespaces without symbolic links exist only in tests.
        "found in pg_tblspc",
    ] {
        cluster.allow_log(text);
    }
}

/// Adds rows with `canary` to all tables, and changes others.
pub(super) fn change(cluster: &Cluster, canary: &str, rows: u32) -> Result<()> {
    insert(cluster, canary, rows / 10)?;
    cluster.sql(&format!(
        "INSERT INTO sealed (name) SELECT '{canary}-' || i || repeat('.', 100) FROM generate_series(1, {rows}) i;
         INSERT INTO elsewhere SELECT i, '{canary}-' || i FROM generate_series(1, {rows}) i;
         UPDATE elsewhere SET name = '{canary}!' || id WHERE id % 50 = 0;
         INSERT INTO fleeting SELECT i FROM generate_series(1, 100) i"
    ))
}

/// A digest of the tables.
pub(super) fn content(cluster: &Cluster) -> Result<String> {
    cluster.text(
        "SELECT concat_ws(' ', (SELECT md5(string_agg(name, ',' ORDER BY id)) FROM sealed),
            (SELECT md5(string_agg(name, ',' ORDER BY id, name)) FROM elsewhere),
            (SELECT count(*) FROM t))",
    )
}

/// Creates new keys of every kind. On both sides of a divergence they have the same versions.
pub(super) fn rotate(cluster: &Cluster) -> Result<()> {
    cluster.sql("SELECT pagevault.rotate_wal_key()")?;
    cluster.sql("SELECT pagevault.rotate_data_key('sealed')")?;
    cluster.sql("SELECT pagevault.wait_for_rekey('sealed'::regclass, '1min')")
}

/// `pg_rewind` of `target`, run by exec.
pub(super) fn rewind(target: &Cluster, source: &[String]) -> Command {
    let mut command = exec(target, &[], "pg_rewind");
    command.arg("--target-pgdata").arg(target.data_directory()).args(source);
    command
}

pub(super) fn server(source: &Cluster) -> Vec<String> {
    let host = source.directory().display();
    vec![format!("--source-server=host={host} user=postgres dbname=postgres")]
}

pub(super) fn files(source: &Cluster) -> Vec<String> {
    vec![format!("--source-pgdata={}", source.data_directory().display())]
}

/// Starts a rewound server as the standby of `primary`.
pub(super) fn follow(rewound: &Cluster, primary: &Cluster) -> Result<()> {
    Standby::default().follow(rewound, primary)?;
    rewound.start_server()?;
    wait_for(rewound, primary)
}

/// All files of a data directory with their contents.
fn image(directory: &Path) -> Result<BTreeMap<PathBuf, Vec<u8>>> {
    let mut all = BTreeMap::new();
    let mut open = vec![directory.to_owned()];
    while let Some(next) = open.pop() {
        for entry in std::fs::read_dir(&next)? {
            let path = entry?.path();
            if path.is_dir() {
                open.push(path);
            } else if path.is_file() {
                let bytes = std::fs::read(&path)?;
                all.insert(path, bytes);
            }
        }
    }
    Ok(all)
}

/// Rewinds the old primary from the new one's server, then the other way from files.
#[test]
fn both_directions_after_timelines_have_diverged() -> Result<()> {
    let (a, b, _keys) = pair()?;
    b.sql("SELECT pg_promote()")?;
    b.eventually("SELECT pg_is_in_recovery()", "f")?;
    b.sql("CHECKPOINT")?;
    rotate(&a)?;
    change(&a, "drossel", 5000)?;
    a.sql("CREATE TABLE lost AS SELECT * FROM sealed; SELECT pagevault.encrypt('lost')")?;
    rotate(&b)?;
    change(&b, "fink", 7000)?;
    b.sql("CREATE TABLE kept AS SELECT * FROM sealed; SELECT pagevault.encrypt('kept')")?;
    // Evicts pages that were changed only in memory; they are written under the newest key.
    a.sql("SELECT count(*) FROM sealed")?;
    a.stop(StopMode::Fast)?;

    let before = image(&a.data_directory())?;
    let reported = run(rewind(&a, &server(&b)).arg("--dry-run"))?;
    ensure!(image(&a.data_directory())? == before, "a dry run has changed something: {reported}");
    drop(before);
    run(&mut rewind(&a, &server(&b)))?;
    follow(&a, &b)?;
    ensure!(content(&a)? == content(&b)?, "the tables differ");
    ensure!(count(&a, "drossel")? == "0" && count(&a, "fink")? == "700", "not what the source has");
    a.sql("SELECT pagevault.verify('sealed')")?;

    // The other way, from files.
    a.sql("SELECT pg_promote()")?;
    a.eventually("SELECT pg_is_in_recovery()", "f")?;
    a.sql("CHECKPOINT")?;
    rotate(&b)?;
    change(&b, "lost", 3000)?;
    rotate(&a)?;
    change(&a, "meise", 3000)?;
    b.stop(StopMode::Fast)?;
    a.stop(StopMode::Fast)?;
    run(&mut rewind(&b, &files(&a)))?;
    a.start_server()?;
    follow(&b, &a)?;
    ensure!(content(&a)? == content(&b)?, "the tables differ");
    change(&a, "zeisig", 1000)?;
    rotate(&a)?;
    wait_for(&b, &a)?;
    b.crash()?;
    wait_for(&b, &a)?;
    ensure!(content(&a)? == content(&b)?, "the tables differ after a crash");
    for cluster in [&a, &b] {
        for canary in ["drossel", "fink", "meise", "zeisig"] {
            assert_hidden(cluster, canary)?;
        }
    }
    b.stop(StopMode::Fast)?;
    a.stop(StopMode::Fast)?;
    a.pg_checksums()?;
    b.pg_checksums()?;
    b.finish()?;
    a.finish()
}

/// A crashed primary: `pg_rewind` first runs a single-user server, which must get the keys by
/// itself. Also uses WAL that only the archive contains.
#[test]
fn after_a_crash_and_from_the_archive() -> Result<()> {
    let (a, b, _keys) = pair()?;
    b.sql("SELECT pg_promote()")?;
    b.eventually("SELECT pg_is_in_recovery()", "f")?;
    b.sql("CHECKPOINT")?;
    change(&b, "fink", 2000)?;
    change(&a, "drossel", 2000)?;
    rotate(&a)?;
    change(&a, "meise", 2000)?;
    a.kill()?;
    run(&mut rewind(&a, &server(&b)))?;
    follow(&a, &b)?;
    ensure!(content(&a)? == content(&b)?, "the tables differ");

    a.sql("SELECT pg_promote()")?;
    a.eventually("SELECT pg_is_in_recovery()", "f")?;
    a.sql("CHECKPOINT")?;
    rotate(&b)?;
    change(&b, "zeisig", 5000)?;
    b.stop(StopMode::Fast)?;
    let archive = super::directory(&b, "archive")?;
    let segments = pagevault_tests::wal::Segment::all(&b.data_directory().join("pg_wal"))?;
    for segment in segments {
        let name = segment.path.file_name().unwrap_or_default();
        std::fs::rename(&segment.path, archive.join(name))?;
    }
    // The program that restores segments does not get the keys, and copies segments as they are.
    let script = b.script(
        "restore",
        &format!(
            "env > {0}/environment; ls -l /proc/$$/fd > {0}/descriptors; exec cp {0}/$1 $2",
            archive.display()
        ),
    )?;
    b.append_conf(&format!("restore_command = '{script} %f %p'"))?;
    run(rewind(&b, &server(&a)).arg("--restore-target-wal"))?;
    let environment = std::fs::read_to_string(archive.join("environment"))?;
    ensure!(
        !environment.contains("PAGEVAULT_BRIEFING") && !environment.contains("LD_PRELOAD"),
        "{environment}"
    );
    let descriptors = std::fs::read_to_string(archive.join("descriptors"))?;
    ensure!(!descriptors.contains("memfd"), "{descriptors}");
    follow(&b, &a)?;
    ensure!(content(&a)? == content(&b)?, "the tables differ");
    b.without_witness("pg_rewind has copied files");
    b.finish()?;
    a.without_witness("pg_rewind has copied files");
    a.finish()
}

/// Killed during the rewind, with keys that only the target has, it can be repeated.
#[test]
fn it_can_be_repeated_after_a_kill() -> Result<()> {
    let (a, b, _keys) = pair()?;
    b.sql("SELECT pg_promote()")?;
    b.eventually("SELECT pg_is_in_recovery()", "f")?;
    b.sql("CHECKPOINT")?;
    rotate(&a)?;
    change(&a, "drossel", 20_000)?;
    rotate(&b)?;
    b.sql("SELECT pagevault.rotate_database_key()")?;
    change(&b, "fink", 20_000)?;
    a.stop(StopMode::Fast)?;
    b.stop(StopMode::Fast)?;
    // Files that take time to copy, between the keystore and WAL in the order of names.
    let ballast = b.data_directory().join("pagf");
    std::fs::File::create(&ballast)?.set_len(2 << 30)?;
    b.installation().give(&ballast)?;
    let copied = a.data_directory().join("pagf");
    let keystore = a.data_directory().join("pagevault");
    let (own, waiting) = (keystore.join("cluster.keys"), keystore.join("cluster.keys.rewind"));
    let before = std::fs::read(&own)?;
    for _ in 0..2 {
        let mut program = rewind(&a, &files(&b)).stderr(Stdio::null()).spawn()?;
        let start = Instant::now();
        while std::fs::metadata(&copied).map_or(0, |file| file.len()) == 0 {
            ensure!(program.try_wait()?.is_none(), "pg_rewind ends before");
            ensure!(start.elapsed() < Duration::from_secs(60), "pg_rewind does not get that far");
        }
        program.kill()?;
        program.wait()?;
        ensure!(waiting.exists(), "the source's keystore was not copied");
        ensure!(std::fs::read(&own)? == before, "the target's keystore was touched");
        std::fs::remove_file(&copied)?;
    }
    std::fs::remove_file(&ballast)?;
    run(&mut rewind(&a, &files(&b)))?;
    ensure!(!waiting.exists(), "the new keystore is not in its place");
    b.start_server()?;
    follow(&a, &b)?;
    ensure!(content(&a)? == content(&b)?, "the tables differ");
    b.finish()?;
    a.finish()
}

/// After the keystore was replaced, and before the control file is written, it still needs the
/// target's own WAL keys when it is repeated.
#[test]
fn it_can_be_repeated_after_the_keystore_was_replaced() -> Result<()> {
    // All that the target has written since is in one segment: pg_rewind removes others.
    let (mut a, b, _keys) = pair_with(16)?;
    a.allow_log("pg_rewind was killed after it had replaced the keystore");
    b.sql("SELECT pg_promote()")?;
    b.eventually("SELECT pg_is_in_recovery()", "f")?;
    b.sql("CHECKPOINT")?;
    rotate(&a)?;
    change(&a, "drossel", 100)?;
    rotate(&b)?;
    rotate(&b)?;
    change(&b, "fink", 1000)?;
    a.stop(StopMode::Fast)?;
    let control = a.data_directory().join("global/pg_control");
    let cluster_keys = a.data_directory().join("pagevault/cluster.keys");
    let before = std::fs::read(&cluster_keys)?;
    // The control file cannot be opened for writing.
    std::fs::set_permissions(&control, Permissions::from_mode(0o400))?;
    failure(&mut rewind(&a, &server(&b)))?;
    std::fs::set_permissions(&control, Permissions::from_mode(0o600))?;
    ensure!(std::fs::read(&cluster_keys)? != before, "the keystore was not replaced");
    // The target's own WAL needs its own keys.
    Standby::default().follow(&a, &b)?;
    let refused = format!("{:#}", a.start_server().err().context("a server that starts")?);
    ensure!(refused.contains("pg_rewind was killed"), "{refused}");
    let kept = a.data_directory().join("pagevault.rewinding");
    let copy = a.directory().join("kept");
    run(Command::new("cp").arg("-a").args([&kept, &copy]))?;
    run(&mut rewind(&a, &server(&b)))?;
    ensure!(!kept.exists() && !kept.with_extension("rewinding.new").exists(), "files are left");

    // A run that was killed later has left keys that nothing needs.
    run(Command::new("cp").arg("-a").args([&copy, &kept]))?;
    run(Command::new("cp").arg("-a").args([&copy, &kept.with_extension("rewinding.new")]))?;
    let waiting = cluster_keys.with_extension("keys.rewind");
    run(Command::new("cp").arg("-a").args([&cluster_keys, &waiting]))?;
    follow(&a, &b)?;
    for left in [&kept, &kept.with_extension("rewinding.new"), &waiting] {
        ensure!(!left.exists(), "{} is left", left.display());
    }
    ensure!(content(&a)? == content(&b)?, "the tables differ");
    b.finish()?;
    a.finish()
}

/// The source's server removes files of its keystore while `pg_rewind` copies others. The target
/// does not have them either then; an empty one would prevent its start.
#[test]
fn what_the_source_removes_meanwhile_is_not_copied() -> Result<()> {
    let (a, b, _keys) = pair()?;
    b.sql("SELECT pg_promote()")?;
    b.eventually("SELECT pg_is_in_recovery()", "f")?;
    b.sql("CHECKPOINT")?;
    change(&a, "drossel", 1000)?;
    change(&b, "fink", 1000)?;
    a.stop(StopMode::Fast)?;
    let keystore = |cluster: &Cluster| cluster.data_directory().join("pagevault");
    // The second one is also in the target.
    let gone = ["given_up", "anchor.unchecked"];
    std::fs::write(keystore(&a).join(gone[1]), "old")?;
    // A file that takes time to copy, before the keystore in the order of names.
    let ballast = b.data_directory().join("ballast");
    std::fs::File::create(&ballast)?.set_len(512 << 20)?;
    for path in gone.iter().map(|name| keystore(&b).join(name)) {
        std::fs::write(&path, "new")?;
        b.installation().give(&path)?;
    }
    b.installation().give(&ballast)?;
    let copied = a.data_directory().join("ballast");
    let mut program = rewind(&a, &server(&b)).spawn()?;
    let start = Instant::now();
    while !copied.exists() {
        ensure!(program.try_wait()?.is_none(), "pg_rewind ends before");
        ensure!(start.elapsed() < Duration::from_secs(60), "pg_rewind does not get that far");
    }
    for name in gone {
        std::fs::remove_file(keystore(&b).join(name))?;
    }
    ensure!(program.wait()?.success(), "pg_rewind fails");
    for entry in std::fs::read_dir(keystore(&a))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        ensure!(!name.ends_with(".rewind") && !gone.contains(&&*name), "{name} was copied");
    }
    for path in [&copied, &ballast] {
        std::fs::remove_file(path)?;
    }
    follow(&a, &b)?;
    ensure!(content(&a)? == content(&b)?, "the tables differ");
    b.finish()?;
    a.finish()
}

/// A damaged keystore of the source is not copied to the target: local files are checked before
/// anything is changed, those from a server before they replace the old ones.
#[test]
fn a_damaged_keystore_is_not_copied() -> Result<()> {
    let (a, mut b, _keys) = pair()?;
    // Its workers may read the key file while it is damaged.
    b.allow_log("key file \"cluster.keys\" is not readable");
    b.sql("SELECT pg_promote()")?;
    b.eventually("SELECT pg_is_in_recovery()", "f")?;
    b.sql("CHECKPOINT")?;
    change(&a, "drossel", 1000)?;
    change(&b, "fink", 1000)?;
    a.stop(StopMode::Fast)?;
    b.stop(StopMode::Fast)?;
    let theirs = b.data_directory().join("pagevault/cluster.keys");
    let right = std::fs::read(&theirs)?;
    let mut wrong = right.clone();
    *wrong.get_mut(100).context("a keystore has more bytes")? ^= 1;
    std::fs::write(&theirs, &wrong)?;
    let before = image(&a.data_directory())?;
    let error = failure(&mut rewind(&a, &files(&b)))?;
    ensure!(error.contains("cluster.keys\" is not readable"), "{error}");
    ensure!(image(&a.data_directory())? == before, "the target was touched");
    std::fs::write(&theirs, &right)?;
    b.start_server()?;
    std::fs::write(&theirs, &wrong)?;
    let error = failure(&mut rewind(&a, &server(&b)))?;
    ensure!(error.contains("cluster.keys.rewind\" is not readable"), "{error}");
    let now = std::fs::read(a.data_directory().join("pagevault/cluster.keys"))?;
    ensure!(before.get(&a.data_directory().join("pagevault/cluster.keys")) == Some(&now));
    std::fs::write(&theirs, &right)?;
    b.finish()?;
    a.finish()
}
