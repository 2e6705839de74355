//! Minor releases: what an upgrade of packages does to a server, and its reversal.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagevault_tests::backup::Backup;
use pagevault_tests::cluster::column;
use pagevault_tests::datafile::assert_sealed;
use pagevault_tests::keyfile::KeyFile;
use pagevault_tests::leaks::{Canary, Scanner, report};
use pagevault_tests::standby::{ORDINARY, Standby, wait_for};
use pagevault_tests::{Cluster, Installation, Settings, StopMode};

use crate::described::Described;

/// The oldest and the newest release of each major among builds that have the same name otherwise.
pub(crate) fn pairs(names: &[&str]) -> Vec<[String; 2]> {
    let mut families: BTreeMap<(&str, u32), BTreeMap<Vec<u32>, &str>> = BTreeMap::new();
    for name in names {
        let Some((family, version)) = name.rsplit_once('-') else { continue };
        let numbers: Option<Vec<u32>> = version.split('.').map(|part| part.parse().ok()).collect();
        let Some(numbers) = numbers.filter(|numbers| numbers.len() > 1) else { continue };
        families.entry((family, numbers[0])).or_default().insert(numbers, *name);
    }
    let ends =
        families.into_values().filter(|releases| releases.len() > 1).filter_map(|releases| {
            let (first, last) = (releases.first_key_value()?, releases.last_key_value()?);
            Some([first.1.to_string(), last.1.to_string()])
        });
    ends.collect()
}

