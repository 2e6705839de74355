//! Rows that logical decoding leaves out, because their data keys were destroyed, or are locked.
//!
//! They are not collected for their transaction. A transaction without some of its rows must not
//! be shown as if it were whole: that is an error, until the keys are there or the slot has been
//! advanced past it. The error is raised where the transaction would be shown, not at the row: a
//! slot is also read from before transactions that its reader has received long ago
//! (`restart_lsn`).
//!
//! What is streamed of a transaction in progress (`ReorderBufferStreamTXN`, reorderbuffer.c) may
//! lack rows. It does not count until the reader is told of COMMIT or PREPARE, which is refused.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};

use pagevault_keystore::{Lsn, RelFile};
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{self, ForkNumber};

use crate::keys::usage::key_error::KeyError;
use crate::page;
use crate::page::io::PageFault;
use crate::pg::compat::{self, SHARED_BACKEND, SmgrFile};
use crate::pg::process::ProcessLocal;
use crate::pg::report::Report;

/// A row that was left out.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub(super) file: RelFile,
    pub(super) block: u32,
    pub(super) error: KeyError,
}

/// A transaction or subtransaction without some of its rows.
#[derive(Clone, Copy)]
struct Incomplete {
    row: Row,
    /// Where it was prepared, if that has been passed over.
    prepared: Option<Lsn>,
}

/// What the current decoding has left out.
struct LeftOut {
    /// The address of its `LogicalDecodingContext`.
    context: usize,
    transactions: BTreeMap<u32, Incomplete>,
}

static LEFT_OUT: ProcessLocal<LeftOut> =
    ProcessLocal::new(LeftOut { context: 0, transactions: BTreeMap::new() });

/// Whether this decoding has left out rows of transactions that have not ended.
pub(super) fn any(context: *mut pg_sys::LogicalDecodingContext) -> bool {
    LEFT_OUT.with(|known| known.context == context.addr() && !known.transactions.is_empty())
}

/// Leaves out the record that the server has read, with this row.
///
/// # Safety
/// `context` is the server's, and its reader has read a record of rows. May raise an ERROR.
pub(super) unsafe fn leave_out(context: *mut pg_sys::LogicalDecodingContext, row: Row) {
    // SAFETY: the server's context, with the record that it has read.
    unsafe {
        let reader = (*context).reader;
        let (xid, here) = ((*(*reader).record).header.xl_xid, (*reader).ReadRecPtr);
        // What the server does with a record whose rows it does not collect, when it advances a
        // slot (`heap_decode`, decode.c). Without a snapshot of its own the transaction would count
        // as one that changed nothing, of which COMMIT PREPARED is not shown
        // (`ReorderBufferFinishPrepared`, reorderbuffer.c of 18).
        pg_sys::ReorderBufferProcessXid((*context).reorder, xid, here);
        if pg_sys::SnapBuildProcessChange((*context).snapshot_builder, xid, here) {
            remember_for(context);
            let incomplete = Incomplete { row, prepared: None };
            LEFT_OUT.with(|known| {
                known.transactions.entry(xid.into_inner()).or_insert(incomplete);
            });
        }
    }
}

/// What is left out from now on is forgotten with the context: the next one of this session may
/// find the same rows unlocked.
///
/// # Safety
/// `context` is the server's. May raise an ERROR.
unsafe fn remember_for(context: *mut pg_sys::LogicalDecodingContext) {
    if LEFT_OUT.with(|known| known.context == context.addr()) {
        return;
    }
    // SAFETY: the callback is in memory of the context that it is for, and is called before this is
    // freed (`MemoryContextRegisterResetCallback`, mcxt.c).
    unsafe {
        let size = size_of::<pg_sys::MemoryContextCallback>();
        let callback: *mut pg_sys::MemoryContextCallback =
            pg_sys::MemoryContextAllocZero((*context).context, size).cast();
        (*callback).func = Some(forget);
        (*callback).arg = context.cast();
        pg_sys::MemoryContextRegisterResetCallback((*context).context, callback);
    }
    LEFT_OUT.with(|known| {
        *known = LeftOut { context: context.addr(), transactions: BTreeMap::new() };
    });
}

/// Contract: called by the server when the memory of a decoding context is freed; raises no error.
unsafe extern "C-unwind" fn forget(context: *mut c_void) {
    LEFT_OUT.with(|known| {
        if known.context == context.addr() {
            *known = LeftOut { context: 0, transactions: BTreeMap::new() };
        }
    });
}

