//! What happens to nodes: each fault is brought about, and undone when others have coped with it.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagevault_tests::Random;
use pagevault_tests::cluster::{column, run_sql};
use pagevault_tests::process::{postmaster, processes_in};
use rustix::process::{Pid, Signal, kill_process};

use super::super::load::Load;
use super::super::nodes::Group;
use super::super::wire::Way;
use super::super::{LOST, next_leader};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fault {
    /// SIGKILL of the leader's postmaster.
    PostmasterDies,
    /// SIGKILL of another process of the leader, or of a standby.
    ProcessOfLeaderDies,
    ProcessOfStandbyDies,
    /// SIGKILL of Patroni, whose server goes on.
    PatroniOfLeaderDies,
    PatroniOfStandbyDies,
    /// SIGKILL of Patroni and all of its server.
    LeaderDies,
    StandbyDies,
    AllDie,
    /// The same, after rows and keys that no standby has received.
    LeaderDiesAlone,
    /// Nobody reaches it, and it does not reach etcd.
    LeaderIsCutOff,
    StandbyIsCutOff,
    /// Nobody reaches etcd.
    EtcdIsAway,
    /// SIGSTOP of what sends, receives or replays WAL; of Patroni; of it and all of its server.
    ReplicationStops,
    PatroniStops,
    LeaderStops,
    Switchover,
    NewCopy,
    Restart,
    CleanStop,
}

pub(super) const FAULTS: &[Fault] = &[
    Fault::PostmasterDies,
    Fault::ProcessOfLeaderDies,
    Fault::ProcessOfStandbyDies,
    Fault::PatroniOfLeaderDies,
    Fault::PatroniOfStandbyDies,
    Fault::LeaderDies,
    Fault::StandbyDies,
    Fault::AllDie,
    Fault::LeaderDiesAlone,
    Fault::LeaderIsCutOff,
    Fault::StandbyIsCutOff,
    Fault::EtcdIsAway,
    Fault::ReplicationStops,
    Fault::PatroniStops,
    Fault::LeaderStops,
    Fault::Switchover,
    Fault::NewCopy,
    Fault::Restart,
    Fault::CleanStop,
];

/// Processes of a leader or a standby, by their titles.
const PROCESSES: &[&str] = &[
    "checkpointer",
    "walwriter",
    "background writer",
    "127.0.0.1(",
    "walsender",
    "logical replication",
    "pagevault rekey",
    "pagevault wal",
    "pagevault revalidate",
    "startup",
    "walreceiver",
    "pagevault-keyring",
];

/// Continues what was stopped.
struct Stopped(Vec<Pid>);

impl Drop for Stopped {
    fn drop(&mut self) {
        for pid in &self.0 {
            let _ = kill_process(*pid, Signal::CONT);
        }
    }
}

