//! Rows that logical decoding leaves out, because their data keys were destroyed.
//!
//! They are not collected for their transaction. A transaction without some of its rows must not
//! be shown as if it were whole: that is an error, and the slot has to be advanced past it. The
//! error is raised where the transaction would be shown, not at the row: a slot is also read from
//! before transactions that its reader has received long ago (`restart_lsn`).

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};

use pagevault_keystore::{Lsn, RelFile};
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{self, ForkNumber};

use crate::pg::compat;
use crate::pg::process::ProcessLocal;
use crate::pg::report::Report;

/// A transaction or subtransaction without some of its rows.
#[derive(Clone, Copy)]
struct Incomplete {
    /// Of one of them.
    file: RelFile,
    /// Where it was prepared, if that has been passed over.
    prepared: Option<Lsn>,
}

/// Transactions and subtransactions that this process has found in WAL. They ended before the
/// keys of a file were destroyed, so there will not be more and more of them.
static INCOMPLETE: ProcessLocal<BTreeMap<u32, Incomplete>> = ProcessLocal::new(BTreeMap::new());

/// Whether rows were left out.
pub(super) fn any() -> bool {
    INCOMPLETE.with(|known| !known.is_empty())
}

/// Leaves out the record that the server has read, of rows in this file.
///
/// # Safety
/// `context` is the server's, and its reader has read a record of rows. May raise an ERROR.
pub(super) unsafe fn leave_out(context: *mut pg_sys::LogicalDecodingContext, file: RelFile) {
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
            let incomplete = Incomplete { file, prepared: None };
            INCOMPLETE.with(|known| known.insert(xid.into_inner(), incomplete));
        }
    }
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
        let found = INCOMPLETE.with(|known| ended.filter_map(|xid| known.remove(xid)).last());
        let Some(incomplete) = found else { return };
        if end.shows_rows(context, incomplete.prepared) && is_shown(context) {
            report(end.xid, incomplete.file, &hint(context, &end)).raise();
        }
        if end.operation == pg_sys::XLOG_XACT_PREPARE {
            let prepared = Some(Lsn((*(*context).reader).ReadRecPtr));
            let incomplete = Incomplete { prepared, ..incomplete };
            INCOMPLETE.with(|known| known.insert(end.xid, incomplete));
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
unsafe fn hint(context: *mut pg_sys::LogicalDecodingContext, ended: &End) -> String {
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
    let later = match ended.operation {
        pg_sys::XLOG_XACT_PREPARE => {
            " Its COMMIT PREPARED will be shown nevertheless: before that, prepare an empty transaction there, under the name that it commits."
        }
        _ => "",
    };
    format!(
        "To pass over transaction {}, {read}call pg_replication_slot_advance('{slot}', '{end}'). What it changed in other tables is missing then where the changes go: copy the tables there again.{later}",
        ended.xid
    )
}

fn report(xid: u32, file: RelFile, hint: &str) -> Report {
    let path = compat::relation_path(file, ForkNumber::MAIN_FORKNUM);
    Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("transaction {xid} cannot be decoded: data keys of relation file {path} were destroyed"),
    )
    .detail("Rows that it changed were shredded. They are not shown again, and the transaction is not shown without them.")
    .hint(hint)
}
