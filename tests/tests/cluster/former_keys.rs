//! Keys of files that are gone are forgotten, on each server when it needs them no more, and
//! nothing else is.

use std::collections::BTreeSet;
use std::fs;
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
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, KeyFile, Settings, StopMode};

use crate::{assert_plain, assert_sealed};

const SUM: &str = "SELECT count(*) || ' ' || coalesce(sum(hashtext(t::text)::bigint), 0) FROM t";

/// Times in which the worker has looked at least twice.
const TWO_ROUNDS: Duration = Duration::from_secs(4);

fn settings() -> Settings {
    Settings::default()
        .conf("fsync = on") // else checkpoints settle nothing
        .conf("checkpoint_timeout = 1h")
        .conf("autovacuum = off")
        .conf("wal_keep_size = 512MB")
        .conf("pagevault.keep_former_keys = 0")
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

/// The server is killed at each step, and forgets all the same.
#[test]
fn a_crash_while_keys_are_forgotten_loses_nothing() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let sum = cluster.text(SUM)?;
    let points =
        ["keys.in_file", "keys.in_wal", "forget.decided", "keys.compaction", "forget.compacted"];
    for point in points {
        cluster.sql("VACUUM FULL t")?;
        cluster.stop_at(point)?;
        // A checkpoint waits for the lock that the stopped worker holds.
        let checkpoints = cluster.client()?;
        let session = thread::spawn(move || {
            let mut client = checkpoints;
            while run_sql(&mut client, "CHECKPOINT").is_ok() {
                thread::sleep(Duration::from_millis(100));
            }
        });
        cluster.stopped_at(point)?;
        cluster.kill()?;
        cluster.resume();
        let _ = session.join();
        cluster.start_server().with_context(|| point.to_owned())?;
        ensure!(cluster.text(SUM)? == sum, "rows changed after a crash at {point}");
        forgets(&cluster).with_context(|| point.to_owned())?;
    }
    Ok(())
}

/// A standby keeps keys until it does not replay from before any more: not before its own restart
/// point.
#[test]
fn a_standby_forgets_after_its_own_restart_point() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let mut standby = standby_of(&cluster, &[])?;
    standby.allow_log("could not");
    let before = with_keys(&cluster)?;
    cluster.sql("VACUUM FULL t")?;
    forgets(&cluster)?;
    let left = with_keys(&cluster)?;
    wait_for(&standby, &cluster)?;
    // It has the record, and the keys. It starts again from before the files were gone.
    for _ in 0..2 {
        ensure!(with_keys(&standby)?.is_superset(&before), "keys are gone too early");
        standby.kill()?;
        standby.start_server()?;
        wait_for(&standby, &cluster)?;
    }
    ensure!(state(&standby)?.former_files().ranges().count() > 0, "nothing is recorded");
    forgets_all_but(&standby, &left)?;
    standby.kill()?;
    standby.start_server()?;
    wait_for(&standby, &cluster)?;
    let sum = cluster.text(SUM)?;
    ensure!(standby.text(SUM)? == sum, "rows of the standby differ");
    standby.promote()?;
    standby.sql("UPDATE t SET name = name")?;
    standby.sql("VACUUM FULL t")?;
    ensure!(standby.text(SUM)? == sum, "rows changed");
    forgets(&standby)
}

/// The key file is copied after keys were forgotten that WAL of the backup needs: a restore says
/// so, and changes nothing.
#[test]
fn a_backup_that_took_longer_is_refused() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE TABLE early AS SELECT * FROM t")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE early IS 'encrypted'")?;
    let backup = Backup::begin_with_files(&cluster)?;
    cluster.sql("UPDATE early SET name = name; DROP TABLE early")?;
    forgets(&cluster)?;
    let mut restored = backup.end()?;
    restored.allow_log("is of a later time than the WAL to be replayed");
    for _ in 0..2 {
        ensure!(restored.start_server().is_err(), "the restore has started");
        ensure!(restored.log().contains("is of a later time than the WAL to be replayed"));
    }
    cluster.expect_verified(&restored.data_directory(), 2, &["pagevault: of a later time"])?;
    // One that began afterwards is good.
    let backup = Backup::begin_with_files(&cluster)?;
    cluster.sql("UPDATE t SET name = name")?;
    let restored = backup.end()?;
    restored.start_server()?;
    restored.sql(SUM)?;
    ensure!(restored.text(SUM)? == cluster.text(SUM)?, "rows differ");
    Ok(())
}

