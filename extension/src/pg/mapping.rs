//! Memory that the postmaster maps once and every process inherits.
//!
//! Unlike PostgreSQL's shared memory it survives a crash restart, so unwrapped database keys need
//! not be requested again. It can be locked in memory and excluded from core dumps.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64};

/// How the kernel treats a mapping.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    /// Reserves address space only; memory is allocated when it is first used.
    Sparse,
    /// Locked in memory if the limit permits; excluded from core dumps.
    Secret,
}

/// Types for shared memory: atomics, and structures made by [`shared_struct`].
///
/// # Safety
/// All-zero bytes are a value of the type, the initial one. Every part that can change behind a
/// shared reference changes by atomic operations, so several processes may each have a reference.
pub(crate) unsafe trait Shared: Sync + 'static {}

// SAFETY: 0 is false, and all processes write through this type, so the byte is always that of
// false or true.
unsafe impl Shared for AtomicBool {}
// SAFETY: an integer, of which every bit pattern is a value, changed by atomic operations only.
unsafe impl Shared for AtomicU8 {}
// SAFETY: an integer like the one above.
unsafe impl Shared for AtomicU32 {}
// SAFETY: an integer like the two above.
unsafe impl Shared for AtomicU64 {}
// SAFETY: an array contains only values of the element type, which may be shared.
unsafe impl<T: Shared, const N: usize> Shared for [T; N] {}
// SAFETY: the type has no bytes that could change or have a wrong value.
unsafe impl Shared for () {}

/// Declares a structure for shared memory. All of its fields are [`Shared`].
macro_rules! shared_struct {
    (
        $(#[$attribute:meta])*
        $visibility:vis struct $name:ident $(<const $parameter:ident: usize>)? {
            $($(#[$of_field:meta])* $of:vis $field:ident: $type:ty,)*
        }
    ) => {
        $(#[$attribute])*
        #[repr(C)]
        $visibility struct $name $(<const $parameter: usize>)? {
            $($(#[$of_field])* $of $field: $type,)*
        }
        // SAFETY: all fields may be shared, or their bounds would not compile; padding has no
        // meaning.
        unsafe impl $(<const $parameter: usize>)? $crate::pg::mapping::Shared
            for $name $(<$parameter>)?
        where
            $($type: $crate::pg::mapping::Shared,)*
        {
        }
    };
}
pub(crate) use shared_struct;

/// A mapping: a head, followed by a table of the requested number of entries.
pub(crate) struct Region<H: 'static, E: 'static = ()> {
    pub(crate) head: &'static H,
    pub(crate) entries: &'static [E],
    bytes: usize,
}

impl<H, E> Clone for Region<H, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<H, E> Copy for Region<H, E> {}

impl<H: Shared, E: Shared> Region<H, E> {
    /// Where the table begins.
    const TABLE: usize = size_of::<H>().next_multiple_of(align_of::<E>());

    /// Bytes that are mapped for this number of entries; saturates on overflow.
    pub(crate) fn size(entries: usize) -> usize {
        entries.saturating_mul(size_of::<E>()).saturating_add(Self::TABLE)
    }

    /// Maps zeroed memory, shared with all processes forked later; never unmapped.
    ///
    /// # Errors
    /// If the system refuses the memory.
    pub(crate) fn map(entries: usize, kind: MemoryKind) -> io::Result<Region<H, E>> {
        const { assert!(align_of::<H>() <= PAGE && align_of::<E>() <= PAGE) };
        let bytes = Self::size(entries);
        let address = map(bytes, kind)?;
        // SAFETY: the mapping begins at a page, so head and table are aligned, and it is large
        // enough for both; it is never unmapped. Zeros are values of both types, because both are
        // `Shared`.
        unsafe {
            let head = &*address.cast::<H>();
            let entries = std::slice::from_raw_parts(address.add(Self::TABLE).cast(), entries);
            Ok(Region { head, entries, bytes })
        }
    }

    /// Zeroes everything and returns the memory to the kernel. Not for secrets: locked memory
    /// cannot be returned.
    ///
    /// # Errors
    /// If the system refuses.
    pub(crate) fn clear(&self) -> io::Result<()> {
        let address = std::ptr::from_ref(self.head).cast_mut().cast();
        // SAFETY: exactly the mapping that `map` made. The kernel zeroes it as another process
        // could by stores: the types allow both zeros and changes by others.
        match unsafe { libc::madvise(address, self.bytes, libc::MADV_REMOVE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// The smallest page size of all platforms.
const PAGE: usize = 4096;

fn map(bytes: usize, kind: MemoryKind) -> io::Result<*const u8> {
    let mut flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    if kind == MemoryKind::Sparse {
        flags |= libc::MAP_NORESERVE;
    }
    // SAFETY: a new mapping at an address that the kernel chooses, so it replaces no other.
    let address = unsafe {
        libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    if kind == MemoryKind::Secret {
        // SAFETY: advice on the range that has just been mapped.
        if unsafe { libc::madvise(address, bytes, libc::MADV_DONTDUMP) } != 0 {
            return Err(io::Error::last_os_error());
        }
        lock_in_memory(address, bytes);
    }
    Ok(address.cast())
}

/// Keeps the range out of swap, or logs a warning if the limit forbids that.
fn lock_in_memory(address: *mut libc::c_void, bytes: usize) {
    // SAFETY: changes no contents, only whether they stay in memory.
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

/// Excludes the pages of a static object from core dumps; children inherit this.
pub(crate) fn exclude_from_core_dumps<T>(object: *const T) -> io::Result<()> {
    exclude_bytes_from_core_dumps(object.cast(), size_of::<T>())
}

/// Likewise of other memory: what else is on these pages is excluded, too.
pub(crate) fn exclude_bytes_from_core_dumps(memory: *const u8, length: usize) -> io::Result<()> {
    let start = memory.addr() / PAGE * PAGE;
    let end = (memory.addr() + length).div_ceil(PAGE) * PAGE;
    // SAFETY: only advice on pages of this process; the contents are untouched.
    if unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_DONTDUMP) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
