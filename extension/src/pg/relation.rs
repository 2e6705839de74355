//! Facts about relations, from the catalogs and the relation cache.

pub(crate) use pagevault_core::policy::RelationKind;
use pagevault_core::policy::relation::SHARED;
use pagevault_keystore::RelFile;
use pgrx::pg_sys::{self, Oid};
use pgrx::{PgList, PgSqlErrorCode};

use super::report::{Report, Result};
use super::text::ServerText;
use super::{catalog, compat, process, survey};

/// Facts about a relation, copied from its relation cache entry.
#[derive(Clone)]
pub(crate) struct Facts {
    pub(crate) oid: Oid,
    pub(crate) name: ServerText,
    pub(crate) owner: Oid,
    pub(crate) kind: RelationKind,
    pub(crate) temporary: bool,
    /// Its file, for kinds with storage.
    pub(crate) file: RelFile,
    pub(crate) toast: Option<Oid>,
    /// Created by a user, not by initdb or this extension.
    pub(crate) user_made: bool,
    pub(crate) schema: Oid,
    /// Never 0: the database's default tablespace if the catalog contains 0.
    pub(crate) tablespace: Oid,
    /// A partition of [`partition_parent`].
    pub(crate) is_partition: bool,
    /// The relation that this transient relation will replace. VACUUM FULL, CLUSTER, REFRESH and
    /// rewriting ALTER TABLE fill one (make_new_heap in cluster.c). Users cannot create any.
    pub(crate) rewrites: Option<Oid>,
    /// The table of an index; `None` if the current command has created the index.
    pub(crate) indexed_table: Option<Oid>,
}

impl Facts {
    /// True if it has files that outlive its session.
    pub(crate) fn is_stored(&self) -> bool {
        self.kind.has_storage() && !self.temporary
    }

    /// True for shared catalogs.
    pub(crate) fn is_shared(&self) -> bool {
        self.file.database == SHARED
    }
}

/// Facts about a relation from the relation cache, without a lock; `None` if it does not exist.
/// Works for a relation whose catalog rows are not visible yet. While a [`survey`] exists, from the
/// survey.
pub(crate) fn facts(oid: Oid) -> Option<Facts> {
    if let Some(known) = survey::known(oid) {
        return Some(known);
    }
    // SAFETY: RelationIdGetRelation returns a counted reference or null; facts are copied before
    // the reference is released.
    unsafe {
        let relation = pg_sys::RelationIdGetRelation(oid);
        if relation.is_null() {
            return None;
        }
        let facts = facts_of(relation);
        pg_sys::RelationClose(relation);
        Some(facts)
    }
}

/// False for an index whose build has not been committed, or was interrupted; as
/// [`Held::is_ready`](super::pages::Held::is_ready), without a lock.
pub(crate) fn is_ready(oid: Oid) -> bool {
    // SAFETY: RelationIdGetRelation returns a counted reference or null; what is read belongs to
    // its relation cache entry, and the reference is released after that.
    unsafe {
        let relation = pg_sys::RelationIdGetRelation(oid);
        if relation.is_null() {
            return true;
        }
        let is_ready = (*relation).rd_index.as_ref().is_none_or(|index| index.indisready);
        pg_sys::RelationClose(relation);
        is_ready
    }
}

/// True if the relation's main fork has no block.
pub(crate) fn is_empty(oid: Oid) -> bool {
    main_fork_blocks(oid) == Some(0)
}

/// True if the relation got its file in the current transaction, so that other sessions do not see
/// the file yet.
pub(crate) fn is_new_here(oid: Oid) -> bool {
    // SAFETY: a counted reference, released after use.
    unsafe {
        let relation = pg_sys::RelationIdGetRelation(oid);
        if relation.is_null() {
            return false;
        }
        let new = compat::is_file_of_this_transaction(relation);
        pg_sys::RelationClose(relation);
        new
    }
}

/// The number of blocks of its main fork; 0 if there is no such relation.
pub(crate) fn blocks(oid: Oid) -> u32 {
    main_fork_blocks(oid).unwrap_or(0)
}

