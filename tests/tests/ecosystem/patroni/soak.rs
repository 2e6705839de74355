//! The long form: nodes fail in many ways, again and again, while rows are written and keys, tables
//! and databases change. `make patroni MINUTES=60`; docs/testing.md says what it does.
//!
//! | variable | means |
//! |---|---|
//! | `PAGEVAULT_PATRONI_MINUTES` | for how long; without it the test does not run |
//! | `PAGEVAULT_SEED` | which faults, in which order; the clock's |

mod faults;
mod keys;

use std::collections::{BTreeMap, HashMap};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{column, text};
use pagevault_tests::datafile::if_exists;
use pagevault_tests::installation::run;
use pagevault_tests::leaks::{Canary, Scanner, report};
use pagevault_tests::{Installation, Random};

use self::faults::{FAULTS, Fault, restore, strike};
use self::keys::Keeper;
use super::load::Load;
use super::nodes::{Group, Node, Programs};
use super::{CANARY, CONTENT, LOST, check, group};

/// The contents of all tables of a database.
const TABLES: &str = "SELECT string_agg(format('%s=%s', oid::regclass,
        (xpath('/row/d/text()', query_to_xml(format(
            'SELECT count(*) || '':'' || coalesce(sum(hashtext(t::text)::bigint), 0) AS d
             FROM %s t', oid::regclass), false, true, '')))[1]), ' ' ORDER BY oid)
    FROM pg_class WHERE relkind = 'r' AND relpersistence = 'p' AND oid >= 16384";

const DATABASES: &str = "SELECT datname FROM pg_database WHERE datallowconn ORDER BY 1";

/// What no server may say.
const ALARMS: &[&str] = &[
    "PANIC:",
    "TRAP:",
    "panicked at",
    "signal 6",
    "signal 11",
    "invalid page in block",
    "page verification failed",
    "could not decrypt",
    "FATAL:  relation file",
    "WAL has not brought",
    "incorrect resource manager data checksum",
    // pg_waldump and pg_rewind, which did not get their keys.
    "WAL segment size must be",
    "invalid info bits",
];

/// The key provider is away for some seconds.
struct Away(JoinHandle<()>);

impl Away {
    fn start(path: PathBuf, time: Duration) -> Result<Away> {
        // The file stays where it is: a server that is making a key would write another one.
        std::fs::set_permissions(&path, Permissions::from_mode(0o000))?;
        Ok(Away(std::thread::spawn(move || {
            std::thread::sleep(time);
            let _ = std::fs::set_permissions(&path, Permissions::from_mode(0o600));
        })))
    }
}

struct Soak {
    group: Group,
    load: Load,
    keeper: Keeper,
    random: Random,
    scanner: Scanner,
    /// How much of each node's log was read.
    read: Vec<usize>,
    /// Files that were looked at, with the time of their last change, and length.
    seen: Seen,
    rounds: u64,
    faults: BTreeMap<Fault, u64>,
}

type Seen = HashMap<PathBuf, (SystemTime, u64)>;

/// Faults of all kinds come in turn, in an order drawn from a seed.
pub(super) fn nodes_fail_for_long() -> Result<()> {
    let minutes = std::env::var("PAGEVAULT_PATRONI_MINUTES").context("for how many minutes?")?;
    let time = Duration::from_secs(60 * minutes.parse::<u64>()?);
    let seed = match std::env::var("PAGEVAULT_SEED") {
        Ok(seed) => seed.parse()?,
        Err(_) => SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs(),
    };
    eprintln!("patroni: {minutes} minutes, PAGEVAULT_SEED={seed}");
    let begin = Instant::now();
    let mut soak = Soak::start(Random::new(seed))?;
    let mut left = Vec::new();
    while begin.elapsed() < time {
        if left.is_empty() {
            left = FAULTS.to_vec();
        }
        let fault = left.swap_remove(usize::try_from(soak.random.below(left.len() as u64))?);
        let (round, start) = (soak.rounds, Instant::now());
        soak.round(fault).with_context(|| format!("seed {seed}, round {round}, {fault:?}"))?;
        eprintln!("  round {round} took {} s", start.elapsed().as_secs());
    }
    eprintln!("{} rounds: {:?}", soak.rounds, soak.faults);
    eprintln!("{} rows; {}", soak.load.count(), soak.keeper.told());
    soak.finish()
}

impl Soak {
    fn start(random: Random) -> Result<Soak> {
        let group = group(3, Programs::WithKeys)?;
        let leader = &group.nodes[group.leader()?];
        leader.sql("CREATE SCHEMA secret")?;
        leader.sql("CREATE SCHEMA open")?;
        leader.sql("CREATE DATABASE original")?;
        let mut client = leader.client_to("original")?;
        client.batch_execute(&format!(
            "CREATE EXTENSION pagevault;
             CREATE TABLE first AS SELECT '{CANARY}' || i AS name FROM generate_series(1, 999) i"
        ))?;
        if Installation::get()?.has_extension("amcheck") {
            leader.sql("CREATE EXTENSION amcheck")?;
        }
        // More checkpoints, and less WAL to look at.
        group.patronictl(&[
            "edit-config",
            "--force",
            "-p",
            "wal_keep_size=96MB",
            "-p",
            "max_wal_size=128MB",
            "-p",
            "checkpoint_timeout=30s",
            "main",
        ])?;
        let load = Load::start(&group);
        load.set_pace(4);
        let keeper = Keeper::start(&group, random.of(1));
        let canaries = [CANARY, LOST].map(|text| Canary::stored(text, text.as_bytes().to_vec()));
        Ok(Soak {
            read: vec![0; group.nodes.len()],
            group,
            load,
            keeper,
            random,
            scanner: Scanner::new(&canaries),
            seen: Seen::new(),
            rounds: 0,
            faults: BTreeMap::new(),
        })
    }

    fn round(&mut self, fault: Fault) -> Result<()> {
        let number = self.rounds;
        self.rounds += 1;
        *self.faults.entry(fault).or_default() += 1;
        let leader = self.group.whole()?;
        self.load.pgbench_with(&self.group, leader, &["-R", "80"])?;
        self.load.resume();
        self.keeper.resume();
        self.load.goes_on(&self.group)?;
        let mut away = None;
        if self.random.percent(30) {
            let time = Duration::from_millis(1000 + self.random.below(12_000));
            away = Some(Away::start(self.group.keys.path().to_owned(), time)?);
        }
        let is_away = if away.is_some() { ", keys away" } else { "" };
        eprintln!("round {number}: {fault:?}{is_away}");
        let struck = strike(fault, &mut self.group, &self.load, &mut self.random, number);
        if let Ok(how) = &struck {
            eprintln!("  {how}");
        }
        if let Some(Away(thread)) = away {
            thread.join().map_err(|_| anyhow::anyhow!("the key file stays away"))?;
        }
        struck?;
        restore(&mut self.group)?;
        self.group.whole()?;
        self.load.goes_on(&self.group)?;
        self.keeper.pause(&self.group)?;
        self.load.pause(&self.group)?;
        let start = Instant::now();
        self.judge(number)?;
        eprintln!("  judged in {} s", start.elapsed().as_secs());
        Ok(())
    }

    /// Nobody writes any more: all nodes have the same, and nothing of it can be read in files.
    fn judge(&mut self, number: u64) -> Result<()> {
        let leader = self.group.whole()?;
        let group = &self.group;
        let databases = column(&mut group.nodes[leader].client()?, DATABASES)?;
        for database in &databases {
            settle(group, leader, database).with_context(|| format!("database {database}"))?;
        }
        for node in &group.nodes {
            same_on(group, leader, node, &databases)?;
            self.load.is_all_on(node)?;
            if Installation::get()?.has_extension("amcheck") {
                node.text(
                    "SELECT count(bt_index_check(indexrelid, true)) FROM pg_index
                     WHERE indrelid >= 16384 AND indisvalid",
                )?;
            }
        }
        for (node, read) in group.nodes.iter().zip(&mut self.read) {
            let log = node.log();
            let said: Vec<_> = log[*read..]
                .lines()
                .filter(|line| ALARMS.iter().any(|alarm| line.contains(alarm)))
                // Of a segment that is prepared and was never used, as without pagevault.
                .filter(|line| !line.contains("header specifies 0 bytes"))
                .collect();
            ensure!(said.is_empty(), "{} says:\n{}", node.name, said.join("\n"));
            *read = log.len();
            let changed = changed_below(&node.data_directory(), &mut self.seen)?;
            let changed: Vec<_> = changed.iter().map(PathBuf::as_path).collect();
            let found = self.scanner.scan_trees(&changed)?;
            ensure!(found.is_empty(), "{}", report(&found));
        }
        if number % 4 == 3 {
            let others: Vec<_> = (0..group.nodes.len()).filter(|node| *node != leader).collect();
            let standby = self.random.one_of(&others);
            self.verify(standby)?;
        }
        Ok(())
    }

    /// Stops a standby, and has tools look at its files.
    fn verify(&mut self, standby: usize) -> Result<()> {
        self.group.nodes[standby].stop()?;
        let data = self.group.nodes[standby].data_directory();
        run(self.group.tool("pg_checksums").args(["--check", "-D"]).arg(&data))?;
        run(self.group.tool("pagevault-keyring").arg("verify").arg(&data))?;
        eprintln!("  the files of {} are verified", self.group.nodes[standby].name);
        self.group.start_node(standby)?;
        self.group.whole().map(drop)
    }

    fn finish(self) -> Result<()> {
        let leader = self.group.whole()?;
        self.keeper.end()?;
        self.load.finish(&self.group.nodes[leader])?;
        // The first node may have kept WAL from before the first key.
        check(self.group, leader, Some(0))
    }
}

/// Ends the jobs of a database, and looks for what is not as the policy wants it.
fn settle(group: &Group, leader: usize, database: &str) -> Result<()> {
    let mut client = group.nodes[leader].client_to(database)?;
    if text(&mut client, "SELECT count(*) FROM pg_extension WHERE extname = 'pagevault'")? == "0" {
        return Ok(());
    }
    let unfinished = "SELECT job FROM pagevault.rekey_jobs
        WHERE state IN ('paused', 'cancelled') AND relation IS NOT NULL ORDER BY job";
    for job in column(&mut client, unfinished)? {
        // Another job, or a new file, may have made it superfluous.
        let _ = client.batch_execute(&format!("SELECT pagevault.resume_rekey({job})"));
    }
    group.eventually("jobs", |_| {
        let open = "SELECT coalesce(string_agg(
                format('%s of %s: %s %s', kind, relation, state, error), '; '), '')
            FROM pagevault.rekey_jobs WHERE state IN ('waiting', 'running', 'failed')";
        let open = text(&mut client, open)?;
        ensure!(open.is_empty(), "{open}");
        Ok(())
    })?;
    let drift = "SELECT coalesce(string_agg(
            format('%s %s %s: %s', relation, expected, actual, fix), '; '), '')
        FROM pagevault.drift(true)";
    let drift = text(&mut client, drift)?;
    ensure!(drift.is_empty(), "not as wanted: {drift}");
    Ok(())
}

