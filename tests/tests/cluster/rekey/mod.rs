//! Rekeying online: new data keys for relations in use, by jobs that survive failures.

mod asking;
mod attacks;
mod between;
mod building;
mod fairness;
mod faults;
mod forged;
mod hints;
mod locked;
mod meanwhile;
mod pace;
mod power;
mod requests;
mod standbys;
mod turns;
mod unseen;
mod waiting;
mod waking;
mod without_wal;
mod workers;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pagevault_tests::datafile::PageState;
use pagevault_tests::{Cluster, DataFile, Settings, StopMode};
use rustix::process::Pid;

/// A table with TOAST, two indexes and a sequence, some 3,000 pages.
const TABLE: &str = "SET pagevault.default_encryption = on;
    CREATE TABLE t (id serial PRIMARY KEY, name text, long text);
    ALTER TABLE t ALTER long SET STORAGE EXTERNAL;
    INSERT INTO t (name, long) SELECT md5(i::text), CASE WHEN i % 100 = 0 THEN repeat(md5(i::text), 200) END
      FROM generate_series(1, 100000) i;
    CREATE INDEX ON t (name)";

/// The relations that are rekeyed with `t`, including itself.
const FAMILY: &str = "SELECT string_agg(oid::regclass::text, ' ') FROM pg_class
     WHERE oid IN ('t'::regclass, (SELECT reltoastrelid FROM pg_class WHERE oid = 't'::regclass), 't_id_seq'::regclass)
        OR oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = 't'::regclass
                   OR indrelid = (SELECT reltoastrelid FROM pg_class WHERE oid = 't'::regclass))";

fn cluster(conf: &str) -> Result<Cluster> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default().conf(conf))?;
    cluster.sql(TABLE)?;
    cluster.sql("CHECKPOINT")?;
    Ok(cluster)
}

/// The relations with the versions of their pages on disk.
fn versions(cluster: &Cluster) -> Result<Vec<(String, Vec<u16>)>> {
    let mut all = Vec::new();
    for name in cluster.text(FAMILY)?.split(' ') {
        let mut found = Vec::new();
        for file in cluster.files(name)? {
            found.extend(versions_of(&file)?);
        }
        found.sort_unstable();
        found.dedup();
        all.push((name.to_owned(), found));
    }
    all.sort();
    Ok(all)
}

fn versions_of(file: &DataFile) -> Result<Vec<u16>> {
    file.states()?
        .into_iter()
        .filter_map(|state| match state {
            PageState::Zero => None,
            PageState::Sealed(version) => Some(Ok(version)),
            PageState::Plaintext => {
                Some(Err(anyhow::anyhow!("{} has a plain page", file.path.display())))
            }
        })
        .collect()
}

/// Fails unless every page of every file on disk has this key version, without a checkpoint.
fn assert_version(cluster: &Cluster, wanted: u16) -> Result<()> {
    let found = versions(cluster)?;
    ensure!(found.len() == 6, "not the family of t: {found:?}");
    ensure!(found.iter().all(|(_, versions)| *versions == [wanted]), "{found:?}");
    Ok(())
}

const SUM: &str =
    "SELECT count(*) || ' ' || sum(hashtext(name)) || ' ' || sum(length(long)) FROM t";
const STATE: &str = "SELECT state FROM pagevault.rekey_jobs ORDER BY job DESC LIMIT 1";

#[test]
fn every_page_gets_the_new_key() -> Result<()> {
    let cluster = cluster("pagevault.rekey_rate = 0")?;
    let before = cluster.text(SUM)?;
    assert_version(&cluster, 1)?;
    let job = cluster.text("SELECT pagevault.rotate_data_key('t')")?;
    ensure!(
        cluster.text(&format!("SELECT pagevault.wait_for_rekey({job}, '60s')"))? == "t",
        "too slow"
    );
    assert_version(&cluster, 2)?;
    let reported = cluster.text(
        "SELECT concat_ws(' ', relation, kind, state, percent, pages_done > 2000, requested_by, error,
            finished_at > started_at) FROM pagevault.rekey_jobs",
    )?;
    ensure!(reported == "t rotate done 100.0 t postgres t", "{reported}");
    // Old keys are kept for backups, but no page needs them.
    ensure!(cluster.text(SUM)? == before, "contents differ");
    cluster.crash()?;
    ensure!(cluster.text(SUM)? == before, "contents differ after a crash");
    ensure!(cluster.text("SELECT nextval('t_id_seq')")? != "1");
    cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
    cluster.sql("SELECT pagevault.wait_for_rekey('t'::regclass)")?;
    assert_version(&cluster, 3)?;
    cluster.finish()
}

