//! A temporary cluster: data directory, server, connections and log.
//!
//! `PAGEVAULT_TEST_CONF` contains lines for `postgresql.conf`, separated by semicolons, for all
//! clusters (`tools/test-hostile`).

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};

use anyhow::{Context, Result, bail, ensure};
use postgres::{Client, NoTls, SimpleQueryMessage};
use tempfile::TempDir;

use crate::initdb::initdb;
use crate::{DataFile, Installation, KeyFile, SqlError, log, process};

/// How to create a cluster.
#[derive(Clone, Debug)]
pub struct Settings {
    checksums: bool,
    preload: bool,
    wal_segment_size: Option<u32>,
    within: Option<PathBuf>,
    conf: Vec<String>,
    installation: Option<&'static Installation>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            checksums: true,
            preload: true,
            wal_segment_size: None,
            within: None,
            conf: Vec::new(),
            installation: None,
        }
    }
}

impl Settings {
    /// A cluster without page checksums.
    #[must_use]
    pub fn without_checksums(mut self) -> Self {
        self.checksums = false;
        self
    }

    /// A cluster whose `shared_preload_libraries` is empty.
    #[must_use]
    pub fn without_preload(mut self) -> Self {
        self.preload = false;
        self
    }

    /// A cluster whose WAL segments have this many MB.
    #[must_use]
    pub fn wal_segment_size(mut self, megabytes: u32) -> Self {
        self.wal_segment_size = Some(megabytes);
        self
    }

    /// A cluster below this directory instead of the system's directory for temporary files. The
    /// server user needs access to it.
    #[must_use]
    pub fn within(mut self, directory: &Path) -> Self {
        self.within = Some(directory.to_owned());
        self
    }

    /// A cluster of an installation other than the one under test.
    #[must_use]
    pub fn on(mut self, installation: &'static Installation) -> Self {
        self.installation = Some(installation);
        self
    }

    /// One more line for `postgresql.conf`.
    #[must_use]
    pub fn conf(mut self, line: &str) -> Self {
        self.conf.push(line.to_owned());
        self
    }
}

/// How to stop a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopMode {
    /// Disconnects clients, writes a checkpoint.
    Fast,
    /// Ends all processes without a checkpoint; recovery follows.
    Immediate,
}

/// A data directory with its server. Dropping it kills the server and removes the directory
/// (`PAGEVAULT_KEEP=1` keeps it).
#[derive(Debug)]
pub struct Cluster {
    installation: &'static Installation,
    directory: TempDir,
    allowed: Vec<String>,
    environment: Vec<(String, OsString)>,
    finished: bool,
    /// The data directory as `initdb` made it.
    pub(crate) origin: Option<PathBuf>,
    pub(crate) killed: AtomicBool,
    pub(crate) without_witness: OnceLock<&'static str>,
    pub(crate) follower: Mutex<Option<Box<Cluster>>>,
}

impl Cluster {
    /// Creates a cluster and starts its server.
    ///
    /// # Errors
    /// When `initdb` or the start fails; the server log is in the message.
    pub fn start(settings: &Settings) -> Result<Cluster> {
        let cluster = Cluster::create(settings)?;
        cluster.start_server()?;
        Ok(cluster)
    }

    /// Creates a cluster whose server runs with pagevault, a key file with the key `main`, the
    /// provider `local` for it, and a master key of the cluster.
    ///
    /// # Errors
    /// When any of these steps fails.
    pub fn with_keys(settings: &Settings) -> Result<(Cluster, KeyFile)> {
        let cluster = Cluster::start(settings)?;
        let keys = cluster.key_file("keys", "main")?;
        cluster.sql("CREATE EXTENSION pagevault")?;
        cluster.sql(&keys.add_provider("local"))?;
        cluster.sql("SELECT pagevault.set_cluster_master_key('local', 'main')")?;
        Ok((cluster, keys))
    }

    /// Creates a cluster without starting its server.
    ///
    /// # Errors
    /// When `initdb` fails.
    pub fn create(settings: &Settings) -> Result<Cluster> {
        let installation = settings.installation.map_or_else(Installation::get, Ok)?;
        let mut builder = tempfile::Builder::new();
        builder.prefix("pagevault-");
        let directory = match &settings.within {
            Some(within) => builder.tempdir_in(within)?,
            None => builder.tempdir()?,
        };
        installation.give(directory.path())?;
        let mut cluster = Cluster::in_directory(installation, directory);
        let data = cluster.data_directory();
        cluster.origin =
            Some(initdb(installation, &data, settings.checksums, settings.wal_segment_size)?);
        // Each start initializes the memory for connections and WAL buffers.
        cluster.append_conf(&format!(
            "listen_addresses = ''\n\
             unix_socket_directories = '{}'\n\
             fsync = off\n\
             max_connections = 40\n\
             wal_buffers = 1MB\n\
             max_wal_size = '4GB'\n\
             wal_keep_size = '32GB'\n\
             autovacuum = off\n\
             jit = off\n\
             log_line_prefix = '%m [%p] %b '\n\
             shared_preload_libraries = '{}'",
            cluster.directory.path().display(),
            if settings.preload { "pagevault" } else { "" }
        ))?;
        // What a test needs comes after what a run of tests is to try.
        if let Ok(tried) = std::env::var("PAGEVAULT_TEST_CONF") {
            cluster.append_conf(&tried.replace(';', "\n"))?;
        }
        for line in &settings.conf {
            if line.contains("wal_level = minimal") {
                cluster.without_witness("WAL does not contain everything");
            }
            cluster.append_conf(line)?;
        }
        Ok(cluster)
    }

