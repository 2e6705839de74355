//! The servers to compare: one created for each variant, or two databases of an existing cluster.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Installation, Settings, StopMode, process};
use postgres::config::Host;
use postgres::{Client, NoTls};
use rustix::process::Pid;

use crate::accounts::{Account, Spent};
use crate::interrupt;
use crate::others::Other;
use crate::processes::postmaster_of;
use crate::variants::Variant;

/// Settings of a cell, by name.
pub(crate) type ServerSettings = BTreeMap<String, String>;

/// One server, or one database of an existing cluster, to measure.
pub(crate) struct Side {
    pub(crate) variant: Variant,
    config: postgres::Config,
    installation: Option<&'static Installation>,
    cluster: Option<Cluster>,
    /// The postmaster of an existing cluster on this machine.
    foreign_postmaster: Option<Pid>,
    account: Account,
    applied: ServerSettings,
    dataset: String,
}

impl Side {
    /// Creates a cluster for `variant` below `directory` and starts it.
    fn start(variant: Variant, directory: &Path) -> Result<Side> {
        let common = Settings::default()
            .within(directory)
            .conf("fsync = on")
            .conf("max_wal_size = '1GB'")
            .conf("checkpoint_timeout = '1h'")
            .conf("max_connections = 200")
            .conf("max_locks_per_transaction = 256")
            .conf("log_min_messages = warning")
            .conf("include_if_exists = 'bench.conf'");
        let settings = variant.settings(common);
        let cluster = Cluster::create(&settings)?;
        interrupt::watch(cluster.directory());
        cluster.start_server()?;
        if variant.has_library() {
            cluster.sql("CREATE EXTENSION pagevault")?;
        }
        if variant.seals() {
            let keys = cluster.key_file("keys", "main")?;
            cluster.sql(&keys.add_provider("local"))?;
            cluster.sql("SELECT pagevault.set_cluster_master_key('local', 'main')")?;
        }
        if variant.seals_wal() {
            cluster.set(&[("pagevault.wal_encryption", "on")])?;
            cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
        }
        let mut config = postgres::Config::new();
        config.host_path(cluster.directory()).user("postgres").dbname("postgres");
        let side = Side {
            variant,
            config,
            installation: Some(cluster.installation()),
            cluster: Some(cluster),
            foreign_postmaster: None,
            account: Account::open(),
            applied: ServerSettings::new(),
            dataset: String::new(),
        };
        if let Variant::Other(other) = variant {
            side.set_up(other)?;
        }
        Ok(side)
    }

    /// Runs the scripts of a server of the user's by psql. Each is followed by a restart: it can
    /// change settings that the next one needs.
    fn set_up(&self, other: &Other) -> Result<()> {
        for (name, script) in &other.scripts {
            let mut psql = self.program("psql");
            psql.args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", "-"]);
            run_with_input(&mut psql, script).with_context(|| name.clone())?;
            self.restart()?;
        }
        Ok(())
    }

    /// The cluster, if this program created it.
    pub(crate) fn cluster(&self) -> Option<&Cluster> {
        self.cluster.as_ref()
    }

    /// The cluster, or an error if it is not one that this program created.
    pub(crate) fn own_cluster(&self) -> Result<&Cluster> {
        self.cluster.as_ref().context("this needs servers of its own, not an existing cluster")
    }

    pub(crate) fn postmaster(&self) -> Option<Pid> {
        match &self.cluster {
            Some(cluster) => process::postmaster(&cluster.data_directory()),
            None => self.foreign_postmaster,
        }
    }

    /// What the server's processes have used, if they run on this machine.
    pub(crate) fn spent(&self) -> Option<Spent> {
        self.account.spent(self.postmaster()?)
    }

