//! Keys of files that are gone are forgotten, on each server when it needs them no more, and
//! nothing else is.

mod copies;
mod lagging;
mod places;
mod receivers;
mod versions;
mod waiting;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagevault_keystore::anchor::parse_lsn;
use pagevault_keystore::state::State;
use pagevault_keystore::storage::FileStorage;
use pagevault_keystore::{Lsn, Record, Scope, log};
use pagevault_tests::backup::Backup;
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::installation::run;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, KeyFile, Settings, StopMode};

use crate::{assert_plain, assert_sealed};

const SUM: &str = "SELECT count(*) || ' ' || coalesce(sum(hashtext(t::text)::bigint), 0) FROM t";

/// Times in which the worker has looked at least twice.
pub(crate) const TWO_ROUNDS: Duration = Duration::from_secs(4);

fn settings() -> Settings {
    Settings::default()
        .conf("fsync = on") // else checkpoints settle nothing
        .conf("checkpoint_timeout = 1h")
        .conf("autovacuum = off")
        .conf("wal_keep_size = 512MB")
        .conf("pagevault.keep_former_keys = 0")
        .conf("pagevault.keep_former_wal_keys = 0")
}

/// A cluster with the encrypted table `t`.
fn cluster() -> Result<(Cluster, KeyFile)> {
    let (cluster, keys) = Cluster::with_keys(&settings())?;
    cluster.sql(
        "CREATE TABLE t (id int PRIMARY KEY, name text);
         SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted';
         INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 3000) i",
    )?;
    Ok((cluster, keys))
}

/// The scope of the database `postgres`, the first that has a key file.
fn scope(cluster: &Cluster) -> Result<Scope> {
    Ok(Scope::database(
        cluster.text("SELECT oid FROM pg_database WHERE datname = 'postgres'")?.parse()?,
    ))
}

/// What the key file of a database says.
fn state_of(cluster: &Cluster, scope: Scope) -> Result<State> {
    let path = cluster.data_directory().join("pagevault").join(log::file_name(scope));
    Ok(State::from_records(log::replay(&fs::read(path)?, scope)?.records)?)
}

fn state(cluster: &Cluster) -> Result<State> {
    state_of(cluster, scope(cluster)?)
}

/// Numbers of the files of `postgres` with keys.
fn with_keys(cluster: &Cluster) -> Result<BTreeSet<u32>> {
    Ok(state(cluster)?.files().map(|(file, _)| file.relation).collect())
}

/// Those of them that exist.
fn in_use(cluster: &Cluster) -> Result<BTreeSet<u32>> {
    let database = scope(cluster)?.to_string();
    let data = cluster.data_directory();
    let mut places = vec![data.join("base").join(&database)];
    for link in fs::read_dir(data.join("pg_tblspc"))? {
        let directories = fs::read_dir(link?.path())?;
        places.extend(directories.filter_map(|entry| Some(entry.ok()?.path().join(&database))));
    }
    let mut numbers = with_keys(cluster)?;
    numbers.retain(|number| places.iter().any(|place| place.join(number.to_string()).exists()));
    Ok(numbers)
}

/// Waits until the key file has keys of these files only, and memory as many keys as key files.
fn forgets_all_but(cluster: &Cluster, left: &BTreeSet<u32>) -> Result<()> {
    cluster.eventually_that("former keys are forgotten", || {
        cluster.sql("CHECKPOINT")?;
        let found = with_keys(cluster)?;
        ensure!(found == *left, "keys of {found:?}, not {left:?}");
        Ok(())
    })?;
    cluster.eventually_that("the directory has as many keys", || {
        let found: usize = cluster.text("SELECT data_keys FROM pagevault.status")?.parse()?;
        let mut keys = 0;
        for scope in log::scopes(&FileStorage::new(&cluster.data_directory().join("pagevault"))?)? {
            let state = state_of(cluster, scope)?;
            keys += state.files().map(|(_, entry)| entry.keys.len()).sum::<usize>();
        }
        ensure!(found == keys, "{found} keys, not {keys}");
        Ok(())
    })
}

/// Waits until a standby has forgotten something. Its restart points are checkpoints of its
/// primary.
fn forgets_when_its_primary_has_checkpoints(
    standby: &Cluster,
    primary: &Cluster,
    has_forgotten: impl Fn() -> Result<()>,
) -> Result<()> {
    standby.eventually_that("a standby forgets", || {
        primary.sql("CHECKPOINT")?;
        wait_for(standby, primary)?;
        standby.sql("CHECKPOINT")?;
        has_forgotten()
    })
}

/// Waits until keys of files that do not exist are forgotten.
fn forgets(cluster: &Cluster) -> Result<()> {
    cluster.sql("CHECKPOINT")?; // removes files that were dropped before
    forgets_all_but(cluster, &in_use(cluster)?)
}

