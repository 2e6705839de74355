//! Rows that logical decoding leaves out, because their data keys were destroyed.
//!
//! They are not collected for their transaction. A transaction without some of its rows must not
//! be shown as if it were whole: that is an error, and the slot has to be advanced past it. The
//! error is raised where the transaction would be shown, not at the row: a slot is also read from
//! before transactions that its reader has received long ago (`restart_lsn`).

use std::collections::BTreeMap;
use std::ffi::CStr;

use pagevault_keystore::{Lsn, RelFile};
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{self, ForkNumber};

use crate::pg::compat;
use crate::pg::process::ProcessLocal;
use crate::pg::report::Report;

/// Transactions and subtransactions that this process has found in WAL, with a file of each. They
/// ended before the keys of the file were destroyed, so there will not be more and more of them.
static INCOMPLETE: ProcessLocal<BTreeMap<u32, RelFile>> = ProcessLocal::new(BTreeMap::new());

/// Whether rows were left out.
pub(super) fn any() -> bool {
    INCOMPLETE.with(|known| !known.is_empty())
}

/// Leaves out the record that the server has read, of rows in this file.
///
/// # Safety
/// `context` is the server's, and its reader has read a record. May raise an ERROR.
pub(super) unsafe fn leave_out(context: *mut pg_sys::LogicalDecodingContext, file: RelFile) {
    // SAFETY: the server's context, with the record that it has read.
    unsafe {
        let reader = (*context).reader;
        let xid = (*(*reader).record).header.xl_xid;
        // What the server would do with a record that it does not collect (`heap_decode`,
        // decode.c).
        pg_sys::ReorderBufferProcessXid((*context).reorder, xid, (*reader).ReadRecPtr);
        use pg_sys::SnapBuildState::SNAPBUILD_FULL_SNAPSHOT;
        if pg_sys::SnapBuildCurrentState((*context).snapshot_builder) >= SNAPBUILD_FULL_SNAPSHOT {
            INCOMPLETE.with(|known| known.insert(xid.into_inner(), file));
        }
    }
}

/// Refuses to show the transaction that the server is about to decode the end of.
///
/// # Safety
/// As for [`leave_out`], and the record is one of transactions.
#[cold]
pub(super) unsafe fn refuse_incomplete(context: *mut pg_sys::LogicalDecodingContext) {
    // SAFETY: the server's context, with the record that it has read.
    unsafe {
        let Some(Shown { xid, parts, has_ended }) = Shown::with(context) else { return };
        let found = INCOMPLETE.with(|known| {
            let file = [&xid].into_iter().chain(&parts).find_map(|xid| known.get(xid)).copied();
            if has_ended {
                known.retain(|known, _| *known != xid && !parts.contains(known));
            }
            file
        });
        if let Some(file) = found
            && is_shown(context)
        {
            report(xid, file, &hint(context, xid)).raise();
        }
    }
}

/// What the server shows with a record, unless it passes over that (`xact_decode`, decode.c).
struct Shown {
    xid: u32,
    /// Subtransactions.
    parts: Vec<u32>,
    /// Not when it is prepared only.
    has_ended: bool,
}

impl Shown {
    /// # Safety
    /// `context` is the server's, and its reader has read a record of transactions.
    unsafe fn with(context: *mut pg_sys::LogicalDecodingContext) -> Option<Shown> {
        let mut parsed = pg_sys::xl_xact_parsed_commit::default();
        // SAFETY: the server's record is complete, and of the kind that each function parses; the
        // array that it finds is in the record.
        unsafe {
            let record = &*(*(*context).reader).record;
            let info = record.header.xl_info;
            let operation = u32::from(info) & pg_sys::XLOG_XACT_OPMASK;
            match operation {
                pg_sys::XLOG_XACT_COMMIT | pg_sys::XLOG_XACT_COMMIT_PREPARED => {
                    pg_sys::ParseCommitRecord(info, record.main_data.cast(), &raw mut parsed);
                }
                pg_sys::XLOG_XACT_PREPARE if (*context).twophase => {
                    pg_sys::ParsePrepareRecord(info, record.main_data.cast(), &raw mut parsed);
                }
                _ => return None,
            }
            let has_ended = operation != pg_sys::XLOG_XACT_PREPARE;
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
            Some(Shown { xid: xid.into_inner(), parts, has_ended })
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
unsafe fn hint(context: *mut pg_sys::LogicalDecodingContext, xid: u32) -> String {
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
    format!(
        "To pass over transaction {xid}, {read}call pg_replication_slot_advance('{slot}', '{end}'). What it changed in other tables is missing then where the changes go: copy the tables there again."
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
