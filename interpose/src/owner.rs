//! Which library an address belongs to.

use std::ffi::CStr;
use std::ptr;

/// The load address of the library that contains an address; 0 if none does.
pub(crate) fn base(address: usize) -> usize {
    information(address).map_or(0, |info| info.dli_fbase.expose_provenance())
}

/// The path of the library that contains an address, as it was loaded.
pub(crate) fn path(address: usize) -> Option<String> {
    let info = information(address).filter(|info| !info.dli_fname.is_null())?;
    // SAFETY: dladdr returns a C string, which lives as long as the library is loaded; it is
    // copied at once.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(name.to_string_lossy().into_owned())
}

fn information(address: usize) -> Option<libc::Dl_info> {
    // SAFETY: Dl_info is a plain structure of pointers and null is a valid value for each; dladdr
    // takes any address.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let found = libc::dladdr(ptr::with_exposed_provenance(address), &raw mut info);
        (found != 0).then_some(info)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no dynamic linker")]
    fn functions_belong_to_their_libraries() {
        let function = libc::getpid as *const () as usize;
        let library = path(function).unwrap();
        assert!(library.contains("libc"), "{library}");
        let own = functions_belong_to_their_libraries as *const () as usize;
        assert_ne!(base(own), base(function));
        assert_eq!((base(8), path(8)), (0, None));
    }
}
