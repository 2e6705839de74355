//! The functions behind ours.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

/// The next function of a name.
pub(crate) struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    pub(crate) const fn new(name: &'static CStr) -> Next {
        Next { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    pub(crate) fn get(&self) -> *mut c_void {
        let found = self.found.load(Relaxed);
        if !found.is_null() {
            return found;
        }
        // SAFETY: the name is a C string.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        if found.is_null() {
            // SAFETY: has no arguments, and ends the process: there is nothing to call.
            unsafe { libc::abort() }
        }
        self.found.store(found, Relaxed);
        found
    }
}

/// Calls the next function of a name.
macro_rules! next {
    ($name:literal as ($($type:ty),*) -> $result:ty, $($argument:expr),* $(,)?) => {{
        static NEXT: $crate::next::Next = $crate::next::Next::new($name);
        // The function of this name has this type in the C library.
        let function: unsafe extern "C" fn($($type),*) -> $result =
            std::mem::transmute::<*mut std::ffi::c_void, _>(NEXT.get());
        function($($argument),*)
    }};
}
pub(crate) use next;
