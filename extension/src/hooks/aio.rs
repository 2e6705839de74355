//! PostgreSQL 18: completion of asynchronous reads.
//!
//! A read has two completion callbacks (aio_callback.c), both in a critical section.
//! `complete_shared` runs once, in the process that finds the read finished: its owner, an I/O
//! worker, or, with `io_method = io_uring`, any process that waits for any read of the same owner,
//! because it processes all completions in the owner's ring (`pgaio_uring_drain_locked`). So it may
//! follow pointers to shared memory only. `complete_local` runs in the owner only, when the handle
//! is reclaimed (`pgaio_io_reclaim`): after the owner's own wait, when it runs out of handles, when
//! a transaction is aborted, or at exit.
//!
//! Pages in shared buffers are opened in the first: from then on every process may use them. Pages
//! of temporary tables are opened in the second, just before the server verifies them: their
//! buffers, and the backend number that their key is derived from, exist in the owner only.
//!
//! A read that failed is reported by its owner, through a third callback (`report`). It gets what
//! the completion has found out: a number, and which page.
//!
//! Contract of the completions: they must not allocate, raise errors, or wait for a lock. Keys are
//! read from shared memory without locks.

use std::ffi::c_void;

use pgrx::pg_sys;
use pgrx::prelude::PgLogLevel;

use super::calls_seen::{self, Call};
use super::forward::Forward;
use crate::page;
use crate::page::io::{Cause, PageFault};
use crate::pg::compat::{self, SmgrFile};

/// `PgAioResult` (aio_types.h): `id:6, status:3, error_data:23`, then the result.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct IoResult {
    bits: u32,
    result: i32,
}

const STATUS_SHIFT: u32 = 6;
const STATUS_MASK: u32 = 0b111 << STATUS_SHIFT;
const ERROR_SHIFT: u32 = 9;
const STATUS_OK: u32 = 1; // PGAIO_RS_*
const STATUS_PARTIAL: u32 = 2;
const STATUS_ERROR: u32 = 4;

/// Error numbers of pages that are refused, beyond those of the system: a page in plaintext that is
/// not accepted, one that is not authentic, and one under a former key.
const NOT_ACCEPTED: u32 = 1 << 20;
const NOT_AUTHENTIC: u32 = NOT_ACCEPTED + 1;
const FORMER: u32 = NOT_ACCEPTED + 2;

/// `PGAIO_HCB_MD_READV`: the callback whose report function reports the error.
const CALLBACK_MD_READV: u32 = 1;

/// `PgAioTargetData` (aio_types.h): its only variant, `smgr`.
#[repr(C)]
pub(super) struct TargetData {
    locator: compat::Locator,
    block: u32,
    count: u32,
    fork: u8,
    flags: u8,
}

const FLAG_IS_TEMP: u8 = 1;

/// `PgAioHandleCallbackComplete`
pub(super) type Complete = unsafe extern "C-unwind" fn(*mut c_void, IoResult, u8) -> IoResult;
/// `PgAioHandleCallbackReport`
pub(super) type ReportResult = unsafe extern "C-unwind" fn(IoResult, *const TargetData, i32);
/// `pgaio_io_get_target_data`
pub(super) type GetTargetData = unsafe extern "C-unwind" fn(*mut c_void) -> *const TargetData;
/// `pgaio_io_get_handle_data`
pub(super) type GetHandleData = unsafe extern "C-unwind" fn(*mut c_void, *mut u8) -> *const u64;

/// `pgaio_error_cleanup`
pub(super) type LeaveBatch = unsafe extern "C-unwind" fn();
/// `pgaio_io_release`
pub(super) type Release = unsafe extern "C-unwind" fn(*mut c_void);

/// `aio_md_readv_cb.complete_shared`
pub(super) static MD_READV_COMPLETE: Forward<Complete> = Forward::unresolved();
/// `aio_md_readv_cb.report`
pub(super) static MD_READV_REPORT: Forward<ReportResult> = Forward::unresolved();
/// `aio_local_buffer_readv_cb.complete_local`
pub(super) static LOCAL_READV_COMPLETE: Forward<Complete> = Forward::unresolved();
pub(super) static GET_TARGET_DATA: Forward<GetTargetData> = Forward::unresolved();
pub(super) static GET_HANDLE_DATA: Forward<GetHandleData> = Forward::unresolved();
pub(super) static LEAVE_BATCH: Forward<LeaveBatch> = Forward::unresolved();
pub(super) static RELEASE: Forward<Release> = Forward::unresolved();

impl IoResult {
    /// The number of blocks that were actually read.
    fn blocks(self) -> u32 {
        match (self.bits & STATUS_MASK) >> STATUS_SHIFT {
            STATUS_OK | STATUS_PARTIAL => self.result.max(0) as u32,
            _ => 0,
        }
    }

