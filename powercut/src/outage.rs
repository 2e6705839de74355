//! An outage of the provider of key groups, in which a server recovers from a power cut.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use pagevault_tests::Cluster;
use pagevault_tests::cluster::text;

use crate::ledger::Ledger;
use crate::recording::Recorded;
use crate::workload::TABLES;

/// All images of a recording share the key file.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// While it is there, no other image is tried; until [`Outage::end`], the key file is away.
#[derive(Debug)]
pub(crate) struct Outage {
    keys: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

impl Outage {
    /// Takes the key file away.
    pub(crate) fn begin(recorded: &Recorded) -> Result<Outage> {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let keys = recorded.group_keys();
        std::fs::rename(&keys, away(&keys)).context("take the keys of groups away")?;
        Ok(Outage { keys, _turn: turn })
    }

    /// A server has started without the keys: what is in no group is there, and what is in one
    /// is there or refused. It is killed, and recovers once more, if `again`. Returns whether
    /// recovery has written pages under interim keys.
    pub(crate) fn judge(&self, server: &Cluster, ledger: &Ledger, again: bool) -> Result<bool> {
        are_right_or_locked(server, ledger)?;
        server.sql("CHECKPOINT")?;
        if again {
            server.kill()?;
            server.start_server().context("another start in the outage")?;
            are_right_or_locked(server, ledger)?;
        }
        Ok(server.interim_marks()? > 0)
    }

    /// Brings the key file back. The server uses it, and gives new data keys to what recovery has
    /// written under interim keys.
    pub(crate) fn end(&self, server: &Cluster) -> Result<()> {
        self.bring_back()?;
        if server.text("SELECT to_regnamespace('pagevault') IS NULL")? == "t" {
            return Ok(());
        }
        server.sql("SELECT pagevault.unlock()")?;
        server.wait_for_no_interim_marks(Duration::from_secs(90))
    }

    fn bring_back(&self) -> Result<()> {
        std::fs::rename(away(&self.keys), &self.keys).context("bring the keys of groups back")
    }
}

impl Drop for Outage {
    fn drop(&mut self) {
        // Not there any more after `end`.
        let _ = self.bring_back();
    }
}

fn away(keys: &Path) -> PathBuf {
    keys.with_extension("away")
}

fn are_right_or_locked(server: &Cluster, ledger: &Ledger) -> Result<()> {
    let mut client = server.client()?;
    ledger.judge(&mut client)?;
    let rows = text(&mut client, "SELECT count(*) FROM ledger")?;
    for table in TABLES {
        match text(&mut client, &format!("SELECT coalesce(sum(v), 0) FROM {table}")) {
            Ok(sum) => ensure!(sum == rows, "{table}: {sum} instead of {rows} in the outage"),
            Err(error) if error.to_string().starts_with("55000") => {}
            Err(error) => bail!("{table} in the outage: {error:#}"),
        }
    }
    Ok(())
}
