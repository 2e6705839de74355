//! Security labels of any object, as the catalogs hold them.

use std::ffi::CStr;

use pgrx::pg_sys::{self, Oid};

/// The label provider's name.
pub(crate) const PROVIDER: &CStr = c"pagevault";

/// Something that may have a label: the catalog it stands in, and its OID there.
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

    /// The database of this session.
    pub(crate) fn my_database() -> Object {
        // SAFETY: a plain global of this process.
        Object { class: pg_sys::DatabaseRelationId, oid: unsafe { pg_sys::MyDatabaseId } }
    }

    fn address(self) -> pg_sys::ObjectAddress {
        pg_sys::ObjectAddress { classId: self.class, objectId: self.oid, objectSubId: 0 }
    }

    /// Its label, read from `pg_seclabel` or `pg_shseclabel`.
    pub(crate) fn label(self) -> Option<String> {
        // SAFETY: a catalog look-up in a transaction; the result is null or a palloc'd copy.
        unsafe {
            let label = pg_sys::GetSecurityLabel(&self.address(), PROVIDER.as_ptr());
            (!label.is_null()).then(|| CStr::from_ptr(label).to_string_lossy().into_owned())
        }
    }

    /// Kind and name, e.g. `schema app`.
    pub(crate) fn describe(self) -> String {
        // SAFETY: a catalog look-up in a transaction; null for an object that is gone.
        unsafe {
            let text = pg_sys::getObjectDescription(&self.address(), true);
            if text.is_null() {
                return format!("object {}", self.oid.to_u32());
            }
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }
}
