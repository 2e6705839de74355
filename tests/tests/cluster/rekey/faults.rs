//! SIGKILL at every step of rekeying, to the process at that step and to others, and power
//! failures. Jobs continue by themselves and end. Commands leave readable pages of both kinds, and
//! can be repeated.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::column;
use pagevault_tests::leaks::{Canary, Scanner, report};
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::witnesses::Witnesses;
use pagevault_tests::{Cluster, Settings};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use super::power::AtCheckpoint;
use super::{FAMILY, SUM, after_recovery};

/// The steps of a job before it rewrites pages.
const FIRST_HALF: [&str; 7] = [
    "rekey.claimed",
    "keys.in_file",
    "keys.in_wal",
    "rekey.switched",
    "rekey.barrier_passed",
    "rekey.page_done",
    "rekey.batch_done",
];

/// The remaining steps, until the job is recorded as done.
const SECOND_HALF: [&str; 6] = [
    "rekey.flushed",
    "rekey.synced",
    "rekey.proved",
    "keys.in_file",
    "rekey.rewritten",
    "rekey.ended",
];

/// Steps at which a base backup is taken.
const DURING: [&str; 2] = ["rekey.page_done", "rekey.proved"];

/// The process to kill.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Victim {
    /// The process at the step.
    Worker,
    /// The session that requested the job and waits for it.
    Requester,
    Checkpointer,
    /// The postmaster and all its processes.
    Server,
    /// Like [`Victim::Server`], and half of the sectors written since the last checkpoint are lost.
    Power,
}

/// The work of a job, and how it is requested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Work {
    Encrypt,
    Rotate,
    Decrypt,
}

impl Work {
    fn sql(self) -> &'static str {
        match self {
            Work::Encrypt => "SELECT pagevault.encrypt('t')",
            Work::Rotate => "SELECT pagevault.rotate_data_key('t')",
            Work::Decrypt => "SELECT pagevault.decrypt('t')",
        }
    }
}

fn canary() -> Canary {
    Canary::text("rekeying")
}