/// Refuses to show an incomplete transaction that the server is about to decode the end of.
///
/// # Safety
/// As for [`leave_out`], and the record is one of transactions.
#[cold]
pub(super) unsafe fn refuse_incomplete(context: *mut pg_sys::LogicalDecodingContext) {
    // SAFETY: the server's context, with the record that it has read.
    unsafe {
        let Some(end) = End::with(context) else { return };
        // The transaction itself comes last: it may have been prepared.
        let ended = end.parts.iter().chain([&end.xid]);
        let found =
            LEFT_OUT.with(|known| ended.filter_map(|xid| known.transactions.remove(xid)).last());
        let Some(incomplete) = found else { return };
        if end.shows_rows(context, incomplete.prepared) && is_shown(context) {
            report(end.xid, incomplete.row, &hint(context, &end, incomplete.row.error)).raise();
        }
        if end.operation == pg_sys::XLOG_XACT_PREPARE {
            let prepared = Some(Lsn((*(*context).reader).ReadRecPtr));
            let incomplete = Incomplete { prepared, ..incomplete };
            LEFT_OUT.with(|known| known.transactions.insert(end.xid, incomplete));
        }
    }
}

/// A record of the end of a transaction, or of its PREPARE (`xact_decode`, decode.c).
struct End {
    operation: u32,
    xid: u32,
    /// Subtransactions.
    parts: Vec<u32>,
    /// The name of a prepared transaction.
    gid: [c_char; pg_sys::GIDSIZE as usize],
}

impl End {
    /// # Safety
    /// `context` is the server's, and its reader has read a record of transactions.
    unsafe fn with(context: *mut pg_sys::LogicalDecodingContext) -> Option<End> {
        let mut parsed = pg_sys::xl_xact_parsed_commit::default();
        // SAFETY: the server's record is complete, and of the kind that each function parses; the
        // array that it finds is in the record.
        unsafe {
            let record = &*(*(*context).reader).record;
            let (info, data) = (record.header.xl_info, record.main_data);
            let operation = u32::from(info) & pg_sys::XLOG_XACT_OPMASK;
            match operation {
                pg_sys::XLOG_XACT_COMMIT | pg_sys::XLOG_XACT_COMMIT_PREPARED => {
                    pg_sys::ParseCommitRecord(info, data.cast(), &raw mut parsed);
                }
                pg_sys::XLOG_XACT_PREPARE => {
                    pg_sys::ParsePrepareRecord(info, data.cast(), &raw mut parsed);
                }
                pg_sys::XLOG_XACT_ABORT | pg_sys::XLOG_XACT_ABORT_PREPARED => {
                    let mut aborted = pg_sys::xl_xact_parsed_abort::default();
                    pg_sys::ParseAbortRecord(info, data.cast(), &raw mut aborted);
                    parsed.twophase_xid = aborted.twophase_xid;
                    (parsed.nsubxacts, parsed.subxacts) = (aborted.nsubxacts, aborted.subxacts);
                }
                _ => return None,
            }
            let prepared = parsed.twophase_xid;
            let xid = match prepared == pg_sys::InvalidTransactionId {
                true => record.header.xl_xid,
                false => prepared,
            };
            let parts = match parsed.nsubxacts {
                count @ 1.. => std::slice::from_raw_parts(parsed.subxacts, count as usize),
                _ => &[],
            };
            let parts = parts.iter().map(|xid| xid.into_inner()).collect();
            Some(End { operation, xid: xid.into_inner(), parts, gid: parsed.twophase_gid })
        }
    }

