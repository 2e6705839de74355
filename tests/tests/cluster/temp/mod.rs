//! Temporary files contain no plaintext, and reading them back gives what was written. Each test
//! also runs with encryption off, where the files must show the canary; that verifies that the test
//! finds the right files in time.

mod decoding;
mod faults;
mod marks;
mod notify;
mod queries;
mod repacking;
mod switching;
mod tables;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::datafile::holds;
use pagevault_tests::{Cluster, Settings};
use postgres::Client;

/// Occurs in every row.
const CANARY: &str = "kanarienvogel-auf-zeit";

/// The advisory lock that [`SETUP`]'s `hold` waits for.
const LOCK: &str = "4711";

/// A table to sort and to hash, and a function that returns its argument after the lock is free.
const SETUP: &str = "
    CREATE FUNCTION hold(t text) RETURNS text LANGUAGE plpgsql PARALLEL RESTRICTED AS $$
    BEGIN
        PERFORM pg_advisory_lock_shared(4711);
        PERFORM pg_advisory_unlock_shared(4711);
        RETURN t;
    END $$;
    CREATE TABLE data (id int, t text);
    INSERT INTO data
        SELECT i, md5(i::text) || ' kanarienvogel-auf-zeit ' || i FROM generate_series(1, 8000) i;
    ANALYZE data;";

/// Settings of the sessions: little memory, and always the same plan.
const LITTLE_MEMORY: &str = "
    SET work_mem = '64kB'; SET hash_mem_multiplier = 1; SET max_parallel_workers_per_gather = 0;";

fn cluster(settings: &Settings) -> Result<Cluster> {
    let (cluster, _keys) = Cluster::with_keys(settings)?;
    cluster.sql(SETUP)?;
    Ok(cluster)
}

/// A temporary file and its contents.
struct Found {
    path: PathBuf,
    bytes: Vec<u8>,
    marked: bool,
}

/// Non-empty files below `directory`, while files are created and removed.
fn files_below(directory: &Path) -> Vec<Found> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        let Ok(metadata) = std::fs::metadata(&path) else { continue };
        if metadata.is_dir() {
            found.extend(files_below(&path));
        } else if let Ok(bytes) = std::fs::read(&path)
            && !bytes.is_empty()
        {
            let marked = metadata.permissions().mode() & 0o1000 != 0;
            found.push(Found { path, bytes, marked });
        }
    }
    found
}

/// Current files of sorts, hashes and so on.
fn spilled(cluster: &Cluster) -> Vec<Found> {
    files_below(&cluster.data_directory().join("base/pgsql_tmp"))
}

/// Fails unless there are files, and all are either sealed, without the canary, or plaintext with
/// the canary.
fn check(files: &[Found], sealed: bool) -> Result<()> {
    let total: usize = files.iter().map(|file| file.bytes.len()).sum();
    ensure!(total > 0, "there is no file");
    for file in files {
        ensure!(file.marked == sealed, "{}: sealed is {}", file.path.display(), file.marked);
    }
    let shown = files.iter().filter(|file| holds(&file.bytes, CANARY.as_bytes())).count();
    match sealed {
        true => ensure!(shown == 0, "{shown} of {} files show the canary", files.len()),
        false => ensure!(shown > 0, "{} plain files do not show the canary", files.len()),
    }
    Ok(())
}

/// Runs `query`, which calls `hold`, and calls `look` while it is held; returns its result.
fn held(
    cluster: &Cluster,
    client: &mut Client,
    query: &str,
    look: impl FnOnce() -> Result<()>,
) -> Result<String> {
    let mut lock = cluster.client()?;
    run_sql(&mut lock, &format!("SELECT pg_advisory_lock({LOCK})"))?;
    std::thread::scope(|scope| {
        let answer = scope.spawn(|| text(client, query));
        let looked = cluster
            .eventually("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory'", "1")
            .and_then(|()| look());
        run_sql(&mut lock, &format!("SELECT pg_advisory_unlock({LOCK})"))?;
        let answer = match answer.join() {
            Ok(answer) => answer?,
            Err(_) => anyhow::bail!("the thread of the query panicked"),
        };
        looked.map(|()| answer)
    })
}
