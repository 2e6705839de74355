//! Other servers that judge the one whose power was cut: a standby that followed it until then,
//! restores of backups from before and from during, which follow it from now on, and recovery to
//! points before the cut and after it, where timelines fork and both sides make keys.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{column, text};
use pagevault_tests::standby::wait_for;
use pagevault_tests::{Cluster, Standby};

use crate::facts::has_extension;
use crate::judge;
use crate::recording::{Recorded, cluster_of, without_syncs};
use crate::said;
use crate::scenarios::Scenario;

const STATE: &str = "SELECT concat_ws(' ', count(*), sum(hashtext(client || '-' || n)),
    (SELECT sum(v) FROM t1), (SELECT sum(v) FROM t2), (SELECT sum(v) FROM t3)) FROM ledger";

/// What servers say that have lost others, or whose history ends.
const ORDINARY: [&str; 6] = [
    "terminating walreceiver process",
    // Newer minor releases: the standby has more of WAL than the cut has left (WalReceiverMain,
    // walreceiver.c).
    "while waiting for upstream to catch up",
    "could not send end-of-streaming message to primary",
    "could not connect to the primary server",
    "could not receive",
    "requested timeline",
];

/// Has all of them judge a server that has recovered.
pub(crate) fn judge(
    recorded: &Recorded,
    place: u64,
    scenario: &Scenario,
    server: &Cluster,
) -> Result<()> {
    let state = server.text(STATE)?;
    let mut witnesses = vec![("restored from before", cluster_of(&recorded.before())?)];
    if let Some(image) = recorded.standby_at(place)? {
        witnesses.push(("that followed until the cut", cluster_of(&image)?));
    }
    if let Some(backup) = backup(recorded, place) {
        let mut restored = Cluster::from_files(|target| copy(&backup, target))?;
        without_syncs(&mut restored)?;
        restored.keep_quiet();
        witnesses.push(("restored from during", restored));
    }
    server.sql("SELECT pg_create_restore_point('after')")?;
    let follow = |(name, witness): (&str, Cluster)| {
        let judged = follows(witness, scenario, server, &state);
        judged.with_context(|| format!("a standby {name}"))
    };
    in_parallel(witnesses.into_iter().map(|witness| move || follow(witness)))?;
    // The server goes on alone, with keys that the others do not get.
    new_keys(server, "t2")?;
    server.sql("SELECT pg_switch_wal()")?;
    let mut points = vec![("after".to_owned(), Some(state.as_str()))];
    points.extend(last_point(recorded, place).map(|point| (point, None)));
    let recover = |(point, state): (String, Option<&str>)| {
        let judged = recovered(recorded, scenario, server, &point, state);
        judged.with_context(|| format!("recovery to {point:?}"))
    };
    in_parallel(points.into_iter().map(|point| move || recover(point)))
}

fn in_parallel<F: FnOnce() -> Result<()> + Send>(judges: impl Iterator<Item = F>) -> Result<()> {
    std::thread::scope(|scope| {
        let judges: Vec<_> = judges.map(|judge| scope.spawn(judge)).collect();
        let verdicts = judges
            .into_iter()
            .map(|judge| judge.join().map_err(|_| anyhow::anyhow!("a judge panicked"))?);
        verdicts.collect()
    })
}

/// Since 15.20 a WAL receiver that is ahead of what the primary has flushed, as after a cut by
/// which the primary lost WAL, waits for it that long, and the promotion for the WAL receiver.
const RECEIVER_TIMEOUT: &str = "wal_receiver_timeout = 5s";
const TIMED_OUT: &str = "terminating walreceiver due to timeout";

/// It hears of everything that the server has recovered, is the same, and can take its place.
fn follows(witness: Cluster, scenario: &Scenario, server: &Cluster, state: &str) -> Result<()> {
    Standby::default().conf(RECEIVER_TIMEOUT).follow(&witness, server)?;
    let judged = witness.start_server().and_then(|()| {
        wait_for(&witness, server)?;
        let found = witness.text(STATE)?;
        ensure!(found == state, "{found} instead of {state}");
        witness.promote()?;
        takes_over(&witness, scenario, Some(state))?;
        said::judge(&witness.log(), &[&ORDINARY[..], &[TIMED_OUT], scenario.log].concat())
    });
    judged.with_context(|| judge::end_of_log(&witness))
}

