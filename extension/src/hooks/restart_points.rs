//! Suppresses restart points that would discard WAL which recovery may need again.
//!
//! While a key is missing that WAL may still bring, redo leaves pages on disk unchanged
//! ([`crate::page::placeholders`], [`crate::page::written_over`]). If the key never comes, because
//! the keystore is older than the data directory, everything must be replayed again from an earlier
//! address with the right keystore. A restart point in between would prevent that.
//!
//! PostgreSQL has a rule for a similar case: a checkpoint record replayed while redo has references
//! to pages that do not exist is not used as a restart point (`RecoveryRestartPoint`, xlog.c, calls
//! `XLogHaveInvalidPages`, xlogutils.c; 15 to 18). So we add such a reference while the record is
//! replayed, and remove it afterwards: at consistency PostgreSQL would report it as damage.
//!
//! `pg_rewind` begins at the last checkpoint record in the WAL of its target (`findLastCheckpoint`,
//! parsexlog.c), whether or not that was a restart point, and relies on it that pages which were
//! changed before are on disk. So at consistency, when no key is missing any more, all dirty pages
//! are written, and all files synced, if a record was not used. A clean stop would not do that: it
//! makes no restart point without a record to use (`CreateRestartPoint`, xlog.c). So the startup
//! process does it when it is stopped before, between two records. If a key is missing then, or if
//! the process ends because something has failed, the stop is no clean one: `pg_rewind` refuses the
//! data directory, and the next start repeats the same WAL. After an error in a record, pages may
//! be half changed, and a page whose write has failed is waited for by whoever writes it again
//! (`StartBufferIO`, bufmgr.c), for ever.

use pgrx::prelude::PgLogLevel;
use pgrx::{PgSqlErrorCode, pg_sys};

use super::smgr;
use crate::fault;
use crate::page::{flushing, placeholders, undecided};
use crate::pg::process::{self, ProcessLocal};
use crate::pg::report::Report;
use crate::pg::{checkpoint, compat, exit, wal};

type Redo = unsafe extern "C-unwind" fn(*mut pg_sys::XLogReaderState);

static PREVIOUS: ProcessLocal<Option<Redo>> = ProcessLocal::new(None);

/// Whether a checkpoint record was not used.
static SUPPRESSED: ProcessLocal<bool> = ProcessLocal::new(false);

/// Whether what is done at consistency has begun, and not succeeded yet.
static BEGUN: ProcessLocal<bool> = ProcessLocal::new(false);

/// Replaces `xlog_redo`; from `_PG_init`.
pub(crate) fn install() {
    const XLOG: usize = pg_sys::RmgrIds::RM_XLOG_ID as usize;
    // SAFETY: in the postmaster, before any process is forked. The table has an entry for every
    // resource manager and is not constant (rmgr.c); built-in entries exist from the beginning.
    unsafe {
        let manager = (&raw mut pg_sys::RmgrTable).cast::<pg_sys::RmgrData>().add(XLOG);
        PREVIOUS.set((*manager).rm_redo);
        (*manager).rm_redo = Some(redo);
    }
}

/// Contract: startup process, not in a critical section; errors end recovery.
unsafe extern "C-unwind" fn redo(record: *mut pg_sys::XLogReaderState) {
    let Some(next) = PREVIOUS.get() else { return };
    // SAFETY: the server's own argument, passed on; no values with destructors here.
    unsafe {
        let missing = if is_checkpoint(record) && process::is_not_consistent_yet() {
            pg_sys::panic::pgrx_extern_c_guard(|| {
                let file = placeholders::file_with_missing_key(smgr::unknown_version_on_disk)
                    .or_else(undecided::file_with_torn_page);
                file.inspect(|file| compat::refer_to_missing_page(*file))
            })
        } else {
            None
        };
        next(record);
        if let Some(file) = missing {
            SUPPRESSED.set(true);
            pg_sys::panic::pgrx_extern_c_guard(|| {
                compat::forget_missing_page(file);
                fault::point("restart_point.suppressed");
            });
        }
    }
}

/// In the startup process, before it replays any WAL.
pub(crate) fn watch_exit() {
    // Called in reverse order. An ERROR in one of them is FATAL (`errstart`, elog.c: the process is
    // about to exit), and the next one is called.
    exit::at_exit(require_made_up);
    exit::at_exit(make_up_at_exit);
}

/// Does what is to be done at consistency. If that fails, nothing is written when the process ends.
pub(crate) fn at_consistency(work: fn()) {
    BEGUN.set(true);
    work();
    make_up();
    BEGUN.set(false);
}

/// Writes and syncs what a restart point would have.
fn make_up() {
    if SUPPRESSED.get() {
        flushing::everything();
        checkpoint::sync_relation_files();
        SUPPRESSED.set(false);
    }
}

fn make_up_at_exit() {
    if SUPPRESSED.get() && is_stopped() && is_complete() {
        make_up();
    }
}

/// Whether nothing has failed: the process ends between two records, by a request. Not because the
/// postmaster has gone, whose successor would have to wait.
fn is_stopped() -> bool {
    !BEGUN.get() && wal::is_between_records() && process::has_postmaster()
}

/// Whether everything that redo has replayed can be written.
fn is_complete() -> bool {
    placeholders::missing_key(smgr::unknown_version_on_disk).is_none()
        && undecided::file_with_torn_page().is_none()
}

fn require_made_up() {
    if SUPPRESSED.get() {
        Report::new(
            PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
            "pagevault: recovery ends as in a crash, because a key or a page is missing or something has failed",
        )
        .detail("Pages on disk may be as they were. The next start repeats the same WAL.")
        .send(PgLogLevel::LOG);
        exit::as_in_a_crash();
    }
}

/// # Safety
/// `record` is a reader with a decoded record of `RM_XLOG_ID`.
unsafe fn is_checkpoint(record: *mut pg_sys::XLogReaderState) -> bool {
    // SAFETY: the caller's reader has a record, which is valid until the next one is read.
    let info = unsafe { (*(*record).record).header.xl_info } & !(pg_sys::XLR_INFO_MASK as u8);
    matches!(u32::from(info), pg_sys::XLOG_CHECKPOINT_ONLINE | pg_sys::XLOG_CHECKPOINT_SHUTDOWN)
}
