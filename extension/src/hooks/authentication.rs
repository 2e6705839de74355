//! Admits no session before the self-check has passed.

use std::ffi::{c_int, c_void};

use pgrx::pg_guard;

use super::proof;
use crate::pg::externs::{self, ClientAuthentication};
use crate::pg::process::ProcessLocal;

static PREVIOUS: ProcessLocal<Option<ClientAuthentication>> = ProcessLocal::new(None);

/// Installs the hook; from `_PG_init`.
pub(crate) fn install() {
    // SAFETY: in the postmaster, before anything is forked.
    unsafe {
        PREVIOUS.set(externs::ClientAuthentication_hook);
        externs::ClientAuthentication_hook = Some(authenticate);
    }
}

/// Contract: a backend that a client has connected to (`ClientAuthentication`, auth.c), in a
/// transaction and before it reads its database (`PerformAuthentication`, postinit.c), whether
/// authentication has succeeded or not; may raise, which ends the session.
#[pg_guard]
unsafe extern "C-unwind" fn authenticate(port: *mut c_void, status: c_int) {
    if let Some(previous) = PREVIOUS.get() {
        // SAFETY: the hook that was there before us, called when and as the server calls ours.
        unsafe { previous(port, status) };
    }
    const STATUS_OK: c_int = 0;
    if status == STATUS_OK {
        proof::require();
    }
}
