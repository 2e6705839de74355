//! A server with the library under it, and what it has acknowledged.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::{Cluster, KeyFile, Settings, SqlError, StopMode, process};
use postgres::Client;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use crate::catalogue::{ENCRYPTED_WAL, Scenario};
use crate::injector::Injector;
use crate::messages::PREFIX;

/// No statement takes longer: one that does hangs.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) cluster: Cluster,
    pub(crate) injector: Injector,
    pub(crate) keys: KeyFile,
    /// The key of the group that the table `g` is in.
    group_keys: Option<KeyFile>,
    /// Without pagevault.
    pub(crate) stock: bool,
    /// Rows of the ledger that were acknowledged: 1 to this number.
    pub(crate) acknowledged: u64,
}

/// How a statement ended.
#[derive(Debug)]
pub(crate) enum Ending {
    Done,
    Refused(SqlError),
    /// The connection broke.
    Lost(String),
}

impl std::fmt::Display for Ending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Ending::Done => f.write_str("it succeeded"),
            Ending::Refused(error) => write!(f, "{error}"),
            Ending::Lost(cause) => f.write_str(cause),
        }
    }
}

/// What the postmaster says before it makes shared memory anew.
const REINITIALIZING: &str = "all server processes terminated; reinitializing";

const TABLES: &str = "
    CREATE TABLE ledger (n bigint PRIMARY KEY, pad text);
    CREATE TABLE t (id int PRIMARY KEY, v int, pad text);
    INSERT INTO t SELECT i, 1, repeat('x', 100) FROM generate_series(1, 2000) i;";

impl Server {
    /// A server at work.
    pub(crate) fn start(scenario: &Scenario) -> Result<Server> {
        let Scenario { stock, conf, .. } = *scenario;
        let with_keys = scenario.keys && !stock;
        let mut settings = Settings::default();
        if stock {
            settings = settings.without_preload();
        }
        for line in [
            "fsync = on",
            "shared_buffers = 4MB",
            "restart_after_crash = on",
            "wal_level = logical",
            "max_prepared_transactions = 2",
            "pagevault.keyring_timeout = '10s'",
            "pagevault.unlock_timeout = '5s'",
            "wal_recycle = off",
            PREFIX,
        ]
        .iter()
        .chain(conf)
        {
            settings = settings.conf(line);
        }
        let mut cluster = Cluster::create(&settings)?;
        cluster.without_witness("the judges of injected errors look at the server itself");
        let keys = cluster.key_file("keys", "main")?;
        let injector = Injector::under(&mut cluster, keys.path())?;
        cluster.keep_quiet();
        cluster.start_server()?;
        if !stock {
            cluster.sql("CREATE EXTENSION pagevault")?;
        }
        cluster.sql(TABLES)?;
        if with_keys {
            cluster.sql(&keys.add_provider("local"))?;
            cluster.sql("SELECT pagevault.set_cluster_master_key('local', 'main')")?;
            cluster.sql("SELECT pagevault.encrypt('ledger'), pagevault.encrypt('t')")?;
        }
        if with_keys && conf.contains(&ENCRYPTED_WAL) {
            cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
        }
        let group_keys = scenario.outage.then(|| grouped(&cluster)).transpose()?;
        cluster.sql("CHECKPOINT")?;
        Ok(Server { cluster, injector, keys, group_keys, stock, acknowledged: 0 })
    }

    /// The provider of the key group does not answer any more.
    pub(crate) fn begin_outage(&self) -> Result<()> {
        self.group_keys.as_ref().map_or(Ok(()), KeyFile::take_away)
    }

    /// It answers. What recovery has written under interim keys gets new data keys, and is as it
    /// was.
    pub(crate) fn end_outage(&self) -> Result<()> {
        let Some(keys) = &self.group_keys else { return Ok(()) };
        keys.bring_back()?;
        self.cluster.sql("SELECT pagevault.unlock()")?;
        // A launcher that could not look looks again after a minute.
        self.cluster.wait_for_no_interim_marks(2 * PATIENCE)?;
        for plan in ["enable_seqscan = on", "enable_seqscan = off"] {
            let found = self.cluster.text(&format!(
                "SET {plan}; SELECT count(*) || ' ' || sum(v) FROM g WHERE id > 0"
            ))?;
            ensure!(found == "2000 2000", "g: {found} with {plan}");
        }
        Ok(())
    }

    /// Adds a row to the ledger that must be there from now on.
    pub(crate) fn acknowledge(&mut self) -> Result<()> {
        let n = self.acknowledged + 1;
        self.cluster.sql(&format!("INSERT INTO ledger VALUES ({n}, repeat('p', 300))"))?;
        self.acknowledged = n;
        Ok(())
    }

