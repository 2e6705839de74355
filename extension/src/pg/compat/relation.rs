//! Relations.

use pgrx::pg_sys;

use super::files::Locator;
use crate::pg::externs;

/// The file of an open relation (`rd_locator`; `rd_node` before 16).
///
/// # Safety
/// `relation` is an open relation.
pub(crate) unsafe fn relation_locator(relation: pg_sys::Relation) -> Locator {
    // SAFETY: the caller has the relation open, so its relation cache entry is valid.
    unsafe {
        #[cfg(feature = "pg15")]
        return (*relation).rd_node;
        #[cfg(not(feature = "pg15"))]
        return (*relation).rd_locator;
    }
}

/// The relfilenumber of a mapped relation, which its row in pg_class does not contain
/// (`RelationMapOidToFilenumber`; `RelationMapOidToFilenode` in 15).
pub(crate) fn mapped_file(oid: pg_sys::Oid, is_shared: bool) -> u32 {
    // SAFETY: reads the relation maps that a session loads when it connects; cannot raise an error.
    unsafe { externs::RelationMapOidToFilenumber(oid, is_shared) }
}

/// Whether changes of the relation are logged in WAL (the macro `RelationNeedsWAL` in rel.h).
///
/// # Safety
/// The caller has the relation open.
pub(crate) unsafe fn relation_needs_wal(relation: pg_sys::Relation) -> bool {
    // SAFETY: fields of a relation cache entry that is valid while the relation is open; wal_level
    // is a plain global.
    unsafe {
        let permanent = (*(*relation).rd_rel).relpersistence as u8 == b'p';
        let logs_new = pg_sys::wal_level >= pg_sys::WalLevel::WAL_LEVEL_REPLICA as i32;
        permanent && (logs_new || !is_file_of_this_transaction(relation))
    }
}

/// Whether the relation got its file in the current transaction, so that other sessions do not see
/// the file yet.
///
/// # Safety
/// The caller has the relation open.
pub(crate) unsafe fn is_file_of_this_transaction(relation: pg_sys::Relation) -> bool {
    // SAFETY: fields of a relation cache entry that is valid while the relation is open.
    unsafe {
        #[cfg(feature = "pg15")]
        let new_file = (*relation).rd_firstRelfilenodeSubid;
        #[cfg(not(feature = "pg15"))]
        let new_file = (*relation).rd_firstRelfilelocatorSubid;
        (*relation).rd_createSubid != 0 || new_file != 0 // InvalidSubTransactionId
    }
}

/// Whether the current user owns a relation (`object_ownercheck`; `pg_class_ownercheck` before 16).
pub(crate) fn owns_relation(oid: pg_sys::Oid) -> bool {
    // SAFETY: a catalog look-up in a transaction; raises if there is no such relation.
    unsafe {
        let user = pg_sys::GetUserId();
        #[cfg(feature = "pg15")]
        return pg_sys::pg_class_ownercheck(oid, user);
        #[cfg(not(feature = "pg15"))]
        return pg_sys::object_ownercheck(pg_sys::RelationRelationId, oid, user);
    }
}

/// Whether the current user owns a database (`object_ownercheck`; `pg_database_ownercheck` before
/// 16).
pub(crate) fn owns_database(oid: pg_sys::Oid) -> bool {
    // SAFETY: a catalog look-up in a transaction; raises if there is no such database.
    unsafe {
        let user = pg_sys::GetUserId();
        #[cfg(feature = "pg15")]
        return pg_sys::pg_database_ownercheck(oid, user);
        #[cfg(not(feature = "pg15"))]
        return pg_sys::object_ownercheck(pg_sys::DatabaseRelationId, oid, user);
    }
}

/// The cache of `pg_class` by OID (`SysCacheIdentifier`, syscache.h).
#[allow(clippy::unnecessary_cast, reason = "identifiers are unsigned before 19")]
pub(crate) const RELOID: i32 = pg_sys::SysCacheIdentifier::RELOID as i32;

/// The cache of `pg_database` by OID.
#[allow(clippy::unnecessary_cast, reason = "identifiers are unsigned before 19")]
pub(crate) const DATABASEOID: i32 = pg_sys::SysCacheIdentifier::DATABASEOID as i32;
