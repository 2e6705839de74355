//! Temporary tables that are larger than their buffers, in several sessions that also read a shared
//! table. This runs with each I/O method of PostgreSQL 18, where a session may complete the reads
//! of another one.

use std::thread::{JoinHandle, spawn};

use anyhow::{Result, anyhow, bail, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::{Cluster, Installation, Settings};
use postgres::Client;

/// A shared table of some 440 pages.
const SHARED: &str = "
    CREATE TABLE shared AS SELECT i, repeat(md5(i::text), 12) AS t FROM generate_series(1, 8000) i";
const OF_SHARED: &str = "SELECT count(*) || ' ' || sum(i) || ' ' || max(t) FROM shared";

/// A temporary table of some 270 pages, with 100 local buffers.
const OWN: &str = "
    SET temp_buffers = '800kB';
    CREATE TEMPORARY TABLE own AS SELECT i, repeat(md5(i::text), 12) AS t FROM generate_series(1, 5000) i";
const OF_OWN: &str = "
    SELECT count(*) FROM own WHERE t = repeat(md5(i::text), 12)";

fn settings(io_method: Option<&str>) -> Settings {
    let settings = Settings::default()
        .conf("max_connections = 20")
        .conf("synchronize_seqscans = off")
        .conf("max_parallel_workers_per_gather = 0");
    match io_method {
        Some(method) => settings.conf(&format!("io_method = {method}")),
        None => settings,
    }
}

/// The I/O methods of this server and kernel; `None` if there is no choice.
fn io_methods() -> Result<Vec<Option<&'static str>>> {
    if Installation::get()?.major < 18 {
        return Ok(vec![None]);
    }
    let mut methods = vec![Some("sync"), Some("worker")];
    methods.extend(has_io_uring()?.then_some(Some("io_uring")));
    Ok(methods)
}

/// Not every build supports it and not every kernel permits it; a stock server shows whether it
/// works.
fn has_io_uring() -> Result<bool> {
    if Installation::get()?.major < 18 {
        eprintln!("skipped: io_method is new in PostgreSQL 18");
        return Ok(false);
    }
    let plain = Cluster::create(&settings(Some("io_uring")).without_preload())?;
    if plain.start_server().is_err() {
        eprintln!("skipped: this server or this kernel has no io_uring");
        return Ok(false);
    }
    plain.finish()?;
    Ok(true)
}

#[test]
fn sessions_keep_their_temporary_tables() -> Result<()> {
    for method in io_methods()? {
        let (cluster, _keys) = Cluster::with_keys(&settings(method).conf("shared_buffers = 2MB"))?;
        cluster.sql(SHARED)?;
        let expected = cluster.text(OF_SHARED)?;
        let sessions: Vec<JoinHandle<Result<()>>> = (0..3)
            .map(|_| -> Result<_> {
                let mut client = cluster.client()?;
                let expected = expected.clone();
                Ok(spawn(move || use_both(&mut client, &expected)))
            })
            .collect::<Result<_>>()?;
        for session in sessions {
            session.join().map_err(|_| anyhow!("a session's thread panicked"))??;
        }
        cluster.finish()?;
    }
    Ok(())
}

fn use_both(client: &mut Client, of_shared: &str) -> Result<()> {
    run_sql(client, OWN)?;
    for round in 0..2 {
        // The blocks of the two tables alternate.
        let joined = text(client, "SELECT count(*) FROM shared JOIN own USING (i, t)")?;
        ensure!(joined == "5000", "round {round}: {joined} rows are in both");
        run_sql(client, "UPDATE own SET t = t WHERE i % 3 = 0; ANALYZE own")?;
        let found = text(client, OF_OWN)?;
        ensure!(found == "5000", "round {round}: {found} rows are right");
        let found = text(client, OF_SHARED)?;
        ensure!(found == of_shared, "round {round}: {found}");
    }
    Ok(())
}