/// While a WAL sender copies the data directory, nothing is forgotten.
#[test]
fn a_base_backup_is_waited_for() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE TABLE early AS SELECT * FROM t")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE early IS 'encrypted'; CHECKPOINT")?;
    let installation = cluster.installation();
    // Nobody reads what it writes.
    let mut program: Command = installation.command("pg_basebackup");
    program.args(["--pgdata=-", "--format=tar", "--wal-method=none", "--checkpoint=fast"]);
    program.arg("--no-manifest").arg("--host").arg(cluster.directory());
    program.args(["--username=postgres"]).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut program = program.spawn()?;
    cluster.eventually_that("a base backup has begun", || {
        let found = cluster.text(
            "SELECT count(*) FROM pg_stat_progress_basebackup WHERE phase LIKE 'streaming%'",
        )?;
        ensure!(found == "1", "{found}");
        Ok(())
    })?;
    cluster.sql("DROP TABLE early; CHECKPOINT")?;
    let before = with_keys(&cluster)?;
    thread::sleep(TWO_ROUNDS);
    ensure!(with_keys(&cluster)? == before, "keys were forgotten");
    program.kill()?;
    program.wait()?;
    forgets(&cluster)
}

/// Files that do not exist yet, because they are being copied, are not gone.
#[test]
fn keys_of_files_being_copied_are_kept() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let sum = cluster.text(SUM)?;
    cluster.sql("CREATE DATABASE model TEMPLATE postgres")?;
    cluster.stop_at("database.keys_copied")?;
    let mut creator = cluster.client()?;
    let creator = thread::spawn(move || {
        run_sql(&mut creator, "CREATE DATABASE made TEMPLATE model STRATEGY file_copy")
    });
    cluster.stopped_at("database.keys_copied")?;
    cluster.sql("CHECKPOINT")?;
    thread::sleep(TWO_ROUNDS);
    cluster.sql("CHECKPOINT")?;
    thread::sleep(TWO_ROUNDS);
    cluster.resume();
    creator.join().map_err(|_| anyhow::anyhow!("the creator failed"))??;
    let mut made = cluster.client_to("made")?;
    ensure!(text(&mut made, SUM)? == sum, "rows of the copy differ");
    run_sql(&mut made, "UPDATE t SET name = name; CHECKPOINT")?;
    // They are gone from now on, not since they did not exist yet.
    let scope = cluster.text("SELECT oid FROM pg_database WHERE datname = 'made'")?.parse()?;
    let scope = Scope::database(scope);
    let end = cluster.text("SELECT pg_current_wal_lsn()")?;
    let end = parse_lsn(&end).context("an address")?;
    drop(made);
    cluster.sql("DROP DATABASE made")?;
    cluster.eventually_that("keys of a dropped database are forgotten", || {
        cluster.sql("CHECKPOINT")?;
        ensure!(state_of(&cluster, scope)?.files().next().is_none(), "there are keys");
        Ok(())
    })?;
    let former = state_of(&cluster, scope)?.former_files().clone();
    ensure!(former.ranges().all(|range| range.gone >= end), "{former:?} were gone before {end}");
    Ok(())
}

/// A tablespace that is not mounted looks as if all its files were gone.
#[test]
fn keys_of_files_in_a_missing_tablespace_are_kept() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let sum = cluster.text(SUM)?;
    let path = cluster.make_tablespace("far")?;
    cluster.sql("ALTER TABLE t SET TABLESPACE far")?;
    forgets(&cluster)?;
    let left = with_keys(&cluster)?;
    let away = path.with_extension("away");
    fs::rename(&path, &away)?;
    fs::create_dir(&path)?;
    cluster.sql("CREATE TABLE gone AS SELECT 1")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE gone IS 'encrypted'; DROP TABLE gone")?;
    ensure!(with_keys(&cluster)? != left, "nothing is to be forgotten");
    forgets_all_but(&cluster, &left)?;
    fs::remove_dir(&path)?;
    fs::rename(&away, &path)?;
    cluster.restart()?;
    ensure!(cluster.text(SUM)? == sum, "rows changed");
    Ok(())
}