fn main_fork_blocks(oid: Oid) -> Option<u32> {
    // SAFETY: a counted reference, released after use.
    unsafe {
        let relation = pg_sys::RelationIdGetRelation(oid);
        if relation.is_null() {
            return None;
        }
        let blocks =
            pg_sys::RelationGetNumberOfBlocksInFork(relation, pg_sys::ForkNumber::MAIN_FORKNUM);
        pg_sys::RelationClose(relation);
        Some(blocks)
    }
}

/// OIDs of all relations in `pg_class`.
pub(crate) fn all() -> Vec<Oid> {
    // SAFETY: rows of pg_class have this structure, and stay valid while the scan calls this.
    catalog::scan(pg_sys::RelationRelationId, |row| unsafe {
        Some((*pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_class>()).oid)
    })
}

/// Makes the changes of the current command visible; between commands of a transaction.
pub(crate) fn make_command_visible() {
    // SAFETY: in a transaction, between two commands, as our callers guarantee.
    unsafe { pg_sys::CommandCounterIncrement() }
}

/// Like [`facts`], after making the changes of the current command visible.
pub(crate) fn facts_after_command(oid: Oid) -> Option<Facts> {
    make_command_visible();
    // SAFETY: between commands of a transaction; a dropped relation has no pg_class row any more.
    let exists = unsafe {
        pg_sys::SearchSysCacheExists(
            compat::RELOID,
            pg_sys::Datum::from(oid),
            pg_sys::Datum::null(),
            pg_sys::Datum::null(),
            pg_sys::Datum::null(),
        )
    };
    if exists { facts(oid) } else { None }
}

/// The table that owns a sequence, by OWNED BY or an identity column.
pub(crate) fn owner_of_sequence(sequence: Oid) -> Option<Oid> {
    let (mut table, mut column) = (Oid::INVALID, 0);
    // SAFETY: catalog look-ups; both results are written before true is returned.
    let owned = unsafe {
        let auto = pg_sys::DependencyType::DEPENDENCY_AUTO as std::ffi::c_char;
        let internal = pg_sys::DependencyType::DEPENDENCY_INTERNAL as std::ffi::c_char;
        pg_sys::sequenceIsOwned(sequence, auto, &raw mut table, &raw mut column)
            || pg_sys::sequenceIsOwned(sequence, internal, &raw mut table, &raw mut column)
    };
    owned.then_some(table)
}

/// # Safety
/// `relation` is an open relation.
unsafe fn facts_of(relation: pg_sys::Relation) -> Facts {
    // SAFETY: rd_rel is set in every open relation.
    unsafe {
        let class = &*(*relation).rd_rel;
        let toast = class.reltoastrelid;
        let index = (*relation).rd_index;
        let indexed_table = (!index.is_null()).then(|| (*index).indrelid);
        Facts {
            oid: (*relation).rd_id,
            name: ServerText::copied(class.relname.data.as_ptr()).unwrap_or_default(),
            owner: class.relowner,
            kind: RelationKind::of(class.relkind as u8),
            temporary: class.relpersistence as u8 == b't',
            file: compat::rel_file(compat::relation_locator(relation)),
            toast: (toast != Oid::INVALID).then_some(toast),
            user_made: (*relation).rd_id.to_u32() >= pg_sys::FirstNormalObjectId
                && !is_ours(class.relnamespace, indexed_table.unwrap_or((*relation).rd_id)),
            schema: class.relnamespace,
            tablespace: match class.reltablespace {
                Oid::INVALID => pg_sys::MyDatabaseTableSpace,
                named => named,
            },
            is_partition: class.relispartition,
            rewrites: (class.relrewrite != Oid::INVALID).then_some(class.relrewrite),
            indexed_table,
        }
    }
}

/// True for a table of this extension. Its schema may contain tables of others; and if the
/// extension is not installed, any user may own a schema of that name.
pub(super) fn is_ours(schema: Oid, table: Oid) -> bool {
    // SAFETY: catalog look-ups in a transaction.
    unsafe {
        is_our_schema(schema)
            && (process::creates_us()
                || pg_sys::getExtensionOfObject(pg_sys::RelationRelationId, table)
                    == pg_sys::get_extension_oid(c"pagevault".as_ptr(), true))
    }
}

