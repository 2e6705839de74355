//! Rows of catalogs by OID, and databases.

use std::ffi::{CStr, CString};

use pgrx::pg_sys::{self, Oid};

/// Reads the row of a catalog whose first indexed column is `oid`, with `SnapshotSelf`: also one that the
/// current command has made.
pub(super) fn find_row(
    catalog: Oid,
    index: Oid,
    oid: Oid,
    read: impl FnOnce(pg_sys::HeapTuple) -> Oid,
) -> Option<Oid> {
    const FIRST_COLUMN: pg_sys::AttrNumber = 1;
    // SAFETY: a catalog scan by OID; the tuple is read before the scan ends.
    unsafe {
        let lock = pg_sys::AccessShareLock as pg_sys::LOCKMODE;
        let catalog = pg_sys::table_open(catalog, lock);
        let mut key = pg_sys::ScanKeyData::default();
        pg_sys::ScanKeyInit(
            &raw mut key,
            FIRST_COLUMN,
            pg_sys::BTEqualStrategyNumber as pg_sys::StrategyNumber,
            pg_sys::F_OIDEQ.into(),
            pg_sys::Datum::from(oid),
        );
        let scan = pg_sys::systable_beginscan(
            catalog,
            index,
            true,
            &raw mut pg_sys::SnapshotSelfData,
            1,
            &raw mut key,
        );
        let tuple = pg_sys::systable_getnext(scan);
        let found = (!tuple.is_null()).then(|| read(tuple));
        pg_sys::systable_endscan(scan);
        pg_sys::table_close(catalog, lock);
        found
    }
}

/// A database's name; `None` if there is no such database.
pub(crate) fn database_name(oid: u32) -> Option<String> {
    // SAFETY: a catalog look-up in a transaction; the result is null or a palloc'd copy.
    unsafe {
        let name = pg_sys::get_database_name(oid.into());
        (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
    }
}

/// What `read` takes from each row of a catalog, in a transaction.
pub(super) fn scan<T>(
    catalog: Oid,
    mut read: impl FnMut(pg_sys::HeapTuple) -> Option<T>,
) -> Vec<T> {
    let mut found = Vec::new();
    // SAFETY: a scan of a catalog; each tuple is read before the next is fetched.
    unsafe {
        let lock = pg_sys::AccessShareLock as pg_sys::LOCKMODE;
        let catalog = pg_sys::table_open(catalog, lock);
        let (no_snapshot, no_key) = (std::ptr::null_mut(), std::ptr::null_mut());
        let scan = pg_sys::systable_beginscan(catalog, Oid::INVALID, false, no_snapshot, 0, no_key);
        loop {
            let tuple = pg_sys::systable_getnext(scan);
            if tuple.is_null() {
                break;
            }
            found.extend(read(tuple));
        }
        pg_sys::systable_endscan(scan);
        pg_sys::table_close(catalog, lock);
    }
    found
}

/// OIDs of the databases that can be connected to.
pub(crate) fn databases() -> Vec<Oid> {
    // SAFETY: a row of pg_database.
    scan(pg_sys::DatabaseRelationId, |row| unsafe {
        let row = pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_database>();
        (*row).datallowconn.then_some((*row).oid)
    })
}

/// OIDs of all tablespaces.
pub(crate) fn tablespaces() -> Vec<Oid> {
    // SAFETY: a row of pg_tablespace.
    scan(pg_sys::TableSpaceRelationId, |row| unsafe {
        Some((*pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_tablespace>()).oid)
    })
}

/// A schema's name, as SQL would write it; `None` if there is no such schema.
pub(crate) fn schema_name(oid: Oid) -> Option<String> {
    // SAFETY: a catalog look-up; the result is null or a palloc'd copy, and quoted into another one.
    unsafe {
        let name = pg_sys::get_namespace_name(oid);
        let quoted = |name| CStr::from_ptr(pg_sys::quote_identifier(name));
        (!name.is_null()).then(|| quoted(name).to_string_lossy().into_owned())
    }
}

/// A schema's OID; invalid if there is none of this name.
pub(crate) fn schema_oid(name: &CStr) -> Oid {
    // SAFETY: a catalog look-up by name.
    unsafe { pg_sys::get_namespace_oid(name.as_ptr(), true) }
}

/// A database's OID; `None` if there is none of this name.
pub(crate) fn database_oid(name: &str) -> Option<Oid> {
    let name = CString::new(name).ok()?;
    // SAFETY: a catalog look-up by name.
    let oid = unsafe { pg_sys::get_database_oid(name.as_ptr(), true) };
    (oid != Oid::INVALID).then_some(oid)
}

/// A database's default tablespace as the current command leaves it.
pub(crate) fn new_tablespace_of_database(database: Oid) -> Option<Oid> {
    // SAFETY: a row of pg_database.
    let read = |row: pg_sys::HeapTuple| unsafe {
        (*pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_database>()).dattablespace
    };
    find_row(pg_sys::DatabaseRelationId, pg_sys::DatabaseOidIndexId.into(), database, read)
}

/// A database's default tablespace as the current command has found it.
pub(crate) fn tablespace_of_database(database: Oid) -> Option<Oid> {
    // SAFETY: a catalog look-up in a transaction; the row is read before it is given back.
    unsafe {
        let row = pg_sys::SearchSysCache1(
            pg_sys::SysCacheIdentifier::DATABASEOID as i32,
            pg_sys::Datum::from(database),
        );
        if row.is_null() {
            return None;
        }
        let form = pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_database>();
        let tablespace = (*form).dattablespace;
        pg_sys::ReleaseSysCache(row);
        Some(tablespace)
    }
}

/// A text as an SQL literal, right whatever `standard_conforming_strings` says.
pub(crate) fn quoted_literal(text: &str) -> String {
    let Ok(raw) = CString::new(text) else { return "''".to_owned() };
    // SAFETY: makes a palloc'd copy of a NUL-terminated string.
    let quoted = unsafe { CStr::from_ptr(pg_sys::quote_literal_cstr(raw.as_ptr())) };
    quoted.to_string_lossy().into_owned()
}
