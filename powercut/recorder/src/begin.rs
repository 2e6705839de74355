//! Before `main`: what to record, and where to.

use std::ffi::{CString, c_int};
use std::os::unix::ffi::OsStringExt;
use std::sync::OnceLock;

use crate::raw;

pub(crate) struct Work {
    pub(crate) journal: c_int,
    /// Without a slash at its end.
    pub(crate) root: Vec<u8>,
    pub(crate) server: u8,
    pub(crate) sync: u32,
}

static WORK: OnceLock<Work> = OnceLock::new();

/// A descriptor that programs are not likely to close or to use themselves.
const DESCRIPTOR: c_int = 700;

pub(crate) fn work() -> Option<&'static Work> {
    WORK.get()
}

/// Called by the dynamic linker before the program's `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

extern "C" fn begin() {
    let variable = |name: &str| std::env::var_os(format!("PAGEVAULT_POWERCUT_{name}"));
    let number = |name: &str| variable(name).and_then(|value| value.to_str()?.parse().ok());
    let (Some(journal), Some(root)) = (variable("JOURNAL"), variable("ROOT")) else { return };
    let Ok(path) = CString::new(journal.into_vec()) else { raw::give_up() };
    let flags = libc::O_RDWR | libc::O_APPEND | libc::O_CLOEXEC;
    let opened = raw::openat(libc::AT_FDCWD, &path, flags, 0);
    let journal = raw::fcntl(opened, libc::F_DUPFD_CLOEXEC, DESCRIPTOR.into());
    raw::close(opened);
    if journal < 0 {
        raw::give_up();
    }
    let server = number("SERVER").unwrap_or(0) as u8;
    let sync = number("SYNC_US").unwrap_or(0);
    let _ = WORK.set(Work { journal, root: root.into_vec(), server, sync });
}
