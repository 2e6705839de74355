//! Names of calls: function, path and process.

use std::ffi::{CStr, c_int};

use crate::begin::orders;
use crate::order::ENTRY;

/// Text of limited length.
pub(crate) struct Name {
    bytes: [u8; ENTRY - 1],
    length: usize,
}

impl Name {
    pub(crate) const fn new() -> Name {
        Name { bytes: [0; ENTRY - 1], length: 0 }
    }

    pub(crate) fn push(&mut self, text: &[u8]) {
        let room = &mut self.bytes[self.length..];
        let length = text.len().min(room.len());
        room[..length].copy_from_slice(&text[..length]);
        self.length += length;
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// Adds text with `#` in place of its numbers, decimal ones and those of WAL segments.
pub(crate) fn push_without_numbers(name: &mut Name, text: &[u8]) {
    let mut rest = text;
    while let Some(first) = rest.first() {
        let hexadecimal = rest.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
        let decimal = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let number = if hexadecimal >= 8 && decimal > 0 { hexadecimal } else { decimal };
        if number > 0 {
            name.push(b"#");
            rest = &rest[number..];
        } else {
            name.push(&[*first]);
            rest = &rest[1..];
        }
    }
}

/// The file that the self-check makes.
const SCRATCH: &[u8] = b"global/9161";

/// The name of a path that concerns pagevault; `None` for others.
pub(crate) fn of_path(directory: c_int, path: &CStr) -> Option<Name> {
    let orders = orders()?;
    let path = path.to_bytes();
    if let Some(below) = path.strip_prefix(orders.root.as_slice()) {
        return match below {
            [] => of_relative(b"."),
            [b'/', below @ ..] => of_relative(below),
            _ => None,
        };
    }
    if !orders.keys.is_empty() && path.starts_with(&orders.keys) {
        let mut name = Name::new();
        name.push(b"keyfile");
        return Some(name);
    }
    // The working directory of all processes of a server is its data directory.
    let is_relative = path.first() != Some(&b'/') && directory == libc::AT_FDCWD;
    if is_relative { of_relative(path.strip_prefix(b"./").unwrap_or(path)) } else { None }
}

fn of_relative(path: &[u8]) -> Option<Name> {
    let is_below = |directory: &[u8]| {
        path.strip_prefix(directory).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
    };
    let is_spill = path.starts_with(b"pg_replslot/") && path.ends_with(b".spill");
    let mut name = Name::new();
    if [&b"pagevault"[..], b"pg_wal", b"base/pgsql_tmp", b"pg_notify", SCRATCH, b"."]
        .iter()
        .any(|directory| is_below(directory))
        || is_spill
    {
        push_without_numbers(&mut name, path);
        return Some(name);
    }
    let relation = |rest: &[u8]| rest.first().is_some_and(u8::is_ascii_digit);
    if path.strip_prefix(b"base/").is_some_and(relation) {
        name.push(b"relation");
        return Some(name);
    }
    None
}
