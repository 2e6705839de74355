//! Standard input and output under a deadline.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::time::Instant;

use nix::libc::PIPE_BUF;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use zeroize::Zeroizing;

/// Reads to the end, at most `limit` bytes; one more byte is returned to show that there are more.
pub(crate) fn read_to_end(
    mut from: impl Read + AsFd,
    limit: usize,
    deadline: Instant,
) -> io::Result<Zeroizing<Vec<u8>>> {
    // One allocation: growing would leave copies of the secrets behind.
    let mut text = Zeroizing::new(vec![0; limit + 1]);
    let mut filled = 0;
    while filled < text.len() {
        wait(&from, PollFlags::POLLIN, deadline)?;
        match from.read(&mut text[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    text.truncate(filled);
    Ok(text)
}

/// Writes all of `text`. Never waits longer than the deadline: a pipe that is ready takes at least
/// `PIPE_BUF` bytes.
pub(crate) fn write_all(
    mut to: impl Write + AsFd,
    text: &[u8],
    deadline: Instant,
) -> io::Result<()> {
    for piece in text.chunks(PIPE_BUF) {
        wait(&to, PollFlags::POLLOUT, deadline)?;
        to.write_all(piece)?;
    }
    to.flush()
}

fn wait(on: &impl AsFd, events: PollFlags, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(on.as_fd(), events)], timeout) {
            Ok(0) if Instant::now() >= deadline => return Err(io::ErrorKind::TimedOut.into()),
            Ok(0) | Err(nix::Error::EINTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}
