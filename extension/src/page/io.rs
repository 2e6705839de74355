//! Sealing and opening pages: which key, which fault.
//!
//! Everything here runs on the page path, some of it inside critical sections: no allocation, no
//! lock, no key schedule for a key that this process used lately, and no error raised. Faults are
//! returned; [`super::errors`] words them.

use pagevault_cipher::{DataKeyVersion, Fork, Lsn, PAGE_SIZE, Page, PageKey, page};
use pagevault_keystore::RelFile;

use super::{stand_ins, written_over};
use crate::keys::store::directory;
use crate::keys::usage::key_error::KeyError;
use crate::keys::usage::{cache, temporary};
use crate::pg::compat::SmgrFile;
use crate::pg::process::{data_checksums, in_recovery, is_not_consistent_yet, serves_users};
use crate::shmem;
use crate::shmem::counters::StatsKind;
use crate::stats::{self, Timing};

const _: () =
    assert!(pgrx::pg_sys::BLCKSZ as usize == PAGE_SIZE, "page format 1 is for 8 kB pages");

/// Why a page could not be sealed or opened.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageFault {
    pub(crate) file: SmgrFile,
    pub(crate) cause: Cause,
}

/// The cause of a [`PageFault`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// There is no key to use.
    Key(KeyError),
    /// There is, but the page is not as it was sealed.
    NotAuthentic,
}

impl PageFault {
    pub(crate) fn of_key(file: SmgrFile, error: KeyError) -> PageFault {
        PageFault { file, cause: Cause::Key(error) }
    }
}

/// Under which key a file's pages are written now.
#[derive(Clone, Copy)]
pub(crate) struct SealTarget {
    file: SmgrFile,
    version: DataKeyVersion,
}

/// The version that new writes of temporary files use; their key lives as long as the server.
const TEMPORARY_VERSION: DataKeyVersion = DataKeyVersion::FIRST;

/// Where and under which key to seal, or `None` when the file is written in plaintext.
#[inline]
pub(crate) fn seal_target(file: SmgrFile) -> Option<SealTarget> {
    if file.is_temporary() {
        let target = SealTarget { file, version: TEMPORARY_VERSION };
        return temporary::is_wanted().then_some(target);
    }
    if !shmem::anything_sealed() {
        return None;
    }
    directory::current_version(file.file).map(|version| SealTarget { file, version })
}

/// How a page is written over one that is there.
#[derive(Clone, Copy)]
pub(crate) struct Writing {
    /// As [`seal_target`].
    pub(crate) target: Option<SealTarget>,
    /// The file is being rewritten, so the page may lie on disk written otherwise: it must be
    /// looked at; see [`target_over`].
    pub(crate) must_look: bool,
    /// In recovery: whether the page on disk is sealed under a key that is not known must be looked
    /// at; see [`may_write_over`].
    pub(crate) must_watch: bool,
}

/// Under which key to write over a page, and whether to look at it on disk first: both as they are
/// at one moment.
#[inline]
pub(crate) fn writing(file: SmgrFile) -> Writing {
    let settled = |target| Writing { target, must_look: false, must_watch: false };
    if file.is_temporary() {
        return settled(seal_target(file));
    }
    if !shmem::anything_sealed() {
        // Nothing yet: WAL may bring the first data key of all.
        let must_watch = shmem::any_database_key() && in_recovery();
        return Writing { target: None, must_look: false, must_watch };
    }
    let writing = directory::writing(file.file);
    let current = writing.as_ref().and_then(|writing| writing.current);
    let target = current.map(|(version, _)| SealTarget { file, version });
    let must_look = writing.is_some_and(|writing| writing.mixed);
    Writing { target, must_look, must_watch: in_recovery() }
}

/// In recovery, before a page is written: the page on disk may be sealed under a key that is not
/// known, be it the first of the file or a later one. Then that is noted, and the page on disk
/// stays (false); a fault once all WAL is replayed that could have brought the key. See
/// [`written_over`].
pub(crate) fn may_write_over(
    file: SmgrFile,
    block: u32,
    on_disk: &Page,
) -> Result<bool, PageFault> {
    match page::version_of(on_disk) {
        Some(version)
            if written_over::is_unknown(file.file, version)
                && page::may_be_sealed(on_disk, block, data_checksums()) =>
        {
            if written_over::note(file.file, version, block) {
                Ok(false)
            } else {
                Err(PageFault::of_key(file, KeyError::NoKey { version }))
            }
        }
        _ => Ok(true),
    }
}

/// The version that a page, as it is on disk, is sealed under; `None` as well for one that only
/// looks so.
pub(crate) fn version_of(on_disk: &Page, block: u32) -> Option<DataKeyVersion> {
    page::version_of(on_disk).filter(|_| page::may_be_sealed(on_disk, block, data_checksums()))
}