/// Some 400 pages: a table with TOAST, an index and a sequence, sealed unless the job is to encrypt
/// it. WAL contains none of its values.
fn cluster(work: Work) -> Result<Cluster> {
    let settings = Settings::default()
        .conf("pagevault.rekey_rate = 0")
        .conf("pagevault.rekey_threshold = 0")
        .conf("pagevault.rekey_workers = 1")
        .conf("wal_keep_size = 1GB");
    let (mut cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.allow_log("terminating connection because of crash of another server process");
    cluster.allow_log("terminated by signal 9");
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    // Catalogs are encrypted with the first table, within its command.
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE first (id int)")?;
    let wanted = if work == Work::Encrypt { "off" } else { "on" };
    let canary = canary();
    cluster.sql(&format!(
        "SET pagevault.default_encryption = {wanted};
         CREATE TABLE t (id serial PRIMARY KEY, name text, long text);
         ALTER TABLE t ALTER long SET STORAGE EXTERNAL;
         INSERT INTO t (name, long)
             SELECT '{0}' || i, CASE WHEN i % 200 = 0 THEN repeat('{0}', 300) END
             FROM generate_series(1, 20000) i",
        canary.as_str()
    ))?;
    cluster.sql("CHECKPOINT")?;
    Ok(cluster)
}

/// A session that requests the work and waits for its end.
struct Requester {
    pid: Pid,
    session: JoinHandle<bool>,
}

impl Requester {
    fn of(cluster: &Cluster, statements: &str) -> Result<Requester> {
        let mut client = cluster.client()?;
        let pid: i32 = client.query_one("SELECT pg_backend_pid()", &[])?.get(0);
        let statements: Vec<String> = statements.split(';').map(str::to_owned).collect();
        let session = std::thread::spawn(move || {
            statements.iter().all(|statement| client.batch_execute(statement).is_ok())
        });
        Ok(Requester { pid: Pid::from_raw(pid).context("a process")?, session })
    }

    /// Waits for the session; true if it reports no error.
    fn end(self) -> bool {
        self.session.join().unwrap_or(false)
    }
}

fn kill(
    cluster: &Cluster,
    victim: Victim,
    stands: Pid,
    requester: Pid,
    old: &AtCheckpoint,
) -> Result<()> {
    let pid = match victim {
        Victim::Worker => stands,
        Victim::Requester => requester,
        Victim::Checkpointer => {
            let pid = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'";
            Pid::from_raw(cluster.text(pid)?.parse()?).context("a process")?
        }
        Victim::Server => {
            cluster.kill()?;
            return Ok(());
        }
        Victim::Power => {
            old.cut_power(cluster, u64::from(stands.as_raw_nonzero().get().unsigned_abs()))?;
            return Ok(());
        }
    };
    kill_process(pid, Signal::KILL)?;
    // The postmaster then ends all other processes.
    let deadline = Instant::now() + Duration::from_secs(60);
    while test_kill_process(stands).is_ok() {
        ensure!(Instant::now() < deadline, "{stands:?} lives on");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Waits until the server is up after [`kill`], or starts it.
fn ensure_running(cluster: &Cluster, victim: Victim) -> Result<String> {
    if matches!(victim, Victim::Server | Victim::Power) {
        cluster.start_server()?;
    }
    after_recovery(cluster)
}

/// Runs one job; at each step the victim is killed.
fn killed_at(work: Work, victim: Victim, steps: &[&str]) -> Result<()> {
    let mut cluster = cluster(work)?;
    cluster.allow_log("the database system is");
    let before = cluster.text(SUM)?;
    let mut witnesses = Witnesses::of(&cluster)?;
    let mut old = AtCheckpoint::of(&cluster)?;
    cluster.stop_at(steps[0])?;
    let mut requester = Requester::of(
        &cluster,
        &format!("{};SELECT pagevault.wait_for_rekey('t'::regclass)", work.sql()),
    )?;
    for (at, step) in steps.iter().enumerate() {
        let stands = cluster.stopped_at(step)?;
        ensure!(stands != requester.pid, "{step}: there is no job");
        if DURING.contains(step) {
            witnesses.back_up(&cluster, step)?;
            old = AtCheckpoint::of(&cluster)?;
        }
        kill(&cluster, victim, stands, requester.pid, &old)?;
        ensure!(!requester.end(), "{step}: the session has not noticed");
        match steps.get(at + 1) {
            Some(next) => cluster.stop_at(next)?,
            None => cluster.resume(),
        }
        ensure!(ensure_running(&cluster, victim)? == before, "{step}: contents differ");
        // Without a checkpoint: the worker may already be stopped at the next step, where a
        // checkpoint may have to wait for it.
        old = AtCheckpoint::since_start(&cluster)?;
        // After a start the launcher waits for a while, unless it is woken.
        cluster.sql("SELECT pg_reload_conf()")?;
        requester = Requester::of(&cluster, "SELECT pagevault.wait_for_rekey('t'::regclass)")?;
    }
    ensure!(requester.end(), "the job did not end");
    let sealed: &[&str] = if work == Work::Decrypt { &["first"] } else { &["t", "first"] };
    witnesses.judge(&cluster, &[SUM], sealed)?;
    assert_done(&cluster, work, &before)?;
    cluster.finish()
}

/// The contents are intact, the files show that the work was done, and nothing is left to do.
fn assert_done(cluster: &Cluster, work: Work, before: &str) -> Result<()> {
    ensure!(cluster.text(SUM)? == before, "contents differ");
    cluster.sql("CHECKPOINT")?;
    let on_disk = column(
        &mut cluster.client()?,
        "SELECT concat_ws(' ', relation, string_agg(DISTINCT concat(state, ' ', data_key_version), ', '))
         FROM pagevault.verify('t') WHERE state <> 'empty' GROUP BY relation",
    )?;
    let state = if work == Work::Decrypt { "plaintext" } else { "encrypted" };
    let one = |row: &String| row.contains(state) && !row.contains(',');
    ensure!(on_disk.len() == 6 - 1 && on_disk.iter().all(one), "{on_disk:#?}");
    if work == Work::Decrypt {
        let wrong = format!(
            "SELECT count(*) FROM pagevault.relations
             WHERE relation::text = ANY (string_to_array(({FAMILY}), ' ')) AND sealed_only"
        );
        ensure!(cluster.text(&wrong)? == "0", "plaintext is refused");
    }
    if work != Work::Encrypt {
        // Each file was rewritten.
        ensure!(on_disk.iter().all(|row| !row.ends_with(" 1")), "{on_disk:#?}");
    }
    let drift = column(
        &mut cluster.client()?,
        "SELECT concat_ws(' ', relation, actual) FROM pagevault.drift(true)",
    )?;
    ensure!(drift.is_empty(), "{drift:#?}");
    if work != Work::Decrypt {
        let canary = canary();
        let found = Scanner::new([&canary]).scan_trees(&[&cluster.data_directory()])?;
        ensure!(found.is_empty(), "{}", report(&found));
    }
    cluster.crash()?;
    ensure!(cluster.text(SUM)? == before, "contents differ after one more crash");
    Ok(())
}

#[test]
fn the_worker_is_killed_before_it_rewrites() -> Result<()> {
    killed_at(Work::Rotate, Victim::Worker, &FIRST_HALF)
}

#[test]
fn the_worker_is_killed_before_it_ends() -> Result<()> {
    killed_at(Work::Rotate, Victim::Worker, &SECOND_HALF)
}

#[test]
fn the_requester_is_killed_before_anything_is_rewritten() -> Result<()> {
    killed_at(Work::Encrypt, Victim::Requester, &FIRST_HALF)
}

#[test]
fn the_requester_is_killed_before_the_end() -> Result<()> {
    killed_at(Work::Encrypt, Victim::Requester, &SECOND_HALF[..3])
}

#[test]
fn the_checkpointer_is_killed_before_anything_is_rewritten() -> Result<()> {
    killed_at(Work::Decrypt, Victim::Checkpointer, &FIRST_HALF)
}

#[test]
fn the_checkpointer_is_killed_before_the_end() -> Result<()> {
    killed_at(Work::Decrypt, Victim::Checkpointer, &SECOND_HALF)
}

#[test]
fn all_are_killed_before_anything_is_rewritten() -> Result<()> {
    killed_at(Work::Encrypt, Victim::Server, &FIRST_HALF)
}

#[test]
fn all_are_killed_before_the_end() -> Result<()> {
    killed_at(Work::Rotate, Victim::Server, &SECOND_HALF)
}

#[test]
fn the_power_fails_before_anything_is_rewritten() -> Result<()> {
    killed_at(Work::Rotate, Victim::Power, &FIRST_HALF)
}

#[test]
fn the_power_fails_before_the_end() -> Result<()> {
    killed_at(Work::Rotate, Victim::Power, &SECOND_HALF)
}

/// Either there is no job or it is done: requesting one is a single transaction.
#[test]
fn the_requester_is_killed_before_the_job_is_recorded() -> Result<()> {
    let cluster = cluster(Work::Rotate)?;
    let before = cluster.text(SUM)?;
    let old = AtCheckpoint::of(&cluster)?;
    for victim in [Victim::Requester, Victim::Checkpointer, Victim::Server] {
        cluster.stop_at("rekey.requested")?;
        let requester = Requester::of(&cluster, Work::Rotate.sql())?;
        let stands = cluster.stopped_at("rekey.requested")?;
        ensure!(stands == requester.pid, "another process stands there");
        kill(&cluster, victim, stands, requester.pid, &old)?;
        ensure!(!requester.end(), "the session has not noticed");
        cluster.resume();
        ensure!(ensure_running(&cluster, victim)? == before, "{victim:?}: contents differ");
        ensure!(cluster.text("SELECT count(*) FROM pagevault.rekey_jobs")? == "0", "{victim:?}");
    }
    cluster.sql(Work::Rotate.sql())?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass)")? == "t");
    assert_done(&cluster, Work::Rotate, &before)?;
    cluster.finish()
}

/// A killed command that rewrites pages itself leaves its partial work in a readable file; when
/// repeated, it ends.
#[test]
fn a_command_that_encrypts_is_killed() -> Result<()> {
    let work = Work::Encrypt;
    let victims = [Victim::Requester, Victim::Power, Victim::Checkpointer];
    let cluster = cluster(work)?;
    cluster.set(&[("pagevault.rekey_threshold", "8GB")])?;
    let before = cluster.text(SUM)?;
    let command = "SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted'";
    let steps = [
        "keys.in_file",
        "keys.in_wal",
        "rekey.switched",
        "rekey.barrier_passed",
        "rekey.page_done",
        "rekey.flushed",
        "rekey.synced",
        "rekey.proved",
    ];
    for (step, victim) in steps.iter().zip(victims.iter().cycle()) {
        let old = AtCheckpoint::of(&cluster)?;
        cluster.stop_at(step)?;
        let requester = Requester::of(&cluster, command)?;
        let stands = cluster.stopped_at(step)?;
        ensure!(stands == requester.pid, "another process stands at {step}");
        kill(&cluster, *victim, stands, requester.pid, &old)?;
        ensure!(!requester.end(), "{step}: the session has not noticed");
        cluster.resume();
        ensure!(
            ensure_running(&cluster, *victim)? == before,
            "{step}, {victim:?}: contents differ"
        );
    }
    cluster.sql(command)?;
    assert_done(&cluster, work, &before)?;
    cluster.finish()
}

/// The primary is stopped at a step while the standby is killed and a copy of the standby is
/// promoted, where the job continues.
fn standby_at(work: Work, steps: &[&str]) -> Result<()> {
    let primary = cluster(work)?;
    let before = primary.text(SUM)?;
    let mut standby = standby_of(&primary, &[])?;
    standby.allow_log("could not");
    primary.stop_at(steps[0])?;
    let requester = Requester::of(
        &primary,
        &format!("{};SELECT pagevault.wait_for_rekey('t'::regclass)", work.sql()),
    )?;
    for (at, step) in steps.iter().enumerate() {
        primary.stopped_at(step)?;
        wait_for(&standby, &primary)?;
        standby.kill()?;
        let mut promoted = Cluster::from_files(|target| {
            let copied = std::process::Command::new("cp")
                .args(["-a", "--"])
                .arg(standby.data_directory())
                .arg(target)
                .status()?;
            ensure!(copied.success(), "cp");
            Ok(())
        })?;
        promoted.allow_log("could not");
        promoted.allow_log("terminating walreceiver");
        promoted.allow_log("specified neither");
        promoted.append_conf("primary_conninfo = ''")?;
        promoted.start_server()?;
        promoted.sql("SELECT pg_promote()")?;
        let job = promoted.text("SELECT coalesce(max(job), 0) FROM pagevault.rekey_jobs")?;
        if job == "0" {
            // The standby has not replayed the job.
            promoted.sql(work.sql())?;
        }
        promoted.sql("SELECT pg_reload_conf()")?;
        ensure!(
            promoted.text("SELECT pagevault.wait_for_rekey('t'::regclass)")? == "t",
            "{step}: no end"
        );
        assert_done(&promoted, work, &before)?;
        promoted.finish()?;
        standby.start_server()?;
        ensure!(standby.text(SUM)? == before, "{step}: the standby has other contents");
        match steps.get(at + 1) {
            Some(next) => primary.stop_at(next)?,
            None => primary.resume(),
        }
    }
    ensure!(requester.end(), "the job did not end");
    wait_for(&standby, &primary)?;
    ensure!(standby.text(SUM)? == before, "the standby has other contents");
    let versions = format!(
        "SELECT string_agg(v::text, ' ' ORDER BY v::text) FROM ({FAMILY}) f, pagevault.verify('t') v WHERE state <> 'empty'"
    );
    primary.sql("CHECKPOINT")?;
    // Restart points need a replayed checkpoint.
    wait_for(&standby, &primary)?;
    standby.sql("CHECKPOINT")?;
    ensure!(standby.text(&versions)? == primary.text(&versions)?, "{}", standby.text(&versions)?);
    standby.finish()?;
    primary.finish()
}

#[test]
fn a_standby_is_killed_and_promoted_before_anything_is_rewritten() -> Result<()> {
    standby_at(Work::Rotate, &["rekey.claimed", "keys.in_file", "keys.in_wal"])
}

#[test]
fn a_standby_is_killed_and_promoted_while_pages_are_rewritten() -> Result<()> {
    standby_at(Work::Encrypt, &["rekey.switched", "rekey.barrier_passed", "rekey.page_done"])
}

#[test]
fn a_standby_is_killed_and_promoted_before_the_end() -> Result<()> {
    standby_at(Work::Decrypt, &["rekey.batch_done", "rekey.proved", "rekey.ended"])
}

/// The startup process itself is killed between replaying a key and using it.
#[test]
fn a_standby_is_killed_while_it_replays_a_key() -> Result<()> {
    let primary = cluster(Work::Rotate)?;
    let before = primary.text(SUM)?;
    let mut standby = standby_of(&primary, &[])?;
    standby.allow_log("could not");
    for step in ["redo.keys", "redo.keys_in_file"] {
        wait_for(&standby, &primary)?;
        standby.stop_at(step)?;
        primary.sql(Work::Rotate.sql())?;
        standby.stopped_at(step)?;
        standby.kill()?;
        standby.resume();
        standby.start_server()?;
        ensure!(primary.text("SELECT pagevault.wait_for_rekey('t'::regclass)")? == "t");
        wait_for(&standby, &primary)?;
        ensure!(standby.text(SUM)? == before, "{step}: the standby has other contents");
    }
    standby.sql("CHECKPOINT")?;
    standby.crash()?;
    ensure!(standby.text(SUM)? == before, "contents differ");
    standby.finish()?;
    primary.finish()
}

/// A page added outside shared buffers is written under the key that its writer has read. If a job
/// was cancelled before it had waited for such a writer, the next worker waits.
#[test]
fn writers_are_waited_for_after_a_failure() -> Result<()> {
    let cluster = cluster(Work::Encrypt)?;
    cluster.sql("CREATE TABLE h (k int); CREATE INDEX h_k ON h USING hash (k)")?;
    let file = cluster.text("SELECT pg_relation_filenode('h_k')")?;
    let point = format!("page.extend {file}");
    cluster.stop_at(&point)?;
    // New buckets are added at once, beginning with the last page.
    let writer = Requester::of(&cluster, "INSERT INTO h SELECT generate_series(1, 20000)")?;
    ensure!(cluster.stopped_at(&point)? == writer.pid, "another process adds a page");
    cluster.sql("SELECT pagevault.encrypt('h')")?;
    let job = cluster.text("SELECT max(job) FROM pagevault.rekey_jobs")?;
    const WAITING: &str = "SELECT pid FROM pg_stat_activity
        WHERE backend_type = 'pagevault rekey' AND query LIKE 'pagevault:%waits for process%'";
    let mut last = "0".to_owned();
    for _ in 0..4 {
        let next = format!("SELECT count(*) FROM ({WAITING}) w WHERE pid <> {last}");
        cluster.eventually(&next, "1")?;
        last = cluster.text(WAITING)?;
        cluster.sql(&format!("SELECT pg_cancel_backend({last})"))?;
    }
    cluster.resume();
    ensure!(writer.end(), "the writer has failed");
    ensure!(cluster.text(&format!("SELECT pagevault.wait_for_rekey({job})"))? == "t");
    crate::assert_sealed(&cluster.files("h_k")?)?;
    ensure!(cluster.text("SET enable_seqscan = off; SELECT count(*) FROM h WHERE k = 17")? == "1");
    cluster.finish()
}
