//! The role of each path, and the open descriptors of segments.

use std::ffi::{CStr, CString, OsStr, c_int};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use pagevault_cipher::Lsn;
use pagevault_keystore::briefing::Role;
use pagevault_keystore::wal_segments::{self, Name};
use pagevault_keystore::wal_timelines;

use crate::begin::Work;
use crate::raw;

/// What to do when a file is opened.
pub(crate) enum Opening {
    /// Pass the call to the system.
    Other,
    /// A WAL segment: reads open its pages, writes seal them.
    Segment,
    /// Refuse: the file would be written as plaintext. With the reason.
    Refused(&'static str),
    /// `pg_rewind` replaces a file of the keystore in its target.
    Keystore,
    /// `pg_rewind` is about to finish: put the new keystore in place first.
    Control,
}

/// The role of the file at a path.
pub(crate) fn opening(work: &Work, path: &CStr, flags: c_int) -> Opening {
    let path = Path::new(OsStr::from_bytes(path.to_bytes()));
    let name = path.file_name().unwrap_or_default().as_bytes();
    let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
    match &work.role {
        Role::Probe => Opening::Other,
        Role::Read if !writes && segment_name(name).is_some() => Opening::Segment,
        Role::Read => Opening::Other,
        Role::Seal if segment_name(name).is_some() => Opening::Segment,
        Role::Seal if writes && is_compressed_segment(name) => Opening::Refused(
            "compressed WAL cannot be encrypted: leave out the option for compression",
        ),
        Role::Seal if writes && name.starts_with(b"pg_wal.tar") => Opening::Refused(
            "WAL in a tar file cannot be encrypted: use --format=plain, --wal-method=fetch or --wal-method=none",
        ),
        Role::Seal => Opening::Other,
        Role::Rewind { target } => {
            let target = Path::new(OsStr::from_bytes(target));
            let is_in = |folder: &str| is_in(path, &target.join(folder));
            match (writes, name) {
                (false, name) if segment_name(name).is_some() && is_in("pg_wal") => {
                    Opening::Segment
                }
                (true, b"pg_control") if is_in("global") => Opening::Control,
                // To sync them, `pg_rewind` opens files without this flag.
                (true, _) if flags & libc::O_CREAT != 0 && is_in("pagevault") => Opening::Keystore,
                _ => Opening::Other,
            }
        }
    }
}

/// Whether a file is in a directory; the paths may be spelled differently.
pub(crate) fn is_in(path: &Path, directory: &Path) -> bool {
    let parent = path.parent().and_then(|parent| fs::canonicalize(parent).ok());
    parent.is_some() && parent == fs::canonicalize(directory).ok()
}

/// The parts of a segment's name, with or without `.partial`.
fn segment_name(name: &[u8]) -> Option<Name> {
    wal_segments::parse_name(name.strip_suffix(b".partial").unwrap_or(name))
}

fn is_compressed_segment(name: &[u8]) -> bool {
    name.get(..24).is_some_and(|segment| segment_name(segment).is_some())
        && [&b".gz"[..], b".lz4", b".zst"]
            .iter()
            .any(|ending| name.strip_suffix(b".partial").unwrap_or(name).ends_with(ending))
}

/// Number of descriptors that can refer to segments. A segment with a higher one is not opened.
const DESCRIPTORS: usize = 4096;

/// For each descriptor the number of its segment plus 1; 0 if it does not refer to one.
static SEGMENTS: [AtomicU64; DESCRIPTORS] = [const { AtomicU64::new(0) }; DESCRIPTORS];

/// The timelines of these segments, and the addresses where these timelines began (0 if unknown:
/// none begins there).
static TIMELINES: [AtomicU32; DESCRIPTORS] = [const { AtomicU32::new(0) }; DESCRIPTORS];
static BEGINS: [AtomicU64; DESCRIPTORS] = [const { AtomicU64::new(0) }; DESCRIPTORS];

/// An open segment.
#[derive(Clone, Copy)]
pub(crate) struct Segment {
    pub(crate) fd: c_int,
    name: Name,
    /// Where its timeline began, if that is known.
    begin: Option<Lsn>,
}

impl Segment {
    /// The address of its first byte. It follows from the size, so it is unknown until the file has
    /// a size that segments have. Files grow to that size before they are written.
    pub(crate) fn base(self) -> Option<Lsn> {
        let size = raw::length(self.fd);
        let is_size = size.is_power_of_two() && (1 << 20..=1 << 30).contains(&size);
        let low = u64::from(self.name.number.1);
        (is_size && low < (1 << 32) / size).then(|| self.name.start(size))
    }

