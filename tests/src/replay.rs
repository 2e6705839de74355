//! The witnesses that every crash test has without asking. A server that was killed in a test is
//! not the only one that must come to the state that it shows at the end. So must two restores,
//! each with all WAL since, on this side of each crash and on the other:
//! - The cluster as `initdb` made it. It begins with no keystore. What only files contain that
//!   were written before a crash, and not WAL, is missing on it.
//! - The files as they were after the first kill. They contain what had been written ahead of its
//!   time, and what was half done, and nobody had recovered them yet.
//!
//! The module `follower` has more of this kind, for the long form of crash tests, and
//! [`Witnesses`](crate::witnesses::Witnesses) a standby that streams, and backups from the middle.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

use anyhow::{Context, Result, ensure};

use crate::cluster::{column, run_sql};
use crate::initdb::copy_of;
use crate::installation::run;
use crate::{Cluster, follower, process};

/// Files that an administrator restores from elsewhere.
const CONFIGURATION: [&str; 4] =
    ["postgresql.conf", "postgresql.auto.conf", "pg_hba.conf", "pg_ident.conf"];

/// What would let it disturb others, or wait for them. The last file that is read has it.
const ALONE: &str = "restore_command = 'false'
recovery_target_timeline = latest
archive_mode = off
listen_addresses = ''
logging_collector = off
synchronous_standby_names = ''
primary_conninfo = ''
pagevault.audit_destination = log
";

/// What servers show that must not differ: in each database what its permanent tables contain, the
/// labels, and prepared transactions.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct State(Vec<(String, Vec<String>)>);

const TABLES: &str = "SELECT c.oid::regclass FROM pg_class c
    WHERE relkind IN ('r', 'm') AND relpersistence = 'p' AND c.oid >= 16384
      AND relnamespace::regnamespace::text NOT IN ('information_schema', 'pg_catalog')
    ORDER BY 1::text";

const LABELS: &str = "SELECT concat_ws(' ', objtype, objname, label) FROM pg_seclabels WHERE provider = 'pagevault' ORDER BY 1";

impl State {
    /// That of a server that runs.
    pub(crate) fn of(cluster: &Cluster) -> Result<State> {
        let databases = "SELECT datname FROM pg_database
            WHERE datallowconn AND datconnlimit <> -2 AND datname <> 'template1' ORDER BY 1";
        let mut state = Vec::new();
        for database in column(&mut cluster.client()?, databases)? {
            let mut client = cluster.client_to(&database)?;
            // A prepared transaction may have locked a table.
            run_sql(&mut client, "SET lock_timeout = '100ms'; SET statement_timeout = '60s'")?;
            let mut lines = column(&mut client, LABELS)?;
            lines.extend(column(&mut client, "SELECT gid FROM pg_prepared_xacts ORDER BY 1")?);
            for table in column(&mut client, TABLES)? {
                let rows = format!(
                    "SELECT count(*) || ' rows ' || coalesce(sum(hashtext(t::text)), 0) FROM {table} t"
                );
                // An error is something that they show as well.
                let found = column(&mut client, &rows).map_err(|error| format!("{error:#}"));
                lines.push(format!("{table}: {found:?}"));
            }
            state.push((database, lines));
        }
        Ok(State(state))
    }

    /// Whether every table can be read, or cannot for another reason than its pages.
    fn has_no_damaged_page(&self) -> bool {
        let mut lines = self.0.iter().flat_map(|(_, lines)| lines);
        lines.all(|line| !(line.contains("Err(") && line.contains("block")))
    }
}

/// Has a restore replay what a server has written, which is down now. It must come to this state,
/// keep it, and log nothing that the test does not expect. `fill` makes its data directory, of
/// which the configuration and WAL are replaced by the server's.
pub(crate) fn judge(
    server: &Cluster,
    state: Option<&State>,
    settings: &str,
    fill: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let witness = Cluster::from_files(fill)?.like(server);
    let settings = format!("hot_standby = off\n{settings}");
    let mut witness = prepare(witness, server, "recovery.signal", &settings)?;
    if fs::read_dir(witness.data_directory().join("pg_tblspc"))?.next().is_some() {
        // Of a tablespace in place (CheckTablespaceDirectory, xlogrecovery.c).
        witness.allow_log("unexpected directory entry");
    }
    witness.start_server()?;
    // pg_ctl does not wait for the end of recovery (postmaster.c: PM_STATUS_STANDBY).
    witness.eventually_that("end of recovery", || {
        let status = fs::read_to_string(witness.data_directory().join("postmaster.pid"))?;
        ensure!(status.contains("ready"), "it has not come to an end");
        Ok(())
    })?;
    let found = State::of(&witness)?;
    match state {
        Some(state) => ensure!(found == *state, "it shows {found:#?}\ninstead of {state:#?}"),
        None => ensure!(found.has_no_damaged_page(), "it shows {found:#?}"),
    }
    witness.sql("CREATE TABLE promoted AS SELECT 1 AS id; CHECKPOINT")?;
    witness.finish()
}

