//! Tablespaces whose directories need not be theirs.
//!
//! If a file system is not mounted when a server starts, and WAL is replayed, recovery makes the
//! directory of the tablespace in the mount point (`TablespaceCreateDbspace`, tablespace.c), and
//! the files in it that it changes. All other files seem to be gone then, also after the next
//! start. So a start that replays WAL notes which tablespaces have no directory, in a file beside
//! the key files. What is made there is told from what is mounted later by [`Identity`].
//!
//! ```text
//! tablespace [inode made]        a line for each; numbers in decimal
//! ```

use std::fmt::Write as _;

use pagevault_keystore::storage::Storage;

use super::persist::keystore_failure;
use crate::keystore_dir;
use crate::pg::report::{Report, Result};
use crate::pg::tablespaces::{self, Identity};

const NAME: &str = "unmounted";
const NEW: &str = "unmounted.new";
const LIMIT: u64 = 1 << 20;

/// A tablespace without a directory, and what was found there since.
type Entry = (u32, Option<Identity>);

/// Notes which tablespaces have no directory now; before WAL is replayed.
pub(crate) fn note() -> Result<()> {
    let missing = tablespaces::without_directory();
    if missing.is_empty() {
        return Ok(());
    }
    let mut known = read()?;
    for tablespace in missing {
        known.retain(|(other, _)| *other != tablespace);
        known.push((tablespace, None));
    }
    write(&known)
}

/// Tablespaces that are not to be trusted now, among those outside of the data directory: a file
/// that is not there need not be gone. Notes what is found where nothing was.
pub(crate) fn current() -> Result<Vec<u32>> {
    let mut known = read()?;
    let before = known.clone();
    known.retain_mut(|(tablespace, made)| match (tablespaces::identity(*tablespace), *made) {
        (Some(found), Some(made)) => found == made,
        (found, _) => {
            *made = found;
            true
        }
    });
    if known != before {
        write(&known)?;
    }
    Ok(known.into_iter().map(|(tablespace, _)| tablespace).collect())
}

fn read() -> Result<Vec<Entry>> {
    let bytes = keystore_dir::storage()?.read(NAME, 0, LIMIT).map_err(|error| failed(&error))?;
    let text = String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned();
    let entry = |line: &str| -> Option<Entry> {
        let mut words = line.split(' ');
        let tablespace = words.next()?.parse().ok()?;
        let (inode, made) = (words.next(), words.next());
        let identity = inode.zip(made).and_then(|(inode, made)| {
            Some(Identity { inode: inode.parse().ok()?, made: made.parse().ok()? })
        });
        Some((tablespace, identity))
    };
    Ok(text.lines().filter_map(entry).collect())
}

fn write(entries: &[Entry]) -> Result<()> {
    let mut text = String::new();
    for (tablespace, identity) in entries {
        // Writing to a String does not fail.
        let _ = match identity {
            Some(Identity { inode, made }) => writeln!(text, "{tablespace} {inode} {made}"),
            None => writeln!(text, "{tablespace}"),
        };
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
