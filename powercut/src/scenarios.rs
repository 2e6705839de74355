//! What happens while the journal is written: everything that keys and rekeying can do.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context, Result};
use pagevault_powercut_disk::Random;
use pagevault_tests::cluster::run_sql;
use pagevault_tests::{Cluster, Settings, StopMode};

use crate::recording::{Recorded, Recording};
use crate::workload::{Worker, tables};

/// What must be true once a step was acknowledged, until another one about the same begins.
#[derive(Clone, Copy, Debug)]
pub struct Promise {
    /// Steps with the same subject undo one another.
    pub about: &'static str,
    /// A query that answers `t`.
    pub holds: &'static str,
}

/// A command of the scenario; each has a session of its own, and errors do not matter.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Statements, not in one transaction: they are separated by `;;`.
    pub sql: &'static str,
    /// What is true afterwards.
    pub promise: Option<Promise>,
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
    pub before: &'static str,
    /// Run one after the other.
    pub steps: &'static [Step],
    /// Between two steps.
    pub pause: Duration,
    /// Schemas whose relations cannot be read, as a list of SQL strings.
    pub passed_over: &'static str,
    /// What the server may log.
    pub log: &'static [&'static str],
}

const fn step(sql: &'static str) -> Step {
    Step { sql, promise: None }
}

const fn that(sql: &'static str, about: &'static str, holds: &'static str) -> Step {
    Step { sql, promise: Some(Promise { about, holds }) }
}

const ORDINARY: Scenario = Scenario {
    name: "",
    encrypted: true,
    checksums: true,
    keys: true,
    before: "",
    steps: &[],
    pause: Duration::from_millis(30),
    passed_over: "'shreds'",
    log: &[],
};

const REKEY: &[Step] = &[
    step("SELECT pagevault.encrypt('t1')"),
    step("SELECT pagevault.rotate_data_key('t2')"),
    step("CHECKPOINT"),
    step("VACUUM t2"),
    step("SELECT pagevault.decrypt('t3')"),
    step("CHECKPOINT"),
    step("SELECT count(*) FROM t1, ledger WHERE id = n"),
    step("SELECT pagevault.rotate_data_key('t1')"),
    step("VACUUM"),
    step("SELECT pagevault.encrypt('t3')"),
    step("CHECKPOINT"),
    step("SELECT pagevault.rotate_all_data_keys()"),
    step("CHECKPOINT"),
    step("SELECT pagevault.decrypt('t1')"),
];

/// What happens without pagevault, too.
const STOCK: &[Step] = &[
    step("CHECKPOINT"),
    step(
        "CREATE UNLOGGED TABLE u (id int PRIMARY KEY); INSERT INTO u SELECT generate_series(1, 999)",
    ),
    step("VACUUM t2"),
    step("VACUUM FULL t1"),
    step("CREATE TABLE x AS SELECT * FROM t1;; CREATE INDEX ON x (v);; TRUNCATE x"),
    step("CHECKPOINT"),
    step("REINDEX TABLE t3"),
    step("DROP TABLE u, x"),
    step("CREATE DATABASE d STRATEGY file_copy;; CREATE DATABASE e"),
    step("DROP DATABASE d"),
    step("VACUUM"),
    step("CHECKPOINT"),
];

/// All of them.
pub const ALL: &[Scenario] = &[
    Scenario { name: "stock", encrypted: false, keys: false, steps: STOCK, ..ORDINARY },
    Scenario {
        name: "stock-without-checksums",
        encrypted: false,
        keys: false,
        checksums: false,
        steps: STOCK,
        ..ORDINARY
    },
    Scenario {
        name: "rekey",
        before: "SELECT pagevault.encrypt('t2'); SELECT pagevault.encrypt('t3')",
        steps: REKEY,
        ..ORDINARY
    },
    Scenario {
        name: "rekey-without-checksums",
        checksums: false,
        before: "SELECT pagevault.encrypt('t2'); SELECT pagevault.encrypt('t3')",
        steps: REKEY,
        ..ORDINARY
    },
];

/// The scenario of a name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Scenario> {
    ALL.iter().find(|scenario| scenario.name == name)
}

impl Scenario {
    /// Runs it, and records what the server does: some clients and all steps, a stop in good order
    /// and a start, the clients again, and the end.
    ///
    /// # Errors
    /// When anything but a step fails.
    pub fn record(&self, seed: u64) -> Result<Recorded> {
        let random = Random::new(seed);
        let cluster = self.prepare().with_context(|| format!("prepare {}", self.name))?;
        let recording = Recording::begin(cluster)?;
        let first = self.load(&recording, &random.of(1), 1, self.steps)?;
        recording.cluster().stop(StopMode::Fast)?;
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
        cluster.sql(&tables())?;
        for sql in self.before.split(';').filter(|sql| !sql.trim().is_empty()) {
            cluster.sql(sql)?;
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
            let stepped = self.steps(recording, steps);
            stop.store(true, Relaxed);
            let mut next = first;
            for client in clients {
                let end = client.join().map_err(|_| anyhow::anyhow!("a client panicked"))?;
                next = next.max(end?);
            }
            stepped.map(|()| next)
        })
    }

    fn steps(&self, recording: &Recording, steps: &[Step]) -> Result<()> {
        std::thread::sleep(Duration::from_millis(200));
        let directory = recording.cluster().directory().display().to_string();
        for (number, step) in steps.iter().enumerate() {
            let mut client = recording.cluster().client()?;
            recording.journal().mark(&format!("s {number}"))?;
            let sql = step.sql.replace("DIRECTORY", &directory);
            let done = sql.split(";;").try_for_each(|sql| run_sql(&mut client, sql));
            match done {
                Ok(()) => recording.journal().mark(&format!("d {number}"))?,
                Err(error) => recording.journal().mark(&format!("e {number} {error:#}"))?,
            }
            std::thread::sleep(self.pause);
        }
        Ok(())
    }
}
