//! Under which WAL keys the segments in `pg_wal` are, by the pages themselves. The list of switches
//! does not say: a standby writes what it receives under the switches that it has replayed by then.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use pagevault_cipher::wal::{HEADER_SIZE, address_of, mark_of};
use pagevault_keystore::wal::{Switch, stretch_at};
use pagevault_keystore::wal_segments::parse_name;
use pagevault_keystore::{KeyVersion, Lsn};
use pgrx::pg_sys;

use crate::pg::process;

/// Where the pages of WAL on disk begin, and the lowest version of the key that they are under.
pub(super) struct OnDisk {
    /// The lowest address of a segment, of any timeline; [`Lsn::MAX`] if there is none.
    pub(super) oldest: Lsn,
    /// The lowest version. `None`: no page is encrypted.
    pub(super) lowest: Option<KeyVersion>,
}

/// Looks at the segments in `pg_wal`. On each timeline versions rise with the address, so the first
/// encrypted page has the lowest: the oldest segment is read up to there.
///
/// # Errors
/// If a segment cannot be listed or read. One that was removed or recycled meanwhile has no pages
/// of its own.
pub(super) fn look(switches: impl Iterator<Item = Switch> + Clone) -> io::Result<OnDisk> {
    let mut timelines: BTreeMap<u32, BTreeMap<Lsn, PathBuf>> = BTreeMap::new();
    for file in fs::read_dir(process::data_directory().join("pg_wal"))? {
        let file = file?;
        if let Some(name) = parse_name(file.file_name().as_encoded_bytes()) {
            let start = name.start(process::wal_segment_size());
            timelines.entry(name.timeline).or_default().insert(start, file.path());
        }
    }
    let starts = timelines.values().filter_map(|segments| segments.keys().next());
    let oldest = starts.min().copied().unwrap_or(Lsn::MAX);
    let mut lowest = None;
    for segments in timelines.values() {
        let mut first = None;
        for (start, path) in segments {
            first = first_version(*start, path, switches.clone())?;
            if first.is_some() {
                break;
            }
        }
        lowest = lowest.into_iter().chain(first).min();
    }
    Ok(OnDisk { oldest, lowest })
}

/// The version of the first encrypted page of a segment. Pages with another address are left from
/// the former use of the file.
fn first_version(
    start: Lsn,
    path: &PathBuf,
    switches: impl Iterator<Item = Switch> + Clone,
) -> io::Result<Option<KeyVersion>> {
    const PAGE: usize = pg_sys::XLOG_BLCKSZ as usize;
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut header = [0; HEADER_SIZE];
    for at in (0..process::wal_segment_size()).step_by(PAGE) {
        match file.read_exact_at(&mut header, at) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            done => done?,
        }
        let address = start + at;
        if address_of(&header) == Some(address)
            && let Some(mark) = mark_of(&header)
        {
            let near = stretch_at(switches, address).phase.version;
            return Ok(Some(mark.version_near(near)));
        }
    }
    Ok(None)
}