    pub(crate) fn in_directory(installation: &'static Installation, directory: TempDir) -> Cluster {
        Cluster {
            installation,
            directory,
            allowed: Vec::new(),
            environment: Vec::new(),
            finished: false,
            origin: None,
            killed: AtomicBool::new(false),
            without_witness: OnceLock::new(),
            follower: Mutex::new(None),
        }
    }

    /// The PostgreSQL installation of this cluster.
    #[must_use]
    pub fn installation(&self) -> &'static Installation {
        self.installation
    }

    /// The directory of the data directory, the socket and the log. The server user owns it.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// `PGDATA`.
    #[must_use]
    pub fn data_directory(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    /// Creates a key file next to the data directory, with one key.
    ///
    /// # Errors
    /// When `pagevault-keyring` fails.
    pub fn key_file(&self, file: &str, key: &str) -> Result<KeyFile> {
        KeyFile::create(self.installation, &self.directory.path().join(file), key)
    }

    /// Adds lines to `postgresql.conf`; the last line for a setting wins.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn append_conf(&self, lines: &str) -> Result<()> {
        let path = self.data_directory().join("postgresql.conf");
        let mut text = std::fs::read_to_string(&path)?;
        text.push_str(lines);
        text.push('\n');
        std::fs::write(&path, text).context("write postgresql.conf")
    }

    /// Creates a tablespace outside the data directory. Returns its directory.
    ///
    /// # Errors
    /// When it cannot.
    pub fn make_tablespace(&self, name: &str) -> Result<PathBuf> {
        let directory = self.directory().join(name);
        std::fs::create_dir(&directory)?;
        self.installation().give(&directory)?;
        self.sql(&format!("CREATE TABLESPACE {name} LOCATION '{}'", directory.display()))?;
        Ok(directory)
    }

    /// Permits warnings and errors in the server log that contain `text`.
    pub fn allow_log(&mut self, text: &str) {
        self.allowed.push(text.to_owned());
    }

    /// The server log so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// One more variable in the environment of the server, when it is started next.
    pub fn set_environment(&mut self, name: &str, value: impl Into<OsString>) {
        self.environment.retain(|(known, _)| known != name);
        self.environment.push((name.to_owned(), value.into()));
    }

    /// Prints no log when it is dropped unfinished.
    pub fn keep_quiet(&mut self) {
        self.finished = true;
    }

    pub(crate) fn environment(&self) -> &[(String, OsString)] {
        &self.environment
    }

    pub(crate) fn log_path(&self) -> PathBuf {
        self.directory.path().join("log")
    }

    /// A connection to the database `postgres`.
    ///
    /// # Errors
    /// When the server refuses the connection.
    pub fn client(&self) -> Result<Client> {
        self.client_to("postgres")
    }

    /// A connection to the database `name`.
    ///
    /// # Errors
    /// When the server refuses the connection.
    pub fn client_to(&self, name: &str) -> Result<Client> {
        postgres::Config::new()
            .host_path(self.directory.path())
            .user("postgres")
            .dbname(name)
            .connect(NoTls)
            .with_context(|| format!("connect to {name}"))
    }

    /// Runs statements in a new connection.
    ///
    /// # Errors
    /// When one of them fails; the message contains the server's error.
    pub fn sql(&self, statements: &str) -> Result<()> {
        run_sql(&mut self.client()?, statements)
    }

    /// First column of the first row of `query`, as text; empty for NULL.
    ///
    /// # Errors
    /// When the query fails or has no row.
    pub fn text(&self, query: &str) -> Result<String> {
        text(&mut self.client()?, query)
    }

    /// Runs statements that must fail, and returns the error.
    ///
    /// # Errors
    /// When they succeed, or fail for a reason outside the server.
    pub fn error(&self, statements: &str) -> Result<SqlError> {
        expect_error(&mut self.client()?, statements)
    }

    /// Changes settings in the running server; values as SHOW displays them. Returns as soon as new
    /// sessions have them.
    ///
    /// # Errors
    /// When the server rejects one.
    pub fn set(&self, settings: &[(&str, &str)]) -> Result<()> {
        for (name, value) in settings {
            self.sql(&format!("ALTER SYSTEM SET {name} = '{value}'"))?;
        }
        self.sql("SELECT pg_reload_conf()")?;
        for (name, value) in settings {
            self.eventually(&format!("SHOW {name}"), value)?;
        }
        Ok(())
    }

    /// The files of one relation on disk, all forks and segments, ordered by name. They do not
    /// contain changes that are only in shared buffers: run CHECKPOINT first.
    ///
    /// # Errors
    /// When there is no such relation or it has no storage.
    pub fn files(&self, relation: &str) -> Result<Vec<DataFile>> {
        DataFile::find(&self.data_directory().join(self.relation_path(relation)?))
    }

    /// The first file of a relation, relative to the data directory.
    ///
    /// # Errors
    /// When there is no such relation or it has no storage.
    pub fn relation_path(&self, relation: &str) -> Result<PathBuf> {
        let path = self.text(&format!("SELECT pg_relation_filepath('{relation}')"))?;
        ensure!(!path.is_empty(), "{relation} has no storage");
        Ok(path.into())
    }

    /// The files of a table, its indexes, its TOAST table and the TOAST index.
    ///
    /// # Errors
    /// As [`Cluster::files`].
    pub fn family_files(&self, table: &str) -> Result<Vec<DataFile>> {
        let mut client = self.client()?;
        let members = column(
            &mut client,
            &format!(
                "WITH tables AS (
                     SELECT oid FROM pg_class WHERE oid = '{table}'::regclass
                     UNION ALL
                     SELECT reltoastrelid FROM pg_class
                     WHERE oid = '{table}'::regclass AND reltoastrelid <> 0)
                 SELECT oid::regclass FROM tables
                 UNION ALL
                 SELECT indexrelid::regclass FROM pg_index JOIN tables ON indrelid = oid"
            ),
        )?;
        let mut files = Vec::new();
        for member in members {
            files.extend(self.files(&member)?);
        }
        Ok(files)
    }

    /// From the next start on, the server is that of another installation.
    pub fn run_by(&mut self, installation: &'static Installation) {
        self.installation = installation;
    }

    /// With another's environment, expectations of the log, and reasons.
    pub(crate) fn like(mut self, other: &Cluster) -> Cluster {
        self.installation = other.installation;
        self.allowed.clone_from(&other.allowed);
        self.environment.clone_from(&other.environment);
        self
    }

    pub(crate) fn was_killed(&self) -> bool {
        self.killed.load(Relaxed)
    }

    /// Ends the test: stops the server cleanly and checks its log. If it was killed meanwhile, a
    /// restore replays all of its WAL, and must come to the same state (module `crashed`).
    ///
    /// # Errors
    /// When the server does not stop, or logged a warning that was not permitted, or the restore
    /// does not agree.
    pub fn finish(mut self) -> Result<()> {
        self.end_with_witness()?;
        self.finished = true;
        Ok(())
    }

    /// As [`Cluster::finish`], without the restore, and leaves it to the caller.
    ///
    /// # Errors
    /// As [`Cluster::finish`].
    pub fn end(&self) -> Result<()> {
        if process::postmaster(&self.data_directory()).is_some() {
            self.stop(StopMode::Fast)?;
        }
        let log = self.log();
        let alarms = log::alarms(&log, &self.allowed);
        ensure!(alarms.is_empty(), "unexpected in the server log:\n{}", alarms.join("\n"));
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = process::kill_all(&self.data_directory());
        if !self.finished {
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            eprintln!("--- end of the server log");
            for line in lines.iter().skip(lines.len().saturating_sub(60)) {
                eprintln!("{line}");
            }
        }
        if std::env::var_os("PAGEVAULT_KEEP").is_some() {
            self.directory.disable_cleanup(true);
            eprintln!("kept {}", self.directory.path().display());
        }
    }
}

