//! Rights of roles.

use pgrx::PgSqlErrorCode;
use pgrx::pg_sys;

use crate::pg::compat;
use crate::pg::labels::Object;
use crate::pg::privileges::{has_role, is_superuser, may_select};
use crate::pg::report::{Report, Result};
use crate::pg::{catalog, relation};

/// The role that may manage providers and keys, and remove encryption.
pub(crate) const ADMIN: &std::ffi::CStr = c"pagevault_admin";

/// A role was created or renamed. Refuses the name [`ADMIN`], so that nobody gets its rights by
/// choosing it: a role with CREATEROLE could create it before the extension does, or after it was
/// dropped, and from PostgreSQL 16 on would then have ADMIN OPTION on it (CreateRole in user.c).
pub(crate) fn refuse_reserved(role: pg_sys::Oid, is_new: bool) -> Result<()> {
    let reserved = catalog::new_role_name(role).is_some_and(|name| name.as_c_str() == ADMIN);
    if !reserved || is_superuser() {
        return Ok(());
    }
    // Changes of attributes and members of the existing role are not restricted here.
    if !is_new && catalog::role_oid(ADMIN) == role {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_RESERVED_NAME,
        "role name \"pagevault_admin\" is reserved",
    )
    .detail("Members of the role of this name may manage keys and remove encryption.")
    .hint("A superuser makes it with CREATE EXTENSION pagevault."))
}

/// Whether the caller may see paths of the server and messages of key providers.
pub(crate) fn may_see_providers() -> bool {
    has_role(ADMIN) || has_role(c"pg_monitor")
}

/// Refuses callers who may neither read the relation nor monitor the server: reading its files
/// costs I/O and reveals something about its contents.
pub(crate) fn require_select(relation: pg_sys::Oid, name: &str) -> Result<()> {
    if may_select(relation) || may_see_providers() {
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
    Err(not_owner(name))
}

/// The error for callers who do not own a relation.
pub(crate) fn not_owner(name: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
        format!("must be owner of relation {name}"),
    )
}

/// Refuses callers who do not own the current database.
pub(crate) fn require_database_owner() -> Result<()> {
    let database = Object::my_database();
    if compat::owns_database(database.oid) {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
        format!("must be owner of {}", database.describe()),
    ))
}

/// Whether the caller may run programs on the server. Independent of the rights to keys.
pub(crate) fn may_run_programs() -> bool {
    has_role(c"pg_execute_server_program")
}

/// Refuses callers who may not run programs on the server.
pub(crate) fn require_program_runner(action: &str) -> Result<()> {
    if may_run_programs() {
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
