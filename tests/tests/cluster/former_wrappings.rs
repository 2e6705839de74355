//! Wrappings of database keys that are not in force any more: later base backups do not have them,
//! so a master key that was replaced or dropped does not open these.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Stdio;
use std::thread;

use anyhow::{Context, Result, ensure};
use pagevault_keystore::{Record, Scope, log};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::datafile::holds;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, KeyFile, Settings};

const SUM: &str = "SELECT count(*) || ' ' || sum(hashtext(name)) FROM t";

/// A cluster whose only master key is `main` of provider `local`.
fn cluster(settings: &Settings) -> Result<(Cluster, KeyFile)> {
    let settings = settings.clone().conf("fsync = on").conf("autovacuum = off");
    let (cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.sql(
        "SET pagevault.default_encryption = on;
         CREATE TABLE t (id int PRIMARY KEY, name text);
         INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 1000) i",
    )?;
    Ok((cluster, keys))
}

/// Another provider.
fn provider(cluster: &Cluster, name: &str) -> Result<KeyFile> {
    let file = cluster.key_file(name, "main")?;
    cluster.sql(&file.add_provider(name))?;
    Ok(file)
}

/// All wrappings in the key file of a data directory, in force or not.
fn in_key_file(data: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let bytes = fs::read(data.join("pagevault").join(log::file_name(Scope::CLUSTER)))?;
    let mut found = Vec::new();
    for record in log::replay(&bytes, Scope::CLUSTER)?.records {
        let Record::DatabaseKey { key, .. } = record else { continue };
        for by in key.wrappings() {
            found.push((format!("{} {}", by.provider, by.master_version), by.wrapped.clone()));
        }
    }
    Ok(found)
}

fn master_keys(cluster: &Cluster) -> Result<BTreeSet<String>> {
    Ok(in_key_file(&cluster.data_directory())?.into_iter().map(|(by, _)| by).collect())
}

/// Whether the key file has wrappings by these only: provider and version of the master key.
fn expect(cluster: &Cluster, wanted: &[&str]) -> Result<()> {
    let found = master_keys(cluster)?;
    ensure!(found.iter().eq(wanted), "wrapped by {found:?}, not {wanted:?}");
    Ok(())
}