/// Recovery makes the directory of such a tablespace, and files in it that it changes.
#[test]
fn keys_of_files_in_a_tablespace_that_recovery_has_made_are_kept() -> Result<()> {
    let (mut cluster, _keys) = cluster()?;
    let path = cluster.make_tablespace("far")?;
    cluster.sql("ALTER TABLE t SET TABLESPACE far")?;
    cluster.sql(
        "CREATE TABLE changed (id int) TABLESPACE far;
         SECURITY LABEL FOR pagevault ON TABLE changed IS 'encrypted'",
    )?;
    let sum = cluster.text(SUM)?;
    forgets(&cluster)?;
    let left = with_keys(&cluster)?;
    cluster.sql("INSERT INTO changed VALUES (1)")?;
    cluster.without_witness("recovery does not find a tablespace");
    cluster.kill()?;
    let away = path.with_extension("away");
    fs::rename(&path, &away)?;
    fs::create_dir(&path)?;
    cluster.installation().give(&path)?;
    // The second start finds a directory.
    for _ in 0..2 {
        cluster.start_server()?;
        cluster.sql("CREATE TABLE gone AS SELECT 1")?;
        cluster
            .sql("SECURITY LABEL FOR pagevault ON TABLE gone IS 'encrypted'; DROP TABLE gone")?;
        ensure!(with_keys(&cluster)? != left, "nothing is to be forgotten");
        forgets_all_but(&cluster, &left)?;
        cluster.stop(StopMode::Fast)?;
    }
    fs::rename(&path, path.with_extension("made"))?;
    fs::rename(&away, &path)?;
    cluster.start_server()?;
    ensure!(cluster.text(SUM)? == sum, "rows changed");
    // It is trusted again.
    cluster.sql("DROP TABLE changed")?;
    forgets(&cluster)?;
    cluster.allow_log("could not");
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

/// A standby that has not forgotten the key of a former file does not take another file with its
/// number for it.
#[test]
fn a_standby_with_a_key_of_a_former_file_knows_that_the_next_one_is_another() -> Result<()> {
    // A server in binary-upgrade mode must not have encrypted files.
    let settings = settings().conf("pagevault.data_catalog_encryption = off");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    let standby = standby_of(&cluster, &[])?;
    cluster.sql("CREATE TABLE first AS SELECT 1 AS id")?;
    let number: u32 = cluster.text("SELECT pg_relation_filenode('first')")?.parse()?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE first IS 'encrypted'")?;
    cluster.sql("DROP TABLE first")?;
    forgets(&cluster)?;
    wait_for(&standby, &cluster)?;
    ensure!(with_keys(&standby)?.contains(&number), "the standby has forgotten it");
    cluster.without_witness("OIDs are chosen");
    cluster.stop(StopMode::Fast)?;
    cluster.start_server_with(&["-b"])?;
    let mut client = cluster.client()?;
    const STAMP: &str = "pg_catalog.binary_upgrade_set_next_attribute_versions";
    if !text(&mut client, &format!("SELECT to_regproc('{STAMP}')"))?.is_empty() {
        run_sql(&mut client, &format!("SELECT {STAMP}('{{0/1}}')"))?;
    }
    let set = "SELECT pg_catalog.binary_upgrade_set_next";
    run_sql(
        &mut client,
        &format!(
            "{set}_pg_type_oid('70001'::oid); {set}_array_pg_type_oid('70002'::oid);
             {set}_heap_pg_class_oid('70003'::oid); {set}_heap_relfilenode('{number}'::oid);
             CREATE TABLE again (id int);
             INSERT INTO again SELECT i FROM generate_series(1, 1000) i"
        ),
    )?;
    drop(client);
    cluster.stop(StopMode::Fast)?;
    cluster.start_server()?;
    wait_for(&standby, &cluster)?;
    standby.sql("CHECKPOINT")?;
    assert_plain(&standby.files("again")?)?;
    ensure!(standby.text("SELECT sum(id) FROM again")? == "500500");
    standby.kill()?;
    standby.start_server()?;
    standby.sql("CHECKPOINT")?;
    ensure!(standby.text("SELECT sum(id) FROM again")? == "500500");
    assert_plain(&standby.files("again")?)
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
