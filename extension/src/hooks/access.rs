//! Refuses queries on relations of a locked scope, or with destroyed keys, even if their pages are
//! in shared buffers.
//!
//! Pages that must be read from disk are refused by the storage manager; this covers the others,
//! and has a better message.
//!
//! What a query names is refused when permissions are checked. Its partitions, and other tables
//! that inherit, are refused when the executor has started, if the plan can still scan them: those
//! of other tenants may be locked. So are partitions that are pruned later, while the query runs.
//! For an inserted row the partition is determined during execution: the storage manager refuses
//! the locked ones once their pages have left shared buffers ([`page::withdrawal`]). Until then
//! INSERT with ON CONFLICT would read rows there (`ExecOnConflictUpdate`, nodeModifyTable.c), so it
//! counts as a scan of all partitions.

use std::ffi::{c_int, c_void};

use pgrx::PgList;
use pgrx::pg_sys::{self, NodeTag, Oid};

use super::naming;
use crate::keys::store::directory;
use crate::keys::usage::{cache, closing, refused};
use crate::pg::compat::{self, CheckPerms, SHARED_BACKEND, SmgrFile};
use crate::pg::process::ProcessLocal;
use crate::pg::relation::{self, Facts};
use crate::pg::{externs, inheritance};
use crate::{page, shmem};

static PREVIOUS: ProcessLocal<Option<CheckPerms>> = ProcessLocal::new(None);
static PREVIOUS_START: ProcessLocal<pg_sys::ExecutorStart_hook_type> = ProcessLocal::new(None);

/// Installs the hook; from `_PG_init`.
pub(crate) fn install() {
    // SAFETY: in the postmaster, before any process is forked.
    unsafe {
        PREVIOUS.set(pg_sys::ExecutorCheckPerms_hook);
        pg_sys::ExecutorCheckPerms_hook = Some(check_perms);
        PREVIOUS_START.set(pg_sys::ExecutorStart_hook);
        pg_sys::ExecutorStart_hook = Some(start);
    }
}

compat::check_perms_hook!(check_perms, check, PREVIOUS);

/// Contract: called at the start of every query and of COPY, in a transaction, with the relations
/// locked; may raise errors. While nothing is refused it tests four words.
///
/// # Safety
/// `range_table` is a list of RangeTblEntry or NIL. No frame between here and the server's call has
/// values with destructors.
#[inline]
unsafe fn check(range_table: *mut pg_sys::List) {
    if naming::is_needed() || closing::any() {
        // SAFETY: our caller has no values with destructors, so an ERROR from the guard may skip
        // its frame; the range table is the server's.
        unsafe {
            pg_sys::panic::pgrx_extern_c_guard(|| {
                closing::refuse_session();
                naming::note_all(relations_of(range_table));
                if refuses_any() {
                    cache::forget_destroyed();
                    named_in(range_table).into_iter().for_each(refuse_locked);
                }
            })
        }
    }
}

/// Contract: called to start every query, in a transaction, with its relations locked; may raise
/// errors. While nothing is refused it tests four words.
///
/// The server's part runs outside any pgrx guard, like commands in [`super::utility`].
unsafe extern "C-unwind" fn start(query: *mut pg_sys::QueryDesc, flags: c_int) {
    // SAFETY: the server's own arguments, forwarded unchanged; then the plan state has been built,
    // and stays until the executor ends. No value here has a destructor.
    unsafe {
        let next = PREVIOUS_START.get().unwrap_or(externs::standard_ExecutorStart);
        next(query, flags);
        if refuses_any() {
            pg_sys::panic::pgrx_extern_c_guard(|| {
                scanned_by((*query).planstate).into_iter().for_each(refuse_locked);
            });
        }
    }
}

/// Whether there may be relations that are refused, with pages in shared buffers.
#[inline]
fn refuses_any() -> bool {
    shmem::any_key_refused() || shmem::anything_destroyed() || page::access::shows_locked()
}

#[cold]
fn refuse_locked(oid: Oid) {
    let Some(facts) = relation::facts(oid).filter(Facts::is_stored) else { return };
    let name = || format!("relation \"{}\"", facts.name);
    if directory::is_destroyed(facts.file) {
        page::errors::destroyed(&name(), "").raise();
    }
    if !shmem::any_key_refused() && !page::access::shows_locked() {
        return;
    }
    if let Some(scope) = directory::refused_scope(facts.file) {
        refused::refuses(&name(), "", scope).raise();
    }
    if let Err(fault) =
        page::access::check_access(SmgrFile { file: facts.file, backend: SHARED_BACKEND })
    {
        page::errors::report(fault, 0).raise();
    }
}

