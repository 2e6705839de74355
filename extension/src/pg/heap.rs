//! The heap of this process.

/// Gives memory that was freed back to the system. After much was allocated in small parts, the C
/// library keeps it: in the postmaster for the life of the server.
pub(crate) fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: may be called at any time; it does not touch memory that is in use.
    unsafe {
        libc::malloc_trim(0);
    }
}
