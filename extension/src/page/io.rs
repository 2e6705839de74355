//! Sealing and opening pages: determines keys and faults.
//!
//! All of this is on the page path, partly in critical sections: no allocation, no lock, no key
//! schedule for recently used keys, and no error raised. Faults are returned; [`super::errors`]
//! makes reports of them.

use pagevault_cipher::{
    CipherId, DataKeyVersion, Fork, Lsn, PAGE_SIZE, Page, PageKey, interim as interim_keys, page,
};
use pagevault_keystore::RelFile;
use pagevault_keystore::record::MAX_WRAPPED_DATA_KEY;

use super::lost::{blank, blank_for_redo, blank_if_lost, is_in_use_after_destruction};
use super::{altered, misnamed, placeholders, undecided, written_over};
use crate::keys::store::{directory, given_up};
use crate::keys::usage::key_error::KeyError;
use crate::keys::usage::{cache, destruction, interim, temporary};
use crate::pg::compat::SmgrFile;
use crate::pg::process::{
    self, data_checksums, in_recovery, is_after_own_crash, is_not_consistent_yet,
};
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
    /// No key is available.
    Key(KeyError),
    /// A key is available, but the page is not authentic: it has changed since it was sealed.
    NotAuthentic,
    /// The page is in plaintext, and its file contains sealed pages only.
    Plaintext,
    /// The page is under a key under which the file has no page any more.
    Former,
}

impl PageFault {
    pub(crate) fn of_key(file: SmgrFile, error: KeyError) -> PageFault {
        PageFault { file, cause: Cause::Key(error) }
    }
}

/// The key under which pages of a file are written now.
#[derive(Clone, Copy)]
pub(crate) struct SealTarget {
    pub(super) file: SmgrFile,
    pub(super) version: DataKeyVersion,
}

/// The key version of temporary files; their key exists as long as the server runs.
const TEMPORARY_VERSION: DataKeyVersion = DataKeyVersion::FIRST;

/// The key for sealing pages of a file; `None` if the file is written in plaintext.
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

/// How to overwrite an existing page.
#[derive(Clone, Copy)]
pub(crate) struct Writing {
    /// As [`seal_target`].
    pub(crate) target: Option<SealTarget>,
    /// The file is being rewritten, or may have pages under its interim key. So the page on disk
    /// may be under another key or in plaintext, and must be examined: see [`target_over`].
    pub(crate) must_compare: bool,
    /// The file is being rewritten.
    pub(super) is_mixed: bool,
    /// In recovery: must check whether the page on disk is sealed under an unknown key; see
    /// [`may_write_over`].
    pub(crate) must_check_key: bool,
}

/// The key for overwriting a page, and whether to read the page on disk first. Both are read from
/// the directory together, so they are consistent.
#[inline]
pub(crate) fn writing(file: SmgrFile) -> Writing {
    let settled =
        Writing { target: None, must_compare: false, is_mixed: false, must_check_key: false };
    if file.is_temporary() {
        return Writing { target: seal_target(file), ..settled };
    }
    if !shmem::anything_sealed() {
        // No data key exists yet, but WAL may bring the first one.
        let must_check_key = shmem::any_database_key() && in_recovery();
        return Writing { must_check_key, ..settled };
    }
    let writing = directory::writing(file.file);
    let current = writing.as_ref().and_then(|writing| writing.current);
    let target = current.map(|(version, _)| SealTarget { file, version });
    let may_be_interim = target.is_some() && interim::any();
    let is_mixed = writing.is_some_and(|writing| writing.mixed);
    let must_compare = may_be_interim || is_mixed;
    Writing { target, must_compare, is_mixed, must_check_key: in_recovery() }
}

/// In recovery, before a page is written: if the page on disk is sealed under an unknown key,
/// whether the file's first or a later one, notes that and returns false, so that the page on disk
/// stays. A fault if all WAL has been replayed that could have brought the key, or the user has
/// asked to write over the page in any case. See [`written_over`].
pub(crate) fn may_write_over(
    file: SmgrFile,
    writing: Writing,
    fork: i32,
    block: u32,
    on_disk: &Page,
) -> Result<bool, PageFault> {
    match page::version_of(on_disk) {
        Some(version)
            if written_over::is_unknown(file.file, version)
                && page::may_be_sealed(on_disk, block, data_checksums())
                && !misnamed::is_misnamed(file, fork, block, on_disk) =>
        {
            if writing.target.is_some() && process::ignores_invalid_pages() {
                Err(PageFault::of_key(file, KeyError::NoKey { version }))
            } else if written_over::note(file.file, version, block) {
                Ok(false)
            } else if fork_of(fork) == Fork::FreeSpaceMap {
                Ok(true) // read as empty, see [`open`]
            } else {
                Err(PageFault::of_key(file, KeyError::NoKey { version }))
            }
        }
        _ => Ok(true),
    }
}