/// A table in a cluster that encrypts everything, WAL too.
fn encrypted_table(server: &'static Installation, canary: &Canary) -> Result<(Cluster, KeyFile)> {
    let settings = Settings::default().on(server).conf("pagevault.default_encryption = on");
    let (cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    cluster.sql(&format!(
        "CREATE TABLE t (id bigserial PRIMARY KEY, note text);
         INSERT INTO t (note) SELECT '{0}' || i FROM generate_series(1, 5000) i;
         CREATE INDEX ON t (note); CHECKPOINT",
        canary.as_str()
    ))?;
    Ok((cluster, keys))
}

/// The server is of this release, and has these rows.
fn has(cluster: &Cluster, server: &Installation, acknowledged: &[i64]) -> Result<()> {
    let is = cluster.text("SHOW server_version")?;
    ensure!(server.version.contains(is.split(' ').next().unwrap_or(&is)), "it is {is}");
    ensure!(acknowledged.len() > 10, "only {} rows were written", acknowledged.len());
    let ids: Vec<String> = acknowledged.iter().map(ToString::to_string).collect();
    let found = "SELECT count(*) FROM t WHERE id = ANY";
    let found = cluster.text(&format!("{found} ('{{{}}}')", ids.join(",")))?;
    ensure!(found == acknowledged.len().to_string(), "{found} of {}", acknowledged.len());
    Ok(())
}

/// New keys of every kind, changed rows.
const CHANGES: [&str; 6] = [
    "SELECT pagevault.rotate_data_key('t')",
    "SELECT pagevault.wait_for_rekey('t'::regclass)",
    "SELECT pagevault.rotate_database_key()",
    "SELECT pagevault.rotate_wal_key()",
    "UPDATE t SET note = note || '.' WHERE id % 9 = 0",
    "CHECKPOINT",
];

/// Every page of the table is sealed, and the data is nowhere in plaintext.
fn all_sealed(cluster: &Cluster, canary: &Canary) -> Result<()> {
    assert_sealed(&cluster.family_files("t")?)?;
    let found = Scanner::new([canary]).scan_trees(&[cluster.data_directory().as_path()])?;
    ensure!(found.is_empty(), "in plaintext on disk:\n{}", report(&found));
    Ok(())
}

/// The newer server recovers what the older one has written until it was killed. Then the older one
/// continues, and the newer one again. Sessions write all the time.
pub(crate) fn take_turns(older: &Path, newer: &Path) -> Result<()> {
    let older = Installation::of_prefix(older)?;
    let newer = Installation::of_prefix(newer)?;
    let canary = Canary::text("of a minor release");
    let (mut cluster, _keys) = encrypted_table(older, &canary)?;
    for (server, is_killed) in [(newer, true), (older, false), (newer, false)] {
        let acknowledged = while_writing(&cluster, canary.as_str(), || match is_killed {
            true => cluster.kill(),
            false => cluster.stop(StopMode::Fast),
        })?;
        cluster.run_by(server);
        cluster.start_server().with_context(|| format!("by {}", server.version))?;
        has(&cluster, server, &acknowledged)?;
        CHANGES.iter().try_for_each(|statement| cluster.sql(statement))?;
        all_sealed(&cluster, &canary)?;
        ensure!(cluster.text("SELECT count(*) FROM pagevault.drift(true)")? == "0", "drift");
    }
    cluster.end()?;
    cluster.keep_quiet();
    Ok(())
}

/// A standby of the newer release follows a primary of the older one, as when standbys are upgraded
/// first: new keys arrive, and it is killed. It is promoted, and the older server is its standby.
pub(crate) fn stand_by(older: &Path, newer: &Path) -> Result<()> {
    let older = Installation::of_prefix(older)?;
    let newer = Installation::of_prefix(newer)?;
    let canary = Canary::text("of a primary");
    let (mut former, _keys) = encrypted_table(older, &canary)?;
    // These builds lack pg_basebackup.
    let mut next = Backup::begin(&former)?.end()?;
    next.run_by(newer);
    for cluster in [&mut former, &mut next] {
        ORDINARY.iter().for_each(|text| cluster.allow_log(text));
    }
    Standby::default().follow(&next, &former)?;
    next.start_server().context("a standby")?;
    let acknowledged = while_writing(&former, canary.as_str(), || next.kill())?;
    next.start_server().context("a standby that was killed")?;
    CHANGES.iter().try_for_each(|statement| former.sql(statement))?;
    wait_for(&next, &former)?;
    has(&next, newer, &acknowledged)?;
    // A primary that is stopped sends all that it has written.
    let acknowledged = while_writing(&former, canary.as_str(), || former.stop(StopMode::Fast))?;
    next.promote()?;
    has(&next, newer, &acknowledged)?;
    CHANGES.iter().try_for_each(|statement| next.sql(statement))?;

    Standby::default().follow(&former, &next)?;
    former.start_server().context("the former primary")?;
    let acknowledged = while_writing(&next, canary.as_str(), || former.kill())?;
    former.start_server().context("the former primary, killed as a standby")?;
    CHANGES.iter().try_for_each(|statement| next.sql(statement))?;
    wait_for(&former, &next)?;
    has(&former, older, &acknowledged)?;
    former.sql("CHECKPOINT")?; // a restart point
    for mut cluster in [former, next] {
        all_sealed(&cluster, &canary)?;
        cluster.end()?;
        cluster.keep_quiet();
    }
    Ok(())
}

/// A release in which a function has another name, made of this one: pagevault refuses it, says
/// what to install, and has changed nothing. The release before starts again.
pub(crate) fn unknown(before: &Path) -> Result<()> {
    let canary = Canary::text("of the release before");
    let known = Installation::of_prefix(before)?;
    let (mut cluster, _keys) = encrypted_table(known, &canary)?;
    let changed = tempfile::tempdir()?;
    fs::set_permissions(changed.path(), fs::Permissions::from_mode(0o755))?;
    for shared in ["lib", "share"] {
        symlink(before.join(shared), changed.path().join(shared))?;
    }
    fs::create_dir(changed.path().join("bin"))?;
    for program in fs::read_dir(before.join("bin"))? {
        let program = program?.path();
        let copy = changed.path().join("bin").join(program.file_name().context("a name")?);
        fs::copy(&program, &copy)?;
        if program.ends_with("postgres") {
            let mut bytes = fs::read(&program)?;
            let places: Vec<usize> = bytes
                .windows(FUNCTION.len())
                .enumerate()
                .filter_map(|(at, found)| (found == FUNCTION).then_some(at))
                .collect();
            ensure!(!places.is_empty(), "the server has no such function");
            places.iter().for_each(|at| bytes[at + 1] = b'x');
            fs::write(&copy, bytes)?;
        }
    }
    let unknown = Installation::of_prefix(changed.path())?;
    ensure!(!Described::of(unknown)?.works(), "check-server does not refuse it");

    cluster.stop(StopMode::Fast)?;
    cluster.run_by(unknown);
    let said = format!("{:#}", cluster.start_server().err().context("the server starts")?);
    for part in [
        "FATAL:  pagevault cannot work with this server: ",
        "mdextend",
        "This pagevault was built for PostgreSQL ",
        "Install the packages of PostgreSQL that this server had before, or a newer package",
    ] {
        ensure!(said.contains(part), "it does not say {part:?} but {said}");
    }
    cluster.run_by(known);
    cluster.start_server().context("the release before")?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "5000", "rows");
    all_sealed(&cluster, &canary)?;
    cluster.allow_log("pagevault cannot work with this server");
    cluster.end()?;
    cluster.keep_quiet();
    Ok(())
}

/// One that pagevault replaces, as in a table of names.
const FUNCTION: &[u8] = b"\0mdextend\0";

/// Has a session insert rows one by one, until `end` has returned, which ends this server or
/// another. Returns those that were acknowledged.
fn while_writing(
    cluster: &Cluster,
    note: &str,
    end: impl FnOnce() -> Result<()>,
) -> Result<Vec<i64>> {
    let insert = format!("INSERT INTO t (note) VALUES ('{note}') RETURNING id");
    let mut client = cluster.client()?;
    let (enough, ended) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let writing = scope.spawn(|| {
            let mut acknowledged = Vec::new();
            while !ended.load(Relaxed)
                && let Ok(ids) = column(&mut client, &insert)
            {
                acknowledged.extend(ids.iter().filter_map(|id| id.parse::<i64>().ok()));
                enough.store(acknowledged.len() > 100, Relaxed);
            }
            enough.store(true, Relaxed);
            acknowledged
        });
        while !enough.load(Relaxed) {
            thread::sleep(Duration::from_millis(1));
        }
        let result = end();
        ended.store(true, Relaxed);
        let acknowledged = writing.join().map_err(|_| anyhow::anyhow!("the session panicked"))?;
        result.map(|()| acknowledged)
    })
}