    /// Where that comes from.
    pub(crate) fn source(&self) -> Option<&'static str> {
        self.postmaster().map(|_| self.account.source())
    }

    pub(crate) fn client(&self) -> Result<Client> {
        self.config.connect(NoTls).with_context(|| format!("connect to {}", self.variant.name()))
    }

    /// Runs statements in a new session.
    pub(crate) fn sql(&self, statements: &str) -> Result<()> {
        run_sql(&mut self.client()?, statements)
    }

    /// The first column of the first row, as text.
    pub(crate) fn text(&self, query: &str) -> Result<String> {
        text(&mut self.client()?, query)
    }

    /// A client program that connects to this side.
    pub(crate) fn program(&self, name: &str) -> Command {
        let mut command = match self.installation {
            Some(installation) => installation.command(name),
            None => Command::new(name),
        };
        let address = self.address();
        command
            .env("PGHOST", address.host)
            .env("PGPORT", address.port)
            .env("PGUSER", address.user)
            .env("PGDATABASE", address.database);
        if let Some(password) = address.password {
            command.env("PGPASSWORD", password);
        }
        command
    }

    /// How to connect to this side, for programs that do not read the environment.
    pub(crate) fn address(&self) -> Address {
        let host = match self.config.get_hosts().first() {
            Some(Host::Tcp(name)) => name.clone(),
            Some(Host::Unix(path)) => path.to_string_lossy().into_owned(),
            None => "localhost".into(),
        };
        let user = self.config.get_user().unwrap_or("postgres").to_owned();
        Address {
            host,
            port: self.config.get_ports().first().unwrap_or(&5432).to_string(),
            database: self.config.get_dbname().unwrap_or(&user).to_owned(),
            user,
            password: self
                .config
                .get_password()
                .map(|password| String::from_utf8_lossy(password).into_owned()),
        }
    }

    /// Restarts the server with these settings, if it does not have them. Existing clusters keep
    /// theirs.
    pub(crate) fn configure(&mut self, settings: &ServerSettings) -> Result<()> {
        let Some(cluster) = &self.cluster else { return Ok(()) };
        let running = process::postmaster(&cluster.data_directory()).is_some();
        if *settings == self.applied && running {
            return Ok(());
        }
        let lines: String =
            settings.iter().map(|(name, value)| format!("{name} = '{value}'\n")).collect();
        std::fs::write(cluster.data_directory().join("bench.conf"), lines)?;
        if running {
            cluster.stop(StopMode::Fast)?;
        }
        cluster.start_server()?;
        self.applied.clone_from(settings);
        Ok(())
    }

    /// Stops and starts the server, which empties its shared buffers.
    pub(crate) fn restart(&self) -> Result<()> {
        self.own_cluster()?.restart()
    }

    /// Ensures that the database contains this data set and nothing else. `checked` names a table
    /// that must be encrypted exactly if the variant says so.
    pub(crate) fn dataset(
        &mut self,
        name: &str,
        checked: &str,
        load: impl FnOnce(&Side) -> Result<()>,
    ) -> Result<()> {
        if self.dataset == name {
            return Ok(());
        }
        self.dataset.clear();
        // In several transactions, because each dropped table stays locked until the end of its
        // transaction.
        self.sql(
            "DO $$ DECLARE relation regclass; n int = 0; BEGIN
                FOR relation IN SELECT oid FROM pg_class
                    WHERE relnamespace = to_regnamespace('public') AND relkind = 'r' LOOP
                    EXECUTE format('DROP TABLE %s CASCADE', relation);
                    n := n + 1;
                    IF n % 500 = 0 THEN COMMIT; END IF;
                END LOOP; END $$",
        )?;
        self.sql("DROP SCHEMA IF EXISTS public CASCADE")?;
        self.sql("CREATE SCHEMA public; GRANT ALL ON SCHEMA public TO PUBLIC; CHECKPOINT")?;
        load(self)?;
        self.sql("CHECKPOINT")?;
        if self.variant.has_library() && !checked.is_empty() {
            let sealed = self.text(&format!("SELECT pagevault.is_encrypted('{checked}')"))? == "t";
            ensure!(
                sealed == self.variant.seals(),
                "{}: {checked} is {}sealed on disk",
                self.variant.name(),
                if sealed { "" } else { "not " }
            );
        }
        name.clone_into(&mut self.dataset);
        Ok(())
    }

    /// Marks the database as containing something other than a data set.
    pub(crate) fn forget_dataset(&mut self) {
        self.dataset.clear();
    }
}

/// Host (or socket directory), port and so on of a side.
pub(crate) struct Address {
    pub(crate) host: String,
    pub(crate) port: String,
    pub(crate) user: String,
    pub(crate) database: String,
    pub(crate) password: Option<String>,
}

/// All sides; the first is the baseline.
pub(crate) struct Sides {
    pub(crate) all: Vec<Side>,
    existing: Option<postgres::Config>,
}

const DATABASES: [(Variant, &str); 2] =
    [(Variant::Plain, "pagevault_bench_plain"), (Variant::Encrypted, "pagevault_bench_encrypted")];

