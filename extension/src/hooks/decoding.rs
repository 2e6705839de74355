//! Logical decoding reads rows from WAL, not from pages whose reading could be refused. So changes
//! of locked relations are refused when they are decoded, before they are collected for a
//! transaction.

use pgrx::pg_sys;

use crate::keys::store::directory;
use crate::keys::usage::key_error::KeyError;
use crate::page::io::PageFault;
use crate::pg::compat::{self, Locator, SHARED_BACKEND, SmgrFile};
use crate::pg::process::{self, ProcessLocal};
use crate::{page, shmem};

type Decode = Option<
    unsafe extern "C-unwind" fn(*mut pg_sys::LogicalDecodingContext, *mut pg_sys::XLogRecordBuffer),
>;

static HEAP: ProcessLocal<Decode> = ProcessLocal::new(None);
static HEAP2: ProcessLocal<Decode> = ProcessLocal::new(None);

/// Installs our functions in front of `heap_decode` and `heap2_decode` (decode.c), which decode the
/// rows of every change; from `_PG_init`.
pub(crate) fn install() {
    // SAFETY: in the postmaster, before any process is forked. The table has an entry for each
    // resource manager ID (rmgr.c), and is not constant, because extensions add entries.
    unsafe {
        let table = (&raw mut pg_sys::RmgrTable).cast::<pg_sys::RmgrData>();
        let heap = table.add(pg_sys::RmgrIds::RM_HEAP_ID as usize);
        HEAP.set((*heap).rm_decode);
        (*heap).rm_decode = Some(decode_heap);
        let heap2 = table.add(pg_sys::RmgrIds::RM_HEAP2_ID as usize);
        HEAP2.set((*heap2).rm_decode);
        (*heap2).rm_decode = Some(decode_heap2);
    }
}

/// Contract: called by `LogicalDecodingProcessRecord` (decode.c), in a WAL sender or a session that
/// decodes, for each record of this resource manager; may raise errors. While nothing is refused it
/// tests one flag.
unsafe extern "C-unwind" fn decode_heap(
    context: *mut pg_sys::LogicalDecodingContext,
    buffer: *mut pg_sys::XLogRecordBuffer,
) {
    // SAFETY: the server's own arguments, passed on.
    unsafe {
        check(context);
        if let Some(server) = HEAP.get() {
            server(context, buffer);
        }
    }
}

/// Contract: like [`decode_heap`].
unsafe extern "C-unwind" fn decode_heap2(
    context: *mut pg_sys::LogicalDecodingContext,
    buffer: *mut pg_sys::XLogRecordBuffer,
) {
    // SAFETY: the server's own arguments, passed on.
    unsafe {
        check(context);
        if let Some(server) = HEAP2.get() {
            server(context, buffer);
        }
    }
}

/// # Safety
/// `context` is the server's, and its reader has read a record. No frame between here and the
/// server's call has values with destructors.
#[inline]
unsafe fn check(context: *mut pg_sys::LogicalDecodingContext) {
    if shmem::any_key_refused() {
        // SAFETY: our caller has no values with destructors, so an ERROR from the guard may skip
        // its frame; the context is the server's.
        unsafe { pg_sys::panic::pgrx_extern_c_guard(|| refuse_locked(context)) }
    }
}

/// # Safety
/// `context` is the decoding context passed to `check`.
#[cold]
unsafe fn refuse_locked(context: *mut pg_sys::LogicalDecodingContext) {
    // SAFETY: the server's context, with the record that it has read; output arguments are written
    // if the result is true.
    unsafe {
        if (*context).fast_forward {
            return; // the slot is only advanced; no row is returned
        }
        let reader = (*context).reader;
        for block_id in 0..=(*(*reader).record).max_block_id {
            let (mut locator, mut fork, mut block) = (Locator::default(), 0, 0);
            let known = pg_sys::XLogRecGetBlockTagExtended(
                reader,
                block_id as u8,
                &raw mut locator,
                &raw mut fork,
                &raw mut block,
                std::ptr::null_mut(),
            );
            let file = compat::rel_file(locator);
            // A session decodes only changes of its database, and none of catalogs.
            let is_decoded = known
                && file.database == process::my_database()
                && file.relation >= pg_sys::FirstNormalObjectId;
            if is_decoded && let Some(scope) = directory::refused_scope(file) {
                let file = SmgrFile { file, backend: SHARED_BACKEND };
                page::errors::report(PageFault::of_key(file, KeyError::Refused { scope }), block)
                    .raise();
            }
        }
    }
}
