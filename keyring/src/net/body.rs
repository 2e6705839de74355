//! Reads a server's reply up to a limit: another server may be answering, without end.

use std::io;

use reqwest::Response;
use zeroize::Zeroizing;

/// Maximum size of a reply in bytes. Key servers send some kilobytes at most.
pub(crate) const REPLY_LIMIT: usize = 1 << 20;

/// Initial capacity, enough for usual replies.
const INITIAL_CAPACITY: usize = 16 * 1024;

/// Why the body of a reply could not be read.
pub(crate) enum Unread {
    /// The connection failed or timed out.
    Lost(reqwest::Error),
    /// It is longer than [`REPLY_LIMIT`].
    TooLong,
}

/// The body of a reply. Its Content-Length is ignored.
pub(crate) async fn read_reply(mut response: Response) -> Result<Zeroizing<Vec<u8>>, Unread> {
    let mut body = Zeroizing::new(Vec::with_capacity(INITIAL_CAPACITY));
    while let Some(piece) = response.chunk().await.map_err(Unread::Lost)? {
        if body.len() + piece.len() > REPLY_LIMIT {
            return Err(Unread::TooLong);
        }
        body.extend_from_slice(&piece);
    }
    Ok(body)
}

/// The same as an I/O error, for clients that need one.
pub(crate) fn too_long() -> io::Error {
    io::Error::other(format!("the reply has more than {REPLY_LIMIT} bytes"))
}
