//! Privileges of the current user. In a transaction: every function reads catalogs.

use std::ffi::CStr;

use pgrx::pg_sys::{self, Oid};

/// True for superusers.
pub(crate) fn is_superuser() -> bool {
    // SAFETY: reads this process's user and its row in pg_authid, in a transaction.
    unsafe { pg_sys::superuser() }
}

/// True for superusers and for members of a role, if a role of this name exists.
pub(crate) fn has_role(role: &CStr) -> bool {
    // SAFETY: catalog look-ups by name and OID in a transaction; nothing is kept.
    unsafe {
        let user = pg_sys::GetUserId();
        let role = pg_sys::get_role_oid(role.as_ptr(), true);
        pg_sys::superuser_arg(user)
            || (role != Oid::INVALID && pg_sys::has_privs_of_role(user, role))
    }
}

/// True for users that may read a relation.
pub(crate) fn may_select(relation: Oid) -> bool {
    let select = pg_sys::ACL_SELECT as pg_sys::AclMode;
    // SAFETY: a catalog look-up by OID in a transaction; raises if there is no such relation.
    let found = unsafe { pg_sys::pg_class_aclcheck(relation, pg_sys::GetUserId(), select) };
    found == pg_sys::AclResult::ACLCHECK_OK
}
