//! Who is asking.

use std::ffi::CStr;

use pgrx::pg_sys::{self, Oid};

use super::{catalog, process};

/// Role and database of a session; nothing in processes that have none.
#[derive(Default)]
pub(crate) struct Identity {
    /// The session user.
    pub(crate) role: Option<String>,
    /// The current user, where another (SET ROLE, SECURITY DEFINER).
    pub(crate) current_role: Option<String>,
    pub(crate) database: Option<String>,
}

/// Who this process acts for.
pub(crate) fn identity() -> Identity {
    if !process::runs_transactions() {
        return Identity::default();
    }
    // SAFETY: plain look-ups of this session, in a transaction.
    let (session, current) = unsafe { (pg_sys::GetSessionUserId(), pg_sys::GetUserId()) };
    Identity {
        role: role_name(session),
        current_role: if current == session { None } else { role_name(current) },
        database: catalog::database_name(process::my_database()),
    }
}

fn role_name(role: Oid) -> Option<String> {
    // SAFETY: a catalog look-up in a transaction; the result is null or a palloc'd copy.
    unsafe {
        let name = pg_sys::GetUserNameFromId(role, true);
        (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
    }
}