/// The unknown key that a page on disk is under; `None` also if its header only looks like that of
/// such a page.
pub(crate) fn unknown_version_of(
    file: SmgrFile,
    fork: i32,
    block: u32,
    on_disk: &Page,
) -> Option<DataKeyVersion> {
    page::version_of(on_disk).filter(|version| {
        written_over::is_unknown(file.file, *version)
            && page::may_be_sealed(on_disk, block, data_checksums())
            && !misnamed::is_misnamed(file, fork, block, on_disk)
    })
}

/// The key for overwriting a page where the page on disk may have another key than is wanted.
///
/// A page may have changed without a WAL record since it was last written: hint bits, free space,
/// bits of the visibility map, private data of an access method (list:
/// docs/design/0011-changes-without-wal.md). Then its LSN is the same as on disk. If it were
/// written under another key and torn, it would mix two keys, and nothing would repair it. So it
/// keeps its key on disk, or stays plaintext, until a change of it is logged in WAL, which the
/// rekey engine ensures.
///
/// The page on disk does not decide if it is in a state in which the file had no page any more when
/// the present rewriting began ([`directory::may_be_on_disk`]). Then it is damaged, or somebody has
/// put it there, perhaps so that the server writes plaintext, or under a key without a tag. Nothing
/// is lost by that: a file that is not being rewritten is not compared at all.
///
/// A file that is not being rewritten has only pages under interim keys besides. `is_unlogged`:
/// whether a crash empties the fork, so that nothing is repaired, nor logged.
pub(crate) fn target_over(
    file: SmgrFile,
    writing: Writing,
    lsn: Lsn,
    on_disk: &Page,
    is_unlogged: impl FnOnce() -> bool,
) -> Option<SealTarget> {
    let wanted = writing.target;
    if page::lsn_of(on_disk) != lsn || page::is_zero(on_disk) {
        return wanted;
    }
    let version = page::version_of(on_disk);
    if !writing.is_mixed && (!version.is_some_and(interim_keys::is_interim) || is_unlogged()) {
        return wanted;
    }
    match version {
        _ if writing.is_mixed && !directory::may_be_on_disk(file.file, version) => wanted,
        None => None,
        Some(version) if directory::is_former(file.file, version) => wanted,
        Some(version) if directory::has_key(file.file, version) => {
            Some(SealTarget { file, version })
        }
        Some(_) => wanted,
    }
}

/// Seals consecutive pages of one file in `into`. `fill` first copies each page there; copies are
/// sealed because a page in shared buffers may change meanwhile (hint bits).
///
/// A page whose key was destroyed was read or restored in recovery, or was missed at the
/// destruction. It is sealed under a random key that is not kept. So its contents are lost, as
/// intended, and the checkpoint can finish.
pub(crate) fn seal(
    target: SealTarget,
    fork: i32,
    first_block: u32,
    into: &mut [Page],
    mut fill: impl FnMut(usize, &mut Page),
) -> Result<(), PageFault> {
    let fork = fork_of(fork);
    let checksums = data_checksums();
    let mut run = |key: &PageKey, version: DataKeyVersion| {
        let work = Timing::begin();
        let mut sealed = 0;
        for (i, (block, page)) in (first_block..).zip(into.iter_mut()).enumerate() {
            fill(i, page);
            // A page added to a table and not yet used (hio.c), without WAL, is zero on disk. Also
            // when a file is extended (`is_as_added`).
            if fork == Fork::Main && page::is_bare_block(page, block, checksums) {
                page.fill(0);
            }
            sealed += u64::from(page::seal(page, key, version, block, fork, checksums));
        }
        work.sealed(kind_of(target.file), sealed, sealed * PAGE_SIZE as u64);
    };
    let SealTarget { file, version } = target;
    let sealed = match cache::with_page_key(file, version, |key| run(key, version)) {
        Err(KeyError::Destroyed) => {
            cache::with_lost_key(|key| run(key, version)).ok_or(KeyError::Destroyed)
        }
        Err(error) if destruction::is_under_way(file.file) => {
            cache::with_lost_key(|key| run(key, version)).ok_or(error)
        }
        Err(locked @ KeyError::Locked { scope }) if scope.key_group().is_some() => {
            interim_version(file.file, version).ok_or(locked).and_then(|version| {
                interim::mark(file.file, scope.key_group()).map_err(|_| KeyError::NotMarked)?;
                cache::with_page_key(file, version, |key| run(key, version))
            })
        }
        sealed => sealed,
    };
    sealed.map_err(|error| PageFault::of_key(target.file, error))
}

