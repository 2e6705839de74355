//! The end of this process.

use std::ffi::c_int;

use pgrx::{pg_guard, pg_sys};

/// Calls `work` when this process exits, before it gives up its PGPROC. What was registered last is
/// called first. An ERROR in one is FATAL, and the next ones are called (`shmem_exit`, ipc.c).
pub(crate) fn at_exit(work: fn()) {
    // SAFETY: the function lives as long as the library.
    unsafe { pg_sys::before_shmem_exit(Some(call), pg_sys::Datum::from(work as usize)) }
}

/// Contract: called once, with the argument that was registered.
#[pg_guard]
unsafe extern "C-unwind" fn call(_code: c_int, work: pg_sys::Datum) {
    // SAFETY: only `at_exit` registers this, with a function of this type.
    let work = unsafe { std::mem::transmute::<usize, fn()>(work.value()) };
    work();
}

/// Ends this process so that the postmaster treats it as crashed: without a clean shutdown, as
/// `quickdie` does (postgres.c).
pub(crate) fn as_in_a_crash() -> ! {
    // SAFETY: takes a number by value and does not return. No handler or destructor runs that could
    // meet what this process leaves; the postmaster resets shared memory.
    unsafe { libc::_exit(2) }
}