/// How to write a page over one that may be written otherwise than `wanted`, because its file is
/// being rewritten.
///
/// A page may have changed since it was written last without a record in WAL: hint bits, free
/// space, bits of the visibility map, what an access method remembers for itself
/// (docs/design/0011-changes-without-wal.md has the list). Then it has the LSN that it has on disk.
/// Torn under another key, it would be neither, and nothing would repair it. So it keeps the key
/// that it has on disk, or stays plaintext, until it changes in WAL: the rekey engine sees to that.
pub(crate) fn target_over(
    file: SmgrFile,
    wanted: Option<SealTarget>,
    lsn: Lsn,
    on_disk: &Page,
) -> Option<SealTarget> {
    if page::lsn_of(on_disk) != lsn || page::is_zero(on_disk) {
        return wanted;
    }
    match page::version_of(on_disk) {
        None => None,
        Some(version) if directory::has_key(file.file, version) => {
            Some(SealTarget { file, version })
        }
        Some(_) => wanted,
    }
}

/// Seals pages of one file, that follow each other, in `into`. `fill` puts each there first: its
/// copies are sealed, for a page in shared buffers may change meanwhile (hint bits).
///
/// A page whose key was destroyed was read or restored in recovery, or else it was missed when they
/// were: it is sealed under a key that is lost, which is what should become of it, and does not
/// keep a checkpoint from its end.
pub(crate) fn seal(
    target: SealTarget,
    fork: i32,
    first_block: u32,
    into: &mut [Page],
    mut fill: impl FnMut(usize, &mut Page),
) -> Result<(), PageFault> {
    let fork = fork_of(fork);
    let checksums = data_checksums();
    let mut run = |key: &PageKey| {
        let work = Timing::begin();
        let mut sealed = 0;
        for (i, (block, page)) in (first_block..).zip(into.iter_mut()).enumerate() {
            fill(i, page);
            // Added to a table and not yet used (hio.c), without WAL; on disk it is zero. As where
            // a file grows (`is_as_added`).
            if fork == Fork::Main && page::is_bare(page) {
                page.fill(0);
            }
            sealed += u64::from(page::seal(page, key, target.version, block, fork, checksums));
        }
        work.sealed(kind_of(target.file), sealed, sealed * PAGE_SIZE as u64);
    };
    let sealed = match cache::with_page_key(target.file, target.version, &mut run) {
        Err(KeyError::Destroyed) => cache::with_lost_key(run).ok_or(KeyError::Destroyed),
        sealed => sealed,
    };
    sealed.map_err(|error| PageFault::of_key(target.file, error))
}

/// Whether a page, given by its LSN, stands in for one that could not be opened: it must not be
/// written. See [`stand_ins`].
#[inline]
pub(crate) fn is_stand_in(lsn: Lsn) -> bool {
    page::is_stand_in(lsn)
}

/// Whether a page that is added has nothing but its header: it is written as a page of zeros.
///
/// Up to 15 pages of maps are added so, without WAL (`vm_extend`, `fsm_extend`). Sealed, such a
/// page would be ciphertext throughout, and torn, the rest of it would open to random bits. Readers
/// make a page of zeros what this one is.
#[inline]
pub(crate) fn is_as_added(page: &Page) -> bool {
    page::is_bare(page)
}

/// Opens a page in place if it is sealed.
#[inline]
pub(crate) fn open(
    file: SmgrFile,
    fork: i32,
    block: u32,
    page: &mut Page,
) -> Result<(), PageFault> {
    match page::version_of(page) {
        None => Ok(()),
        Some(version) => open_sealed(file, fork, block, page, version),
    }
}

fn open_sealed(
    file: SmgrFile,
    fork: i32,
    block: u32,
    page: &mut Page,
    version: DataKeyVersion,
) -> Result<(), PageFault> {
    let opened = cache::with_page_key(file, version, |key| {
        let work = Timing::begin();
        let opened = page::open(page, key, block, fork_of(fork), data_checksums());
        work.opened(kind_of(file), 1, PAGE_SIZE as u64);
        opened
    });
    match opened {
        Ok(Ok(())) => Ok(()),
        Ok(Err(page::NotAuthentic)) => {
            count_refusal(file);
            Err(PageFault { file, cause: Cause::NotAuthentic })
        }
        Err(KeyError::Destroyed) if in_recovery() => {
            blank_for_redo(file.file, fork, version, block, page);
            Ok(())
        }
        Err(KeyError::Destroyed) if has_outlived_its_keys(file.file) => {
            blank(file.file, fork, Lsn::INVALID, block, page);
            Ok(())
        }
        // Not sealed, but damaged: PostgreSQL says so, and its means help.
        Err(KeyError::NoKey { .. }) if !page::may_be_sealed(page, block, data_checksums()) => {
            Ok(())
        }
        // Copied by a base backup after the keystore was, and after its key was made.
        Err(KeyError::NoKey { .. }) if is_not_consistent_yet() => {
            if fork_of(fork) == Fork::FreeSpaceMap {
                // It is changed without a look at its LSN, and what it says may be forgotten. An
                // empty one says that nothing is free.
                page.fill(0);
                return Ok(());
            }
            if !stand_ins::wait_for(file.file, version, block) {
                return Err(PageFault::of_key(file, KeyError::TooManyMissing));
            }
            page::stand_in(page, block, data_checksums());
            Ok(())
        }
        Err(error) => {
            count_refusal(file);
            Err(PageFault::of_key(file, error))
        }
    }
}

