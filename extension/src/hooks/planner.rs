//! Plans without statistics while these are locked.
//!
//! `pg_statistic` is sealed as soon as anything in a database is, and the planner asks it about every table.
//! While its key is locked, or refused to users, queries on other tables must go on: they are planned as for
//! a table that was never analysed.
//!
//! Contract of all three hooks: called by the planner in a transaction, not in a critical section; may raise.
//! No frame between here and the server's call holds anything with a destructor.

use pgrx::pg_sys::{self, Oid};

use crate::keys::shared;
use crate::page_io;
use crate::pg::compat::{SHARED_BACKEND, SmgrFile};
use crate::pg::process::ProcessLocal;
use crate::pg::relation;

static RELATION_STATS: ProcessLocal<pg_sys::get_relation_stats_hook_type> = ProcessLocal::new(None);
static INDEX_STATS: ProcessLocal<pg_sys::get_index_stats_hook_type> = ProcessLocal::new(None);
static AVERAGE_WIDTH: ProcessLocal<pg_sys::get_attavgwidth_hook_type> = ProcessLocal::new(None);

/// Installs the hooks; from `_PG_init`.
pub(crate) fn install() {
    // SAFETY: in the postmaster, before anything is forked; the functions live as long as the library.
    unsafe {
        RELATION_STATS.with(|previous| *previous = pg_sys::get_relation_stats_hook);
        pg_sys::get_relation_stats_hook = Some(relation_stats);
        INDEX_STATS.with(|previous| *previous = pg_sys::get_index_stats_hook);
        pg_sys::get_index_stats_hook = Some(index_stats);
        AVERAGE_WIDTH.with(|previous| *previous = pg_sys::get_attavgwidth_hook);
        pg_sys::get_attavgwidth_hook = Some(average_width);
    }
}

/// True: there are no statistics of this column (`vardata` keeps none).
unsafe extern "C-unwind" fn relation_stats(
    root: *mut pg_sys::PlannerInfo,
    entry: *mut pg_sys::RangeTblEntry,
    column: pg_sys::AttrNumber,
    vardata: *mut pg_sys::VariableStatData,
) -> bool {
    let previous = RELATION_STATS.with(|previous| *previous);
    // SAFETY: the earlier hook, with the server's own arguments.
    let known = previous.is_some_and(|previous| unsafe { previous(root, entry, column, vardata) });
    known || are_locked()
}

/// As [`relation_stats`], of an index on expressions.
unsafe extern "C-unwind" fn index_stats(
    root: *mut pg_sys::PlannerInfo,
    index: Oid,
    column: pg_sys::AttrNumber,
    vardata: *mut pg_sys::VariableStatData,
) -> bool {
    let previous = INDEX_STATS.with(|previous| *previous);
    // SAFETY: as above.
    let known = previous.is_some_and(|previous| unsafe { previous(root, index, column, vardata) });
    known || are_locked()
}

/// The average width of a column in bytes; 0 if statistics are to tell.
unsafe extern "C-unwind" fn average_width(table: Oid, column: pg_sys::AttrNumber) -> i32 {
    let previous = AVERAGE_WIDTH.with(|previous| *previous);
    // SAFETY: as above.
    let known = previous.map_or(0, |previous| unsafe { previous(table, column) });
    if known > 0 || !are_locked() {
        return known;
    }
    let (mut kind, mut modifier, mut collation) = (Oid::INVALID, -1, Oid::INVALID);
    // SAFETY: catalog look-ups of a column that the planner has seen.
    unsafe {
        pg_sys::panic::pgrx_extern_c_guard(|| {
            pg_sys::get_atttypetypmodcoll(
                table,
                column,
                &raw mut kind,
                &raw mut modifier,
                &raw mut collation,
            );
            pg_sys::get_typavgwidth(kind, modifier)
        })
    }
}

/// True if reading `pg_statistic` would be refused.
#[inline]
fn are_locked() -> bool {
    if !shared::anything_sealed() {
        return false;
    }
    // SAFETY: the closure keeps nothing with a destructor.
    unsafe { pg_sys::panic::pgrx_extern_c_guard(|| is_refused(pg_sys::StatisticRelationId)) }
}

fn is_refused(catalog: Oid) -> bool {
    let Some(file) = relation::file_of(catalog) else { return false };
    let file = SmgrFile { file, backend: SHARED_BACKEND };
    page_io::check_usable(file).and_then(|()| page_io::check_access(file)).is_err()
}
