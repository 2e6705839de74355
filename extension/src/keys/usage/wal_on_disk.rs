//! Under which WAL keys the segments in `pg_wal` are, by the pages themselves. The list of switches
//! does not say: a standby writes what it receives under the switches that it has replayed by then.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;

use pagevault_cipher::wal::{HEADER_SIZE, address_of, mark_of};
use pagevault_keystore::wal::{Switch, stretch_at};
use pagevault_keystore::wal_segments::parse_name;
use pagevault_keystore::{KeyVersion, Lsn};
use pgrx::pg_sys;

use crate::pg::process;

const PAGE: usize = pg_sys::XLOG_BLCKSZ as usize;

/// Where the pages of WAL on disk begin, and the lowest version of the key that they are under.
pub(super) struct OnDisk {
    /// The lowest address of a segment, of any timeline; [`Lsn::MAX`] if there is none.
    pub(super) oldest: Lsn,
    /// The lowest version. `None`: no page is encrypted.
    pub(super) lowest: Option<KeyVersion>,
}

/// Looks at all segments in `pg_wal`.
///
/// Within a segment versions rise with the address, but not from one segment to the next. A standby
/// that has received WAL before it replays a switch, and starts again or loses its connection,
/// fetches complete segments from the archive, where they are under the new key, and reads the last
/// one, which is not complete, from `pg_wal` (`WaitForWALToBecomeAvailable`, xlogrecovery.c;
/// `KeepFileRestoredFromArchive`, xlogarchive.c). So the first encrypted page of each segment
/// counts, and for certainty the last page.
///
/// # Errors
/// If a segment cannot be listed or read. One that was removed or recycled meanwhile has no pages
/// of its own.
pub(super) fn look(switches: impl Iterator<Item = Switch> + Clone) -> io::Result<OnDisk> {
    let mut found = OnDisk { oldest: Lsn::MAX, lowest: None };
    for file in fs::read_dir(process::data_directory().join("pg_wal"))? {
        let file = file?;
        let Some(name) = parse_name(file.file_name().as_encoded_bytes()) else { continue };
        let start = name.start(process::wal_segment_size());
        found.oldest = found.oldest.min(start);
        let file = match File::open(file.path()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            file => file?,
        };
        let segment = Segment { file, start };
        let first = segment.first_version(switches.clone())?;
        let last = process::wal_segment_size() - PAGE as u64;
        let last = first.map(|_| segment.version_at(last, switches.clone())).transpose()?;
        let versions = [found.lowest, first, last.flatten()];
        found.lowest = versions.into_iter().flatten().min();
    }
    Ok(found)
}

struct Segment {
    file: File,
    start: Lsn,
}

impl Segment {
    /// The version of the first encrypted page.
    fn first_version(
        &self,
        switches: impl Iterator<Item = Switch> + Clone,
    ) -> io::Result<Option<KeyVersion>> {
        for at in (0..process::wal_segment_size()).step_by(PAGE) {
            let version = self.version_at(at, switches.clone())?;
            if version.is_some() {
                return Ok(version);
            }
        }
        Ok(None)
    }

    /// The version of a page, or the lower of two if its mark can stand for both; `None` if it is
    /// not encrypted. A page with another address is left from the former use of the file.
    fn version_at(
        &self,
        at: u64,
        switches: impl Iterator<Item = Switch> + Clone,
    ) -> io::Result<Option<KeyVersion>> {
        let mut header = [0; HEADER_SIZE];
        match self.file.read_exact_at(&mut header, at) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            done => done?,
        }
        let address = self.start + at;
        let mark = mark_of(&header).filter(|_| address_of(&header) == Some(address));
        let near = || stretch_at(switches, address).phase.version;
        Ok(mark.and_then(|mark| mark.versions_near(near()).into_iter().flatten().min()))
    }
}