/// Whether a file below a directory has these bytes.
fn is_below(directory: &Path, bytes: &[u8]) -> Result<bool> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let kind = fs::symlink_metadata(&path)?.file_type();
        let found = if kind.is_dir() {
            is_below(&path, bytes)?
        } else {
            kind.is_file() && holds(&fs::read(&path)?, bytes)
        };
        if found {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Makes a base backup with its WAL, in which there is none of these wrappings, and starts it.
fn later_backup_has_none(cluster: &Cluster, former: &[(String, Vec<u8>)]) -> Result<()> {
    let backup = Cluster::from_files(|target| {
        cluster.base_backup_with(target, &["-X", "fetch"])?;
        for (by, wrapped) in former {
            ensure!(!is_below(target, wrapped)?, "a later backup has the wrapping by {by}");
        }
        Ok(())
    })?;
    backup.start_server()?;
    ensure!(backup.text(SUM)? == cluster.text(SUM)?, "rows differ");
    Ok(())
}

#[test]
fn later_backups_have_only_wrappings_in_force() -> Result<()> {
    let (cluster, _keys) = cluster(&Settings::default())?;
    let standby = standby_of(&cluster, &[])?;
    let _spare = provider(&cluster, "spare")?;
    let mut former = in_key_file(&cluster.data_directory())?;
    let mut change = |sql: &str, left: &[&str]| -> Result<()> {
        former.extend(in_key_file(&cluster.data_directory())?);
        cluster.sql(sql)?;
        expect(&cluster, left).with_context(|| sql.to_owned())?;
        let in_force = in_key_file(&cluster.data_directory())?;
        former.retain(|wrapping| !in_force.contains(wrapping));
        later_backup_has_none(&cluster, &former).with_context(|| sql.to_owned())?;
        wait_for(&standby, &cluster)?;
        expect(&standby, left).with_context(|| format!("standby: {sql}"))
    };
    change("SELECT pagevault.add_cluster_master_key('spare', 'main')", &["local 1", "spare 1"])?;
    change("SELECT pagevault.drop_cluster_master_key('spare', 'main')", &["local 1"])?;
    change("SELECT pagevault.rotate_cluster_master_key()", &["local 2"])?;
    change("SELECT pagevault.set_cluster_master_key('spare', 'main')", &["spare 1"])?;
    change("SELECT pagevault.rotate_database_key()", &["spare 1"])?;
    change("SELECT pagevault.rotate_cluster_master_key()", &["spare 2"])?;
    // WAL has the former ones; a start that replays it unlocks with what is in force.
    standby.kill()?;
    standby.start_server()?;
    wait_for(&standby, &cluster)?;
    expect(&standby, &["spare 2"])?;
    cluster.sql("SELECT pagevault.drop_provider('local')")?;
    for server in [&cluster, &standby] {
        server.kill()?;
        server.start_server()?;
    }
    wait_for(&standby, &cluster)?;
    ensure!(standby.text(SUM)? == cluster.text(SUM)?, "rows differ");
    expect(&cluster, &["spare 2"])
}

/// A crash after the new wrapping is recorded, and before the former one is removed.
#[test]
fn a_crash_before_they_are_removed_removes_them() -> Result<()> {
    let (cluster, _keys) = cluster(&Settings::default())?;
    let sum = cluster.text(SUM)?;
    cluster.stop_at("keys.compaction")?;
    let mut client = cluster.client()?;
    let session =
        thread::spawn(move || client.batch_execute("SELECT pagevault.rotate_cluster_master_key()"));
    cluster.stopped_at("keys.compaction")?;
    expect(&cluster, &["local 1", "local 2"])?;
    cluster.kill()?;
    cluster.resume();
    ensure!(session.join().is_ok_and(|ended| ended.is_err()), "it ended");
    cluster.start_server()?;
    expect(&cluster, &["local 2"])?;
    ensure!(cluster.text(SUM)? == sum, "rows changed");
    Ok(())
}

/// Statements after which a backup is in progress. The server's hook for functions that are
/// executed tells of the first only: PL/pgSQL keeps an expression, and the last is of another name.
const STARTS: [&str; 3] = [
    "SELECT pg_backup_start('a backup', true)",
    "DO $$ DECLARE at pg_lsn; BEGIN
        FOR i IN 1..2 LOOP
            at := pg_backup_start('a backup', true);
            IF i = 1 THEN PERFORM pg_backup_stop(); END IF;
        END LOOP;
    END $$",
    "SELECT start('a backup', true)",
];

/// Statements that do not end it, though they name the function that does.
const NO_ENDS: [&str; 4] = [
    "SELECT 1",
    "EXPLAIN SELECT * FROM pg_backup_stop()",
    "SELECT CASE WHEN pg_is_in_recovery() THEN (SELECT lsn FROM pg_backup_stop()) END",
    "BEGIN; DECLARE c CURSOR FOR SELECT * FROM pg_backup_stop(); COMMIT",
];

/// A program that has called `pg_backup_start()` copies as many bytes of the key file as it had
/// then. So these stay what they are until it has called `pg_backup_stop()`, or its session ends.
#[test]
fn a_backup_by_functions_delays_it() -> Result<()> {
    let (cluster, _keys) = cluster(&Settings::default())?;
    let databases = ["d1", "d2", "d3", "d4"];
    for name in databases {
        cluster.sql(&format!("CREATE DATABASE {name}"))?;
        let mut client = cluster.client_to(name)?;
        run_sql(
            &mut client,
            "CREATE EXTENSION pagevault; SELECT pagevault.set_database_master_key('local', 'main');
             SET pagevault.default_encryption = on; CREATE TABLE t AS SELECT 1 AS id",
        )?;
    }
    // A start after a crash leaves the least that the file can be.
    cluster.crash()?;
    let path = cluster.data_directory().join("pagevault").join(log::file_name(Scope::CLUSTER));
    let rotate = || -> Result<()> {
        for name in databases {
            let mut client = cluster.client_to(name)?;
            run_sql(&mut client, "SELECT pagevault.rotate_database_master_key()")?;
        }
        let longer = "k".repeat(60);
        let other = cluster.key_file(&format!("other{}", fs::metadata(&path)?.len()), &longer)?;
        let name = format!("other{}", fs::metadata(&path)?.len());
        cluster.sql(&other.add_provider(&name))?;
        cluster.sql(&format!("SELECT pagevault.set_cluster_master_key('{name}', '{longer}')"))
    };
    let in_force = || -> Result<()> {
        let bytes = fs::read(&path)?;
        let mut known = BTreeSet::new();
        for record in log::replay(&bytes, Scope::CLUSTER)?.records {
            let Record::DatabaseKey { scope, version, .. } = record else { continue };
            ensure!(known.insert((scope, version)), "two wrappings of the key of {scope:?}");
        }
        Ok(())
    };
    cluster.sql(
        "CREATE FUNCTION start(text, boolean) RETURNS pg_lsn
         LANGUAGE internal AS 'pg_backup_start'",
    )?;
    for (start, end) in STARTS.into_iter().zip(["SELECT pg_backup_stop()", "", ""]) {
        let mut session = cluster.client()?;
        run_sql(&mut session, start)?;
        let listed = fs::read(&path)?;
        for other in NO_ENDS {
            run_sql(&mut session, other)?;
            rotate()?;
            let bytes = fs::read(&path)?;
            ensure!(bytes.starts_with(&listed), "the file was rewritten: {start}: {other}");
        }
        match end {
            "" => drop(session),
            _ => run_sql(&mut session, end)?,
        }
        cluster.eventually_that("the former wrappings are removed", in_force)?;
    }
    // Without a backup they are removed at once.
    rotate()?;
    in_force()?;
    for name in databases {
        let mut client = cluster.client_to(name)?;
        ensure!(text(&mut client, "SELECT id FROM t")? == "1");
    }
    Ok(())
}

/// The worker waits for base backups.
#[test]
fn a_base_backup_in_progress_delays_it() -> Result<()> {
    let (cluster, _keys) = cluster(&Settings::default())?;
    // It waits for whoever reads its output.
    let mut backup = cluster.program("pg_basebackup");
    backup.args(["--checkpoint=fast", "--format=tar", "-X", "none", "--no-manifest", "-D", "-"]);
    let mut backup = backup.stdout(Stdio::piped()).spawn()?;
    cluster.eventually("SELECT count(*) FROM pg_stat_replication WHERE state = 'backup'", "1")?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    expect(&cluster, &["local 1", "local 2"])?;
    let mut all = Vec::new();
    backup.stdout.take().context("no output")?.read_to_end(&mut all)?;
    ensure!(backup.wait()?.success(), "the backup failed");
    cluster.eventually_that("the former wrapping is removed", || expect(&cluster, &["local 2"]))
}
