//! Sealing and opening runs of pages: which key, which scratch memory, which fault.
//!
//! Everything here runs on the page path, some of it inside critical sections: no allocation, no
//! lock, no key schedule for a key that this process used lately, and no error raised. Faults are
//! returned; [`report`] words them.

use pagevault_cipher::{CipherId, Epoch, Fork, PAGE_SIZE, Page, PageKey, page};
use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;

use crate::keys::{cache, persist, revoked, shared};
use crate::pg::compat::SmgrFile;
use crate::pg::process::{
    ProcessLocal, data_checksums, hint_bits_are_logged, in_recovery, is_not_consistent_yet,
    is_startup_process, serves_users,
};
use crate::pg::report::Report;
use crate::policy;
use crate::stats::{self, Kind, Work};

const _: () =
    assert!(pgrx::pg_sys::BLCKSZ as usize == PAGE_SIZE, "page format 1 is for 8 kB pages");

/// Most pages sealed in one go; longer writes are cut into runs.
pub(crate) const RUN_MAX: u32 = 16;

/// Why a page could not be sealed or opened.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageFault {
    pub(crate) file: SmgrFile,
    pub(crate) cause: Cause,
}

/// The cause of a [`PageFault`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The database key that wraps the data key is not unwrapped; `scope` is its database or 0.
    Locked { scope: u32 },
    /// The database key is unwrapped, but users are refused: its master key was revoked.
    Refused { scope: u32 },
    /// The keystore has no data key of this epoch for this file.
    NoKey { epoch: u16 },
    /// The data key of this epoch was destroyed on purpose.
    Destroyed,
    /// The wrapped data key does not open: the keystore is damaged or not this cluster's.
    Damaged { epoch: u16 },
}

impl Cause {
    /// Why a file has no data key of an epoch.
    pub(crate) fn of_missing_key(file: RelFile, epoch: u16) -> Cause {
        match shared::destroyed_at(file, epoch) {
            Some(_) => Cause::Destroyed,
            None => Cause::NoKey { epoch },
        }
    }
}

/// Under which key a file's pages are written now.
#[derive(Clone, Copy)]
pub(crate) struct SealTarget {
    file: SmgrFile,
    epoch: Epoch,
}

/// The epoch that new writes of temporary files use; their key lives as long as the server.
const TEMPORARY_EPOCH: Epoch = match Epoch::new(1) {
    Some(epoch) => epoch,
    None => panic!("1 is an epoch"),
};

/// Where and under which key to seal, or `None` when the file is written in plaintext.
#[inline]
pub(crate) fn seal_target(file: SmgrFile) -> Option<SealTarget> {
    if file.is_temporary() {
        let target = SealTarget { file, epoch: TEMPORARY_EPOCH };
        return policy::temporary::is_wanted().then_some(target);
    }
    if !shared::anything_sealed() {
        return None;
    }
    shared::current_epoch(file.file).map(|epoch| SealTarget { file, epoch })
}

/// True if a page of this file must be looked at on disk before it is written over; see [`target_over`].
#[inline]
pub(crate) fn must_look(file: SmgrFile) -> bool {
    shared::anything_rewritten()
        && !hint_bits_are_logged()
        && !file.is_temporary()
        && shared::is_mixed(file.file)
}

/// As [`seal_target`], for a page that is written over one which may be written otherwise, because its file is being
/// rewritten.
///
/// Without checksums and `wal_log_hints` a page that has got nothing but hint bits since it was written last (or whatever
/// else is not logged: free space) goes to disk without WAL, and with the LSN that it has there. Torn under another
/// key, it would be neither, and nothing would repair it. So it keeps the key that it has on disk, or stays plaintext,
/// until it changes in WAL: the rekey engine sees to that.
///
/// # Safety
/// `page` points to a page of PostgreSQL.
pub(crate) unsafe fn target_over(
    file: SmgrFile,
    page: *const u8,
    on_disk: &Page,
) -> Option<SealTarget> {
    let wanted = seal_target(file);
    // SAFETY: by contract; the LSN does not change while the page is being written.
    let lsn = unsafe { page.cast::<[u8; page::LSN_SIZE]>().read() };
    if !on_disk.starts_with(&lsn) || page::is_zero(on_disk) {
        return wanted;
    }
    match page::epoch_of(on_disk) {
        None => None,
        Some(epoch) if shared::has_key(file.file, epoch.get()) => Some(SealTarget { file, epoch }),
        Some(_) => wanted,
    }
}

