//! Standbys of a cluster, created by a base backup. By default they stream.

use std::path::Path;

use anyhow::Result;

use crate::installation::run;
use crate::{Cluster, StopMode};

/// Normal messages of standbys when their primary stops, or when they are promoted.
pub const ORDINARY: [&str; 4] = [
    "terminating walreceiver process",
    "could not send end-of-streaming message to primary",
    "could not receive data from WAL stream",
    "could not connect to the primary server",
];

/// How to create a standby.
#[derive(Clone, Debug, Default)]
pub struct Standby {
    name: Option<String>,
    slot: Option<String>,
    archive: Option<String>,
    backup: Vec<String>,
    conf: Vec<String>,
}

impl Standby {
    /// The standby's name for `synchronous_standby_names`.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        self.name = Some(name.to_owned());
        self
    }

    /// A physical slot of the primary; created if it does not exist.
    #[must_use]
    pub fn slot(mut self, slot: &str) -> Self {
        self.slot = Some(slot.to_owned());
        self
    }

    /// The standby follows this archive, and does not stream.
    #[must_use]
    pub fn archive_only(mut self, archive: &Path) -> Self {
        self.archive = Some(archive.to_string_lossy().into_owned());
        self
    }

    /// One more option for `pg_basebackup`.
    #[must_use]
    pub fn backup(mut self, option: &str) -> Self {
        self.backup.push(option.to_owned());
        self
    }

    /// One more line for the standby's `postgresql.conf`.
    #[must_use]
    pub fn conf(mut self, line: &str) -> Self {
        self.conf.push(line.to_owned());
        self
    }

    /// Creates and starts the standby.
    ///
    /// # Errors
    /// When the backup or the start fails.
    pub fn start(&self, primary: &Cluster) -> Result<Cluster> {
        let standby = self.create(primary)?;
        standby.start_server()?;
        Ok(standby)
    }

    /// Creates the standby without starting its server.
    ///
    /// # Errors
    /// When the backup fails.
    pub fn create(&self, primary: &Cluster) -> Result<Cluster> {
        if let Some(slot) = &self.slot {
            primary.sql(&format!(
                "SELECT pg_create_physical_replication_slot('{slot}', true)
                 WHERE NOT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = '{slot}')"
            ))?;
        }
        let mut standby = Cluster::from_files_for(primary.installation(), |target| {
            let options: Vec<_> = self.backup.iter().map(String::as_str).collect();
            primary.base_backup_with(target, &options)
        })?;
        for text in ORDINARY {
            standby.allow_log(text);
        }
        self.follow(&standby, primary)?;
        Ok(standby)
    }

    /// Configures a stopped `standby` to follow `primary` after its next start.
    ///
    /// # Errors
    /// When files cannot be written.
    pub fn follow(&self, standby: &Cluster, primary: &Cluster) -> Result<()> {
        let signal = standby.data_directory().join("standby.signal");
        std::fs::write(&signal, "")?;
        standby.installation().give(&signal)?;
        standby.append_conf(&format!(
            "unix_socket_directories = '{}'\nwal_retrieve_retry_interval = 200ms",
            standby.directory().display()
        ))?;
        match &self.archive {
            Some(archive) => standby.append_conf(&format!(
                "primary_conninfo = ''\narchive_mode = off\nrestore_command = 'cp {archive}/%f %p'"
            ))?,
            None => {
                let name = self.name.as_ref().map(|name| format!(" application_name={name}"));
                standby.append_conf(&format!(
                    "primary_conninfo = 'host={} user=postgres dbname=postgres{}'\n\
                     primary_slot_name = '{}'",
                    primary.directory().display(),
                    name.unwrap_or_default(),
                    self.slot.as_deref().unwrap_or_default()
                ))?;
            }
        }
        self.conf.iter().try_for_each(|line| standby.append_conf(line))
    }
}

/// Starts a standby that streams from `primary`, with these lines in its configuration.
///
/// # Errors
/// As [`Standby::start`].
pub fn standby_of(primary: &Cluster, conf: &[&str]) -> Result<Cluster> {
    conf.iter().fold(Standby::default(), |standby, line| standby.conf(line)).start(primary)
}

/// Waits until the standby has replayed the current WAL of the primary (which may be a standby
/// too).
///
/// # Errors
/// When it has not within 60 s.
pub fn wait_for(standby: &Cluster, primary: &Cluster) -> Result<()> {
    let end = primary.text(
        "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END",
    )?;
    standby.eventually(&format!("SELECT pg_last_wal_replay_lsn() >= '{end}'"), "t")
}

/// Has the stopped `target` follow `source`, from which its timeline has parted (`pg_rewind`), and
/// starts it.
///
/// # Errors
/// When `pg_rewind` fails, or the server does not start.
pub fn rewind(target: &Cluster, source: &Cluster) -> Result<()> {
    let mut rewind = target.program("pg_rewind");
    rewind.arg("--target-pgdata").arg(target.data_directory());
    rewind.arg(format!(
        "--source-server=host={} user=postgres dbname=postgres",
        source.directory().display()
    ));
    run(&mut rewind)?;
    Standby::default().follow(target, source)?;
    target.start_server()
}

/// The primary `lost` is killed, and the stopped standby `behind` is promoted. The standby `ahead`
/// has replayed more, and is rewound to follow it.
///
/// # Errors
/// As [`rewind`].
pub fn fail_over(lost: &mut Cluster, ahead: &mut Cluster, behind: &Cluster) -> Result<()> {
    for cluster in [&mut *lost, &mut *ahead] {
        cluster.without_witness("its WAL is lost");
        allow_what_failovers_say(cluster);
    }
    lost.kill()?;
    ahead.stop(StopMode::Fast)?;
    behind.start_server()?;
    behind.promote()?;
    behind.sql("CHECKPOINT")?;
    rewind(ahead, behind)
}

/// What servers log when the one that they follow is gone.
pub fn allow_what_failovers_say(cluster: &mut Cluster) {
    for text in ["could not", "terminating walreceiver", "connection to client lost"] {
        cluster.allow_log(text);
    }
}

impl Cluster {
    /// Stock `pg_basebackup` into `target`, with these options.
    ///
    /// # Errors
    /// When it fails.
    pub fn base_backup_with(&self, target: &Path, options: &[&str]) -> Result<()> {
        let mut program = self.program("pg_basebackup");
        run(program.args(["--checkpoint=fast", "-D"]).arg(target).args(options)).map(drop)
    }

    /// Promotes a standby, and waits until it accepts writes.
    ///
    /// # Errors
    /// When it does not.
    pub fn promote(&self) -> Result<()> {
        self.sql("SELECT pg_promote()")?;
        self.eventually("SELECT pg_is_in_recovery()", "f")
    }
}