/// The interim version that stands for this data key of a locked key group, if there is one.
#[cold]
fn interim_version(file: RelFile, version: DataKeyVersion) -> Option<DataKeyVersion> {
    let found = directory::data_key(file, version, &mut [0; MAX_WRAPPED_DATA_KEY])?;
    let version = interim_keys::version_of(CipherId::try_from(found.cipher).ok()?, version);
    directory::has_key(file, version).then_some(version)
}

/// Whether the page with this LSN is a placeholder, which must not be written. See
/// [`placeholders`].
#[inline]
pub(crate) fn is_placeholder(lsn: Lsn) -> bool {
    page::is_placeholder(lsn)
}

/// Whether an added page has nothing but its header: it is then written as zeros.
///
/// Up to 15, pages of maps are added in this form, without WAL (`vm_extend`, `fsm_extend`). Such a
/// page, if sealed, would be ciphertext throughout; after a torn write, the rest of it would open
/// to random bits. Readers initialise a page of zeros to the same form.
#[inline]
pub(crate) fn is_as_added(page: &Page) -> bool {
    page::is_bare(page)
}

/// Opens a page in place if it is sealed. If not, refuses it in a file that contains sealed pages
/// only.
#[inline]
pub(crate) fn open(
    file: SmgrFile,
    fork: i32,
    block: u32,
    page: &mut Page,
) -> Result<(), PageFault> {
    try_open(file, fork, block, page).or_else(|fault| altered::refuse(fault, fork, block, page))
}

/// Like [`open`], but of a page that is not authentic nothing follows, and nothing is counted: the
/// caller reads it again, or calls [`altered::refuse`].
#[inline]
pub(crate) fn try_open(
    file: SmgrFile,
    fork: i32,
    block: u32,
    page: &mut Page,
) -> Result<(), PageFault> {
    match page::version_of(page) {
        None => {
            if shmem::anything_sealed()
                && !file.is_temporary()
                && directory::is_sealed_only(file.file)
            {
                refuse_plaintext(file, fork, page)?;
            }
            if shmem::anything_destroyed() && in_recovery() {
                blank_if_lost(file, fork, block, page);
            }
            Ok(())
        }
        Some(version) => open_sealed(file, fork, block, page, version),
    }
}

/// Refuses a page in plaintext in a file that contains sealed pages only: no server wrote it.
///
/// - Zero pages are accepted: files grow by them.
/// - Damaged pages are left to PostgreSQL, which rejects them, so that its own remedies apply.
/// - Maps are read as empty, as PostgreSQL does if a map is damaged. That only costs time.
/// - In a base backup and on a standby, redo reads pages that are older, or newer, than what it has
///   replayed of the keystore. So it is not checked before the data directory is consistent. After
///   a crash of its own a server has no such pages.
#[cold]
fn refuse_plaintext(file: SmgrFile, fork: i32, page: &mut Page) -> Result<(), PageFault> {
    if !page::is_plaintext(page) {
        return Ok(());
    }
    let may_be_ours = is_not_consistent_yet() && !is_after_own_crash();
    if !may_be_ours {
        count_refusal(file);
    }
    if is_map(fork) {
        page.fill(0);
        return Ok(());
    }
    if may_be_ours {
        undecided::note_older(file.file);
        return Ok(());
    }
    Err(PageFault { file, cause: Cause::Plaintext })
}

/// Refuses a page under a former key, of which was proven that no server has a page under it: it is
/// an old copy. `page` is opened already; PostgreSQL would accept it.
///
/// - Redo reads such pages before the data directory is consistent, see [`refuse_plaintext`].
/// - A visibility map is read as empty. By an old one, rows that were deleted since would be
///   visible.
/// - A free space map is accepted: a standby has pages of its own in it, and nobody relies on them.
#[cold]
fn refuse_former(file: SmgrFile, fork: i32, page: &mut Page) -> Result<(), PageFault> {
    let may_be_ours = is_not_consistent_yet() && !is_after_own_crash();
    match fork_of(fork) {
        _ if may_be_ours => {
            undecided::note_older(file.file);
            Ok(())
        }
        Fork::FreeSpaceMap => Ok(()),
        Fork::VisibilityMap => {
            count_refusal(file);
            page.fill(0);
            Ok(())
        }
        Fork::Main | Fork::Init => {
            count_refusal(file);
            Err(PageFault { file, cause: Cause::Former })
        }
    }
}

