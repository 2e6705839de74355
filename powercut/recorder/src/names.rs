//! Paths, as the journal has them: below the data directory.

use std::ffi::{CStr, CString, c_int};

use crate::begin::Work;
use crate::raw;

const LONGEST: usize = 4096;

/// The path below the data directory, without a leading slash; `None` for what lies elsewhere.
pub(crate) fn below(work: &Work, directory: c_int, path: &CStr) -> Option<Vec<u8>> {
    let path = path.to_bytes();
    let mut whole = Vec::new();
    if path.first() != Some(&b'/') {
        let mut room = [0; LONGEST];
        if directory == libc::AT_FDCWD {
            whole.extend(raw::directory(&mut room)?);
        } else {
            let link = CString::new(format!("/proc/self/fd/{directory}")).ok()?;
            whole.extend(raw::read_link(&link, &mut room)?);
        }
        whole.push(b'/');
    }
    whole.extend(path);
    let mut names: Vec<&[u8]> = Vec::new();
    for name in whole.split(|c| *c == b'/') {
        match name {
            b"" | b"." => {}
            b".." => drop(names.pop()),
            name => names.push(name),
        }
    }
    let whole = [b"/".as_slice(), &names.join(&b'/')].concat();
    match whole.strip_prefix(work.root.as_slice())? {
        [] => Some(Vec::new()),
        [b'/', rest @ ..] => Some(rest.to_vec()),
        _ => None,
    }
}
