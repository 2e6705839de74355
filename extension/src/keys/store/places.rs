//! Where a file that is not there is gone.
//!
//! If a file system is not mounted, all its files seem to be gone. What is found in the mount point
//! says nothing: recovery makes directories of tablespaces and files there
//! (`TablespaceCreateDbspace`, tablespace.c), and they stay when the file system is mounted again.
//! So the directory of a tablespace is trusted only if it is the one that was confirmed: when the
//! server made it, while no file in it had a key, or by an administrator. What tells it from others
//! is its [`Identity`]. Confirmed directories are in a file beside the key files, which is this
//! server's own: in a copy of the data directory, tablespaces are other directories.
//!
//! ```text
//! tablespace inode made          a line for each; numbers in decimal
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use pagevault_keystore::RelFile;
use pagevault_keystore::storage::Storage;
use pgrx::PgSqlErrorCode;

use super::persist::keystore_failure;
use crate::keystore_dir;
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result};
use crate::pg::tablespaces::{self, Identity};
use crate::shmem;

const NAME: &str = "tablespaces";
const NEW: &str = "tablespaces.new";
const LIMIT: u64 = 1 << 20;

/// The directories that were confirmed.
pub(crate) struct Places {
    confirmed: BTreeMap<u32, Identity>,
}

impl Places {
    /// As it is now.
    pub(crate) fn now() -> Result<Places> {
        Ok(Places { confirmed: read()? })
    }

    /// Whether the file would be found, if it existed. To be asked after it was looked for.
    pub(crate) fn are_trusted(&self, file: RelFile) -> bool {
        match tablespaces::is_built_in(file.tablespace) {
            true => tablespaces::has_directory_if_any(file.database, file.tablespace),
            false => self.is_confirmed(file.tablespace),
        }
    }

    /// Whether the directory of a tablespace is the one that was confirmed.
    pub(crate) fn is_confirmed(&self, tablespace: u32) -> bool {
        let found = tablespaces::identity(tablespace);
        found.is_some() && found == self.confirmed.get(&tablespace).copied()
    }
}

/// The directories that these tablespaces have now are theirs. Those without are left out.
pub(crate) fn confirm(tablespaces: impl IntoIterator<Item = u32>) -> Result<()> {
    let _lock = KeystoreLock::acquire();
    let mut known = read()?;
    let before = known.clone();
    let found = |tablespace| Some((tablespace, tablespaces::identity(tablespace)?));
    known.extend(tablespaces.into_iter().filter_map(found));
    if known == before { Ok(()) } else { write(&known) }
}

/// Confirms the tablespaces in which no file has a key: those that get one will be in the present
/// directories.
pub(crate) fn confirm_without_keys() -> Result<()> {
    if shmem::required()?.control.keystore_id().is_none() {
        return Ok(()); // once there are keys
    }
    let places = Places::now()?;
    let mut tablespaces: BTreeSet<u32> = tablespaces::outside().into_iter().collect();
    tablespaces.retain(|tablespace| !places.is_confirmed(*tablespace));
    if tablespaces.is_empty() {
        return Ok(());
    }
    for info in shmem::required()?.directory.files()? {
        tablespaces.remove(&info?.file.tablespace);
    }
    confirm(tablespaces)
}

/// A line that cannot be read is an error: nothing is trusted then.
fn read() -> Result<BTreeMap<u32, Identity>> {
    let bytes = keystore_dir::storage()?.read(NAME, 0, LIMIT).map_err(|error| failed(&error))?;
    let text = String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned();
    let entry = |line: &str| -> Option<(u32, Identity)> {
        let mut words = line.split(' ');
        let tablespace = words.next()?.parse().ok()?;
        let (inode, made) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        words.next().is_none().then_some((tablespace, Identity { inode, made }))
    };
    let wrong = || {
        let path = format!("{}/{NAME}", keystore_dir::NAME);
        Report::new(
            PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
            format!("file \"{path}\" has a line that is not one of its own"),
        )
        .detail("No key is forgotten until it is gone.")
        .hint("Remove the file, and call pagevault.confirm_tablespaces() while everything is mounted.")
    };
    text.lines().map(|line| entry(line).ok_or_else(wrong)).collect()
}

fn write(entries: &BTreeMap<u32, Identity>) -> Result<()> {
    let mut text = String::new();
    for (tablespace, Identity { inode, made }) in entries {
        // Writing to a String does not fail.
        let _ = writeln!(text, "{tablespace} {inode} {made}");
    }
    let storage = keystore_dir::storage()?;
    storage.create(NEW, text.as_bytes()).map_err(|error| failed(&error))?;
    storage.rename(NEW, NAME).map_err(|error| failed(&error))
}

fn failed(source: &std::io::Error) -> Report {
    let source = std::io::Error::new(source.kind(), source.to_string());
    keystore_failure(&pagevault_keystore::log::LogError::Io {
        name: NAME.to_owned(),
        action: "access",
        source,
    })
}