/// Waits until a node has the contents of the leader.
fn same_on(group: &Group, leader: usize, node: &Node, databases: &[String]) -> Result<()> {
    group.eventually(&node.name, |group| {
        let there = column(&mut node.client()?, DATABASES)?;
        ensure!(there == databases, "databases {there:?} instead of {databases:?}");
        for database in databases {
            for query in [CONTENT, TABLES].iter().skip(usize::from(database != "postgres")) {
                let wanted = text(&mut group.nodes[leader].client_to(database)?, query)?;
                let found = text(&mut node.client_to(database)?, query)?;
                ensure!(found == wanted, "{database}: {found} instead of {wanted}");
            }
        }
        Ok(())
    })
}

/// Files that have changed since they were last seen.
fn changed_below(root: &Path, seen: &mut Seen) -> Result<Vec<PathBuf>> {
    let mut changed = Vec::new();
    let mut paths = vec![root.to_owned()];
    while let Some(path) = paths.pop() {
        let Some(metadata) = if_exists(std::fs::metadata(&path))? else { continue };
        if metadata.is_dir() {
            for entry in if_exists(std::fs::read_dir(&path))?.into_iter().flatten() {
                paths.push(entry?.path());
            }
        } else if metadata.is_file() {
            let state = (metadata.modified()?, metadata.len());
            if seen.insert(path.clone(), state) != Some(state) {
                changed.push(path);
            }
        }
    }
    Ok(changed)
}
