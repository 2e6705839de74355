//! No process of the server leaves a key in memory that a core dump contains.
//!
//! All such memory is searched for each half of each key. That finds AES key schedules too, which
//! begin or end with the key itself.

mod keys;

use std::fs;
use std::io::ErrorKind;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use pagevault_tests::memory::{Found, Pieces, is_readable};
use pagevault_tests::process::processes_in;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, Settings};
use postgres::Client;
use rustix::process::{Pid, geteuid};

use crate::wal::sealing;

/// Little memory to search, and no background work with keys.
fn small() -> Settings {
    Settings::default()
        .conf("shared_buffers = 2MB")
        .conf("wal_buffers = 1MB")
        .conf("pagevault.max_data_keys = 10000")
        .conf("pagevault.revalidate_interval = 0")
}

fn number_of(cluster: &Cluster, kind: &str) -> Result<Pid> {
    let query = format!("SELECT pid FROM pg_stat_activity WHERE backend_type = '{kind}'");
    Pid::from_raw(cluster.text(&query)?.parse()?).context("a process")
}

/// Searches every process of the cluster for all its present and former keys.
fn look(cluster: &Cluster, pieces: &mut Pieces, when: &str) -> Result<()> {
    let processes = processes_in(&cluster.data_directory());
    if !is_readable(*processes.first().context("no process of the server")?)? {
        return Ok(());
    }
    keys::add_keys(cluster, pieces)?;
    let found = pieces.in_memory(&processes)?;
    let left: Vec<Found> = found.into_iter().filter(|found| found.dumped).collect();
    ensure!(
        left.is_empty(),
        "{when}, {} keys are where core dumps have them: {left:#?}",
        left.len()
    );
    Ok(())
}

/// Writes and reads sealed pages of permanent and temporary tables, and sorts with a temporary
/// file.
fn work(client: &mut Client) -> Result<()> {
    client.batch_execute(
        "INSERT INTO sealed SELECT i, repeat('x', 100) FROM generate_series(1, 20000) i;
         SELECT count(*) FROM sealed;
         DROP TABLE IF EXISTS passing;
         CREATE TEMPORARY TABLE passing AS SELECT * FROM sealed;
         SELECT count(*) FROM passing;
         SET work_mem = '64kB';
         SELECT count(*) FROM (SELECT id FROM sealed ORDER BY name, id DESC OFFSET 10) AS sorted",
    )?;
    Ok(())
}

fn with_tables() -> Result<Cluster> {
    let (cluster, _) = sealing(&small())?;
    cluster.sql(
        "CREATE TABLE sealed (id int, name text);
         CREATE INDEX ON sealed (id);
         SELECT pagevault.encrypt('sealed')",
    )?;
    Ok(cluster)
}

#[test]
fn no_key_is_left_in_memory() -> Result<()> {
    let cluster = with_tables()?;
    let pieces = &mut Pieces::default();
    look(&cluster, pieces, "after encrypt()")?;

    cluster.restart()?;
    let mut client = cluster.client()?;
    work(&mut client)?;
    client.batch_execute("CHECKPOINT")?;
    look(&cluster, pieces, "after a start and a checkpoint")?;
    // Verify that the search finds something that is in memory.
    let checkpointer = number_of(&cluster, "checkpointer")?;
    if is_readable(checkpointer)? {
        let all = pieces.in_memory(&[checkpointer])?;
        for name in ["database key", "data key"] {
            ensure!(all.iter().any(|found| found.piece.starts_with(name)), "no {name}: {all:#?}");
        }
    }

    cluster.sql("SELECT pagevault.set_database_master_key('local', 'main')")?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    look(&cluster, pieces, "after a new database key")?;
    cluster.sql("SELECT pagevault.rotate_wal_key(), pagevault.rotate_database_master_key()")?;
    work(&mut client)?;
    look(&cluster, pieces, "after a new WAL key")?;
    cluster.sql("SELECT pagevault.rotate_data_key('sealed')")?;
    client.batch_execute("CHECKPOINT")?;
    look(&cluster, pieces, "after a new data key")?;
    drop(client);

    cluster.crash()?;
    look(&cluster, pieces, "after recovery")?;
    cluster.finish()
}

/// The worker is stopped between two steps, with the new key in use.
#[test]
fn a_stopped_rekey_worker_has_no_key_in_dumped_memory() -> Result<()> {
    let cluster = with_tables()?;
    work(&mut cluster.client()?)?;
    let pieces = &mut Pieces::default();
    for point in ["rekey.switched", "rekey.page_done", "rekey.flushed"] {
        cluster.stop_at(point)?;
        let mut client = cluster.client()?;
        client.batch_execute("SELECT pagevault.rotate_data_key('sealed')")?;
        cluster.stopped_at(point)?;
        look(&cluster, pieces, point)?;
        cluster.resume();
        client.batch_execute("SELECT pagevault.wait_for_rekey('sealed'::regclass)")?;
    }
    cluster.finish()
}

#[test]
fn a_standby_that_replays_leaves_no_key() -> Result<()> {
    let primary = with_tables()?;
    let standby = standby_of(&primary, &[])?;
    let pieces = &mut Pieces::default();
    work(&mut primary.client()?)?;
    primary.sql("SELECT pagevault.rotate_data_key('sealed')")?;
    primary.sql("SELECT pagevault.rotate_database_key(), pagevault.rotate_wal_key()")?;
    work(&mut primary.client()?)?;
    wait_for(&standby, &primary)?;
    standby.sql("CHECKPOINT; SELECT count(*) FROM sealed")?;
    look(&standby, pieces, "after replay")?;
    standby.finish()?;
    primary.finish()
}

/// A core dump of a live process, by gcore if it is installed and the tests run as root.
fn gcore(cluster: &Cluster, pid: Pid) -> Result<Option<Vec<u8>>> {
    if !geteuid().is_root() {
        return Ok(None);
    }
    let prefix = cluster.directory().join("gcore");
    let number = pid.as_raw_nonzero().to_string();
    match Command::new("gcore").arg("-o").arg(&prefix).arg(&number).output() {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        output => {
            let output = output?;
            let response = String::from_utf8_lossy(&output.stderr).into_owned();
            let core = fs::read(prefix.with_extension(&number));
            core.map(Some).with_context(|| format!("gcore: {response}"))
        }
    }
}

/// A real core dump, which includes registers, if core dumps are possible here.
#[test]
fn a_core_dump_of_the_checkpointer_holds_no_key() -> Result<()> {
    let cluster = with_tables()?;
    cluster.restart()?;
    let mut client = cluster.client()?;
    work(&mut client)?;
    client.batch_execute("CHECKPOINT")?;
    let mut pieces = Pieces::default();
    keys::add_keys(&cluster, &mut pieces)?;
    let checkpointer = number_of(&cluster, "checkpointer")?;
    match gcore(&cluster, checkpointer)? {
        None => eprintln!("skipped: there is no gcore, or it is not for this user"),
        Some(core) => {
            ensure!(core.len() > 1 << 20, "a core dump of {} bytes", core.len());
            let found = pieces.search(&core);
            ensure!(found.is_empty(), "a core dump of {} bytes has keys: {found:?}", core.len());
        }
    }
    cluster.finish()
}
