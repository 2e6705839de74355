//! Which process this is, by its title.

use crate::names::{Name, push_without_numbers};

const ROOM: usize = 256;

/// The command line, which PostgreSQL replaces with a title (ps_status.c).
fn title(room: &mut [u8; ROOM]) -> &[u8] {
    // SAFETY: system calls with a C string, numbers, and memory of the length that is passed.
    let got = unsafe {
        let path = c"/proc/self/cmdline".as_ptr();
        let fd = libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path, libc::O_RDONLY);
        if fd < 0 {
            return b"";
        }
        let got = libc::syscall(libc::SYS_read, fd, room.as_mut_ptr(), ROOM);
        libc::syscall(libc::SYS_close, fd);
        got
    };
    &room[..usize::try_from(got).unwrap_or(0)]
}

/// Adds the kind of this process: `backend`, `checkpointer`, the name of a worker, or the program.
pub(crate) fn push_kind(name: &mut Name) {
    let mut room = [0; ROOM];
    let title = title(&mut room);
    let title = title.split(|byte| *byte == 0).next().unwrap_or_default();
    let Some(title) = title.strip_prefix(b"postgres: ") else {
        let program = title.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        return name.push(if program == b"postgres" { b"postmaster" } else { program });
    };
    if title.windows(7).any(|part| part == b"[local]") {
        return name.push(b"backend");
    }
    // Of others, what they are doing is no part of the kind.
    let kind: &[u8] = match title {
        _ if title.starts_with(b"startup") => b"startup",
        _ if title.starts_with(b"archiver") => b"archiver",
        _ => title.trim_ascii_end(),
    };
    let mut spaceless = [0; 48];
    let length = kind.len().min(spaceless.len());
    for (to, byte) in spaceless.iter_mut().zip(kind) {
        *to = if *byte == b' ' { b'-' } else { *byte };
    }
    push_without_numbers(name, &spaceless[..length]);
}

/// Whether this is the program that asks key providers.
pub(crate) fn is_helper() -> bool {
    let mut room = [0; ROOM];
    let title = title(&mut room);
    let program = title.split(|byte| *byte == 0).next().unwrap_or_default();
    program.ends_with(b"pagevault-keyring")
}