    /// Runs statements, separated by `;;`, in one session.
    pub(crate) fn run(&self, sql: &str) -> Result<Ending> {
        let statements = sql.replace("DIRECTORY", &self.cluster.directory().display().to_string());
        let mut client = match self.cluster.client() {
            Ok(client) => client,
            Err(error) => return Ok(Ending::Lost(format!("{error:#}"))),
        };
        let (send, receive) = mpsc::channel();
        std::thread::spawn(move || {
            let ending = statements.split(";;").try_for_each(|sql| client.batch_execute(sql));
            let ending = match ending {
                Ok(()) => Ending::Done,
                Err(error) => match SqlError::of(&error) {
                    // The end of the session, or of the server.
                    Some(error) if !error.sqlstate.starts_with("57P") => Ending::Refused(error),
                    _ => Ending::Lost(error.to_string()),
                },
            };
            let _ = send.send(ending);
        });
        receive.recv_timeout(PATIENCE).context("the statement hangs")
    }

    /// Statements that must succeed.
    pub(crate) fn must(&self, sql: &str) -> Result<()> {
        match self.run(sql)? {
            Ending::Done => Ok(()),
            other => bail!("{other} in: {sql}"),
        }
    }

    /// Waits until the server, which may be recovering from a crash, answers; starts it if it has
    /// ended. Returns whether it had.
    pub(crate) fn revive(&self) -> Result<bool> {
        let deadline = Instant::now() + PATIENCE;
        let mut quiet = 0;
        loop {
            if self.is_down() {
                self.cluster.kill()?;
                self.cluster.start_server().context("the start without errors")?;
                return Ok(true);
            }
            // A server that is about to crash may still admit a session.
            if self.cluster.text("SELECT 1").is_ok() {
                quiet += 1;
                if quiet > 1 {
                    return Ok(false);
                }
            } else {
                quiet = 0;
            }
            ensure!(Instant::now() < deadline, "the server does not come back");
            std::thread::sleep(Duration::from_millis(30));
        }
    }

    pub(crate) fn is_down(&self) -> bool {
        match process::postmaster(&self.cluster.data_directory()) {
            None => true,
            Some(pid) => !is_alive(pid),
        }
    }

    /// A session, and the process that serves it.
    pub(crate) fn session(&self) -> Result<(Client, Pid)> {
        let mut client = self.cluster.client()?;
        let pid = text(&mut client, "SELECT pg_backend_pid()")?;
        Ok((client, Pid::from_raw(pid.parse()?).context("a process")?))
    }

    /// Kills a process of the server, and waits until that has restarted itself or ended.
    pub(crate) fn crash(&self, (mut client, pid): (Client, Pid)) -> Result<()> {
        let from = self.cluster.log().len();
        kill_process(pid, Signal::KILL)?;
        // Ends with the process.
        let _ = run_sql(&mut client, "SELECT pg_sleep(5)");
        let deadline = Instant::now() + PATIENCE;
        // Until the postmaster knows of it, it admits sessions.
        let restarts =
            || self.cluster.log().get(from..).map_or(0, |log| log.matches(REINITIALIZING).count());
        let is_over = || self.is_down() || restarts() > 0 && self.cluster.text("SELECT 1").is_ok();
        while !is_over() {
            ensure!(restarts() < 5, "it crashes again and again");
            ensure!(Instant::now() < deadline, "the restart after a crash hangs");
            std::thread::sleep(Duration::from_millis(30));
        }
        Ok(())
    }

    pub(crate) fn restart(&self) -> Result<()> {
        self.cluster.stop(StopMode::Fast)?;
        self.cluster.start_server()
    }
}

/// A table in a key group.
fn grouped(cluster: &Cluster) -> Result<KeyFile> {
    let keys = cluster.key_file("group_keys", "main")?;
    cluster.sql(&keys.add_provider("tenants"))?;
    cluster.sql(
        "SELECT pagevault.create_key_group('acme');
         SELECT pagevault.set_key_group_master_key('acme', 'tenants', 'main');
         CREATE TABLE g (LIKE t INCLUDING ALL);
         INSERT INTO g SELECT * FROM t",
    )?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE g IS 'encrypted key_group=acme'")?;
    Ok(keys)
}

/// A dead process that nobody has reaped is a zombie.
fn is_alive(pid: Pid) -> bool {
    let stat = format!("/proc/{}/stat", pid.as_raw_nonzero());
    let is_zombie = std::fs::read_to_string(stat)
        .is_ok_and(|stat| stat.contains(") Z ") || stat.contains(") X "));
    test_kill_process(pid).is_ok() && !is_zombie
}
