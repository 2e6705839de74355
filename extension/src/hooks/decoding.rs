//! Logical decoding reads rows from WAL, not from pages whose reading could be refused. So rows of
//! locked relations, and of shredded files, whose keys were destroyed, are not collected for a
//! transaction, and it is not shown without them ([`super::left_out`]). That includes rows in
//! former files of relations: their keys are not forgotten while a slot needs WAL about them
//! ([`crate::keys::usage::forgetting`]).

use pagevault_keystore::RelFile;
use pgrx::pg_sys;

use super::left_out::{self, Row};
use crate::keys::store::directory;
use crate::keys::usage::key_error::KeyError;
use crate::pg::compat::{self, Locator};
use crate::pg::process::{self, ProcessLocal};
use crate::pg::relation_files;
use crate::shmem;

const HEAP_MANAGER: u32 = pg_sys::RmgrIds::RM_HEAP_ID;
const HEAP2_MANAGER: u32 = pg_sys::RmgrIds::RM_HEAP2_ID;
/// `XLOG_HEAP_OPMASK`
const OPERATION: u32 = 0x70;

type Decode = Option<
    unsafe extern "C-unwind" fn(*mut pg_sys::LogicalDecodingContext, *mut pg_sys::XLogRecordBuffer),
>;

static HEAP: ProcessLocal<Decode> = ProcessLocal::new(None);
static HEAP2: ProcessLocal<Decode> = ProcessLocal::new(None);
static TRANSACTIONS: ProcessLocal<Decode> = ProcessLocal::new(None);

/// Installs our functions in front of `heap_decode` and `heap2_decode` (decode.c), which decode the
/// rows of every change, and of `xact_decode`, which shows them; from `_PG_init`.
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
        let transactions = table.add(pg_sys::RmgrIds::RM_XACT_ID as usize);
        TRANSACTIONS.set((*transactions).rm_decode);
        (*transactions).rm_decode = Some(decode_transaction);
    }
}

/// Contract: called by `LogicalDecodingProcessRecord` (decode.c), in a WAL sender or a session that
/// decodes, for each record of this resource manager; may raise errors. While nothing is refused,
/// locked or destroyed it tests three flags.
unsafe extern "C-unwind" fn decode_heap(
    context: *mut pg_sys::LogicalDecodingContext,
    buffer: *mut pg_sys::XLogRecordBuffer,
) {
    // SAFETY: the server's own arguments, passed on.
    unsafe {
        if may_be_collected(context)
            && let Some(server) = HEAP.get()
        {
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
        if may_be_collected(context)
            && let Some(server) = HEAP2.get()
        {
            server(context, buffer);
        }
    }
}

/// Contract: like [`decode_heap`]. The server shows the rows of a transaction when it decodes that
/// it was committed or prepared.
unsafe extern "C-unwind" fn decode_transaction(
    context: *mut pg_sys::LogicalDecodingContext,
    buffer: *mut pg_sys::XLogRecordBuffer,
) {
    // SAFETY: the server's own arguments, passed on. No frame here has values with destructors, so
    // an ERROR from the guard may skip it.
    unsafe {
        if left_out::any(context) {
            pg_sys::panic::pgrx_extern_c_guard(|| left_out::refuse_incomplete(context));
        }
        if let Some(server) = TRANSACTIONS.get() {
            server(context, buffer);
        }
    }
}

/// # Safety
/// `context` is the server's, and its reader has read a record. No frame between here and the
/// server's call has values with destructors.
#[inline]
unsafe fn may_be_collected(context: *mut pg_sys::LogicalDecodingContext) -> bool {
    if shmem::any_key_unusable() || shmem::anything_destroyed() {
        // SAFETY: our caller has no values with destructors, so an ERROR from the guard may skip
        // its frame; the context is the server's.
        return unsafe { pg_sys::panic::pgrx_extern_c_guard(|| leaves_nothing_out(context)) };
    }
    true
}

/// False if rows of the record are locked or shredded: then the record is done with.
///
/// # Safety
/// `context` is the decoding context passed to `may_be_collected`.
#[cold]
unsafe fn leaves_nothing_out(context: *mut pg_sys::LogicalDecodingContext) -> bool {
    // SAFETY: the server's context, with the record that it has read; output arguments are written
    // if the result is true.
    unsafe {
        if (*context).fast_forward {
            return true; // the slot is only advanced; no row is returned
        }
        let reader = (*context).reader;
        if !has_rows((*reader).record) {
            return true;
        }
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
            // A session decodes only changes of its database.
            let is_decoded = known && file.database == process::my_database();
            if is_decoded && let Some(error) = key_error(file) {
                left_out::leave_out(context, Row { file, block, error });
                return false;
            }
        }
    }
    true
}

/// Whether a heap record has rows for decoding, or confirms one (`DecodeSpecConfirm`, decode.c).
/// Those about catalogs have none (`RelationIsLogicallyLogged`, which `heap_insert`,
/// `heap_multi_insert`, `log_heap_update` and `heap_delete` ask, heapam.c), and later are passed
/// over.
///
/// # Safety
/// The record is one that a reader has decoded.
unsafe fn has_rows(record: *const pg_sys::DecodedXLogRecord) -> bool {
    // SAFETY: the reader's record is complete, and nobody changes it meanwhile.
    let (manager, info, data) = unsafe {
        let record = &*record;
        let data = match record.main_data.is_null() {
            true => &[][..],
            false => std::slice::from_raw_parts(
                record.main_data.cast::<u8>(),
                record.main_data_len as usize,
            ),
        };
        (u32::from(record.header.xl_rmid), u32::from(record.header.xl_info), data)
    };
    // Place and bits (XLH_*_CONTAINS_*) of the flags in the records of heapam_xlog.h, 15 to 19.
    let (place, bits) = match (manager, info & OPERATION) {
        (HEAP_MANAGER, pg_sys::XLOG_HEAP_INSERT) => (2, 0x08),
        (HEAP_MANAGER, pg_sys::XLOG_HEAP_DELETE) => (7, 0x06),
        (HEAP_MANAGER, pg_sys::XLOG_HEAP_UPDATE | pg_sys::XLOG_HEAP_HOT_UPDATE) => (7, 0x1c),
        (HEAP2_MANAGER, pg_sys::XLOG_HEAP2_MULTI_INSERT) => (0, 0x08),
        (HEAP_MANAGER, pg_sys::XLOG_HEAP_CONFIRM) => return true,
        _ => return false,
    };
    // A record that is too short is for the server to refuse.
    data.get(place).is_none_or(|flags| flags & bits != 0)
}

/// Why the rows of a file must not be shown.
fn key_error(file: RelFile) -> Option<KeyError> {
    if is_shredded(file) {
        return Some(KeyError::Destroyed);
    }
    if let Some(scope) = directory::refused_scope(file) {
        return Some(KeyError::Refused { scope });
    }
    let former = || {
        // Keys of a file that is there may be those of its time before it was decrypted.
        directory::unusable_scope(file).filter(|_| !relation_files::may_have_any_fork(file))
    };
    directory::locked_scope(file).or_else(former).map(|scope| KeyError::Locked { scope })
}

/// Whether the file is written under a destroyed key, or is gone and its keys were destroyed.
fn is_shredded(file: RelFile) -> bool {
    directory::is_destroyed(file)
        || directory::has_lost_all_keys(file) && !relation_files::may_have_any_fork(file)
}