#[test]
fn sessions_continue_during_a_job() -> Result<()> {
    let cluster = cluster("pagevault.rekey_rate = 0\nmax_connections = 50")?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| -> Result<()> {
        let writers: Vec<_> = (0..3)
            .map(|n| {
                let (cluster, stop) = (&cluster, &stop);
                scope.spawn(move || -> Result<i64> {
                    let mut client = cluster.client()?;
                    // A long wait for a lock would end the session with an error.
                    client.batch_execute("SET lock_timeout = '2s'")?;
                    let mut made = 0;
                    while !stop.load(Ordering::SeqCst) {
                        let id = made * 3 + n + 1;
                        client.execute("INSERT INTO t (name) VALUES ('new')", &[])?;
                        client
                            .execute("UPDATE t SET name = name WHERE id = $1", &[&(id as i32)])?;
                        client.query("SELECT * FROM t WHERE id = $1", &[&(id as i32)])?;
                        made += 1;
                    }
                    Ok(made)
                })
            })
            .collect();
        for _ in 0..3 {
            let job = cluster.text("SELECT pagevault.rotate_data_key('t')")?;
            let done = cluster.text(&format!("SELECT pagevault.wait_for_rekey({job}, '120s')"))?;
            ensure!(done == "t", "too slow");
        }
        stop.store(true, Ordering::SeqCst);
        let mut made = 0;
        for writer in writers {
            made += writer.join().map_err(|_| anyhow::anyhow!("panic"))??;
        }
        ensure!(made > 0, "nobody wrote: the test proves nothing");
        let rows: i64 = cluster.text("SELECT count(*) FROM t")?.parse()?;
        ensure!(rows == 100_000 + made, "{rows} rows, {made} were added");
        Ok(())
    })?;
    cluster.sql("CHECKPOINT")?;
    assert_version(&cluster, 4)?;
    cluster.finish()
}

#[test]
fn jobs_are_paused_resumed_and_cancelled() -> Result<()> {
    let cluster = cluster("pagevault.rekey_rate = 1MB")?;
    let before = cluster.text(SUM)?;
    let job = cluster.text("SELECT pagevault.rotate_data_key('t')")?;
    cluster.eventually("SELECT (pages_done > 100)::text FROM pagevault.rekey_jobs", "true")?;
    let shown =
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'pagevault: rotate job%pages'";
    ensure!(cluster.text(shown)? == "1", "pg_stat_activity does not show it");
    let reported = cluster.text(
        "SELECT concat_ws(' ', state, percent BETWEEN 1 AND 90, mb_per_second BETWEEN 0.5 AND 1.5,
            eta BETWEEN '3s' AND '5min') FROM pagevault.rekey_jobs",
    )?;
    ensure!(reported == "running t t t", "{reported}");

    cluster.sql(&format!("SELECT pagevault.pause_rekey({job})"))?;
    cluster.eventually(
        "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pagevault rekey'",
        "0",
    )?;
    ensure!(cluster.text(STATE)? == "paused");
    cluster.sql("CHECKPOINT")?;
    let mixed = versions(&cluster)?;
    ensure!(
        mixed.iter().any(|(_, versions)| *versions == [1, 2]),
        "nothing or everything was done: {mixed:?}"
    );
    ensure!(cluster.text(SUM)? == before, "a mixture is not readable");
    ensure!(cluster.text(&format!("SELECT pagevault.wait_for_rekey({job})"))? == "f");
    // Neither a restart nor a crash resumes it.
    cluster.crash()?;
    std::thread::sleep(Duration::from_secs(1));
    ensure!(cluster.text(STATE)? == "paused");

    cluster.sql(&format!("SELECT pagevault.resume_rekey({job})"))?;
    cluster.eventually(STATE, "running")?;
    cluster.sql(&format!("SELECT pagevault.cancel_rekey({job})"))?;
    ensure!(cluster.text(STATE)? == "cancelled");
    let error = cluster.error(&format!("SELECT pagevault.pause_rekey({job})"))?;
    ensure!(error.sqlstate == "55000" && error.message.contains("cancelled"), "{error}");
    // Another job finishes the work of the first; a changed setting reaches the running job.
    let job = cluster.text("SELECT pagevault.rotate_data_key('t')")?;
    cluster.eventually(STATE, "running")?;
    cluster.set(&[("pagevault.rekey_rate", "0")])?;
    ensure!(
        cluster.text(&format!("SELECT pagevault.wait_for_rekey({job}, '60s')"))? == "t",
        "too slow"
    );
    let found = versions(&cluster)?;
    ensure!(found.iter().all(|(_, versions)| versions.len() == 1), "{found:?}");
    ensure!(cluster.text(SUM)? == before, "contents differ");
    cluster.finish()
}

#[test]
fn jobs_outlive_crashes() -> Result<()> {
    let mut cluster = cluster("pagevault.rekey_rate = 8MB")?;
    cluster.allow_log("terminated by signal 9");
    let before = cluster.text(SUM)?;
    let job = cluster.text("SELECT pagevault.rotate_data_key('t')")?;
    const WORKER: &str =
        "SELECT coalesce(min(pid), 0) FROM pg_stat_activity WHERE backend_type = 'pagevault rekey'";
    for victim in ["worker", "server", "worker", "server"] {
        cluster
            .eventually("SELECT (state <> 'waiting')::text FROM pagevault.rekey_jobs", "true")?;
        std::thread::sleep(Duration::from_millis(300));
        match (victim, cluster.text(WORKER)?.as_str()) {
            ("worker", pid) if pid != "0" => {
                let pid = Pid::from_raw(pid.parse()?).context("a process")?;
                cluster.crash_process(pid)?;
            }
            _ => cluster.crash()?,
        }
        ensure!(cluster.text(SUM)? == before, "contents differ");
    }
    let done = cluster.text(&format!("SELECT pagevault.wait_for_rekey({job}, '120s')"))?;
    ensure!(done == "t", "it did not end");
    // A crash does not cause another key change, except between the creation of the key and the
    // record of it.
    let found = versions(&cluster)?;
    let again: Vec<_> = found.iter().filter(|(_, versions)| *versions != [2]).collect();
    ensure!(
        again.is_empty() || again.len() == 1 && again[0].1 == [3],
        "keys were changed once more: {found:?}"
    );
    ensure!(cluster.text(SUM)? == before, "contents differ");
    cluster.finish()
}

