//! The long form of what every crash test has without asking (`PAGEVAULT_WITNESSES=all`):
//! - A standby that follows from kill to kill. At each kill it gets what the server has written,
//!   and replays that. Then it makes a restart point and stops, or is killed itself, by turns. At
//!   the end it is promoted, and must show what the server shows.
//! - At the first kill, restores to that moment, and to the last checkpoint before. Each begins a
//!   timeline with keys of its own while the server goes on, and must be sound.

use std::fs;
use std::path::Path;
use std::sync::PoisonError;

use anyhow::{Context, Result};

use crate::initdb::copy_of;
use crate::installation::run;
use crate::replay::{Wanted, judge, prepare};
use crate::{Cluster, StopMode};

/// A standby must allow as much as the primary ever did (`CheckRequiredParameterValues`,
/// xlogrecovery.c), also where a test reduces something.
const ENOUGH: &str = "max_connections = 100
max_worker_processes = 32
max_wal_senders = 32
max_prepared_transactions = 32
max_locks_per_transaction = 128
";

/// Whether crash tests have these witnesses, too.
pub(crate) fn is_wanted() -> bool {
    std::env::var("PAGEVAULT_WITNESSES").is_ok_and(|wanted| wanted == "all")
}

/// Waits until a standby without a primary has replayed all WAL that is there
/// (`WaitForWALToBecomeAvailable`, xlogrecovery.c).
fn replays_all(standby: &Cluster) -> Result<()> {
    let waits = "SELECT count(*) FROM pg_stat_activity
        WHERE backend_type = 'startup' AND wait_event = 'RecoveryRetrieveRetryInterval'";
    standby.eventually(waits, "1")
}

impl Cluster {
    /// The server was killed: its standby replays what it has written until now.
    pub(crate) fn follow(&self, first: bool) -> Result<()> {
        let Some(origin) = &self.origin else { return Ok(()) };
        let begin =
            |target: &Path| copy_of(self.installation(), origin, &self.data_directory(), target);
        if first {
            judge(self, &Wanted::Earlier, "", begin).context("a restore to the first kill")?;
            let checkpoint = self.last_checkpoint()?;
            let target =
                format!("recovery_target_lsn = '{checkpoint}'\nrecovery_target_action = promote\n");
            judge(self, &Wanted::Earlier, &target, begin).with_context(|| {
                format!("a restore to {checkpoint}, a checkpoint before the kill")
            })?;
        }
        let standby = self.take_follower();
        let kills = standby.is_some();
        let standby = match standby {
            Some(standby) => standby.like(self),
            None => Cluster::from_files(begin)?.like(self),
        };
        let standby = prepare(standby, self, "standby.signal", ENOUGH)?;
        standby.start_server().context("a standby that follows from kill to kill")?;
        replays_all(&standby)?;
        if kills {
            standby.kill()?;
        } else {
            standby.stop(StopMode::Fast)?;
        }
        *self.follower.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(standby));
        Ok(())
    }

    fn take_follower(&self) -> Option<Box<Cluster>> {
        self.follower.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Where the last checkpoint is of which the control file knows.
    fn last_checkpoint(&self) -> Result<String> {
        let mut command = self.installation().command("pg_controldata");
        let output = run(command.arg("-D").arg(self.data_directory()))?;
        let line = output.lines().find_map(|line| line.strip_prefix("Latest checkpoint location:"));
        Ok(line.context("pg_controldata does not say it")?.trim().to_owned())
    }

    /// The standby that has followed until now replays the rest, and must come to this.
    pub(crate) fn end_following(&self, wanted: &Wanted<'_>) -> Result<()> {
        let Some(standby) = self.take_follower() else { return Ok(()) };
        standby.end()?;
        fs::remove_file(standby.data_directory().join("standby.signal"))?;
        judge(self, wanted, "", |target| Ok(fs::rename(standby.data_directory(), target)?))
            .context("a standby that follows from kill to kill (Cluster::without_witness)")?;
        standby.finish()
    }
}
