//! Reading and writing pipes within a deadline.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::time::Instant;

use nix::libc::PIPE_BUF;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use pagevault_keystore::object_end::ObjectEnd;
use zeroize::Zeroizing;

/// Reads one JSON object up to its closing brace, without waiting for the end of the input: the
/// caller may keep its end open. Bytes after that are not used. The result is shorter if the input
/// ends earlier or does not begin with an object. It is one byte longer than `limit` if the object
/// is larger. The parser has to check whether it is JSON.
pub(crate) fn read_object(
    mut from: impl Read + AsFd,
    limit: usize,
    deadline: Instant,
) -> io::Result<Zeroizing<Vec<u8>>> {
    let mut text = Zeroizing::new(vec![0; FIRST_ROOM.min(limit + 1)]);
    let mut filled = 0;
    let mut scan = ObjectEnd::default();
    while filled <= limit {
        if filled == text.len() {
            // A vector that grows by itself leaves copies of secrets behind.
            let mut larger = Zeroizing::new(vec![0; (2 * text.len()).min(limit + 1)]);
            larger[..filled].copy_from_slice(&text);
            text = larger;
        }
        wait(&from, PollFlags::POLLIN, deadline)?;
        let count = match from.read(&mut text[filled..]) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let end = text[filled..filled + count].iter().position(|&byte| scan.is_at(byte));
        if let Some(end) = end {
            filled += end + 1;
            break;
        }
        filled += count;
    }
    text.truncate(filled);
    Ok(text)
}

/// Initial size of the buffer: enough for some hundred operations.
const FIRST_ROOM: usize = 32 * 1024;

/// Writes all of `text`. Never blocks beyond the deadline: a pipe that is ready accepts at least
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::thread;
    use std::time::Duration;

    const LIMIT: usize = 100_000;

    const SHORT: Duration = Duration::from_millis(200);
    const LONG: Duration = Duration::from_secs(30);

    /// Reads `text`, written in pieces to a pipe that stays open unless `close`.
    fn read(text: &[u8], piece: usize, close: bool, time: Duration) -> io::Result<Vec<u8>> {
        let (from, mut to) = io::pipe()?;
        thread::scope(|scope| {
            let (stop, wait) = std::sync::mpsc::channel::<()>();
            scope.spawn(move || {
                for part in text.chunks(piece) {
                    let _ = to.write_all(part);
                }
                if !close {
                    let _ = wait.recv();
                }
            });
            let from = File::from(std::os::fd::OwnedFd::from(from));
            let result = read_object(from, LIMIT, Instant::now() + time).map(|text| text.to_vec());
            drop(stop);
            result
        })
    }

    #[test]
    fn an_object_ends_at_its_last_brace() {
        for (text, end) in [
            (&br#"{}"#[..], 2),
            (br#" {"a":{"b":[{}]}} {"#, 17),
            (br#"{"}":"\"}\\"}x"#, 13),
            (br#"{"a":1}{"b":2}"#, 7),
            (b"hello", 1),
            (b"[{}]", 1),
            (b"}", 1),
        ] {
            for piece in [1, 3, text.len()] {
                let read = read(text, piece, false, LONG).unwrap();
                assert_eq!(read, &text[..end], "{}", String::from_utf8_lossy(text));
            }
        }
    }

    #[test]
    fn an_incomplete_object_is_waited_for_until_the_deadline_or_the_end() {
        for text in [&b"{"[..], b"{\"}", b"{\"\\\"}", b"  "] {
            assert_eq!(read(text, 1, true, LONG).unwrap(), text);
            assert_eq!(read(text, 1, false, SHORT).unwrap_err().kind(), io::ErrorKind::TimedOut);
        }
    }

    #[test]
    fn large_objects_are_read_completely_and_too_large_ones_are_detected() {
        for room in [FIRST_ROOM - 2, FIRST_ROOM, 3 * FIRST_ROOM - 1, LIMIT - 2] {
            let text = format!("{{{}}}", " ".repeat(room));
            assert_eq!(read(text.as_bytes(), 5000, false, LONG).unwrap(), text.as_bytes());
        }
        let text = format!("{{{}}}", " ".repeat(LIMIT - 1));
        assert_eq!(read(text.as_bytes(), 5000, false, LONG).unwrap().len(), LIMIT + 1);
        assert_eq!(read(&vec![b' '; 2 * LIMIT], 5000, false, LONG).unwrap().len(), LIMIT + 1);
    }
}
