//! The GOT slots of an imported symbol, and the function they lead to.
//!
//! A slot holds one of three things:
//!
//! - the function, once bound (always so in a `BIND_NOW` build);
//! - an address in the program's own procedure linkage table (PLT), as long as a lazy slot has not
//!   been used. Calls must not be forwarded to such a stub: it binds the slot again and thereby
//!   undoes the swap;
//! - the program's own PLT entry as the *canonical* address of the function, in a program that is
//!   not position independent and takes the function's address. That entry jumps through the
//!   `JUMP_SLOT`, so after the swap it jumps to the replacement, and forwarding to it would never
//!   end.
//!
//! In the last two cases the dynamic linker is asked for the definition.

use std::ffi::{CStr, CString, c_void};

use crate::elf::{Import, Version};
use crate::error::Error;
use crate::executable::{Code, Executable};
use crate::owner;
use crate::program::Program;

/// A slot to be swapped.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot {
    pub(crate) address: usize,
    pub(crate) value: usize,
}

/// The slots of a symbol and the function they lead to; `None` if the program does not import it.
pub(crate) fn slots(exe: &Executable, symbol: &str) -> Result<Option<(Vec<Slot>, Code)>, Error> {
    let mut slots = Vec::new();
    let mut functions: Vec<usize> = Vec::new();
    for (address, import) in exe.imports(symbol) {
        let value = exe.word(address)?.ok_or_else(|| Error::NotPrivate {
            what: format!("the GOT slot of \"{symbol}\""),
            address,
        })?;
        let function = if exe.owns(value) { definition(exe, symbol, import)? } else { value };
        slots.push(Slot { address, value });
        functions.push(function);
    }
    functions.sort_unstable();
    functions.dedup();
    match functions.as_slice() {
        [] => Ok(None),
        &[function] => match Code::at(function) {
            Some(function) => Ok(Some((slots, function))),
            None => Err(unresolved(exe, symbol, None)),
        },
        several => Err(Error::SlotsDisagree {
            symbol: symbol.to_owned(),
            count: several.len(),
            executable: exe.path().to_owned(),
        }),
    }
}

/// The definition that an unbound slot would be bound to.
fn definition(exe: &Executable, symbol: &str, import: &Import) -> Result<usize, Error> {
    let version = import.version;
    let name = CString::new(symbol).map_err(|_| unresolved(exe, symbol, version))?;
    let version_name = version.and_then(|version| CString::new(exe.name(version.name)).ok());
    let library = version.and_then(|version| CString::new(exe.name(version.library)).ok());
    let elsewhere = |found: &usize| *found != 0 && !exe.owns(*found);

    let first = Some(look_up(libc::RTLD_DEFAULT, &name, None)).filter(elsewhere);
    let exact = Some(look_up(libc::RTLD_DEFAULT, &name, version_name.as_deref()))
        .filter(elsewhere)
        // The lookup in the global scope may return a canonical PLT entry: look in the library
        // itself.
        .or_else(|| Some(in_library(library.as_deref()?, &name, version_name.as_deref())))
        .filter(elsewhere);
    match (first, exact) {
        // A preloaded library without versions takes precedence, but dlvsym does not find it.
        (Some(first), Some(exact)) if owner::base(first) != owner::base(exact) => Ok(first),
        (_, Some(exact)) => Ok(exact),
        (Some(first), None) => Ok(first),
        (None, None) => Err(unresolved(exe, symbol, version)),
    }
}

fn in_library(library: &CStr, name: &CStr, version: Option<&CStr>) -> usize {
    // SAFETY: a valid C string; RTLD_NOLOAD opens only what is loaded already, so no
    // initialisation code runs.
    let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return 0;
    }
    let found = look_up(handle, name, version);
    // SAFETY: the handle comes from dlopen and is closed once. The library stays loaded: the
    // program needs it (it is named in its version requirements).
    unsafe { libc::dlclose(handle) };
    found
}

fn look_up(handle: *mut c_void, name: &CStr, version: Option<&CStr>) -> usize {
    let found = match version {
        // SAFETY: valid C strings and a handle that is RTLD_DEFAULT or open.
        #[cfg(target_env = "gnu")]
        Some(version) => unsafe { libc::dlvsym(handle, name.as_ptr(), version.as_ptr()) },
        // SAFETY: as above. C libraries other than glibc have no symbol versions.
        _ => unsafe { libc::dlsym(handle, name.as_ptr()) },
    };
    found.expose_provenance()
}

fn unresolved(exe: &Executable, symbol: &str, version: Option<Version>) -> Error {
    let version = version.map_or_else(
        || "no version".to_owned(),
        |version| {
            let name = String::from_utf8_lossy(exe.name(version.name));
            format!("version {name} of {}", String::from_utf8_lossy(exe.name(version.library)))
        },
    );
    Error::Unresolved { symbol: symbol.to_owned(), version, executable: exe.path().to_owned() }
}
