//! Hooks for requesting and initialising shared memory.

use pgrx::{pg_guard, pg_sys};

use crate::pg::process::ProcessLocal;

type Hook = Option<unsafe extern "C-unwind" fn()>;

static PREVIOUS_REQUEST: ProcessLocal<Hook> = ProcessLocal::new(None);
static PREVIOUS_STARTUP: ProcessLocal<Hook> = ProcessLocal::new(None);
static REQUEST: ProcessLocal<Option<fn()>> = ProcessLocal::new(None);
static STARTUP: ProcessLocal<Option<fn()>> = ProcessLocal::new(None);

/// Makes the postmaster call `request` before it computes the size of its shared memory, and
/// `startup` when the memory is allocated, also after a crash restart; from `_PG_init`.
pub(crate) fn install(request: fn(), startup: fn()) {
    REQUEST.set(Some(request));
    STARTUP.set(Some(startup));
    // SAFETY: in the postmaster, before any process is forked; the functions live as long as the
    // library.
    unsafe {
        PREVIOUS_REQUEST.set(pg_sys::shmem_request_hook);
        pg_sys::shmem_request_hook = Some(shmem_request);
        PREVIOUS_STARTUP.set(pg_sys::shmem_startup_hook);
        pg_sys::shmem_startup_hook = Some(shmem_startup);
    }
}

/// Contract: postmaster (`process_shmem_requests`, miscinit.c), once; may raise errors, which end
/// it.
#[pg_guard]
unsafe extern "C-unwind" fn shmem_request() {
    call(PREVIOUS_REQUEST.get(), REQUEST.get());
}

/// Contract: postmaster (`CreateSharedMemoryAndSemaphores`, ipci.c), at its start and after a
/// crash; may raise errors, which end it.
#[pg_guard]
unsafe extern "C-unwind" fn shmem_startup() {
    call(PREVIOUS_STARTUP.get(), STARTUP.get());
}

fn call(previous: Hook, ours: Option<fn()>) {
    if let Some(previous) = previous {
        // SAFETY: the previous hook, called when and as the server calls ours.
        unsafe { previous() };
    }
    if let Some(ours) = ours {
        ours();
    }
}
