//! Destinations of audit lines beside the server log.
//!
//! Both are opened for each line; there are few lines. So log rotation and restarts of the syslog
//! receiver need no notification.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use pagevault_keystore::audit::MARK;

/// Appends a line to a file, completely or not at all. The caller holds the lock of the trail.
pub(super) fn append(path: &Path, text: &str, sync: bool) -> io::Result<()> {
    // Opening a FIFO would block, and a symbolic link could point elsewhere.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    let mut file = OpenOptions::new()
        .read(true)
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(flags)
        .open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let length = metadata.len();
    let mut end = [b'\n'];
    if length > 0 {
        file.read_exact_at(&mut end, length - 1)?;
    }
    // Begin a new line if the file ends in an incomplete one, left by another writer or a full
    // disk.
    let before = if end == *b"\n" { "" } else { "\n" };
    let line = format!("{before}{text}\n");
    if let Err(error) = file.write_all(line.as_bytes()) {
        let _ = file.set_len(length);
        return Err(error);
    }
    if sync { file.sync_data() } else { Ok(()) }
}

/// Sends a line to the syslog receiver at this socket, without blocking. The message contains no
/// time stamp or host: the receiver adds them, and the time is in the line (RFC 3164, section
/// 4.3.2).
pub(super) fn send(socket: &Path, facility: &str, ident: &str, text: &str) -> io::Result<()> {
    const NOTICE: u32 = 5;
    /// Facility `local0`; the others follow.
    const LOCAL: u32 = 16;
    let number = facility.strip_prefix("local").and_then(|number| number.parse::<u32>().ok());
    let priority = (LOCAL + number.unwrap_or(0)) * 8 + NOTICE;
    let message = format!("<{priority}>{ident}[{}]: {MARK}{text}", std::process::id());
    let sender = UnixDatagram::unbound()?;
    sender.set_nonblocking(true)?;
    sender.send_to(message.as_bytes(), socket).map(drop)
}
