//! Partitions, and other tables that inherit (pg_inherits).

use pgrx::pg_sys::{self, Oid};

use super::relation::{self, Facts};
use super::{catalog, externs};

/// Facts about a relation and, if it is partitioned, its partitions on all levels. Also those that
/// are being detached concurrently, or whose detaching was interrupted: they are dropped with it.
pub(crate) fn with_partitions(oid: Oid) -> Vec<Facts> {
    let mut found = vec![oid];
    let mut next = 0;
    while let Some(&table) = found.get(next) {
        found.extend(partitions_of(table));
        next += 1;
    }
    found.into_iter().filter_map(relation::facts).collect()
}

/// The partitions of a partitioned table, on the next level.
fn partitions_of(oid: Oid) -> Vec<Oid> {
    // SAFETY: a catalog look-up; the list is a palloc'd copy.
    unsafe {
        if pg_sys::get_rel_relkind(oid) as u8 != b'p' {
            return Vec::new();
        }
        let (no_lock, none) = (pg_sys::NoLock as pg_sys::LOCKMODE, std::ptr::null_mut());
        let (all, by) = (false, std::ptr::null_mut());
        relation::oids(pg_sys::ffi::pg_guard_ffi_boundary(|| {
            externs::find_inheritance_children_extended(oid, all, no_lock, none, by)
        }))
    }
}

/// A relation and all its descendants by inheritance, partitions included. Empty if it has none.
pub(crate) fn inheritors(oid: Oid) -> Vec<Oid> {
    // SAFETY: a counted reference, released after use; then a catalog look-up, whose list is a
    // palloc'd copy.
    unsafe {
        let relation = pg_sys::RelationIdGetRelation(oid);
        if relation.is_null() {
            return Vec::new();
        }
        let has_any = (*(*relation).rd_rel).relhassubclass;
        pg_sys::RelationClose(relation);
        if !has_any {
            return Vec::new();
        }
        let no_lock = pg_sys::NoLock as pg_sys::LOCKMODE;
        relation::oids(pg_sys::ffi::pg_guard_ffi_boundary(|| {
            externs::find_all_inheritors(oid, no_lock, std::ptr::null_mut())
        }))
    }
}

/// The partitioned table of a partition, even of one created by the current command.
pub(crate) fn partition_parent(partition: Oid) -> Option<Oid> {
    // SAFETY: the scan's row of pg_inherits.
    let read = |row| unsafe { link(row).parent };
    catalog::find_row(INHERITS, INHERITS_BY_CHILD, partition, read)
}

/// All tables that a table inherits from, as a partition or otherwise.
pub(crate) fn parents(child: Oid) -> Vec<Oid> {
    // SAFETY: the scan's row of pg_inherits.
    let read = |row| unsafe { link(row).parent };
    catalog::rows_of(INHERITS, INHERITS_BY_CHILD, (catalog::FIRST_COLUMN, child), read)
}

/// `InheritsRelationId` (pg_inherits) and `InheritsRelidSeqnoIndexId` (its index on the child). Not
/// among pgrx's bindings.
pub(crate) const INHERITS: Oid = Oid::from_u32(2611);
const INHERITS_BY_CHILD: Oid = Oid::from_u32(2680);

/// The columns of pg_inherits.
#[repr(C)]
struct Inherits {
    child: Oid,
    parent: Oid,
    number: i32,
    detach_pending: bool,
}

/// The columns of a row.
///
/// # Safety
/// `row` is a row of pg_inherits, and stays valid while the result is used.
unsafe fn link<'a>(row: *mut pg_sys::HeapTupleData) -> &'a Inherits {
    // SAFETY: rows of pg_inherits have this structure.
    unsafe { &*pg_sys::GETSTRUCT(row).cast::<Inherits>() }
}

/// Of a relation and the partitioned tables above it, the nearest whose detaching has begun
/// (CONCURRENTLY) and has not ended. Its rows are not in the table any more, and it can only be
/// detached wholly.
pub(crate) fn half_detached(oid: Oid) -> Option<Oid> {
    // SAFETY: the scan's row of pg_inherits.
    let read = |row| unsafe { (link(row).parent, link(row).detach_pending) };
    let mut table = oid;
    loop {
        match catalog::find_row(INHERITS, INHERITS_BY_CHILD, table, read)? {
            (_, true) => return Some(table),
            (parent, false) => table = parent,
        }
    }
}

/// The partitions whose detaching this transaction begins (`MarkInheritDetached`, tablecmds.c).
pub(crate) fn half_detached_here() -> Vec<Oid> {
    relation::make_command_visible();
    // SAFETY: the scan's row of pg_inherits, which stays valid while the scan calls this.
    catalog::scan(INHERITS, |row| unsafe {
        let by = (*(*row).t_data).t_choice.t_heap.t_xmin;
        let is_ours = pg_sys::TransactionIdIsCurrentTransactionId(by);
        (link(row).detach_pending && is_ours).then(|| link(row).child)
    })
}
