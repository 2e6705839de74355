//! The end of a schedule, and what is looked at while a server is down.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::Player;
use crate::schedules::judge;
use crate::schedules::operation::{Operation, Order};
use crate::schedules::world::SESSIONS;
use crate::{Cluster, StopMode};

const BLOCK: u64 = 8192;

/// A process that is killed while it extends a file leaves a part of a block there, because the
/// kernel copies page by page. The server does not count it (`mdnblocks`, md.c); `pg_checksums`
/// takes it for damage.
fn cut_torn_ends(directory: &Path) -> Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let (path, length) = (entry.path(), entry.metadata()?.len());
        if path.is_dir() {
            cut_torn_ends(&path)?;
        } else if entry.file_name().as_encoded_bytes()[0].is_ascii_digit() && length % BLOCK != 0 {
            File::options().write(true).open(&path)?.set_len(length - length % BLOCK)?;
        }
    }
    Ok(())
}

impl Player {
    /// Ends all that is open, judges once more, and stops the servers.
    pub(in crate::schedules) fn finish(mut self) -> Result<()> {
        let mut last = vec![Operation::KeysBack, Operation::Crawl { on: false }];
        last.extend((0..SESSIONS).map(|session| Operation::Commit { session }));
        last.push(Operation::FinishPrepared { commit: true });
        last.push(Operation::Order { order: Order::Resume });
        last.extend([Operation::WaitForJobs, Operation::Decode, Operation::Judge]);
        for operation in last {
            self.play(&operation).with_context(|| format!("at the end: {operation:?}"))?;
        }
        self.clients.clear();
        for backup in std::mem::take(&mut self.backups) {
            self.verify(&backup).context("a backup")?;
            backup.finish()?;
        }
        if let Some(standby) = self.standby.take() {
            standby.stop(StopMode::Fast)?;
            self.verify(&standby).context("the standby")?;
            standby.finish()?;
        }
        self.primary.stop(StopMode::Fast)?;
        self.verify(&self.primary)?;
        judge::hides(&self.primary, self.wal_is_hidden)?;
        if self.checksums {
            for directory in ["base", "global", "pg_tblspc"] {
                cut_torn_ends(&self.primary.data_directory().join(directory))?;
            }
            self.primary.pg_checksums()?;
        }
        self.primary.finish()
    }

    /// Whether `pagevault-keyring verify` finds everything in order, of a server that is down.
    pub(super) fn verify(&self, server: &Cluster) -> Result<()> {
        if self.world.keys_away {
            return Ok(());
        }
        let (response, code) = server.verify_offline(&server.data_directory())?;
        ensure!(code == Some(0), "pagevault-keyring verify ends with {code:?}:\n{response}");
        Ok(())
    }
}
