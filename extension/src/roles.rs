//! Who may do what.

use pgrx::PgSqlErrorCode;
use pgrx::pg_sys;

use crate::pg::relation;
use crate::pg::report::{Report, Result};

/// The role that may manage providers and keys and remove encryption.
pub(crate) const ADMIN: &std::ffi::CStr = c"pagevault_admin";

/// True for superusers and for members of `role`.
fn has_role(role: &std::ffi::CStr) -> bool {
    // SAFETY: catalog look-ups by name and OID in a transaction; nothing is kept.
    unsafe {
        let user = pg_sys::GetUserId();
        let role = pg_sys::get_role_oid(role.as_ptr(), true);
        pg_sys::superuser_arg(user)
            || (role != pg_sys::Oid::INVALID && pg_sys::has_privs_of_role(user, role))
    }
}

/// True if the caller may see paths of the server and messages of key providers.
pub(crate) fn may_see_providers() -> bool {
    has_role(ADMIN) || has_role(c"pg_monitor")
}

/// Refuses callers who may neither read the relation nor monitor the server: looking at its files
/// costs I/O and tells about its contents.
pub(crate) fn require_select(relation: pg_sys::Oid, name: &str) -> Result<()> {
    // SAFETY: a catalog look-up in a transaction.
    let allowed = unsafe {
        let mode = pg_sys::ACL_SELECT as pg_sys::AclMode;
        pg_sys::pg_class_aclcheck(relation, pg_sys::GetUserId(), mode)
    };
    if allowed == pg_sys::AclResult::ACLCHECK_OK || may_see_providers() {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
        format!("permission denied for relation {name}"),
    ))
}

/// True for superusers and members of [`ADMIN`].
pub(crate) fn is_admin() -> bool {
    has_role(ADMIN)
}

/// Refuses callers who neither own the relation nor are administrators.
pub(crate) fn require_owner_or_admin(relation: pg_sys::Oid, name: &str) -> Result<()> {
    if relation::is_owned_by_caller(relation) || is_admin() {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
        format!("must be owner of relation {name}"),
    ))
}

/// Refuses callers who may not have the server run programs, whatever they may do with keys.
pub(crate) fn require_program_runner(action: &str) -> Result<()> {
    if has_role(c"pg_execute_server_program") {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
        format!("permission denied to {action}"),
    )
    .detail("Only superusers and members of the role pg_execute_server_program may name programs that the server runs."))
}

/// Refuses callers who are neither superuser nor member of [`ADMIN`]. `action` completes
/// "must be a member of pagevault_admin to ...".
pub(crate) fn require_admin(action: &str) -> Result<()> {
    if has_role(ADMIN) {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
        format!("permission denied to {action}"),
    )
    .detail("Only superusers and members of the role pagevault_admin may do this."))
}