    /// The result of a read of which this page could not be opened.
    fn failed(cause: Cause, page: u32) -> IoResult {
        let error = match cause {
            Cause::Key(_) => libc::ENOKEY as u32,
            Cause::NotAuthentic => NOT_AUTHENTIC,
            Cause::Plaintext => NOT_ACCEPTED,
            Cause::Former => FORMER,
        };
        let bits = CALLBACK_MD_READV | STATUS_ERROR << STATUS_SHIFT | error << ERROR_SHIFT;
        IoResult { bits, result: page as i32 }
    }

    /// Why a page was refused, if the server has no error number for that.
    fn refusal(self) -> Option<Cause> {
        match self.bits >> ERROR_SHIFT {
            NOT_ACCEPTED => Some(Cause::Plaintext),
            NOT_AUTHENTIC => Some(Cause::NotAuthentic),
            FORMER => Some(Cause::Former),
            _ => None,
        }
    }
}

/// `aio_md_readv_cb.complete_shared`: opens pages that were read into shared buffers.
///
/// If the key of a page is not available the result is the error ENOKEY, and the backend that waits
/// for the read reports it as a failed read. Of pages that are refused: [`md_readv_report`].
pub(super) unsafe extern "C-unwind" fn md_readv_complete(
    handle: *mut c_void,
    prior: IoResult,
    data: u8,
) -> IoResult {
    // SAFETY: arguments forwarded unchanged. The handle's target is in shared memory.
    unsafe {
        calls_seen::note(Call::CompleteRead);
        let done = MD_READV_COMPLETE.get()(handle, prior, data);
        let target = &*GET_TARGET_DATA.get()(handle);
        if target.flags & FLAG_IS_TEMP != 0 {
            return done;
        }
        open(handle, target, compat::SHARED_BACKEND, done)
    }
}

/// `aio_md_readv_cb.report`: reports a page that is refused, with the error that other reads of it
/// raise. May raise errors.
pub(super) unsafe extern "C-unwind" fn md_readv_report(
    result: IoResult,
    target: *const TargetData,
    level: i32,
) {
    // SAFETY: arguments forwarded; the target is that of the read; an ERROR may skip our frame,
    // which has no values with destructors.
    unsafe {
        let Some(cause) = result.refusal() else {
            return MD_READV_REPORT.get()(result, target, level);
        };
        let target = &*target;
        let file = compat::rel_file(target.locator);
        let file = SmgrFile { file, backend: compat::SHARED_BACKEND };
        let fault = PageFault { file, cause };
        let block = target.block + result.result as u32;
        pg_sys::panic::pgrx_extern_c_guard(|| {
            let level =
                if level < PgLogLevel::ERROR as i32 { PgLogLevel::LOG } else { PgLogLevel::ERROR };
            page::errors::report(fault, block).send(level);
        });
    }
}

/// `aio_local_buffer_readv_cb.complete_local`: opens pages that were read into local buffers,
/// before the server verifies them.
pub(super) unsafe extern "C-unwind" fn local_readv_complete(
    handle: *mut c_void,
    prior: IoResult,
    data: u8,
) -> IoResult {
    // SAFETY: arguments forwarded, except for the result; this process started the read.
    unsafe {
        let target = &*GET_TARGET_DATA.get()(handle);
        let opened = open(handle, target, compat::temporary_backend(), prior);
        LOCAL_READV_COMPLETE.get()(handle, opened, data)
    }
}

/// Opens the blocks that were actually read. Returns the read's result, or an error if a page could
/// not be opened.
///
/// # Safety
/// In a completion of the read, in a process that can access its buffers. Handle, target and
/// buffers do not change during the call, and no other process accesses the pages.
#[inline]
unsafe fn open(handle: *mut c_void, target: &TargetData, backend: i32, done: IoResult) -> IoResult {
    let file = SmgrFile { file: compat::rel_file(target.locator), backend };
    let mut buffers: u8 = 0;
    // SAFETY: the caller guarantees the handle, whose number of buffers is read from it, and
    // exclusive access to their pages.
    unsafe {
        let buffer_ids = GET_HANDLE_DATA.get()(handle, &mut buffers);
        for i in 0..done.blocks().min(u32::from(buffers)) {
            let page = compat::buffer_page(*buffer_ids.add(i as usize) as pg_sys::Buffer);
            let page = &mut *page.cast();
            let opened = page::io::open(file, i32::from(target.fork), target.block + i, page);
            if let Err(fault) = opened {
                return IoResult::failed(fault.cause, i);
            }
        }
    }
    done
}