/// Where a page is read to that [`target_over`] looks at: aligned for direct I/O.
pub(crate) fn place_for_disk() -> *mut Page {
    #[repr(C, align(4096))]
    struct OnDisk(Page);
    static ON_DISK: ProcessLocal<OnDisk> = ProcessLocal::new(OnDisk([0; PAGE_SIZE]));
    ON_DISK.with(|place| &raw mut place.0)
}

/// Private copies of the pages being written. Aligned for direct I/O (`PG_IO_ALIGN_SIZE`).
#[repr(C, align(4096))]
struct Scratch {
    pages: [Page; RUN_MAX as usize],
    pointers: [*const u8; RUN_MAX as usize],
}

static SCRATCH: ProcessLocal<Scratch> = ProcessLocal::new(Scratch {
    pages: [[0; PAGE_SIZE]; RUN_MAX as usize],
    pointers: [std::ptr::null(); RUN_MAX as usize],
});

/// Seals `count` pages into scratch memory and returns pointers to them, good until the next call.
///
/// A page in shared buffers may change under us (hint bits): it is read once, into the scratch copy,
/// and everything after works on that copy.
///
/// A page whose key was destroyed was read or restored in recovery, or else it was missed when they were: it is
/// sealed under a key that is lost, which is what should become of it, and does not keep a checkpoint
/// from its end.
///
/// # Safety
/// `pages` points to `count` pointers to pages of PostgreSQL; `count <= RUN_MAX`.
pub(crate) unsafe fn seal(
    target: SealTarget,
    fork: i32,
    first_block: u32,
    pages: *const *const u8,
    count: u32,
) -> Result<*const *const u8, PageFault> {
    let fork = fork_of(fork);
    let checksums = data_checksums();
    let run = |key: &PageKey| {
        let work = Work::begin();
        let mut sealed = 0;
        let pointers = SCRATCH.with(|scratch| {
            for i in 0..count.min(RUN_MAX) as usize {
                let copy = &mut scratch.pages[i];
                // SAFETY: by contract the source is a page; the copy is ours alone.
                unsafe {
                    std::ptr::copy_nonoverlapping(*pages.add(i), copy.as_mut_ptr(), PAGE_SIZE)
                };
                let block = first_block + i as u32;
                sealed += u64::from(page::seal(copy, key, target.epoch, block, fork, checksums));
                scratch.pointers[i] = copy.as_ptr();
            }
            scratch.pointers.as_ptr()
        });
        work.sealed(kind_of(target.file), sealed, sealed * PAGE_SIZE as u64);
        pointers
    };
    let sealed = match cache::with_page_key(target.file, target.epoch, run) {
        Err(Cause::Destroyed) => cache::with_lost_key(run).ok_or(Cause::Destroyed),
        sealed => sealed,
    };
    sealed.map_err(|cause| PageFault { file: target.file, cause })
}

/// Opens a page in place if it is sealed.
///
/// # Safety
/// `page` points to one page that nobody else reads or writes now.
#[inline]
pub(crate) unsafe fn open(
    file: SmgrFile,
    fork: i32,
    block: u32,
    page: *mut u8,
) -> Result<(), PageFault> {
    // SAFETY: by contract.
    let page = unsafe { &mut *page.cast::<Page>() };
    match page::epoch_of(page) {
        None => Ok(()),
        Some(epoch) => open_sealed(file, fork, block, page, epoch),
    }
}

fn open_sealed(
    file: SmgrFile,
    fork: i32,
    block: u32,
    page: &mut Page,
    epoch: Epoch,
) -> Result<(), PageFault> {
    let opened = cache::with_page_key(file, epoch, |key| {
        let work = Work::begin();
        page::open(page, key, block, fork_of(fork), data_checksums());
        work.opened(kind_of(file), 1, PAGE_SIZE as u64);
    });
    match opened {
        Ok(()) => Ok(()),
        Err(Cause::Destroyed) if in_recovery() => {
            blank_for_redo(file.file, epoch, block, page);
            Ok(())
        }
        Err(Cause::NoKey { .. }) if is_map(fork) && is_not_consistent_yet() => {
            // Copied by a base backup after the keystore was, and after its key was made. Redo reads pages of maps that
            // it has no image of, and takes an empty one as well: it says of nothing that it is visible, or free.
            page.fill(0);
            Ok(())
        }
        Err(cause) => {
            count_refusal(file);
            Err(PageFault { file, cause })
        }
    }
}

/// A page of this file was not opened for want of its key.
pub(crate) fn count_refusal(file: SmgrFile) {
    stats::count_failure(kind_of(file));
}

#[inline]
fn kind_of(file: SmgrFile) -> Kind {
    if file.is_temporary() { Kind::Temporary } else { Kind::Relation }
}