    /// Whether a page of this timeline and address was left by a parent of the segment's timeline.
    pub(crate) fn has_left_over(self, timeline: u32, address: Lsn) -> bool {
        wal_timelines::is_left_over(timeline, address, self.name.timeline, || self.begin)
    }
}

/// The segment that a descriptor refers to.
#[inline]
pub(crate) fn segment(fd: c_int) -> Option<Segment> {
    let at = usize::try_from(fd).ok()?;
    let number = SEGMENTS.get(at)?.load(Relaxed).checked_sub(1)?;
    let number = ((number >> 32) as u32, number as u32);
    let begin = Some(Lsn(BEGINS[at].load(Relaxed))).filter(|begin| *begin != Lsn::INVALID);
    Some(Segment { fd, name: Name { timeline: TIMELINES[at].load(Relaxed), number }, begin })
}

/// Remembers that a descriptor refers to a segment. False if the descriptor is too high.
pub(crate) fn opened(fd: c_int, path: &CStr) -> bool {
    let name = path.to_bytes().rsplit(|c| *c == b'/').next().unwrap_or_default();
    let at = usize::try_from(fd).ok().filter(|at| *at < DESCRIPTORS);
    let (Some(Name { timeline, number: (high, low) }), Some(at)) = (segment_name(name), at) else {
        return false;
    };
    let number = u64::from(high) << 32 | u64::from(low);
    let Some(number) = number.checked_add(1) else { return false };
    TIMELINES[at].store(timeline, Relaxed);
    let begin = begin_beside(path, name.len(), timeline).unwrap_or(Lsn::INVALID);
    BEGINS[at].store(begin.0, Relaxed);
    SEGMENTS[at].store(number, Relaxed);
    true
}

/// Where a timeline began, from its history file, which is next to the segments in `pg_wal` and in
/// archives.
fn begin_beside(segment: &CStr, name: usize, timeline: u32) -> Option<Lsn> {
    let bytes = segment.to_bytes();
    let directory = bytes.get(..bytes.len().checked_sub(name)?).filter(|_| timeline > 1)?;
    let path = [directory, &wal_timelines::history_name(timeline)].concat();
    // There may be a FIFO, or a device.
    let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
    let fd = raw::openat(libc::AT_FDCWD, &CString::new(path).ok()?, flags, 0);
    if fd < 0 {
        return None;
    }
    let mut tail = [0; wal_timelines::HISTORY_TAIL];
    let from = raw::length(fd).saturating_sub(tail.len() as u64);
    // SAFETY: the memory has room for as many bytes.
    let got = unsafe { raw::pread(fd, tail.as_mut_ptr(), tail.len(), from as libc::off_t) };
    raw::close(fd);
    wal_timelines::begin_of(tail.get(..usize::try_from(got).ok()?)?)
}

/// Called when a descriptor is about to be closed, or now refers to another file.
#[inline]
pub(crate) fn forget(fd: c_int) {
    let entry = usize::try_from(fd).ok().and_then(|fd| SEGMENTS.get(fd));
    if let Some(entry) = entry.filter(|entry| entry.load(Relaxed) != 0) {
        entry.store(0, Relaxed);
    }
}
