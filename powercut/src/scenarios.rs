//! What happens while the journal is written: everything that keys and rekeying can do.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context, Result};
use pagevault_powercut_disk::Random;
use pagevault_tests::choice::Named;
use pagevault_tests::cluster::run_sql;
use pagevault_tests::{Cluster, Settings, StopMode};

use crate::facts::Facts;
use crate::recording::{GROUP_KEYS, Recorded, Recording, STOPPED};
use crate::workload::{Worker, is_deadlock, tables};

/// What must be true once a step was acknowledged, until another one about the same begins.
#[derive(Clone, Copy, Debug)]
pub struct Promise {
    /// Steps with the same subject undo one another.
    pub about: &'static str,
    /// A query that answers `t`.
    pub holds: &'static str,
}

/// A command of the scenario; each has a session of its own.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Statements. Those that `;;` separates are not in one transaction; the first may begin with
    /// `@` and the name of a database. `DIRECTORY` is where the key file is.
    pub sql: &'static str,
    /// What is true afterwards.
    pub promise: Option<Promise>,
    /// With which SQLSTATE it may fail, because of what else happens; without: it never may.
    pub may_fail: Option<&'static str>,
}

/// The provider `tenants`, which has the keys of key groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tenants {
    /// There is none.
    Absent,
    /// It answers.
    Present,
    /// It does not answer while a server recovers from a cut.
    Away,
}

/// A load, and commands that are given meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// Its name.
    pub name: &'static str,
    /// Whether pagevault is loaded.
    pub encrypted: bool,
    /// Whether pages have checksums.
    pub checksums: bool,
    /// Whether there is a master key at the beginning.
    pub keys: bool,
    /// Run before the journal begins.
    pub before: &'static [&'static str],
    /// Run one after the other.
    pub steps: &'static [Step],
    /// Between two steps.
    pub pause: Duration,
    /// Schemas whose relations cannot be read, as a list of SQL strings.
    pub passed_over: &'static str,
    /// What the server may log.
    pub log: &'static [&'static str],
    /// Lines of its configuration.
    pub conf: &'static [&'static str],
    /// Where keys of key groups come from.
    pub tenants: Tenants,
}

impl Named for Scenario {
    fn name(&self) -> &'static str {
        self.name
    }
}

impl Scenario {
    /// Runs it, and records what the server does: some clients and all steps, a stop in good order
    /// and a start, the clients again, and the end. With `witnesses`, a standby and a backup are
    /// recorded, too.
    ///
    /// # Errors
    /// When anything fails that is not intended to.
    pub fn record(&self, seed: u64, witnesses: bool) -> Result<Recorded> {
        let random = Random::new(seed);
        let cluster = self.prepare().with_context(|| format!("prepare {}", self.name))?;
        let mut recording = Recording::begin(cluster)?;
        if witnesses {
            recording.add_standby()?;
        }
        let first = self.load(&recording, &random.of(1), 1, self.steps)?;
        recording.cluster().stop(StopMode::Fast)?;
        recording.journal().mark(STOPPED)?;
        recording.cluster().start_server()?;
        self.load(&recording, &random.of(2), first, &[])?;
        recording.end()
    }

    fn prepare(&self) -> Result<Cluster> {
        let mut settings = Settings::default();
        for line in [
            "fsync = on",
            "shared_buffers = 1MB",
            "max_prepared_transactions = 20",
            "allow_in_place_tablespaces = on",
            "wal_keep_size = 1GB",
            "bgwriter_delay = 10ms",
            "bgwriter_lru_maxpages = 10",
            "log_checkpoints = off",
        ] {
            settings = settings.conf(line);
        }
        if !self.encrypted {
            settings = settings.without_preload();
        } else {
            settings = settings.conf("pagevault.rekey_threshold = 0");
        }
        if !self.checksums {
            settings = settings.without_checksums().conf("wal_log_hints = off");
        }
        settings = self.conf.iter().fold(settings, |settings, line| settings.conf(line));
        let settings = settings.wal_segment_size(1);
        let cluster = if self.encrypted && self.keys {
            Cluster::with_keys(&settings)?.0
        } else {
            let cluster = Cluster::start(&settings)?;
            if self.encrypted {
                cluster.key_file("keys", "main")?;
            }
            cluster
        };
        if self.tenants != Tenants::Absent {
            cluster.sql(&cluster.key_file(GROUP_KEYS, "main")?.add_provider("tenants"))?;
        }
        cluster.sql(&tables())?;
        for sql in self.before {
            run(&cluster, sql).with_context(|| format!("before: {sql}"))?;
        }
        if self.encrypted && self.keys {
            cluster.eventually(
                "SELECT count(*) FROM pagevault.rekey_jobs WHERE state IN ('waiting', 'running')",
                "0",
            )?;
        }
        cluster.stop(StopMode::Fast)?;
        Ok(cluster)
    }

