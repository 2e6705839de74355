//! Who may do what.

use pgrx::PgSqlErrorCode;
use pgrx::pg_sys;

use crate::pg::report::{Report, Result};

/// The role that may manage providers and keys and remove encryption.
pub(crate) const ADMIN: &std::ffi::CStr = c"pagevault_admin";

/// Refuses callers who are neither superuser nor member of [`ADMIN`]. `action` completes
/// "must be a member of pagevault_admin to ...".
pub(crate) fn require_admin(action: &str) -> Result<()> {
    // SAFETY: catalog look-ups by name and OID in a transaction; nothing is kept.
    let allowed = unsafe {
        let user = pg_sys::GetUserId();
        let admin = pg_sys::get_role_oid(ADMIN.as_ptr(), true);
        pg_sys::superuser_arg(user)
            || (admin != pg_sys::Oid::INVALID && pg_sys::has_privs_of_role(user, admin))
    };
    if allowed {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
        format!("permission denied to {action}"),
    )
    .detail("Only superusers and members of the role pagevault_admin may do this."))
}
