//! Restart points that would cost what recovery may have to do again.
//!
//! While a key is missing that WAL may still bring, redo leaves pages on disk as they are
//! ([`crate::page::stand_ins`], [`crate::page::written_over`]). If it never comes, for the keystore
//! is older than the data directory, all has to be replayed again from before, with the right one.
//! A restart point meanwhile would begin that later.
//!
//! PostgreSQL has the same concern, and a rule for it: a checkpoint record that is replayed while
//! redo has met references to pages that do not exist is not remembered as one to restart from
//! (`RecoveryRestartPoint`, xlog.c, asks `XLogHaveInvalidPages`, xlogutils.c; 15 to 18). So while
//! such a record is replayed, there is one. It does not last: where the data directory is
//! consistent PostgreSQL would take it for damage.

use pgrx::pg_sys;

use super::smgr;
use crate::page::stand_ins;
use crate::pg::compat;
use crate::pg::process::{self, ProcessLocal};

type Redo = unsafe extern "C-unwind" fn(*mut pg_sys::XLogReaderState);

static PREVIOUS: ProcessLocal<Option<Redo>> = ProcessLocal::new(None);

/// Puts our function in the place of `xlog_redo`; from `_PG_init`.
pub(crate) fn install() {
    const XLOG: usize = pg_sys::RmgrIds::RM_XLOG_ID as usize;
    // SAFETY: in the postmaster, before anything is forked. The table has a place for every
    // resource manager and is not constant (rmgr.c); built-in ones are there from the beginning.
    unsafe {
        let manager = (&raw mut pg_sys::RmgrTable).cast::<pg_sys::RmgrData>().add(XLOG);
        PREVIOUS.set((*manager).rm_redo);
        (*manager).rm_redo = Some(redo);
    }
}

/// Contract: startup process, not in a critical section; what it raises ends recovery.
unsafe extern "C-unwind" fn redo(record: *mut pg_sys::XLogReaderState) {
    let Some(next) = PREVIOUS.get() else { return };
    // SAFETY: the server's own argument, passed on; nothing here has a destructor.
    unsafe {
        let held_up = if is_checkpoint(record) && process::is_not_consistent_yet() {
            pg_sys::panic::pgrx_extern_c_guard(|| {
                let file = stand_ins::file_at_stake(smgr::version_on_disk);
                file.inspect(|file| compat::refer_to_missing_page(*file))
            })
        } else {
            None
        };
        next(record);
        if let Some(file) = held_up {
            pg_sys::panic::pgrx_extern_c_guard(|| compat::forget_missing_page(file));
        }
    }
}

/// # Safety
/// `record` is a reader with a decoded record of `RM_XLOG_ID`.
unsafe fn is_checkpoint(record: *mut pg_sys::XLogReaderState) -> bool {
    // SAFETY: the caller's reader has a record, which stays until the next one is read.
    let info = unsafe { (*(*record).record).header.xl_info } & !(pg_sys::XLR_INFO_MASK as u8);
    matches!(u32::from(info), pg_sys::XLOG_CHECKPOINT_ONLINE | pg_sys::XLOG_CHECKPOINT_SHUTDOWN)
}