impl Sides {
    /// One server for each variant.
    pub(crate) fn own(
        variants: &[Variant],
        directory: &Path,
        mut started: impl FnMut(&str),
    ) -> Result<Sides> {
        let mut all = Vec::new();
        for variant in variants {
            started(variant.name());
            let side = Side::start(*variant, directory)
                .with_context(|| format!("start the server {}", variant.name()))?;
            all.push(side);
        }
        Ok(Sides { all, existing: None })
    }

    /// Two databases of an existing cluster, one with encryption.
    pub(crate) fn existing(
        connection: &str,
        installation: Option<&'static Installation>,
    ) -> Result<Sides> {
        let base = postgres::Config::from_str(connection).context("the connection string")?;
        let mut client = base.connect(NoTls).context("connect to the existing cluster")?;
        let loaded = text(&mut client, "SHOW shared_preload_libraries")?;
        ensure!(
            loaded.contains("pagevault"),
            "that server does not load pagevault: its shared_preload_libraries is {loaded:?}"
        );
        let taken = "SELECT count(*) FROM pg_database WHERE datname LIKE 'pagevault\\_bench\\_%'";
        if text(&mut client, taken)? != "0" {
            bail!(
                "there are databases pagevault_bench_plain or _encrypted already, of an earlier run or of \
                 somebody else's: drop them first"
            );
        }
        let pid = text(&mut client, "SELECT pg_backend_pid()")?.parse()?;
        let local = matches!(base.get_hosts().first(), Some(Host::Unix(_)));
        let foreign_postmaster = if local { postmaster_of(pid) } else { None };
        let mut sides = Sides { all: Vec::new(), existing: Some(base.clone()) };
        for (variant, database) in DATABASES {
            run_sql(&mut client, &format!("CREATE DATABASE {database}"))?;
            let setting = if variant.seals() { "on" } else { "off" };
            let mut config = base.clone();
            config.dbname(database);
            sides.all.push(Side {
                variant,
                config,
                installation,
                cluster: None,
                foreign_postmaster,
                account: Account::of_another(),
                applied: ServerSettings::new(),
                dataset: String::new(),
            });
            run_sql(
                &mut client,
                &format!("ALTER DATABASE {database} SET pagevault.default_encryption = {setting}"),
            )?;
            sides.all[sides.all.len() - 1].sql("CREATE EXTENSION pagevault")?;
        }
        Ok(sides)
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.all.iter().map(|side| side.variant.name().to_owned()).collect()
    }

    pub(crate) fn are_own(&self) -> bool {
        self.existing.is_none()
    }

    /// The servers on which relations are encrypted and nothing else, for work that only they can
    /// do: their places in [`Sides::all`].
    pub(crate) fn sealing_relations(&self) -> Result<Vec<usize>> {
        let places: Vec<_> = (0..self.all.len())
            .filter(|&place| {
                matches!(self.all[place].variant, Variant::Relations | Variant::RelationsXts)
            })
            .collect();
        ensure!(!places.is_empty(), "this needs the variant `relations`, or `relations-xts`");
        Ok(places)
    }

    /// The first of them.
    pub(crate) fn sealing(&mut self) -> Result<&mut Side> {
        let places = self.sealing_relations()?;
        Ok(&mut self.all[places[0]])
    }

    /// Stops the servers; returns their warnings and errors.
    pub(crate) fn finish(mut self) -> Vec<String> {
        let mut complaints = Vec::new();
        for side in self.all.drain(..) {
            let name = side.variant.name();
            if let Some(Err(error)) = side.cluster.map(Cluster::finish) {
                complaints.push(format!("server {name}: {error:#}"));
            }
        }
        complaints
    }
}

impl Drop for Sides {
    fn drop(&mut self) {
        let Some(base) = &self.existing else { return };
        let dropped = base.connect(NoTls).map(|mut client| {
            DATABASES.map(|(_, name)| {
                client.batch_execute(&format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
            })
        });
        if !dropped.is_ok_and(|each| each.iter().all(Result::is_ok)) {
            eprintln!(
                "pagevault-bench: drop the databases pagevault_bench_plain and _encrypted yourself"
            );
        }
    }
}

/// Runs a program that reads this.
fn run_with_input(command: &mut Command, input: &str) -> Result<()> {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    if let Some(mut pipe) = child.stdin.take() {
        // If the program ends early, its message says more than the broken pipe.
        let _ = pipe.write_all(input.as_bytes());
    }
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

/// Runs a client program on a side and returns what it printed.
pub(crate) fn output(side: &Side, program: &str, arguments: &[&str]) -> Result<String> {
    run(side.program(program).args(arguments))
}