/// Has a fault come and pass. `number` is that of the round.
pub(super) fn strike(
    fault: Fault,
    group: &mut Group,
    load: &Load,
    random: &mut Random,
    number: u64,
) -> Result<String> {
    let leader = group.leader()?;
    let others: Vec<_> = (0..group.nodes.len()).filter(|other| *other != leader).collect();
    let standby = random.one_of(&others);
    let mut subject = leader;
    let mut how = String::new();
    match fault {
        Fault::PostmasterDies => {
            let pid = postmaster(&group.nodes[leader].data_directory()).context("no postmaster")?;
            kill_process(pid, Signal::KILL)?;
            load.goes_on(group)?;
        }
        Fault::ProcessOfLeaderDies | Fault::ProcessOfStandbyDies => {
            subject = if fault == Fault::ProcessOfLeaderDies { leader } else { standby };
            how = kill_one(&group.nodes[subject].data_directory(), random)?;
            load.goes_on(group)?;
        }
        Fault::PatroniOfLeaderDies => {
            group.nodes[leader].kill_patroni()?;
            if random.percent(70) {
                how = "until another leads".into();
                next_leader(group, leader)?;
                // What a watchdog does. Patroni 3.0.2 that finds a former leader running reloads it
                // without synchronous_standby_names before it stops it, so that commits are
                // acknowledged which nobody else has.
                group.nodes[leader].kill()?;
            }
            group.start_node(leader)?;
        }
        Fault::PatroniOfStandbyDies => {
            subject = standby;
            group.nodes[standby].kill_patroni()?;
            load.goes_on(group)?;
            group.start_node(standby)?;
        }
        Fault::LeaderDies => {
            group.kill_node(leader)?;
            if random.percent(60) {
                how = "until another leads".into();
                next_leader(group, leader)?;
                load.goes_on(group)?;
            }
            group.start_node(leader)?;
        }
        Fault::StandbyDies => {
            subject = standby;
            group.kill_node(standby)?;
            load.goes_on(group)?;
            group.start_node(standby)?;
        }
        Fault::AllDie => {
            (0..group.nodes.len()).try_for_each(|node| group.kill_node(node))?;
            group.start_node(standby)?;
            pass_time(random, 4000);
            (0..group.nodes.len())
                .filter(|node| *node != standby)
                .try_for_each(|node| group.start_node(node))?;
        }
        Fault::LeaderDiesAlone => {
            let senders = "SELECT pid FROM pg_stat_replication";
            let mut pids = Vec::new();
            for sender in column(&mut group.nodes[leader].client()?, senders)? {
                pids.extend(Pid::from_raw(sender.parse()?));
            }
            let stopped = stop(pids);
            how = live_alone(group, leader, number);
            group.kill_node(leader)?;
            drop(stopped);
            if random.percent(70) {
                how += ", until another leads";
                next_leader(group, leader)?;
                load.goes_on(group)?;
            }
            group.start_node(leader)?;
        }
        Fault::LeaderIsCutOff => {
            let way = random.one_of(&[Way::Silent, Way::Closed]);
            cut_off(group, leader, way);
            how = format!("{way:?}, {}", live_alone(group, leader, number));
            next_leader(group, leader)?;
            load.goes_on(group)?;
            cut_off(group, leader, Way::Open);
        }
        Fault::StandbyIsCutOff => {
            subject = standby;
            let way = random.one_of(&[Way::Silent, Way::Closed]);
            how = format!("{way:?}");
            cut_off(group, standby, way);
            load.goes_on(group)?;
            pass_time(random, 20_000);
            cut_off(group, standby, Way::Open);
        }
        Fault::EtcdIsAway => {
            let way = random.one_of(&[Way::Silent, Way::Closed]);
            how = format!("{way:?}");
            group.nodes.iter().for_each(|node| node.gates.etcd.set(way));
            group.eventually("a leader without etcd gives up", |group| {
                let recovers = group.nodes[leader].text("SELECT pg_is_in_recovery()");
                ensure!(!recovers.is_ok_and(|answer| answer == "f"), "it accepts writes");
                Ok(())
            })?;
            pass_time(random, 10_000);
            group.nodes.iter().for_each(|node| node.gates.etcd.set(Way::Open));
        }
        Fault::ReplicationStops => {
            let title = random.one_of(&["walsender", "walreceiver", "startup"]);
            subject = if title == "walsender" { leader } else { standby };
            let pids = titled(&group.nodes[subject].data_directory(), title);
            how = format!("{} {title}", pids.len());
            let _stopped = stop(pids);
            pass_time(random, 15_000);
        }
        Fault::PatroniStops => {
            how = freeze(group, leader, Vec::new(), random)?;
        }
        Fault::LeaderStops => {
            let server = processes_in(&group.nodes[leader].data_directory());
            how = freeze(group, leader, server, random)?;
        }
        Fault::Switchover => switch_over(group, leader)?,
        Fault::NewCopy => {
            subject = standby;
            let before = group.nodes[standby].log().len();
            let name = group.nodes[standby].name.clone();
            group.patronictl(&["reinit", "--force", "main", &name])?;
            group.eventually("a new copy", |group| {
                let made = &group.nodes[standby].log()[before..];
                ensure!(made.contains("replica has been created"), "it is not made yet");
                Ok(())
            })?;
        }
        Fault::Restart => {
            subject = random.one_of(&[leader, standby]);
            let name = group.nodes[subject].name.clone();
            group.patronictl(&["restart", "--force", "main", &name])?;
            load.goes_on(group)?;
        }
        Fault::CleanStop => {
            subject = random.one_of(&[leader, standby]);
            group.nodes[subject].stop()?;
            load.goes_on(group)?;
            group.start_node(subject)?;
        }
    }
    Ok(format!("{} {how}", group.nodes[subject].name))
}