/// A page of this file was not opened.
pub(crate) fn count_refusal(file: SmgrFile) {
    stats::count_failure(kind_of(file));
}

#[inline]
fn kind_of(file: SmgrFile) -> StatsKind {
    if file.is_temporary() { StatsKind::Temporary } else { StatsKind::Relation }
}

/// Recovery begins where the last checkpoint began, which may be before keys were destroyed, and
/// repeats changes of pages that can no longer be opened. It is given empty pages that say that
/// they were changed later than all that, and passes over them. (Users were refused:
/// [`check_access`].)
#[cold]
fn blank_for_redo(file: RelFile, fork: i32, version: DataKeyVersion, block: u32, page: &mut Page) {
    let lsn = match fork_of(fork) {
        // It is changed without a look at its LSN (`XLogRecordPageWithFreeSpace`, freespace.c), and
        // written: WAL may end before that address.
        Fork::FreeSpaceMap => Lsn::INVALID,
        _ => directory::destroyed_at(file, version).unwrap_or(Lsn::INVALID),
    };
    blank(file, fork, lsn, block, page);
}

/// What a page is read as whose key was destroyed. Where the file goes on its indexes do as well,
/// and point to rows that the page had: these are dead. Redo finds it so, too.
#[cold]
fn blank(file: RelFile, fork: i32, lsn: Lsn, block: u32, page: &mut Page) {
    if has_outlived_its_keys(file) && fork_of(fork) == Fork::Main {
        page::bury(page, lsn, block, data_checksums());
    } else {
        page::blank(page, lsn, block, data_checksums());
    }
}

/// Whether a file goes on although keys that it had before were destroyed. No page under those is
/// left of it, unless its data directory is older than its keystore. This is done to statistics
/// only ([`crate::remnants`]): in such a directory they are lost, and ANALYZE makes them anew,
/// while an error would be one of every query.
#[cold]
fn has_outlived_its_keys(file: RelFile) -> bool {
    !directory::is_destroyed(file)
}

/// Refuses a file that is sealed and whose key cannot be had: its pages could be neither opened
/// nor, when they are written, sealed. Where its keys were destroyed, only users are refused.
#[inline]
pub(crate) fn check_usable(file: SmgrFile) -> Result<(), PageFault> {
    match seal_target(file) {
        None => Ok(()),
        Some(target) => match cache::with_page_key(file, target.version, |_| ()) {
            Err(KeyError::Destroyed) if !serves_users() => Ok(()),
            checked => checked.map_err(|error| PageFault::of_key(file, error)),
        },
    }
}

/// Refuses users of a file whose data keys were destroyed.
#[inline]
fn check_not_destroyed(file: SmgrFile) -> Result<(), PageFault> {
    let refused = shmem::anything_destroyed()
        && !file.is_temporary()
        && serves_users()
        && directory::is_destroyed(file.file);
    if refused { Err(PageFault::of_key(file, KeyError::Destroyed)) } else { Ok(()) }
}

/// Refuses users of a file whose database key is refused, or whose data keys were destroyed. Asked
/// before reading, and before adding pages, which would be in shared buffers then; two flag tests
/// while there are none.
#[inline]
pub(crate) fn check_access(file: SmgrFile) -> Result<(), PageFault> {
    if shmem::anything_refused() || shmem::anything_destroyed() {
        check_not_refused(file)
    } else {
        Ok(())
    }
}

/// Recovery, the checkpointer and their like go on: what they read they do not show to anyone.
#[cold]
fn check_not_refused(file: SmgrFile) -> Result<(), PageFault> {
    if file.is_temporary() || !serves_users() {
        return Ok(());
    }
    check_not_destroyed(file)?;
    match directory::refused_scope(file.file) {
        Some(scope) => Err(PageFault::of_key(file, KeyError::Refused { scope })),
        None => Ok(()),
    }
}

/// The fork in the tweak of a page.
fn fork_of(fork: i32) -> Fork {
    match fork {
        1 => Fork::FreeSpaceMap,
        2 => Fork::VisibilityMap,
        3 => Fork::Init,
        _ => Fork::Main,
    }
}
