//! The witness that every crash test has without asking. A server that was killed in a test is not
//! the only one that must come to the state that it shows at the end: so must a restore of the
//! cluster as `initdb` made it, with all WAL since. It begins with no keystore, and replays
//! everything that the server has written, on this side of each crash and on the other. What only
//! files contain that were written before a crash, and not WAL, is missing on it.
//!
//! [`Witnesses`](crate::witnesses::Witnesses) has more: a standby that follows all the time, and
//! backups from the middle.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::cluster::{column, run_sql};
use crate::initdb::copy_of;
use crate::{Cluster, process};

/// Files that an administrator restores from elsewhere.
const CONFIGURATION: [&str; 4] =
    ["postgresql.conf", "postgresql.auto.conf", "pg_hba.conf", "pg_ident.conf"];

/// What would let it disturb others, or wait for them. The last file that is read has it.
const ALONE: &str = "restore_command = 'false'
recovery_target_timeline = latest
hot_standby = off
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
}

/// Has a restore replay what a server has written, which is down now, and takes its WAL. It must
/// come to this state, keep it, and log nothing that the test does not expect.
pub(crate) fn judge(server: &Cluster, origin: &Path, state: Option<&State>) -> Result<()> {
    let data = server.data_directory();
    let witness = Cluster::from_files(|target| {
        copy_of(server.installation(), origin, &data, target)?;
        for file in CONFIGURATION {
            fs::copy(data.join(file), target.join(file))?;
        }
        fs::remove_dir_all(target.join("pg_wal"))?;
        fs::rename(data.join("pg_wal"), target.join("pg_wal"))?;
        make_room_for_tablespaces(&data.join("pg_tblspc"))?;
        let signal = target.join("recovery.signal");
        fs::write(&signal, "")?;
        server.installation().give(&signal)
    })?;
    let witness = witness.like(server);
    let last = witness.data_directory().join("postgresql.auto.conf");
    let socket = format!("unix_socket_directories = '{}'\n", witness.directory().display());
    fs::write(&last, fs::read_to_string(&last)? + ALONE + &socket)?;
    witness.start_server()?;
    // pg_ctl does not wait for the end of recovery (postmaster.c: PM_STATUS_STANDBY).
    witness.eventually_that("end of recovery", || {
        let status = fs::read_to_string(witness.data_directory().join("postmaster.pid"))?;
        ensure!(status.contains("ready"), "it has not come to an end");
        Ok(())
    })?;
    if let Some(state) = state {
        let found = State::of(&witness)?;
        ensure!(found == *state, "it shows {found:#?}\ninstead of {state:#?}");
    }
    witness.sql("CREATE TABLE promoted AS SELECT 1 AS id; CHECKPOINT")?;
    witness.finish()
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

    /// Ends the test, and has the witness judge if the server was ever killed.
    pub(crate) fn end_with_witness(&self) -> Result<()> {
        let origin = match &self.origin {
            Some(origin) if self.was_killed() && self.without_witness.get().is_none() => origin,
            _ => return self.end(),
        };
        let running = process::postmaster(&self.data_directory()).is_some();
        let state = match running {
            true => Some(State::of(self).context("what the server shows at the end")?),
            false => None,
        };
        self.end()?;
        judge(self, origin, state.as_ref()).context(
            "a restore of the cluster as initdb made it, with all WAL since (Cluster::without_witness)",
        )
    }
}
