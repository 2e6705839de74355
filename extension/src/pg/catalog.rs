//! Catalog rows by OID, and databases.

use std::ffi::CStr;

use pgrx::pg_sys::{self, Oid};

use super::compat;
use super::locks::require_unlocked_keystore;
use super::statement::quoted_identifier;
use super::text::ServerText;

/// The column that most catalog look-ups use.
pub(super) const FIRST_COLUMN: pg_sys::AttrNumber = 1;

/// Reads the catalog row whose first column, also the index's first column, is `oid`. Uses
/// `SnapshotSelf`, so it also finds a row that the current command has made.
pub(super) fn find_row<T>(
    catalog: Oid,
    index: Oid,
    oid: Oid,
    read: impl FnOnce(pg_sys::HeapTuple) -> T,
) -> Option<T> {
    require_unlocked_keystore();
    // SAFETY: a catalog scan by OID; the tuple is read before the scan ends.
    unsafe {
        let lock = pg_sys::AccessShareLock as pg_sys::LOCKMODE;
        let catalog = pg_sys::table_open(catalog, lock);
        let mut key = equals(FIRST_COLUMN, oid);
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

/// The results of `read` for each catalog row in which `column`, the first of the index, is `oid`.
pub(super) fn rows_of<T>(
    catalog: Oid,
    index: Oid,
    (column, oid): (pg_sys::AttrNumber, Oid),
    read: impl Fn(pg_sys::HeapTuple) -> T,
) -> Vec<T> {
    require_unlocked_keystore();
    let mut found = Vec::new();
    // SAFETY: a scan of a catalog by its index; each tuple is read before the next is fetched.
    unsafe {
        let lock = pg_sys::AccessShareLock as pg_sys::LOCKMODE;
        let catalog = pg_sys::table_open(catalog, lock);
        let (mut key, no_snapshot) = (equals(column, oid), std::ptr::null_mut());
        let scan = pg_sys::systable_beginscan(catalog, index, true, no_snapshot, 1, &raw mut key);
        loop {
            let tuple = pg_sys::systable_getnext(scan);
            if tuple.is_null() {
                break;
            }
            found.push(read(tuple));
        }
        pg_sys::systable_endscan(scan);
        pg_sys::table_close(catalog, lock);
    }
    found
}

/// Scan key for rows in which a column is `oid`.
fn equals(column: pg_sys::AttrNumber, oid: Oid) -> pg_sys::ScanKeyData {
    let mut key = pg_sys::ScanKeyData::default();
    // SAFETY: writes the key; the comparison function exists in every server.
    unsafe {
        pg_sys::ScanKeyInit(
            &raw mut key,
            column,
            pg_sys::BTEqualStrategyNumber as pg_sys::StrategyNumber,
            pg_sys::F_OIDEQ.into(),
            pg_sys::Datum::from(oid),
        );
    }
    key
}

/// A database's name; `None` if there is no such database.
pub(crate) fn database_name(oid: u32) -> Option<ServerText> {
    require_unlocked_keystore();
    // SAFETY: a catalog look-up in a transaction; the result is null or a palloc'd copy.
    unsafe { ServerText::copied(pg_sys::get_database_name(oid.into())) }
}

/// The results of `read` for each row of a catalog, in a transaction.
pub(super) fn scan<T>(
    catalog: Oid,
    mut read: impl FnMut(pg_sys::HeapTuple) -> Option<T>,
) -> Vec<T> {
    scan_columns(catalog, |row, _| read(row))
}

/// Like [`scan`], for rows that no snapshot shows as well: those of transactions in progress and of
/// prepared ones. It may miss a row that is changed meanwhile.
pub(super) fn scan_uncommitted<T>(
    catalog: Oid,
    mut read: impl FnMut(pg_sys::HeapTuple) -> Option<T>,
) -> Vec<T> {
    // SAFETY: as `InitDirtySnapshot` (snapmgr.h) sets one; the other members are outputs.
    let mut dirty: pg_sys::SnapshotData = unsafe { std::mem::zeroed() };
    dirty.snapshot_type = pg_sys::SnapshotType::SNAPSHOT_DIRTY;
    scan_with(catalog, &raw mut dirty, |row, _| read(row))
}

/// Like [`scan`]; `read` also gets the row descriptor.
pub(super) fn scan_columns<T>(
    catalog: Oid,
    read: impl FnMut(pg_sys::HeapTuple, pg_sys::TupleDesc) -> Option<T>,
) -> Vec<T> {
    scan_with(catalog, std::ptr::null_mut(), read)
}

/// `snapshot`: null for one of the catalog now.
fn scan_with<T>(
    catalog: Oid,
    snapshot: pg_sys::Snapshot,
    mut read: impl FnMut(pg_sys::HeapTuple, pg_sys::TupleDesc) -> Option<T>,
) -> Vec<T> {
    require_unlocked_keystore();
    let mut found = Vec::new();
    // SAFETY: a scan of a catalog; each tuple is read before the next is fetched.
    unsafe {
        let lock = pg_sys::AccessShareLock as pg_sys::LOCKMODE;
        let catalog = pg_sys::table_open(catalog, lock);
        let no_key = std::ptr::null_mut();
        let scan = pg_sys::systable_beginscan(catalog, Oid::INVALID, false, snapshot, 0, no_key);
        loop {
            let tuple = pg_sys::systable_getnext(scan);
            if tuple.is_null() {
                break;
            }
            found.extend(read(tuple, (*catalog).rd_att));
        }
        pg_sys::systable_endscan(scan);
        pg_sys::table_close(catalog, lock);
    }
    found
}

/// OIDs of the databases that accept connections, without those that an interrupted DROP DATABASE
/// has left (`database_is_invalid_form`, dbcommands.c).
pub(crate) fn databases() -> Vec<Oid> {
    // SAFETY: rows of pg_database have this structure, and stay valid while the scan calls this.
    scan(pg_sys::DatabaseRelationId, |row| unsafe {
        let row = pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_database>();
        let is_valid = (*row).datconnlimit != pg_sys::DATCONNLIMIT_INVALID_DB;
        ((*row).datallowconn && is_valid).then_some((*row).oid)
    })
}

/// OIDs of all databases.
pub(crate) fn all_databases() -> Vec<Oid> {
    scan(pg_sys::DatabaseRelationId, database_of)
}

/// OIDs of all databases, and of those that are being created or dropped.
pub(crate) fn any_databases() -> Vec<Oid> {
    // First, so that what commits meanwhile is in the snapshot.
    let mut all = scan_uncommitted(pg_sys::DatabaseRelationId, database_of);
    all.extend(all_databases());
    all
}

fn database_of(row: pg_sys::HeapTuple) -> Option<Oid> {
    // SAFETY: rows of pg_database have this structure, and stay valid while the scan calls this.
    Some(unsafe { (*pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_database>()).oid })
}

/// Whether this extension is installed in this database.
pub(crate) fn has_extension() -> bool {
    our_extension() != Oid::INVALID
}

/// This extension; 0 if it is not installed in this database.
pub(crate) fn our_extension() -> Oid {
    // SAFETY: a catalog look-up in a transaction. Only a superuser can create an extension of this
    // name.
    unsafe { pg_sys::get_extension_oid(c"pagevault".as_ptr(), true) }
}

/// OIDs of all tablespaces.
pub(crate) fn tablespaces() -> Vec<Oid> {
    // SAFETY: rows of pg_tablespace have this structure, and stay valid while the scan calls this.
    scan(pg_sys::TableSpaceRelationId, |row| unsafe {
        Some((*pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_tablespace>()).oid)
    })
}

/// OIDs of all schemas of this database.
pub(crate) fn schemas() -> Vec<Oid> {
    // SAFETY: rows of pg_namespace have this structure, and stay valid while the scan calls this.
    scan(pg_sys::NamespaceRelationId, |row| unsafe {
        Some((*pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_namespace>()).oid)
    })
}

/// A schema's name; `None` if there is no such schema.
pub(crate) fn bare_schema_name(oid: Oid) -> Option<ServerText> {
    // SAFETY: a catalog look-up; the result is null or a palloc'd copy.
    unsafe { ServerText::copied(pg_sys::get_namespace_name(oid)) }
}

/// A schema's name, quoted for messages; `None` if there is no such schema.
pub(crate) fn schema_name(oid: Oid) -> Option<String> {
    bare_schema_name(oid).map(|name| quoted_identifier(&name).to_string())
}

/// The relation of this name in a schema.
pub(crate) fn relation_in_schema(schema: Oid, name: &CStr) -> Option<Oid> {
    // SAFETY: a catalog look-up by name.
    let oid = unsafe { pg_sys::get_relname_relid(name.as_ptr(), schema) };
    (oid != Oid::INVALID).then_some(oid)
}

/// True if a schema is a member of the extension of this name: created by its script, or added by
/// its owner.
pub(crate) fn is_schema_of_extension(schema: Oid, extension: &CStr) -> bool {
    // SAFETY: catalog look-ups in a transaction.
    unsafe {
        let extension = pg_sys::get_extension_oid(extension.as_ptr(), true);
        extension != Oid::INVALID
            && pg_sys::getExtensionOfObject(pg_sys::NamespaceRelationId, schema) == extension
    }
}

/// The OID of the role of this name, before the current command's changes; invalid if there is
/// none.
pub(crate) fn role_oid(name: &CStr) -> Oid {
    // SAFETY: a catalog look-up by name.
    unsafe { pg_sys::get_role_oid(name.as_ptr(), true) }
}

/// The name of a function that is in the schema of this name; `None` if there is no such function,
/// or if it is in another schema.
pub(crate) fn name_in_schema(function: Oid, schema: &CStr) -> Option<String> {
    // SAFETY: catalog look-ups in a transaction; the name is null or a palloc'd copy.
    unsafe {
        let schema = pg_sys::get_namespace_oid(schema.as_ptr(), true);
        if function == Oid::INVALID || pg_sys::get_func_namespace(function) != schema {
            return None;
        }
        ServerText::copied(pg_sys::get_func_name(function)).map(|name| name.to_string())
    }
}

/// True if a role is superuser.
pub(crate) fn is_superuser(role: Oid) -> bool {
    // SAFETY: a catalog look-up in a transaction.
    unsafe { pg_sys::superuser_arg(role) }
}

/// A database's OID; `None` if there is none of this name.
pub(crate) fn database_oid(name: &ServerText) -> Option<Oid> {
    // SAFETY: a catalog look-up by name.
    let oid = unsafe { pg_sys::get_database_oid(name.as_c_str().as_ptr(), true) };
    (oid != Oid::INVALID).then_some(oid)
}

pub(crate) fn tablespace_oid(name: &ServerText) -> Option<Oid> {
    // SAFETY: a catalog look-up by name.
    let oid = unsafe { pg_sys::get_tablespace_oid(name.as_c_str().as_ptr(), true) };
    (oid != Oid::INVALID).then_some(oid)
}

/// A database's default tablespace, including the current command's changes.
pub(crate) fn new_tablespace_of_database(database: Oid) -> Option<Oid> {
    // SAFETY: rows of pg_database have this structure, and stay valid while find_row() calls this.
    let read = |row: pg_sys::HeapTuple| unsafe {
        (*pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_database>()).dattablespace
    };
    find_row(pg_sys::DatabaseRelationId, pg_sys::DatabaseOidIndexId.into(), database, read)
}

/// A database's name, including the current command's changes.
pub(crate) fn new_database_name(database: Oid) -> Option<ServerText> {
    // SAFETY: a row of pg_database, whose name is NUL-terminated.
    let read = |row: pg_sys::HeapTuple| unsafe {
        let row = pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_database>();
        ServerText::copied((*row).datname.data.as_ptr())
    };
    find_row(pg_sys::DatabaseRelationId, pg_sys::DatabaseOidIndexId.into(), database, read)
        .flatten()
}

/// A role's name, including the current command's changes.
pub(crate) fn new_role_name(role: Oid) -> Option<ServerText> {
    // SAFETY: a row of pg_authid, whose name is NUL-terminated.
    let read = |row: pg_sys::HeapTuple| unsafe {
        let row = pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_authid>();
        ServerText::copied((*row).rolname.data.as_ptr())
    };
    find_row(pg_sys::AuthIdRelationId, pg_sys::AuthIdOidIndexId.into(), role, read).flatten()
}

/// A database's default tablespace, before the current command's changes.
pub(crate) fn tablespace_of_database(database: Oid) -> Option<Oid> {
    require_unlocked_keystore();
    // SAFETY: a catalog look-up in a transaction; the row is read before it is released.
    unsafe {
        let row = pg_sys::SearchSysCache1(compat::DATABASEOID, pg_sys::Datum::from(database));
        if row.is_null() {
            return None;
        }
        let form = pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_database>();
        let tablespace = (*form).dattablespace;
        pg_sys::ReleaseSysCache(row);
        Some(tablespace)
    }
}

/// A database other than `template0`, which never changes.
pub(crate) struct Database {
    pub(crate) oid: Oid,
    pub(crate) name: ServerText,
}

/// All databases but `template0`. Includes databases that refuse connections or are templates,
/// because their owners can change that at any time.
pub(crate) fn databases_in_use() -> Vec<Database> {
    // SAFETY: a row of pg_database, whose name is NUL-terminated.
    scan(pg_sys::DatabaseRelationId, |row| unsafe {
        let row = &*pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_database>();
        let name = ServerText::copied(row.datname.data.as_ptr())?;
        (row.oid.to_u32() != pg_sys::Template0DbOid).then_some(Database { oid: row.oid, name })
    })
}

/// `DbRoleSettingRelationId`, not among pgrx's bindings.
const DATABASE_SETTINGS: Oid = Oid::from_u32(2964);

/// The first columns of pg_db_role_setting.
#[repr(C)]
struct DatabaseSetting {
    database: Oid,
    role: Oid,
}

/// The values of a boolean setting from ALTER DATABASE ... SET and ALTER ROLE ... IN DATABASE ...
/// SET.
pub(crate) fn settings_of_databases(name: &CStr) -> Vec<(Oid, bool)> {
    const SETTINGS: std::ffi::c_int = 3;
    let found = scan_columns(DATABASE_SETTINGS, |row, columns| {
        // SAFETY: a row of pg_db_role_setting; its third column is an array of texts, or null.
        let (database, settings) = unsafe {
            let database = (*pg_sys::GETSTRUCT(row).cast::<DatabaseSetting>()).database;
            let mut null = false;
            let settings = pg_sys::heap_getattr(row, SETTINGS, columns, &mut null);
            if null || database == Oid::INVALID {
                return None;
            }
            (database, texts_of(settings))
        };
        let values = settings.iter().filter_map(|setting| value_of(setting.bytes(), name));
        Some(values.map(|value| (database, value)).collect::<Vec<_>>())
    });
    found.into_iter().flatten().collect()
}

/// # Safety
/// `array` is an array of texts.
unsafe fn texts_of(array: pg_sys::Datum) -> Vec<ServerText> {
    const OF_ANY_LENGTH: std::ffi::c_int = -1;
    let (mut elements, mut nulls, mut count) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
    // SAFETY: the caller's array of texts; deconstruct_array and text_to_cstring return palloc'd
    // memory, never null.
    unsafe {
        let array = pg_sys::pg_detoast_datum(array.cast_mut_ptr()).cast::<pg_sys::ArrayType>();
        pg_sys::deconstruct_array(
            array,
            pg_sys::TEXTOID,
            OF_ANY_LENGTH,
            false,
            pg_sys::TYPALIGN_INT as std::ffi::c_char,
            &raw mut elements,
            &raw mut nulls,
            &raw mut count,
        );
        (0..usize::try_from(count).unwrap_or(0))
            .filter(|index| !*nulls.add(*index))
            .filter_map(|index| {
                let text = (*elements.add(index)).cast_mut_ptr::<pg_sys::text>();
                ServerText::copied(pg_sys::text_to_cstring(text))
            })
            .collect()
    }
}

/// The value of a boolean setting from `name=value`, if the name matches.
fn value_of(setting: &[u8], name: &CStr) -> Option<bool> {
    let (key, rest) = setting.split_at_checked(name.count_bytes())?;
    if !key.eq_ignore_ascii_case(name.to_bytes()) {
        return None;
    }
    let value = ServerText::from_bytes(rest.strip_prefix(b"=")?);
    let mut on = false;
    // SAFETY: reads a NUL-terminated text and writes one local bool.
    let valid = unsafe { pg_sys::parse_bool(value.as_c_str().as_ptr(), &raw mut on) };
    valid.then_some(on)
}