    /// Whether rows are shown with the record, unless the server passes over it. `prepared`: where
    /// PREPARE was passed over.
    ///
    /// # Safety
    /// `context` is the server's, of a slot that is read.
    unsafe fn shows_rows(
        &self,
        context: *mut pg_sys::LogicalDecodingContext,
        prepared: Option<Lsn>,
    ) -> bool {
        // `FilterPrepare` (decode.c)
        let shows_prepare = || {
            // SAFETY: the server's context; the name ends with a zero byte, and the server calls
            // the callback with both likewise.
            unsafe {
                (*context).twophase
                    && ((*context).callbacks.filter_prepare_cb.is_none()
                        || !pg_sys::filter_prepare_cb_wrapper(
                            context,
                            self.xid.into(),
                            self.gid.as_ptr(),
                        ))
            }
        };
        match self.operation {
            pg_sys::XLOG_XACT_COMMIT => true,
            pg_sys::XLOG_XACT_PREPARE => shows_prepare(),
            // Where PREPARE is shown, and it was when its turn came, the rows are not shown again
            // (`ReorderBufferFinishPrepared`, reorderbuffer.c).
            pg_sys::XLOG_XACT_COMMIT_PREPARED => {
                // SAFETY: the server's context has its snapshot builder as long as it decodes.
                let since =
                    Lsn(unsafe { pg_sys::SnapBuildGetTwoPhaseAt((*context).snapshot_builder) });
                prepared.is_none_or(|prepared| prepared < since) || !shows_prepare()
            }
            _ => false,
        }
    }
}

/// `DecodeTXNNeedSkip` (decode.c). Before a consistent snapshot nothing is shown
/// (`SnapBuildCommitTxn`, snapbuild.c).
///
/// # Safety
/// `context` is the server's, and its reader has read a record.
unsafe fn is_shown(context: *mut pg_sys::LogicalDecodingContext) -> bool {
    use pg_sys::SnapBuildState::SNAPBUILD_CONSISTENT;
    // SAFETY: the server's context, with the record that it has read; the callback is called as
    // `FilterByOrigin` (decode.c) does.
    unsafe {
        let (reader, builder) = ((*context).reader, (*context).snapshot_builder);
        let is_for_others = || {
            (*context).callbacks.filter_by_origin_cb.is_some()
                && pg_sys::filter_by_origin_cb_wrapper(context, (*(*reader).record).record_origin)
        };
        !(*context).fast_forward
            && pg_sys::SnapBuildCurrentState(builder) == SNAPBUILD_CONSISTENT
            && !pg_sys::SnapBuildXactNeedsSkip(builder, (*reader).ReadRecPtr)
            && !is_for_others()
    }
}

/// How to pass over the transaction that ends, or is prepared, with the record.
///
/// # Safety
/// `context` is the server's, and its reader has read a record.
unsafe fn hint(
    context: *mut pg_sys::LogicalDecodingContext,
    ended: &End,
    error: KeyError,
) -> String {
    // SAFETY: the server's context, with the record that it has read.
    let (slot, previous, end, has_shown) = unsafe {
        let slot = CStr::from_ptr((*(*context).slot).data.name.data.as_ptr());
        let reader = (*context).reader;
        let previous = Lsn((*(*reader).record).header.xl_prev);
        // Only a WAL sender reports its progress. It has shown each transaction when it comes to
        // the next; by the ERROR in a function all are lost that it has read
        // (`pg_logical_slot_get_changes_guts`, logicalfuncs.c).
        let has_shown = (*context).update_progress.is_some();
        (slot.to_string_lossy(), previous, Lsn((*reader).EndRecPtr), has_shown)
    };
    let read = match has_shown {
        true => String::new(),
        // Reading stops after the record in which the address is. That of the next one may lie
        // behind the header of a page, and be beyond the end of this one.
        false => format!(
            "first read what comes before it, as with pg_logical_slot_get_changes('{slot}', '{}', NULL), then ",
            Lsn(previous.0 + 1),
        ),
    };
    let lost = match error {
        KeyError::Destroyed => "What it changed in other tables",
        _ => "What it changed",
    };
    let later = match ended.operation {
        pg_sys::XLOG_XACT_PREPARE => {
            " Its COMMIT PREPARED will be shown nevertheless: before that, prepare an empty transaction there, under the name that it commits."
        }
        _ => "",
    };
    format!(
        "To pass over transaction {}, {read}call pg_replication_slot_advance('{slot}', '{end}'). {lost} is missing then where the changes go: copy the tables there again.{later}",
        ended.xid
    )
}

fn report(xid: u32, Row { file, block, error }: Row, hint: &str) -> Report {
    if error != KeyError::Destroyed {
        let file = SmgrFile { file, backend: SHARED_BACKEND };
        return page::errors::report(PageFault::of_key(file, error), block).more_hints(hint);
    }
    let path = compat::relation_path(file, ForkNumber::MAIN_FORKNUM);
    Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("transaction {xid} cannot be decoded: data keys of relation file {path} were destroyed"),
    )
    .detail("Rows that it changed were shredded. They are not shown again, and the transaction is not shown without them.")
    .hint(hint)
}
