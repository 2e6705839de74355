//! PostgreSQL 18: completion of asynchronous reads.
//!
//! Contract of the completion: runs in whichever process finds the I/O finished (backends, I/O
//! workers, the checkpointer), inside a critical section, with the buffers' I/O flags held. It may
//! not allocate, raise, or wait for a lock. Keys come from shared memory without locks.

use std::ffi::c_void;

use pgrx::pg_sys;

use super::forward::Forward;
use crate::page_io;
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

pub(super) static MD_READV_COMPLETE: Forward<Complete> = Forward::unresolved();
pub(super) static GET_TARGET_DATA: Forward<GetTargetData> = Forward::unresolved();
pub(super) static GET_HANDLE_DATA: Forward<GetHandleData> = Forward::unresolved();

/// `aio_md_readv_cb.complete_shared`: opens the blocks that were really read.
///
/// A page whose key cannot be had turns the result into an error with ENOKEY, which the server
/// reports as a failed read in the backend that waits for it.
pub(super) unsafe extern "C-unwind" fn md_readv_complete(
    handle: *mut c_void,
    prior: IoResult,
    data: u8,
) -> IoResult {
    // SAFETY: forwarded as received. Afterwards the handle's target and buffers are stable until we
    // return, and the first `result` buffers hold pages that only this completion touches.
    unsafe {
        let mut done = MD_READV_COMPLETE.get()(handle, prior, data);
        let status = (done.bits & STATUS_MASK) >> STATUS_SHIFT;
        if status != STATUS_OK && status != STATUS_PARTIAL {
            return done;
        }
        let target = &*GET_TARGET_DATA.get()(handle);
        // Only the owner of a temporary relation completes reads of it.
        let is_temporary = target.flags & FLAG_IS_TEMP != 0;
        let backend =
            if is_temporary { compat::temporary_backend() } else { compat::SHARED_BACKEND };
        let file = SmgrFile { file: compat::rel_file(target.locator), backend };
        let mut buffers: u8 = 0;
        let buffer_ids = GET_HANDLE_DATA.get()(handle, &mut buffers);
        let blocks = u32::from(buffers).min(done.result.max(0) as u32);
        for i in 0..blocks {
            let page = compat::buffer_page(*buffer_ids.add(i as usize) as pg_sys::Buffer);
            let block = target.block + i;
            if page_io::open(file, i32::from(target.fork), block, page).is_err() {
                done.bits = CALLBACK_MD_READV
                    | (STATUS_ERROR << STATUS_SHIFT)
                    | ((libc::ENOKEY as u32) << ERROR_SHIFT);
                done.result = 0;
                return done;
            }
        }
        done
    }
}