/// Gives a server that replays another's WAL the configuration and all WAL of the other, which is
/// down, and this signal file.
pub(crate) fn prepare(
    witness: Cluster,
    server: &Cluster,
    signal: &str,
    settings: &str,
) -> Result<Cluster> {
    let (data, target) = (server.data_directory(), witness.data_directory());
    for file in CONFIGURATION {
        fs::copy(data.join(file), target.join(file))?;
    }
    let wal = target.join("pg_wal");
    if wal.exists() {
        fs::remove_dir_all(&wal)?;
    }
    copy(server, &data.join("pg_wal"), &wal)?;
    let signal = target.join(signal);
    fs::write(&signal, "")?;
    server.installation().give(&signal)?;
    let last = target.join("postgresql.auto.conf");
    let socket = format!("unix_socket_directories = '{}'\n", witness.directory().display());
    fs::write(&last, fs::read_to_string(&last)? + ALONE + &socket + settings)?;
    Ok(witness)
}

fn copy(server: &Cluster, from: &Path, to: &Path) -> Result<()> {
    run(server.installation().command("/bin/cp").arg("-a").arg(from).arg(to)).map(drop)
}

/// Whether a data directory has all its files below it.
pub(crate) fn has_no_links(data: &Path) -> Result<bool> {
    for link in fs::read_dir(data.join("pg_tblspc"))? {
        if link?.file_type()?.is_symlink() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Redo makes the tablespaces again, in the same places.
fn make_room_for_tablespaces(links: &Path) -> Result<()> {
    for link in fs::read_dir(links)? {
        let link = link?;
        if !link.file_type()?.is_symlink() {
            continue;
        }
        for directory in fs::read_dir(link.path())? {
            let directory = directory?;
            let name = directory.file_name().to_string_lossy().into_owned();
            if name.starts_with("PG_") {
                fs::rename(directory.path(), link.path().join(format!("former_{name}")))?;
            }
        }
    }
    Ok(())
}

impl Cluster {
    /// No restore verifies the crashes of this test: because of this reason.
    pub fn without_witness(&self, reason: &'static str) {
        let _ = self.without_witness.set(reason);
    }

    /// All processes were killed, and none is there. Keeps the files as they are, the first time.
    pub(crate) fn has_crashed(&self) -> Result<()> {
        let data = self.data_directory();
        let first = !self.killed.swap(true, Relaxed);
        if follower::is_wanted() && self.has_witnesses() && has_no_links(&data)? {
            self.follow(first)?;
        }
        if !first || !self.has_witnesses() || !has_no_links(&data)? {
            return Ok(());
        }
        let image = self.image();
        // A data directory is its owner's alone.
        fs::DirBuilder::new().mode(0o700).create(&image)?;
        self.installation().give(&image)?;
        for entry in fs::read_dir(&data)? {
            let name = entry?.file_name();
            // Fault points are files there, and none of the server's.
            if name != "pg_wal" && !name.as_encoded_bytes().starts_with(b"pagevault.") {
                copy(self, &data.join(&name), &image.join(&name))?;
            }
        }
        Ok(())
    }

    /// The files as they were after the first kill.
    fn image(&self) -> PathBuf {
        self.directory().join("killed")
    }

    pub(crate) fn has_witnesses(&self) -> bool {
        self.origin.is_some() && self.without_witness.get().is_none()
    }

    /// Ends the test, and has the witnesses judge if the server was ever killed.
    pub(crate) fn end_with_witness(&self) -> Result<()> {
        let origin = match &self.origin {
            Some(origin) if self.was_killed() && self.has_witnesses() => origin,
            _ => return self.end(),
        };
        let data = self.data_directory();
        let running = process::postmaster(&data).is_some();
        let state = match running {
            true => Some(State::of(self).context("what the server shows at the end")?),
            false => None,
        };
        self.end()?;
        let image = self.image();
        // Its tablespaces outside would be those of the end.
        if image.exists() && has_no_links(&data)? {
            judge(self, state.as_ref(), "", |target| Ok(fs::rename(&image, target)?)).context(
                "a restore of the files after the first kill, with all WAL since (Cluster::without_witness)",
            )?;
        }
        if has_no_links(&data)? {
            self.end_following(state.as_ref())?;
        }
        judge(self, state.as_ref(), "", |target| {
            copy_of(self.installation(), origin, &data, target)?;
            make_room_for_tablespaces(&data.join("pg_tblspc"))
        })
        .context(
            "a restore of the cluster as initdb made it, with all WAL since (Cluster::without_witness)",
        )
    }
}