/// Recovery begins where the last checkpoint began, which may be before keys were destroyed, and repeats
/// changes of pages that can no longer be opened. It is given empty pages that say that they were changed
/// later than all that, and passes over them. (Users were refused: [`check_access`].)
#[cold]
fn blank_for_redo(file: RelFile, epoch: Epoch, block: u32, page: &mut Page) {
    let lsn = shared::destroyed_at(file, epoch.get()).unwrap_or(0);
    page::blank(page, lsn, block, data_checksums());
}

/// Refuses a file that is sealed and whose key cannot be had: its pages could be neither opened nor,
/// when they are written, sealed. Where its keys were destroyed, only users are refused.
#[inline]
pub(crate) fn check_usable(file: SmgrFile) -> Result<(), PageFault> {
    match seal_target(file) {
        None => Ok(()),
        Some(target) => match cache::with_page_key(file, target.epoch, |_| ()) {
            Err(Cause::Destroyed) if !serves_users() => Ok(()),
            checked => checked.map_err(|cause| PageFault { file, cause }),
        },
    }
}

/// Refuses users who would add pages to a file whose data keys were destroyed.
#[inline]
pub(crate) fn check_not_destroyed(file: SmgrFile) -> Result<(), PageFault> {
    let refused = shared::anything_destroyed()
        && !file.is_temporary()
        && serves_users()
        && shared::is_destroyed(file.file);
    if refused { Err(PageFault { file, cause: Cause::Destroyed }) } else { Ok(()) }
}

/// Refuses users of a file whose database key is refused, or whose data keys were destroyed. Asked before
/// reading; two flag tests while there are none.
#[inline]
pub(crate) fn check_access(file: SmgrFile) -> Result<(), PageFault> {
    if shared::anything_refused() || shared::anything_destroyed() {
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
    match shared::refused_scope(file.file) {
        Some(scope) => Err(PageFault { file, cause: Cause::Refused { scope } }),
        None => Ok(()),
    }
}

/// Free space map and visibility map: what they say may be forgotten.
fn is_map(fork: i32) -> bool {
    matches!(fork_of(fork), Fork::FreeSpaceMap | Fork::VisibilityMap)
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

/// The database in the name of a file of a shared catalog.
const SHARED_CATALOGS: u32 = 0;

/// Words a fault for the user.
pub(crate) fn report(fault: PageFault, block: u32) -> Report {
    let RelFile { tablespace, database, relation } = fault.file.file;
    let file = format!("{tablespace}/{database}/{relation}");
    match fault.cause {
        Cause::Locked { scope } => {
            let whose = persist::scope_name(scope);
            Report::new(
                PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                format!("encrypted relation file {file} is locked"),
            )
            .detail(format!("The key of {whose} has not been unwrapped: its key provider did not answer or refused."))
            .hint(match database {
                _ if is_startup_process() => {
                    "Make the key provider reachable and start the server again: replay goes on from here, and nothing is lost."
                }
                SHARED_CATALOGS => "Nobody can log in until then; the server keeps trying. Its log tells the cause.",
                _ => "See pagevault.status for the cause. The server keeps trying; pagevault.unlock() tries again now.",
            })
        }
        Cause::Refused { scope } => revoked::file_refused(&file, scope),
        Cause::NoKey { epoch } => Report::new(
            PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
            format!("no data key of epoch {epoch} for block {block} of relation file {file}"),
        )
        .detail("The page is sealed, but the keystore under pagevault/ in the data directory does not hold its key.")
        .hint("Restore the keystore from a backup taken together with this data directory. Do not zero or reset the page: it is intact."),
        Cause::Destroyed => destroyed(&format!("relation file {file}")),
        Cause::Damaged { epoch } => Report::new(
            PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
            format!("data key of epoch {epoch} of relation file {file} cannot be unwrapped"),
        )
        .detail("Its record in the keystore does not authenticate under the database key.")
        .hint("Restore the keystore from a backup taken together with this data directory."),
    }
}

/// The report for a relation or file whose keys were destroyed.
pub(crate) fn destroyed(name: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("the data keys of {name} were destroyed"),
    )
    .detail("Somebody has shredded it: what it held can never be read again.")
    .hint("DROP it; or TRUNCATE it, to use it again.")
}

/// The storage manager forgot a file while its encryption was being decided.
pub(crate) fn invalidated() -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_T_R_SERIALIZATION_FAILURE,
        "relation cache was reset while new storage was being created",
    )
    .hint("Try the command again.")
}

/// The cipher that a temporary file is sealed with.
pub(crate) const TEMPORARY_CIPHER: CipherId = CipherId::Aes256Xts;