/// The contents, as soon as the server answers again.
fn after_recovery(cluster: &Cluster) -> Result<String> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match cluster.text(SUM) {
            Ok(text) => return Ok(text),
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// Changes of the table's relations during the job, and the remaining number of its 20,000 rows.
const CHANGES: [(&str, &str); 9] = [
    ("TRUNCATE t", "0"),
    ("DROP TABLE t CASCADE; CREATE TABLE t (id int)", "0"),
    ("VACUUM FULL t", "20000"),
    ("CLUSTER t USING t_pkey", "20000"),
    ("REINDEX TABLE t", "20000"),
    ("REINDEX TABLE CONCURRENTLY t", "20000"),
    ("ALTER TABLE t ALTER id TYPE bigint", "20000"),
    ("ALTER TABLE t SET UNLOGGED", "20000"),
    ("DELETE FROM t WHERE id > 1000; VACUUM t", "1000"),
];

#[test]
fn the_relation_may_change_meanwhile() -> Result<()> {
    let (cluster, _keys) =
        Cluster::with_keys(&Settings::default().conf("pagevault.rekey_rate = 1MB"))?;
    for (change, rows) in CHANGES {
        cluster.sql(
            "SET pagevault.default_encryption = on;
            CREATE TABLE t (id serial PRIMARY KEY, name text);
            INSERT INTO t (name) SELECT repeat(md5(i::text), 4) FROM generate_series(1, 20000) i",
        )?;
        cluster.sql("CHECKPOINT")?;
        let job = cluster.text("SELECT pagevault.rotate_data_key('t')")?;
        cluster.eventually(
            &format!("SELECT (pages_done > 64)::text FROM pagevault.rekey_jobs WHERE job = {job}"),
            "true",
        )?;
        let mut client = cluster.client()?;
        client.batch_execute("SET pagevault.default_encryption = on")?;
        // Then the job may already have ended: replaced files need no work.
        let state = format!("SELECT state FROM pagevault.rekey_jobs WHERE job = {job}");
        ensure!(cluster.text(&state)? == "running", "{change}: it was over too early to tell");
        for statement in change.split(';') {
            client.batch_execute(statement)?;
        }
        cluster.set(&[("pagevault.rekey_rate", "0")])?;
        let done = cluster.text(&format!("SELECT pagevault.wait_for_rekey({job}, '60s')"))?;
        ensure!(done == "t", "{change}: the job did not end");
        cluster.set(&[("pagevault.rekey_rate", "1MB")])?;
        ensure!(cluster.text("SELECT count(*) FROM t")? == rows, "{change}");
        cluster.sql("CHECKPOINT")?;
        for file in cluster.files("t")? {
            let versions = versions_of(&file)?;
            ensure!(versions.windows(2).all(|pair| pair[0] == pair[1]), "{change}: {versions:?}");
        }
        cluster.sql("DROP TABLE t CASCADE")?;
    }
    cluster.finish()
}

#[test]
fn a_page_that_does_not_open_ends_the_job() -> Result<()> {
    let mut cluster = cluster("pagevault.rekey_rate = 0")?;
    let before = cluster.text(SUM)?;
    cluster.allow_log("invalid page");
    cluster.allow_log("page verification failed");
    cluster.allow_log("has failed");
    let files = cluster.files("t")?;
    let Some(file) = files.first() else { bail!("no file") };
    cluster.stop(StopMode::Fast)?;
    let intact = file.read_page(70)?;
    file.flip_bit(70, 5000, 3)?;
    cluster.start_server()?;
    let job = cluster.text("SELECT pagevault.rotate_data_key('t')")?;
    let error = cluster.error(&format!("SELECT pagevault.wait_for_rekey({job}, '60s')"))?;
    ensure!(error.message.contains("has failed"), "{error}");
    ensure!(error.detail.contains("block 70"), "{error}");
    // After a repair the job continues and ends.
    cluster.stop(StopMode::Fast)?;
    file.write_page(70, &intact)?;
    cluster.start_server()?;
    cluster.sql(&format!("SELECT pagevault.resume_rekey({job})"))?;
    ensure!(cluster.text(&format!("SELECT pagevault.wait_for_rekey({job}, '60s')"))? == "t");
    ensure!(cluster.text(SUM)? == before, "contents differ");
    assert_version(&cluster, 2)?;
    cluster.finish()
}