#[test]
fn keys_of_files_that_are_gone_are_forgotten() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let sum = cluster.text(SUM)?;
    let mut old = Vec::new();
    for round in 0..5 {
        cluster.sql("CREATE TABLE other AS SELECT * FROM t")?;
        cluster.sql("SECURITY LABEL FOR pagevault ON TABLE other IS 'encrypted'")?;
        cluster.sql("VACUUM FULL t")?;
        let state = state(&cluster)?;
        old.extend(state.files().flat_map(|(file, entry)| {
            entry.keys.values().map(move |key| (file.relation, key.wrapped.clone()))
        }));
        cluster.sql(if round % 2 == 0 {
            "DROP TABLE other"
        } else {
            "TRUNCATE other; DROP TABLE other"
        })?;
    }
    forgets(&cluster)?;
    let left = with_keys(&cluster)?;
    let name = log::file_name(scope(&cluster)?);
    let file = fs::read(cluster.data_directory().join("pagevault").join(name))?;
    for (number, key) in old.iter().filter(|(number, _)| !left.contains(number)) {
        ensure!(!pagevault_tests::datafile::holds(&file, key), "a key of file {number} is there");
    }
    // Recorded as few ranges, which contain each of them, and none in use.
    let former = state(&cluster)?.former_files().clone();
    let database = scope(&cluster)?.number();
    ensure!(former.ranges().count() <= left.len() + 1, "{former:?}");
    ensure!(old.iter().all(|(n, _)| left.contains(n) != former.find(database, *n).is_some()));
    // Crash recovery, and a clean start.
    for kills in [true, false] {
        cluster.sql("UPDATE t SET name = name")?;
        if kills {
            cluster.kill()?;
            cluster.start_server()?;
        } else {
            cluster.restart()?;
        }
        ensure!(cluster.text(SUM)? == sum, "rows changed");
    }
    cluster.sql("CHECKPOINT")?;
    assert_sealed(&cluster.family_files("t")?)?;
    ensure!(cluster.log().contains("data keys of"), "the log says nothing");
    Ok(())
}

/// Kills the server when the worker that forgets has come to this point, and starts it again.
fn killed_at(cluster: &Cluster, point: &str) -> Result<()> {
    cluster.stop_at(point)?;
    // A checkpoint waits for the lock that the stopped worker holds.
    let mut client = cluster.client()?;
    let session = thread::spawn(move || {
        while run_sql(&mut client, "CHECKPOINT").is_ok() {
            thread::sleep(Duration::from_millis(100));
        }
    });
    cluster.stopped_at(point)?;
    cluster.kill()?;
    cluster.resume();
    let _ = session.join();
    cluster.start_server().with_context(|| point.to_owned())
}

/// The server is killed at each step, and forgets all the same.
#[test]
fn a_crash_while_keys_are_forgotten_loses_nothing() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let sum = cluster.text(SUM)?;
    let points =
        ["keys.in_file", "keys.in_wal", "forget.decided", "keys.compaction", "forget.compacted"];
    for point in points {
        cluster.sql("VACUUM FULL t")?;
        killed_at(&cluster, point)?;
        ensure!(cluster.text(SUM)? == sum, "rows changed after a crash at {point}");
        forgets(&cluster).with_context(|| point.to_owned())?;
    }
    Ok(())
}

/// A file number that is used again gets a version that was never used, though nothing else is
/// known of its first file.
#[test]
fn versions_of_a_forgotten_file_are_not_used_again() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE TABLE first AS SELECT 1 AS id")?;
    let number: u32 = cluster.text("SELECT pg_relation_filenode('first')")?.parse()?;
    cluster.sql(
        "SECURITY LABEL FOR pagevault ON TABLE first IS 'encrypted';
         SELECT pagevault.rotate_data_key('first')",
    )?;
    cluster.sql("SELECT pagevault.wait_for_rekey('first')")?;
    let entry = |cluster: &Cluster, number: u32| -> Result<Option<u16>> {
        let state = state(cluster)?;
        let entry = state.files().find(|(file, _)| file.relation == number);
        Ok(entry.and_then(|(_, entry)| Some(entry.last_version()?.get())))
    };
    let used = entry(&cluster, number)?.context("no key")?;
    cluster.sql("DROP TABLE first")?;
    forgets(&cluster)?;
    cluster.stop(StopMode::Fast)?;
    // The next OIDs and file numbers are those from shortly before.
    let next = (number - 20).to_string();
    let reset = cluster
        .installation()
        .command("pg_resetwal")
        .arg("--next-oid")
        .arg(next)
        .arg(cluster.data_directory())
        .output()?;
    ensure!(reset.status.success(), "{}", String::from_utf8_lossy(&reset.stderr));
    cluster.without_witness("pg_resetwal removes WAL");
    cluster.start_server()?;
    cluster.sql(
        "CREATE TABLE again AS SELECT 2 AS id;
         SECURITY LABEL FOR pagevault ON TABLE again IS 'encrypted'",
    )?;
    // Each takes one number.
    let mut again = None;
    for _ in 0..40 {
        again = entry(&cluster, number)?;
        if again.is_some() {
            break;
        }
        cluster.sql("TRUNCATE again; INSERT INTO again VALUES (2)")?;
    }
    let again = again.context("the number was not used again")?;
    ensure!(again == used + 1, "version {again} follows {used}");
    cluster.restart()?;
    ensure!(cluster.text("SELECT id FROM again")? == "2");
    Ok(())
}

/// What is forgotten is in WAL only as a range; no server tells others what it has forgotten.
#[test]
fn forgotten_keys_are_recorded_locally() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("VACUUM FULL t")?;
    forgets(&cluster)?;
    let records = state(&cluster)?.records(scope(&cluster)?);
    ensure!(records.iter().any(|record| matches!(record, Record::KeysForgotten { .. })));
    ensure!(state(&cluster)?.forgotten() > Lsn::INVALID);
    // A setting keeps them for ever.
    cluster.set(&[("pagevault.keep_former_keys", "-1")])?;
    cluster.sql("VACUUM FULL t")?;
    cluster.sql("CHECKPOINT")?;
    let kept = with_keys(&cluster)?;
    cluster.set(&[("pagevault.keep_former_keys", "1d")])?;
    cluster.sql("VACUUM FULL t")?;
    cluster.sql("CHECKPOINT")?;
    ensure!(with_keys(&cluster)?.is_superset(&kept));
    cluster.set(&[("pagevault.keep_former_keys", "0")])?;
    forgets(&cluster)
}
