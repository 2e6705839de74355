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

use anyhow::{Context, Result};

use crate::initdb::copy_of;
use crate::replay::{State, Wanted, copy, judge};
use crate::{Cluster, follower, process};

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
        let wanted = Wanted::of(state.as_ref());
        self.end()?;
        let image = self.image();
        // Its tablespaces outside would be those of the end.
        if image.exists() && has_no_links(&data)? {
            judge(self, &wanted, "", |target| Ok(fs::rename(&image, target)?)).context(
                "a restore of the files after the first kill, with all WAL since (Cluster::without_witness)",
            )?;
        }
        if has_no_links(&data)? {
            self.end_following(&wanted)?;
        }
        judge(self, &wanted, "", |target| {
            copy_of(self.installation(), origin, &data, target)?;
            make_room_for_tablespaces(&data.join("pg_tblspc"))
        })
        .context(
            "a restore of the cluster as initdb made it, with all WAL since (Cluster::without_witness)",
        )
    }
}
