//! Before `main`: maps the orders.

use std::ffi::{CString, c_long};
use std::os::unix::ffi::OsStringExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, AtomicU8, AtomicU32, AtomicU64};

use crate::order::{self, at};
use crate::{descriptors, process};

/// The mapped file.
pub(crate) struct Orders {
    start: *const u8,
    /// The data directory, without a slash at its end.
    pub(crate) root: Vec<u8>,
    /// The key file.
    pub(crate) keys: Vec<u8>,
}

// SAFETY: all access to the mapping is atomic, and it is never unmapped.
unsafe impl Sync for Orders {}
// SAFETY: the mapping belongs to the process; no thread owns it.
unsafe impl Send for Orders {}

static ORDERS: OnceLock<Orders> = OnceLock::new();

impl Orders {
    pub(crate) fn number(&self, at: usize) -> &AtomicU32 {
        // SAFETY: the mapping is as long as the layout says, and the number aligned in it.
        unsafe { &*self.start.add(at).cast() }
    }

    pub(crate) fn name(&self) -> &AtomicU64 {
        // SAFETY: the layout has an aligned number of 64 bits there, within the mapping.
        unsafe { &*self.start.add(at::NAME).cast() }
    }

    pub(crate) fn jump(&self) -> &AtomicI64 {
        // SAFETY: the layout has an aligned, signed number of 64 bits there, within the mapping.
        unsafe { &*self.start.add(at::JUMP).cast() }
    }

    /// Room for a call.
    pub(crate) fn entry(&self, number: usize) -> Option<&[AtomicU8]> {
        let at = at::LIST + number * order::ENTRY;
        // SAFETY: there is room for so many entries; bytes may be shared as atomic ones.
        (number < order::ROOM)
            .then(|| unsafe { std::slice::from_raw_parts(self.start.add(at).cast(), order::ENTRY) })
    }
}

pub(crate) fn orders() -> Option<&'static Orders> {
    ORDERS.get()
}

/// Called by the dynamic linker before the program's `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

extern "C" fn begin() {
    let variable = |name: &str| std::env::var_os(name);
    let file = variable("PAGEVAULT_INJECTOR").map(|path| CString::new(path.into_vec()));
    let (Some(Ok(file)), Some(root)) = (file, variable("PAGEVAULT_INJECTOR_ROOT")) else { return };
    let keys = variable("PAGEVAULT_INJECTOR_KEYS").unwrap_or_default().into_vec();
    // SAFETY: system calls with a C string and numbers; a new mapping replaces no other.
    let start = unsafe {
        let fd = libc::syscall(libc::SYS_openat, libc::AT_FDCWD, file.as_ptr(), libc::O_RDWR);
        if fd < 0 {
            return;
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // Whole words: of the last argument, which is passed in memory, all of them count.
        let start = libc::syscall(
            libc::SYS_mmap,
            0_usize,
            order::LENGTH,
            c_long::from(protection),
            c_long::from(libc::MAP_SHARED),
            fd,
            0_usize,
        );
        libc::syscall(libc::SYS_close, fd);
        start
    };
    if start < 0 {
        return;
    }
    let _ = ORDERS.set(Orders { start: start as *const u8, root: root.into_vec(), keys });
    if process::is_helper() {
        descriptors::opened(0, Some(b"pipe"));
        descriptors::opened(1, Some(b"pipe"));
    }
}
