//! Planning without statistics while `pg_statistic` cannot be read.
//!
//! The planner reads `pg_statistic` for every query. The catalog is encrypted if anything in the
//! database is. While its key is locked or refused, or after it was shredded with its database,
//! queries on plaintext tables would therefore fail too. They are planned as if their tables had
//! never been analyzed.

use pgrx::pg_sys::{self, AttrNumber, Oid, PlannerInfo, RangeTblEntry, VariableStatData};

use crate::pg::compat::{SHARED_BACKEND, SmgrFile};
use crate::pg::process::ProcessLocal;
use crate::pg::relation;
use crate::{page, shmem};

/// The previous hooks.
#[derive(Clone, Copy)]
struct Hooks {
    relation: pg_sys::get_relation_stats_hook_type,
    index: pg_sys::get_index_stats_hook_type,
    width: pg_sys::get_attavgwidth_hook_type,
}

static PREVIOUS: ProcessLocal<Hooks> =
    ProcessLocal::new(Hooks { relation: None, index: None, width: None });

/// Installs the hooks; from `_PG_init`.
pub(crate) fn install() {
    // SAFETY: in the postmaster, before any process is forked.
    unsafe {
        PREVIOUS.set(Hooks {
            relation: pg_sys::get_relation_stats_hook,
            index: pg_sys::get_index_stats_hook,
            width: pg_sys::get_attavgwidth_hook,
        });
        pg_sys::get_relation_stats_hook = Some(relation_statistics);
        pg_sys::get_index_stats_hook = Some(index_statistics);
        pg_sys::get_attavgwidth_hook = Some(average_width);
    }
}

/// True if reading `pg_statistic` would fail. While no key is locked, refused or destroyed, this
/// tests three words.
///
/// # Safety
/// In a transaction; no frame between here and the server's call has values with destructors.
#[inline]
unsafe fn are_unreadable() -> bool {
    // SAFETY: our callers have no values with destructors, so an ERROR from the guard may skip
    // their frames.
    (shmem::any_key_unusable() || shmem::anything_destroyed())
        && unsafe {
            pg_sys::panic::pgrx_extern_c_guard(|| is_withheld(pg_sys::StatisticRelationId))
        }
}

#[cold]
fn is_withheld(catalog: Oid) -> bool {
    let Some(facts) = relation::facts(catalog) else { return false };
    let file = SmgrFile { file: facts.file, backend: SHARED_BACKEND };
    page::access::check_access(file).and_then(|()| page::access::check_usable(file)).is_err()
}

/// Contract: called by the planner for a column of a table (`examine_simple_variable`). True means
/// that `variable` is complete; it contains no statistics then.
unsafe extern "C-unwind" fn relation_statistics(
    root: *mut PlannerInfo,
    entry: *mut RangeTblEntry,
    column: AttrNumber,
    variable: *mut VariableStatData,
) -> bool {
    // SAFETY: the server's own arguments, passed on.
    unsafe {
        are_unreadable()
            || PREVIOUS.get().relation.is_some_and(|next| next(root, entry, column, variable))
    }
}

/// Contract: like [`relation_statistics`], for a column of an index on expressions.
unsafe extern "C-unwind" fn index_statistics(
    root: *mut PlannerInfo,
    index: Oid,
    column: AttrNumber,
    variable: *mut VariableStatData,
) -> bool {
    // SAFETY: the server's own arguments, passed on.
    unsafe {
        are_unreadable()
            || PREVIOUS.get().index.is_some_and(|next| next(root, index, column, variable))
    }
}

/// Contract: called for the average width of a column (`get_attavgwidth`); after 0 the server reads
/// the statistics itself.
unsafe extern "C-unwind" fn average_width(table: Oid, column: AttrNumber) -> i32 {
    // SAFETY: the server's own arguments; the guarded call has returned before another function is
    // called.
    unsafe {
        if column > 0 && are_unreadable() {
            return pg_sys::panic::pgrx_extern_c_guard(|| width_of_type(table, column));
        }
        PREVIOUS.get().width.map_or(0, |next| next(table, column))
    }
}

/// The width that the planner assumes for a column without statistics.
#[cold]
fn width_of_type(table: Oid, column: AttrNumber) -> i32 {
    let (mut kind, mut modifier, mut collation) = (Oid::INVALID, 0, Oid::INVALID);
    // SAFETY: catalog look-ups of a column that the query uses.
    unsafe {
        pg_sys::get_atttypetypmodcoll(
            table,
            column,
            &raw mut kind,
            &raw mut modifier,
            &raw mut collation,
        );
        pg_sys::get_typavgwidth(kind, modifier)
    }
}