/// The relations that a plan can scan. Partitions that were pruned when the executor started have
/// no plan state.
///
/// # Safety
/// `plan` is null or the plan state of a query that has been started.
unsafe fn scanned_by(plan: *mut pg_sys::PlanState) -> Vec<Oid> {
    let mut found = Vec::new();
    // SAFETY: the caller's plan state; the walk ends before the list is used again.
    unsafe { note_scans(plan, (&raw mut found).cast()) };
    found
}

/// Adds the relations that a plan state scans, with its parts and subplans, to the list `found`.
/// An ERROR is raised again when this frame is gone, as the walker's frames may be around it.
///
/// # Safety
/// `plan` is null or a plan state; `found` points to a list of OIDs that nobody else uses.
unsafe extern "C-unwind" fn note_scans(plan: *mut pg_sys::PlanState, found: *mut c_void) -> bool {
    if plan.is_null() {
        return false;
    }
    // SAFETY: the tag says that the plan state begins like a ScanState, whose relation is null or
    // open; the list is the caller's.
    unsafe {
        pg_sys::panic::pgrx_extern_c_guard(|| {
            if is_scan((*plan).type_) {
                let relation = (*plan.cast::<pg_sys::ScanState>()).ss_currentRelation;
                if !relation.is_null() {
                    (*found.cast::<Vec<Oid>>()).push((*relation).rd_id);
                }
            }
            if (*plan).type_ == NodeTag::T_ModifyTableState {
                (*found.cast::<Vec<Oid>>()).extend(may_conflict(plan.cast()));
            }
            pg_sys::ffi::pg_guard_ffi_boundary(|| {
                externs::planstate_tree_walker(plan, note_scans, found)
            })
        })
    }
}

/// The relations in which an INSERT with ON CONFLICT may look up rows, but for those that have none
/// any more.
///
/// # Safety
/// `state` is the state of a plan that changes rows, of a query that has been started.
unsafe fn may_conflict(state: *mut pg_sys::ModifyTableState) -> Vec<Oid> {
    // SAFETY: the caller's state has its plan, and its target is open.
    let root = unsafe {
        let plan = (*state).ps.plan.cast::<pg_sys::ModifyTable>();
        if (*plan).onConflictAction == pg_sys::OnConflictAction::ONCONFLICT_NONE {
            return Vec::new();
        }
        (*(*(*state).rootResultRelInfo).ri_RelationDesc).rd_id
    };
    let partitions = inheritance::with_partitions(root).into_iter();
    partitions.filter(|facts| !directory::is_destroyed(facts.file)).map(|facts| facts.oid).collect()
}

/// Whether a plan state is a `ScanState` that may scan a relation (execnodes.h).
fn is_scan(tag: NodeTag) -> bool {
    use NodeTag::*;
    matches!(
        tag,
        T_SeqScanState
            | T_SampleScanState
            | T_IndexScanState
            | T_IndexOnlyScanState
            | T_BitmapHeapScanState
            | T_TidScanState
            | T_TidRangeScanState
            | T_ForeignScanState
            | T_CustomScanState
    )
}

/// # Safety
/// `range_table` is the range table of a query, as passed to `check`.
unsafe fn named_in(range_table: *mut pg_sys::List) -> Vec<Oid> {
    // SAFETY: a list of the server, of range table entries, which live as long as their query.
    unsafe {
        let entries = PgList::<pg_sys::RangeTblEntry>::from_pg(range_table);
        let is_named = |entry: &*mut pg_sys::RangeTblEntry| {
            (**entry).rtekind == pg_sys::RTEKind::RTE_RELATION && compat::needs_permission(*entry)
        };
        entries.iter_ptr().filter(is_named).map(|entry| (*entry).relid).collect()
    }
}

/// # Safety
/// `range_table` is the range table of a query, as passed to `check`.
unsafe fn relations_of(range_table: *mut pg_sys::List) -> Vec<Oid> {
    // SAFETY: a list of the server, of range table entries, which live as long as their query.
    unsafe {
        let entries = PgList::<pg_sys::RangeTblEntry>::from_pg(range_table);
        let is_relation =
            |entry: &*mut pg_sys::RangeTblEntry| (**entry).rtekind == pg_sys::RTEKind::RTE_RELATION;
        entries.iter_ptr().filter(is_relation).map(|entry| (*entry).relid).collect()
    }
}
