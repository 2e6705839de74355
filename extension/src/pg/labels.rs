//! Security labels of any object, in the catalogs.

use std::ffi::CStr;

use pgrx::pg_sys::{self, Oid};

use super::statement::quoted_identifier;
use super::text::ServerText;
use super::{catalog, relation};

/// The label provider's name.
pub(crate) const PROVIDER: &CStr = c"pagevault";

/// An object that may have a label: its catalog and OID.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Object {
    pub(crate) class: Oid,
    pub(crate) oid: Oid,
}

impl Object {
    pub(crate) fn relation(oid: Oid) -> Object {
        Object { class: pg_sys::RelationRelationId, oid }
    }

    pub(crate) fn schema(oid: Oid) -> Object {
        Object { class: pg_sys::NamespaceRelationId, oid }
    }

    pub(crate) fn tablespace(oid: Oid) -> Object {
        Object { class: pg_sys::TableSpaceRelationId, oid }
    }

    pub(crate) fn database(oid: Oid) -> Object {
        Object { class: pg_sys::DatabaseRelationId, oid }
    }

    /// The database of this session.
    pub(crate) fn my_database() -> Object {
        // SAFETY: a plain global of this process.
        Object { class: pg_sys::DatabaseRelationId, oid: unsafe { pg_sys::MyDatabaseId } }
    }

    fn address(self) -> pg_sys::ObjectAddress {
        pg_sys::ObjectAddress { classId: self.class, objectId: self.oid, objectSubId: 0 }
    }

    /// Its label, read from `pg_seclabel` or `pg_shseclabel`.
    pub(crate) fn label(self) -> Option<ServerText> {
        // SAFETY: a catalog look-up in a transaction; the result is null or a palloc'd copy.
        unsafe { ServerText::copied(pg_sys::GetSecurityLabel(&self.address(), PROVIDER.as_ptr())) }
    }

    /// Kind and name, e.g. `schema app`.
    pub(crate) fn describe(self) -> ServerText {
        let address = self.address();
        // SAFETY: a catalog look-up in a transaction; null for an object that is gone.
        let text = unsafe { ServerText::copied(pg_sys::getObjectDescription(&address, true)) };
        let gone = || ServerText::from_bytes(format!("object {}", self.oid.to_u32()).as_bytes());
        text.unwrap_or_else(gone)
    }

    /// Kind and name in the syntax of SECURITY LABEL, of a relation, schema or database; `None` if
    /// it is gone.
    pub(crate) fn label_target(self) -> Option<ServerText> {
        let named = |keyword: &str, name: ServerText| {
            ServerText::join(&[keyword.as_bytes(), quoted_identifier(&name).bytes()])
        };
        match self.class {
            pg_sys::RelationRelationId => relation::facts(self.oid).map(|facts| {
                let keyword = relation::label_keyword(facts.kind);
                ServerText::join(&[keyword.as_bytes(), b" ", relation::sql_name(&facts).bytes()])
            }),
            pg_sys::NamespaceRelationId => {
                catalog::bare_schema_name(self.oid).map(|name| named("SCHEMA ", name))
            }
            pg_sys::DatabaseRelationId => {
                catalog::database_name(self.oid.to_u32()).map(|name| named("DATABASE ", name))
            }
            _ => None,
        }
    }
}

/// Objects in this database with a label of ours.
pub(crate) fn labelled() -> Vec<Object> {
    const WHOLE: i32 = 0;
    let mut found = catalog::scan(pg_sys::SecLabelRelationId, |row| {
        // SAFETY: rows of pg_seclabel have this structure, and stay valid while the scan calls
        // this.
        let row = unsafe { &*pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_seclabel>() };
        let object = Object { class: row.classoid, oid: row.objoid };
        (row.objsubid == WHOLE).then_some(object)
    });
    found.retain(|object| object.label().is_some());
    found.sort_by_key(|object| (object.class.to_u32(), object.oid.to_u32()));
    found.dedup();
    found
}