/// True for the schema of this extension, in a database that has it.
pub(crate) fn is_our_schema(schema: Oid) -> bool {
    // SAFETY: catalog look-ups in a transaction.
    unsafe {
        schema == pg_sys::get_namespace_oid(c"pagevault".as_ptr(), true)
            && pg_sys::get_extension_oid(c"pagevault".as_ptr(), true) != Oid::INVALID
    }
}

/// The table of an index, even of one created by the current command.
pub(crate) fn table_of_index(index: Oid) -> Option<Oid> {
    // SAFETY: rows of pg_index have this structure, and stay valid while find_row() calls this.
    let read = |row: *mut pg_sys::HeapTupleData| unsafe {
        (*pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_index>()).indrelid
    };
    catalog::find_row(pg_sys::IndexRelationId, pg_sys::IndexRelidIndexId.into(), index, read)
}

/// The indexes of a table, including dead ones. An interrupted DROP INDEX CONCURRENTLY or REINDEX
/// CONCURRENTLY leaves a dead index with all its data (`index_concurrently_set_dead`, index.c), and
/// `RelationGetIndexList` (relcache.c) skips it. Sorted as there: all must lock in this order.
fn indexes_of(table: Oid) -> Vec<Oid> {
    // `IndexIndrelidIndexId`, not among pgrx's bindings, and `Anum_pg_index_indrelid`.
    const BY_TABLE: Oid = Oid::from_u32(2678);
    const TABLE: pg_sys::AttrNumber = 2;
    // SAFETY: rows_of() passes valid rows of the catalog named here, pg_index; all columns but the
    // last few are in every row.
    let read = |row: *mut pg_sys::HeapTupleData| unsafe {
        (*pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_index>()).indexrelid
    };
    let mut indexes = catalog::rows_of(pg_sys::IndexRelationId, BY_TABLE, (TABLE, table), read);
    indexes.sort_unstable_by_key(|index| index.to_u32());
    indexes
}

/// A relation and all relations that follow it: indexes, TOAST table with index, owned sequences.
/// Each is locked with `lock` until the end of the transaction. Raises an error if the relation is
/// gone.
pub(crate) fn family(oid: Oid, lock: pg_sys::LOCKMODE) -> Vec<Facts> {
    self::lock(oid, lock);
    let mut members = Vec::new();
    collect_family(oid, Some(lock), &mut members);
    // SAFETY: the lock was taken twice, but `unlock` releases it once.
    unsafe { pg_sys::UnlockRelationOid(oid, lock) };
    members
}

/// Like [`family`], without locks; relations that are gone are left out.
pub(crate) fn family_unlocked(oid: Oid) -> Vec<Facts> {
    let mut members = Vec::new();
    collect_family(oid, None, &mut members);
    members
}

/// Processes invalidations, so that changes committed by other sessions are seen, as taking a lock
/// does.
pub(crate) fn accept_invalidations() {
    // SAFETY: in a transaction, with no uncounted reference to a relation.
    unsafe { pg_sys::AcceptInvalidationMessages() };
}

/// Releases the locks of [`family`] before the transaction ends.
pub(crate) fn unlock(members: &[Facts], lock: pg_sys::LOCKMODE) {
    for member in members {
        // SAFETY: a lock that family() took.
        unsafe { pg_sys::UnlockRelationOid(member.oid, lock) };
    }
}

fn collect_family(oid: Oid, lock: Option<pg_sys::LOCKMODE>, members: &mut Vec<Facts>) {
    // SAFETY: null if the relation is gone, as a dead index may be at any time; the list is a
    // palloc'd copy.
    let (facts, indexes, sequences) = unsafe {
        let relation = match lock {
            Some(lock) => pg_sys::try_relation_open(oid, lock),
            None => pg_sys::RelationIdGetRelation(oid),
        };
        if relation.is_null() {
            return;
        }
        let facts = facts_of(relation);
        let has_indexes = matches!(
            facts.kind,
            RelationKind::Table | RelationKind::Toast | RelationKind::MaterializedView
        );
        let indexes = if has_indexes { indexes_of(oid) } else { Vec::new() };
        let may_own = matches!(facts.kind, RelationKind::Table | RelationKind::PartitionedTable);
        let sequences = if may_own { oids(pg_sys::getOwnedSequences(oid)) } else { Vec::new() };
        pg_sys::relation_close(relation, pg_sys::NoLock as pg_sys::LOCKMODE);
        (facts, indexes, sequences)
    };
    let toast = facts.toast;
    members.push(facts);
    for dependent in indexes.into_iter().chain(toast).chain(sequences) {
        collect_family(dependent, lock, members);
    }
}

