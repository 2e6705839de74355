//! Memory that the postmaster maps once and every process inherits.
//!
//! Unlike PostgreSQL's shared memory it outlives a crash restart, so unwrapped database keys need
//! not be asked for again, and it can be kept out of swap and core dumps.

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// How a mapping is treated by the kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Address space first, memory when touched.
    Sparse,
    /// Locked in memory where the limit allows, left out of core dumps.
    Secret,
}

/// What a mapping may be an array of.
///
/// # Safety
/// Zero bytes are a value, and a shared one may be changed by several processes.
pub(crate) unsafe trait Word: 'static {}

// SAFETY: integers of which every bit pattern is a value, changed by atomic operations only.
unsafe impl Word for AtomicU32 {}
// SAFETY: as above.
unsafe impl Word for AtomicU64 {}

/// Maps `words` zeroed words, shared with all processes forked later, for ever.
pub(crate) fn shared_words<W: Word>(words: usize, kind: Kind) -> io::Result<&'static [W]> {
    let bytes = words * size_of::<W>();
    let mut flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    if kind == Kind::Sparse {
        flags |= libc::MAP_NORESERVE;
    }
    // SAFETY: a fresh anonymous mapping, owned by nobody else, never unmapped; page aligned.
    let address = unsafe {
        libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    if kind == Kind::Secret {
        // SAFETY: the range just mapped.
        if unsafe { libc::madvise(address, bytes, libc::MADV_DONTDUMP) } != 0 {
            return Err(io::Error::last_os_error());
        }
        lock_in_memory(address, bytes);
    }
    // SAFETY: see above; zero is a word by the trait's contract.
    Ok(unsafe { std::slice::from_raw_parts(address.cast(), words) })
}

/// Keeps the range out of swap, or says in the log that the limit forbids it.
fn lock_in_memory(address: *mut libc::c_void, bytes: usize) {
    // SAFETY: the caller's own mapping.
    if unsafe { libc::mlock(address, bytes) } != 0 {
        let cause = io::Error::last_os_error();
        super::report::Report::new(
            pgrx::PgSqlErrorCode::ERRCODE_INSUFFICIENT_RESOURCES,
            format!("could not lock the memory of database keys: {cause}"),
        )
        .detail("Until this is fixed, the operating system may write unwrapped keys to swap.")
        .hint("Raise RLIMIT_MEMLOCK of the server (LimitMEMLOCK in its systemd unit), or encrypt swap.")
        .send(pgrx::prelude::PgLogLevel::WARNING);
    }
}

/// Leaves the pages of a static object out of core dumps; children inherit the advice.
pub(crate) fn exclude_from_core_dumps<T>(object: *const T) -> io::Result<()> {
    const PAGE: usize = 4096;
    let start = object as usize / PAGE * PAGE;
    let end = (object as usize + size_of::<T>()).div_ceil(PAGE) * PAGE;
    // SAFETY: only advice on pages of this process; the contents are untouched.
    if unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_DONTDUMP) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Gives the memory of a mapping back to the kernel; it reads as zeros afterwards.
pub(crate) fn zero(words: &'static [AtomicU32]) -> io::Result<()> {
    let (address, bytes) = (words.as_ptr().cast_mut().cast(), size_of_val(words));
    // SAFETY: a whole anonymous shared mapping of ours. AtomicU32 allows change behind a shared
    // reference, and zero is a valid value.
    if unsafe { libc::madvise(address, bytes, libc::MADV_REMOVE) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
