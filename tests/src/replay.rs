//! Restores that replay what a server has written, and must come to the state that it shows.

use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};

use crate::Cluster;
use crate::cluster::{column, run_sql};
use crate::installation::run;

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

/// What a restore must come to.
pub(crate) enum Wanted<'a> {
    /// This state.
    State(&'a State),
    /// Any: the server is down and shows none.
    Any,
    /// That of an earlier moment, when the server may have had no key yet, or no room for one.
    Earlier,
}

impl<'a> Wanted<'a> {
    /// What the server shows, if it runs.
    pub(crate) fn of(state: Option<&'a State>) -> Self {
        state.map_or(Self::Any, Self::State)
    }
}

/// Has a restore replay what a server has written, which is down now. It must come to this state,
/// take writes, and log nothing that the test does not expect. `fill` makes its data directory, of
/// which the configuration and WAL are replaced by the server's.
pub(crate) fn judge(
    server: &Cluster,
    wanted: &Wanted<'_>,
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
    let made = witness.sql("CREATE TABLE promoted AS SELECT 1 AS id; CHECKPOINT");
    match wanted {
        Wanted::State(state) => {
            ensure!(found == **state, "it shows {found:#?}\ninstead of {state:#?}")
        }
        Wanted::Any | Wanted::Earlier => {
            ensure!(found.has_no_damaged_page(), "it shows {found:#?}")
        }
    }
    match wanted {
        Wanted::Earlier => witness.allow_log("the cluster has no master key"),
        _ => made?,
    }
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

pub(crate) fn copy(server: &Cluster, from: &Path, to: &Path) -> Result<()> {
    run(server.installation().command("/bin/cp").arg("-a").arg(from).arg(to)).map(drop)
}
