//! PostgreSQL 18: completion of asynchronous reads.
//!
//! A read has two completions (aio_callback.c), both in a critical section. `complete_shared` runs
//! once, in whichever process finds that the read is done: its owner, an I/O worker, or, with
//! `io_method = io_uring`, any process that waits for any read of the same owner, for it takes all
//! that is done from the owner's ring (`pgaio_uring_drain_locked`). Only what lies in shared memory
//! may be followed there. `complete_local` runs in the owner alone, when it takes its handle back
//! (`pgaio_io_reclaim`), however it comes to that: after its own wait, when it runs out of handles,
//! when a transaction is aborted, when it exits.
//!
//! Pages in shared buffers are opened in the first: from then on everybody may use them. Pages of
//! temporary tables are opened in the second, just before the server itself verifies them: their
//! buffers, and the number that their key is derived with, are the owner's.
//!
//! Contract of both: they may not allocate, raise, or wait for a lock. Keys come from shared memory
//! without locks.

use std::ffi::c_void;

use pgrx::pg_sys;

use super::calls_seen::{self, Call};
use super::forward::Forward;
use crate::page;
use crate::page::io::Cause;
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

/// `PGAIO_HCB_MD_READV`: whose report function words the error.
const CALLBACK_MD_READV: u32 = 1;

/// `PgAioTargetData` (aio_types.h), its `smgr` arm, the only one there is.
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
/// `pgaio_io_get_target_data`
pub(super) type GetTargetData = unsafe extern "C-unwind" fn(*mut c_void) -> *const TargetData;
/// `pgaio_io_get_handle_data`
pub(super) type GetHandleData = unsafe extern "C-unwind" fn(*mut c_void, *mut u8) -> *const u64;

/// `aio_md_readv_cb.complete_shared`
pub(super) static MD_READV_COMPLETE: Forward<Complete> = Forward::unresolved();
/// `aio_local_buffer_readv_cb.complete_local`
pub(super) static LOCAL_READV_COMPLETE: Forward<Complete> = Forward::unresolved();
pub(super) static GET_TARGET_DATA: Forward<GetTargetData> = Forward::unresolved();
pub(super) static GET_HANDLE_DATA: Forward<GetHandleData> = Forward::unresolved();

impl IoResult {
    /// How many blocks were really read.
    fn blocks(self) -> u32 {
        match (self.bits & STATUS_MASK) >> STATUS_SHIFT {
            STATUS_OK | STATUS_PARTIAL => self.result.max(0) as u32,
            _ => 0,
        }
    }

    /// The read failed: a page could not be opened.
    fn failed(cause: Cause) -> IoResult {
        let error = match cause {
            Cause::Key(_) => libc::ENOKEY,
            Cause::NotAuthentic => libc::EBADMSG,
        };
        let status = STATUS_ERROR << STATUS_SHIFT;
        IoResult { bits: CALLBACK_MD_READV | status | (error as u32) << ERROR_SHIFT, result: 0 }
    }
}

/// `aio_md_readv_cb.complete_shared`: opens what was read into shared buffers.
///
/// A page whose key cannot be had turns the result into an error with ENOKEY, one that is not as it
/// was sealed into one with EBADMSG. The server reports it as a failed read in the backend that
/// waits for it.
pub(super) unsafe extern "C-unwind" fn md_readv_complete(
    handle: *mut c_void,
    prior: IoResult,
    data: u8,
) -> IoResult {
    // SAFETY: forwarded as received. The handle's target is in shared memory.
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

/// `aio_local_buffer_readv_cb.complete_local`: opens what was read into local buffers, which the
/// server then verifies.
pub(super) unsafe extern "C-unwind" fn local_readv_complete(
    handle: *mut c_void,
    prior: IoResult,
    data: u8,
) -> IoResult {
    // SAFETY: forwarded as received, but for the result; we are in the process that began the read.
    unsafe {
        let target = &*GET_TARGET_DATA.get()(handle);
        let opened = open(handle, target, compat::temporary_backend(), prior);
        LOCAL_READV_COMPLETE.get()(handle, opened, data)
    }
}

/// Opens the blocks that were really read; the result is that of the read, or that there is no key.
///
/// # Safety
/// In a completion of the read, in a process that has its buffers. Handle, target and buffers are
/// stable until it returns, and nobody else touches the pages that were read.
#[inline]
unsafe fn open(handle: *mut c_void, target: &TargetData, backend: i32, done: IoResult) -> IoResult {
    let file = SmgrFile { file: compat::rel_file(target.locator), backend };
    let mut buffers: u8 = 0;
    // SAFETY: the caller has the handle, which has as many buffers as it says, and their pages to
    // itself.
    unsafe {
        let buffer_ids = GET_HANDLE_DATA.get()(handle, &mut buffers);
        for i in 0..done.blocks().min(u32::from(buffers)) {
            let page = compat::buffer_page(*buffer_ids.add(i as usize) as pg_sys::Buffer);
            let page = &mut *page.cast();
            let opened = page::io::open(file, i32::from(target.fork), target.block + i, page);
            if let Err(fault) = opened {
                return IoResult::failed(fault.cause);
            }
        }
    }
    done
}
