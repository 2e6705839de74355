//! Admits no session before the self-check has succeeded, nor to a server in recovery that may lack
//! pages.

use std::ffi::{c_int, c_void};

use pgrx::pg_guard;

use super::proof;
use crate::keys::store::given_up;
use crate::pg::externs::{self, ClientAuthentication};
use crate::pg::process::{self, ProcessLocal};

static PREVIOUS: ProcessLocal<Option<ClientAuthentication>> = ProcessLocal::new(None);

/// Installs the hook; from `_PG_init`.
pub(crate) fn install() {
    // SAFETY: in the postmaster, before any process is forked.
    unsafe {
        PREVIOUS.set(externs::ClientAuthentication_hook);
        externs::ClientAuthentication_hook = Some(authenticate);
    }
}

/// Contract: called in a backend for each connecting client (`ClientAuthentication`, auth.c), in a
/// transaction, before the backend has read its database (`PerformAuthentication`, postinit.c),
/// whether or not authentication succeeded; may raise errors, which end the session.
#[pg_guard]
unsafe extern "C-unwind" fn authenticate(port: *mut c_void, status: c_int) {
    if let Some(previous) = PREVIOUS.get() {
        // SAFETY: the previous hook, called when and as the server calls ours.
        unsafe { previous(port, status) };
    }
    const STATUS_OK: c_int = 0;
    if status == STATUS_OK {
        proof::require_of_session();
        if !process::is_physical_walsender() {
            given_up::refuse_session();
        }
    }
}
