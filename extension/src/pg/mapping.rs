//! Memory that the postmaster maps once and every process inherits.
//!
//! Unlike PostgreSQL's shared memory it outlives a crash restart, so unwrapped database keys need
//! not be asked for again, and it can be kept out of swap and core dumps.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64};

/// How a mapping is treated by the kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    /// Address space first, memory when touched.
    Sparse,
    /// Locked in memory where the limit allows, left out of core dumps.
    Secret,
}

/// What shared memory may hold: atomics, and what [`shared_struct`] makes of them.
///
/// # Safety
/// Zero bytes are a value of the type, its initial one; and whatever of it can be changed behind a
/// shared reference is changed by atomic operations, so that several processes may have one each.
pub(crate) unsafe trait Shared: Sync + 'static {}

// SAFETY: 0 is false, and other processes write through this type as well, so no other byte than
// those of false and true ever stands there.
unsafe impl Shared for AtomicBool {}
// SAFETY: an integer, of which every bit pattern is a value, changed by atomic operations only.
unsafe impl Shared for AtomicU8 {}
// SAFETY: an integer like the one above.
unsafe impl Shared for AtomicU32 {}
// SAFETY: an integer like the two above.
unsafe impl Shared for AtomicU64 {}
// SAFETY: nothing but values that may be shared, one behind the other.
unsafe impl<T: Shared, const N: usize> Shared for [T; N] {}
// SAFETY: there are no bytes of it.
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

/// A mapping: a head, and after it a table of as many entries as were asked for.
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

    /// Bytes that are mapped for as many entries; far too many where that cannot be counted.
    pub(crate) fn size(entries: usize) -> usize {
        entries.saturating_mul(size_of::<E>()).saturating_add(Self::TABLE)
    }

    /// Maps zeros, shared with all processes forked later, for ever.
    ///
    /// # Errors
    /// When the system does not give so much memory.
    pub(crate) fn map(entries: usize, kind: MemoryKind) -> io::Result<Region<H, E>> {
        const { assert!(align_of::<H>() <= PAGE && align_of::<E>() <= PAGE) };
        let bytes = Self::size(entries);
        let address = map(bytes, kind)?;
        // SAFETY: the mapping begins at a page, so head and table are aligned, and it has room for
        // both; it is never unmapped. Zeros are values of both types, which say that they may be
        // shared.
        unsafe {
            let head = &*address.cast::<H>();
            let entries = std::slice::from_raw_parts(address.add(Self::TABLE).cast(), entries);
            Ok(Region { head, entries, bytes })
        }
    }

    /// Makes zeros of all again, and gives the memory back to the kernel. Not of secrets: what is
    /// locked in memory stays there.
    ///
    /// # Errors
    /// When the system refuses that.
    pub(crate) fn clear(&self) -> io::Result<()> {
        let address = std::ptr::from_ref(self.head).cast_mut().cast();
        // SAFETY: the whole mapping that `map` has made, and nothing else. The kernel zeroes it as
        // another process could by stores: the types allow both zeros and changes by others.
        match unsafe { libc::madvise(address, self.bytes, libc::MADV_REMOVE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Pages are no smaller on any platform.
const PAGE: usize = 4096;

fn map(bytes: usize, kind: MemoryKind) -> io::Result<*const u8> {
    let mut flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    if kind == MemoryKind::Sparse {
        flags |= libc::MAP_NORESERVE;
    }
    // SAFETY: a new mapping, wherever the kernel finds room: it takes nobody's place.
    let address = unsafe {
        libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    if kind == MemoryKind::Secret {
        // SAFETY: advice on the range that was mapped just now.
        if unsafe { libc::madvise(address, bytes, libc::MADV_DONTDUMP) } != 0 {
            return Err(io::Error::last_os_error());
        }
        lock_in_memory(address, bytes);
    }
    Ok(address.cast())
}

/// Keeps the range out of swap, or says in the log that the limit forbids it.
fn lock_in_memory(address: *mut libc::c_void, bytes: usize) {
    // SAFETY: changes nothing of what is in memory, only whether it stays there.
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
    let start = object as usize / PAGE * PAGE;
    let end = (object as usize + size_of::<T>()).div_ceil(PAGE) * PAGE;
    // SAFETY: only advice on pages of this process; the contents are untouched.
    if unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_DONTDUMP) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