/// Runs statements; the error contains the server's message.
///
/// # Errors
/// When one of them fails.
pub fn run_sql(client: &mut Client, statements: &str) -> Result<()> {
    client.batch_execute(statements).map_err(|error| described(&error, statements))
}

/// First column of the first row, as text; empty for NULL.
///
/// # Errors
/// When the query fails or has no row.
pub fn text(client: &mut Client, query: &str) -> Result<String> {
    column(client, query)?.into_iter().next().with_context(|| format!("no row: {query}"))
}

/// First column of every row, as text; empty for NULL.
///
/// # Errors
/// When the query fails.
pub fn column(client: &mut Client, query: &str) -> Result<Vec<String>> {
    let messages = client.simple_query(query).map_err(|error| described(&error, query))?;
    Ok(messages
        .iter()
        .filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row.get(0).unwrap_or_default().to_owned()),
            _ => None,
        })
        .collect())
}

/// Runs statements that must fail, and returns the error.
///
/// # Errors
/// When they succeed, or fail for a reason outside the server.
pub fn expect_error(client: &mut Client, statements: &str) -> Result<SqlError> {
    match client.batch_execute(statements) {
        Ok(()) => bail!("this succeeded but must not: {statements}"),
        Err(error) => SqlError::of(&error).with_context(|| format!("{statements}: {error}")),
    }
}

fn described(error: &postgres::Error, statements: &str) -> anyhow::Error {
    let statements: String = statements.chars().take(300).collect();
    match SqlError::of(error) {
        Some(output) => anyhow::anyhow!("{output}\n  in: {statements}"),
        None => anyhow::anyhow!("{error}\n  in: {statements}"),
    }
}