/// Whether this fork is a free space map or a visibility map.
pub(super) fn is_map(fork: i32) -> bool {
    matches!(fork_of(fork), Fork::FreeSpaceMap | Fork::VisibilityMap)
}

fn open_sealed(
    file: SmgrFile,
    fork: i32,
    block: u32,
    page: &mut Page,
    version: DataKeyVersion,
) -> Result<(), PageFault> {
    if interim_keys::is_interim(version) && !file.is_temporary() {
        interim::was_read();
    }
    let opened = cache::with_page_key_of(file, version, |key, is_former| {
        let work = Timing::begin();
        let opened = page::open(page, key, block, fork_of(fork), data_checksums());
        work.opened(kind_of(file), 1, PAGE_SIZE as u64);
        opened.map(|_| is_former && page::is_plaintext(page))
    });
    match opened {
        Ok(Ok(false)) => Ok(()),
        Ok(Ok(true)) => refuse_former(file, fork, page),
        Ok(Err(page::NotAuthentic)) => Err(PageFault { file, cause: Cause::NotAuthentic }),
        // Nobody has replaced it. A map is read as empty, as one that is damaged.
        Err(KeyError::Destroyed)
            if directory::is_lost_key(file.file, version) && !given_up::may_be_for_redo() =>
        {
            count_refusal(file);
            if is_map(fork) {
                page.fill(0);
                return Ok(());
            }
            Err(PageFault::of_key(file, KeyError::Destroyed))
        }
        Err(KeyError::Destroyed) if in_recovery() => {
            blank_for_redo(file.file, fork, version, block, page);
            Ok(())
        }
        Err(KeyError::Destroyed) if is_in_use_after_destruction(file.file) => {
            blank(file.file, fork, Lsn::INVALID, block, page);
            Ok(())
        }
        // Redo changes this map without an image of it, and nobody relies on it.
        Err(KeyError::Locked { .. }) if fork_of(fork) == Fork::FreeSpaceMap && in_recovery() => {
            page.fill(0);
            Ok(())
        }
        // Redo reads the page for its lock only (docs/design/0052-interim-keys.md).
        Err(KeyError::Locked { scope })
            if interim::stands_in(scope) && matches!(fork_of(fork), Fork::Main) =>
        {
            page::placeholder(page, block, data_checksums());
            Ok(())
        }
        // Not sealed, but damaged: PostgreSQL reports that, and its own remedies apply.
        Err(KeyError::NoKey { .. }) if !page::may_be_sealed(page, block, data_checksums()) => {
            Ok(())
        }
        // Redo changes this map without comparing LSNs, and its contents may be lost. An empty map
        // means that there is no free space.
        Err(KeyError::NoKey { .. }) if fork_of(fork) == Fork::FreeSpaceMap => {
            if !in_recovery() {
                count_refusal(file);
            }
            page.fill(0);
            Ok(())
        }
        // A base backup has copied the page after the keystore, and its key was made in between.
        Err(KeyError::NoKey { .. }) if is_not_consistent_yet() => {
            if !placeholders::wait_for(file.file, version, block) {
                return Err(PageFault::of_key(file, KeyError::TooManyMissing));
            }
            page::placeholder(page, block, data_checksums());
            Ok(())
        }
        Err(error) => {
            count_refusal(file);
            Err(PageFault::of_key(file, error))
        }
    }
}

/// Whether a page on disk can be opened, or is none that has to be.
pub(crate) fn is_authentic(file: SmgrFile, fork: i32, block: u32, on_disk: &mut Page) -> bool {
    let Some(version) = page::version_of(on_disk) else { return true };
    let opened = cache::with_page_key_of(file, version, |key, _| {
        page::open(on_disk, key, block, fork_of(fork), data_checksums())
    });
    !matches!(opened, Ok(Err(page::NotAuthentic)))
}

/// Counts a page of this file that was not opened.
pub(crate) fn count_refusal(file: SmgrFile) {
    stats::count_failure(kind_of(file));
}

#[inline]
fn kind_of(file: SmgrFile) -> StatsKind {
    if file.is_temporary() { StatsKind::Temporary } else { StatsKind::Relation }
}

/// The fork number in the tweak of a page.
pub(super) fn fork_of(fork: i32) -> Fork {
    match fork {
        1 => Fork::FreeSpaceMap,
        2 => Fork::VisibilityMap,
        3 => Fork::Init,
        _ => Fork::Main,
    }
}