/// The backup from before, with the WAL of the server, to a point of its history.
fn recovered(
    recorded: &Recorded,
    scenario: &Scenario,
    server: &Cluster,
    point: &str,
    state: Option<&str>,
) -> Result<()> {
    let restored = cluster_of(&recorded.before())?;
    restored.append_conf(&format!(
        "restore_command = 'cp {}/pg_wal/%f %p'\nrecovery_target_name = '{point}'\nrecovery_target_action = promote",
        server.data_directory().display()
    ))?;
    let signal = restored.data_directory().join("recovery.signal");
    std::fs::write(&signal, "")?;
    restored.installation().give(&signal)?;
    let judged = restored.start_server().and_then(|()| {
        restored.eventually("SELECT pg_is_in_recovery()", "f")?;
        takes_over(&restored, scenario, state)?;
        said::judge(&restored.log(), &[&ORDINARY, scenario.log].concat())
    });
    judged.with_context(|| judge::end_of_log(&restored))
}

/// It is whole, makes keys of its own, and starts again.
fn takes_over(cluster: &Cluster, scenario: &Scenario, state: Option<&str>) -> Result<()> {
    let mut client = cluster.client()?;
    for gid in column(&mut client, "SELECT gid FROM pg_prepared_xacts")? {
        client.batch_execute(&format!("COMMIT PREPARED '{gid}'"))?;
    }
    drop(client);
    judge::relations(cluster, scenario)?;
    new_keys(cluster, "t1")?;
    if scenario.encrypted {
        judge::jobs(cluster)?;
    }
    cluster.kill()?;
    cluster.start_server().context("the start after a crash")?;
    if let Some(state) = state {
        let found = cluster.text(STATE)?;
        ensure!(found == state, "{found} instead of {state} after a crash");
    }
    judge::relations(cluster, scenario)
}

fn new_keys(cluster: &Cluster, table: &str) -> Result<()> {
    let mut client = cluster.client()?;
    if !has_extension(cluster, "postgres")? {
        return Ok(());
    }
    if text(&mut client, "SELECT state FROM pagevault.status")? != "unlocked" {
        return Ok(());
    }
    client.batch_execute("SET pagevault.default_encryption = on")?;
    client.batch_execute("CREATE TABLE alone AS SELECT i FROM generate_series(1, 1000) i")?;
    let encrypted =
        format!("SELECT encrypted FROM pagevault.relations WHERE relation = '{table}'::regclass");
    if text(&mut client, &encrypted)? == "t" {
        // In a scenario that pauses a job, it may be paused at the point of recovery.
        client.batch_execute(
            "SELECT pagevault.resume_rekey(job) FROM pagevault.rekey_jobs WHERE state = 'paused'",
        )?;
        judge::jobs(cluster)?;
        client.batch_execute(&format!("SELECT pagevault.rotate_data_key('{table}')"))?;
    }
    Ok(client.batch_execute("CHECKPOINT")?)
}

/// Where the backup is that had ended before a place.
fn backup(recorded: &Recorded, place: u64) -> Option<std::path::PathBuf> {
    recorded.marks(place).find(|(_, mark)| *mark == "k")?;
    Some(recorded.cluster()?.directory().join("backup"))
}

fn copy(from: &std::path::Path, to: &std::path::Path) -> Result<()> {
    let mut command = std::process::Command::new("cp");
    pagevault_tests::installation::run(command.arg("-a").arg(from).arg(to)).map(drop)
}

/// The last restore point whose WAL was durable before a place.
fn last_point(recorded: &Recorded, place: u64) -> Option<String> {
    let points = recorded.marks(place).filter_map(|(_, mark)| mark.strip_prefix("r "));
    points.last().map(str::to_owned)
}