    /// Clients, until all steps are done. Returns the number of the next transaction.
    fn load(
        &self,
        recording: &Recording,
        random: &Random,
        first: u64,
        steps: &[Step],
    ) -> Result<u64> {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let clients: Vec<_> = (1..=3)
                .map(|number| Worker {
                    number,
                    cluster: recording.cluster(),
                    journal: recording.journal(),
                    stop: &stop,
                    random: random.of(number),
                    first,
                    prepares: true,
                })
                .map(|worker| scope.spawn(|| worker.run()))
                .collect();
            // Some steps happen while the backup is taken, some after it.
            let backup = scope.spawn(|| match recording.has_standby() && !steps.is_empty() {
                true => back_up(recording),
                false => Ok(()),
            });
            let stepped = self.steps(recording, steps);
            let backed_up = backup.join().map_err(|_| anyhow::anyhow!("the backup panicked"));
            stop.store(true, Relaxed);
            let mut next = first;
            for client in clients {
                let end = client.join().map_err(|_| anyhow::anyhow!("a client panicked"))?;
                next = next.max(end?);
            }
            backed_up??;
            stepped.map(|()| next)
        })
    }

    fn steps(&self, recording: &Recording, steps: &[Step]) -> Result<()> {
        if !steps.is_empty() {
            note(recording, "-")?;
        }
        std::thread::sleep(Duration::from_millis(200));
        for (number, step) in steps.iter().enumerate() {
            point(recording, number)?;
            recording.journal().mark(&format!("s {number}"))?;
            let mut done = run(recording.cluster(), step.sql);
            while done.as_ref().is_err_and(is_deadlock) {
                done = run(recording.cluster(), step.sql);
            }
            if let Err(error) = done
                && step.may_fail.is_none_or(|code| !error.to_string().starts_with(code))
            {
                return Err(error.context(format!("step {number}")));
            }
            note(recording, &number.to_string())?;
            recording.journal().mark(&format!("d {number}"))?;
            std::thread::sleep(self.pause);
        }
        Ok(())
    }
}

/// Notes what the server says of itself after a step.
fn note(recording: &Recording, step: &str) -> Result<()> {
    let (facts, drift) = (Facts::of(recording.cluster())?, Facts::drift(recording.cluster())?);
    recording.journal().mark(&format!("f {step}\n{}", facts.joined(drift).written()))
}

fn run(cluster: &Cluster, sql: &str) -> Result<()> {
    let directory = cluster.directory().display().to_string();
    let (database, sql) = match sql.strip_prefix('@').and_then(|sql| sql.split_once(' ')) {
        Some((database, sql)) => (database, sql),
        None => ("postgres", sql),
    };
    let mut client = cluster.client_to(database)?;
    let sql = sql.replace("DIRECTORY", &directory);
    sql.split(";;").try_for_each(|sql| run_sql(&mut client, sql))
}

/// A restore point whose WAL is durable.
fn point(recording: &Recording, number: usize) -> Result<()> {
    recording.cluster().sql(&format!(
        "SELECT pg_create_restore_point('step {number}'); INSERT INTO points VALUES ({number})"
    ))?;
    recording.journal().mark(&format!("r step {number}"))
}

fn back_up(recording: &Recording) -> Result<()> {
    let target = recording.cluster().directory().join("backup");
    recording.cluster().base_backup_with(&target, &[])?;
    recording.journal().mark("k")
}