/// The numbers of started and uncompleted reads of a session, of temporary and of shared tables.
fn under_way(watcher: &mut Client, backend: &str) -> Result<(u32, u32)> {
    let mut count = |local: bool| -> Result<u32> {
        let count = text(
            watcher,
            &format!(
                "SELECT count(*) FROM pg_aios
                 WHERE pid = {backend} AND state = 'SUBMITTED' AND f_localmem = {local}"
            ),
        )?;
        Ok(count.parse()?)
    };
    Ok((count(true)?, count(false)?))
}

/// A session with uncompleted reads of both tables, in a transaction with the cursors `theirs` and
/// `mine`. `shared` is not in buffers yet.
fn reads_ahead(cluster: &Cluster, watcher: &mut Client, shared: &str) -> Result<(Client, String)> {
    let mut client = cluster.client()?;
    run_sql(&mut client, OWN)?;
    run_sql(
        &mut client,
        &format!(
            "BEGIN;
             DECLARE theirs CURSOR FOR SELECT i FROM {shared};
             MOVE 1000 FROM theirs;
             SAVEPOINT before;
             DECLARE mine CURSOR FOR SELECT i FROM own WHERE t = repeat(md5(i::text), 12);
             MOVE 1000 FROM mine"
        ),
    )?;
    let backend = text(&mut client, "SELECT pg_backend_pid()")?;
    // A wait for a read of one table completes those of the other too, so proceed in small steps.
    for _ in 0..150 {
        for cursor in ["theirs", "mine"] {
            let (local, shared) = under_way(watcher, &backend)?;
            if local > 0 && shared > 0 {
                return Ok((client, backend));
            }
            run_sql(&mut client, &format!("MOVE 20 FROM {cursor}"))?;
        }
    }
    bail!("the session never reads ahead in both tables")
}

/// With io_uring, a process that waits for one read of a session completes all finished reads of
/// that session. It has no access to the buffers and the state of temporary tables.
#[test]
fn other_processes_complete_reads_of_temporary_tables() -> Result<()> {
    if !has_io_uring()? {
        return Ok(());
    }
    for with_key in [true, false] {
        let settings = settings(Some("io_uring"));
        let cluster = match with_key {
            true => Cluster::with_keys(&settings)?.0,
            false => Cluster::start(&settings)?,
        };
        cluster.sql(SHARED)?;
        cluster.sql("CREATE TABLE second AS TABLE shared; CREATE TABLE third AS TABLE shared")?;
        cluster.restart()?;
        let mut watcher = cluster.client()?;
        let mut read = |table: &str, owner: Option<&str>| -> Result<()> {
            let found = cluster.text(&format!("SELECT count(*) FROM {table}"))?;
            ensure!(found == "8000", "another session reads {found} rows of {table}");
            let left = owner.map(|owner| under_way(&mut watcher, owner)).transpose()?;
            ensure!(left.is_none_or(|left| left == (0, 0)), "nobody has completed the reads");
            Ok(())
        };

        let mut client = cluster.client()?;
        let (mut owner, backend) = reads_ahead(&cluster, &mut client, "shared")?;
        read("shared", Some(&backend))?;
        run_sql(&mut owner, "MOVE ALL FROM mine")?;
        let found = text(&mut owner, OF_OWN)?;
        ensure!(found == "5000", "with a key is {with_key}: {found} rows are right");

        // The subtransaction that started them has ended.
        let (mut owner, backend) = reads_ahead(&cluster, &mut client, "second")?;
        run_sql(&mut owner, "ROLLBACK TO before")?;
        read("second", Some(&backend))?;
        let found = text(&mut owner, OF_OWN)?;
        ensure!(found == "5000", "after a rollback: {found} rows are right");

        // The session ends.
        let (owner, _) = reads_ahead(&cluster, &mut client, "third")?;
        drop(owner);
        read("third", None)?;
        cluster.finish()?;
    }
    Ok(())
}