/// Stops Patroni of a leader, and these processes, for a while; or until another leads. Then they
/// do not go on, as if a watchdog had ended them: Patroni 3.0.2 that goes on takes the leader's key
/// back, whoever has it (`_update_leader`, dcs/etcd3.py).
fn freeze(
    group: &mut Group,
    leader: usize,
    mut pids: Vec<Pid>,
    random: &mut Random,
) -> Result<String> {
    let patroni = group.nodes[leader].patroni.as_ref().context("no Patroni")?.id();
    pids.extend(Pid::from_raw(patroni.try_into()?));
    let _stopped = stop(pids);
    if random.percent(30) {
        pass_time(random, 6000);
        return Ok("for seconds".into());
    }
    group.nodes[leader].is_alone = true;
    // A server that was stopped answers no query.
    group.eventually("another leader", |group| {
        let known = group.with_role(&group.members()?, "leader")?;
        ensure!(known != leader, "it is still {}", group.nodes[leader].name);
        Ok(())
    })?;
    pass_time(random, 5000);
    group.kill_node(leader)?;
    Ok("until another leads".into())
}

fn pass_time(random: &mut Random, milliseconds: u64) {
    std::thread::sleep(Duration::from_millis(random.below(milliseconds)));
}

fn stop(pids: Vec<Pid>) -> Stopped {
    for pid in &pids {
        let _ = kill_process(*pid, Signal::STOP);
    }
    Stopped(pids)
}

/// Nobody reaches a node, nor does it reach anybody.
pub(super) fn cut_off(group: &mut Group, number: usize, way: Way) {
    let name = group.nodes[number].name.clone();
    for (other, node) in group.nodes.iter_mut().enumerate() {
        if other == number {
            node.is_alone = way != Way::Open;
            let gates = &node.gates;
            [&gates.server, &gates.rest, &gates.etcd].into_iter().for_each(|gate| gate.set(way));
        } else {
            node.gates.server.set_for(&name, way);
        }
    }
}

/// Writes rows and keys where no standby receives them. A leader that has lost etcd may end before
/// all is done; returns how much was.
fn live_alone(group: &Group, leader: usize, number: u64) -> String {
    let statements = [
        "SET synchronous_commit = local".to_owned(),
        "SELECT pagevault.rotate_wal_key()".to_owned(),
        "SELECT pagevault.rotate_database_key()".to_owned(),
        "SELECT pagevault.rotate_data_key('t')".to_owned(),
        format!(
            "CREATE TABLE lost{number} AS
             SELECT '{LOST}' || i AS name FROM generate_series(1, 999) i"
        ),
        format!("INSERT INTO t (name) SELECT '{LOST}-' || i FROM generate_series(1, 500) i"),
        "CHECKPOINT".to_owned(),
    ];
    let Ok(mut client) = group.nodes[leader].client() else { return "0 steps alone".into() };
    let done = statements.iter().take_while(|step| run_sql(&mut client, step).is_ok()).count();
    format!("{done} steps alone")
}

fn switch_over(group: &Group, leader: usize) -> Result<()> {
    group.eventually("a switchover", |group| {
        let candidate = &group.nodes[group.synchronous()?].name;
        let leader = &group.nodes[leader].name;
        let said = group.patronictl(&[
            "switchover",
            "--leader",
            leader,
            "--candidate",
            candidate,
            "--force",
            "main",
        ])?;
        ensure!(said.contains("Successfully switched over"), "{said}");
        Ok(())
    })?;
    next_leader(group, leader).map(drop)
}

/// Kills a process of a server other than its postmaster. Returns its title.
fn kill_one(data: &Path, random: &mut Random) -> Result<String> {
    let postmaster = postmaster(data).context("no postmaster")?;
    let mut title = random.one_of(PROCESSES).to_owned();
    let mut pids = titled(data, &title);
    if pids.is_empty() {
        pids = processes_in(data);
        pids.retain(|pid| *pid != postmaster);
        title = "any".into();
    }
    ensure!(!pids.is_empty(), "the postmaster is alone");
    let pid = random.one_of(&pids);
    let own = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
    let _ = kill_process(pid, Signal::KILL);
    Ok(format!("{title}: {}", String::from_utf8_lossy(&own).replace('\0', " ").trim()))
}

fn titled(data: &Path, title: &str) -> Vec<Pid> {
    let has_title = |pid: &Pid| {
        std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero()))
            .is_ok_and(|line| String::from_utf8_lossy(&line).contains(title))
    };
    processes_in(data).into_iter().filter(has_title).collect()
}

/// Undoes what a fault that failed, or passed, may have left.
pub(super) fn restore(group: &mut Group) -> Result<()> {
    for number in 0..group.nodes.len() {
        cut_off(group, number, Way::Open);
    }
    for number in 0..group.nodes.len() {
        if group.nodes[number].patroni.is_none() {
            group.start_node(number)?;
        }
    }
    Ok(())
}