/// True for relations whose files do not go along with those of another one. False for indexes,
/// TOAST tables, sequences of tables. A partitioned table has no file, so its sequences stand for
/// themselves, as its partitions do.
pub(crate) fn is_independent(facts: &Facts) -> bool {
    match facts.kind {
        RelationKind::Table | RelationKind::MaterializedView | RelationKind::PartitionedTable => {
            true
        }
        RelationKind::Sequence => owner_of_sequence(facts.oid)
            .and_then(self::facts)
            .is_none_or(|owner| owner.kind == RelationKind::PartitionedTable),
        _ => false,
    }
}

/// # Safety
/// `list` is an OID list or NIL.
pub(super) unsafe fn oids(list: *mut pg_sys::List) -> Vec<Oid> {
    // SAFETY: a list of OIDs that the server has made for the caller.
    unsafe { PgList::<Oid>::from_pg(list) }.iter_oid().collect()
}

/// Locks a relation until the end of the transaction; raises an error if it is gone.
pub(crate) fn lock(oid: Oid, mode: pg_sys::LOCKMODE) {
    // SAFETY: opens and closes the relation, and keeps the lock.
    unsafe {
        pg_sys::relation_close(
            pg_sys::relation_open(oid, mode),
            pg_sys::NoLock as pg_sys::LOCKMODE,
        );
    }
}

/// Like [`lock`], without waiting; false if another session has a conflicting lock. The relation
/// may be gone.
pub(crate) fn try_lock(oid: Oid, mode: pg_sys::LOCKMODE) -> bool {
    // SAFETY: a lock on an OID, held until the end of the transaction.
    unsafe { pg_sys::ConditionalLockRelationOid(oid, mode) }
}

/// The relation's name with its schema's, quoted for SQL, in the server's encoding.
pub(crate) fn sql_name(facts: &Facts) -> ServerText {
    // SAFETY: get_namespace_name returns null or a palloc'd copy; quote_qualified_identifier copies
    // both, and omits a null schema.
    unsafe {
        let namespace = pg_sys::get_namespace_name(facts.schema);
        let name = facts.name.as_c_str().as_ptr();
        ServerText::copied(pg_sys::quote_qualified_identifier(namespace, name)).unwrap_or_default()
    }
}

/// Like [`sql_name`], for messages; not for SQL or look-ups.
pub(crate) fn quoted_name(facts: &Facts) -> String {
    sql_name(facts).to_string()
}

/// Like [`quoted_name`], for a relation that is locked while its name is read. It must exist.
pub(crate) fn qualified_name(oid: Oid) -> String {
    let mode = pg_sys::AccessShareLock as pg_sys::LOCKMODE;
    // SAFETY: raises an error if the relation is gone; the lock is released when the name is
    // copied.
    unsafe {
        let relation = pg_sys::relation_open(oid, mode);
        let name = quoted_name(&facts_of(relation));
        pg_sys::relation_close(relation, mode);
        name
    }
}

/// The keyword of SECURITY LABEL for relations of this kind.
pub(crate) fn label_keyword(kind: RelationKind) -> &'static str {
    match kind {
        RelationKind::MaterializedView => "MATERIALIZED VIEW",
        RelationKind::Sequence => "SEQUENCE",
        _ => "TABLE", // for other kinds the server raises its own error
    }
}

/// True if the current user owns the relation; also true for superusers and members of the owner.
pub(crate) fn is_owned_by_caller(oid: Oid) -> bool {
    compat::owns_relation(oid)
}

/// Facts about a relation; an error if no relation has this OID.
pub(crate) fn require(oid: Oid) -> Result<Facts> {
    facts(oid).ok_or_else(|| {
        Report::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_TABLE,
            format!("relation with OID {} does not exist", oid.to_u32()),
        )
    })
}
