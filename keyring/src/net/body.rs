//! Reading what a server answers, up to a limit: whoever answers may not be who was asked, and have
//! no end.

use std::io;

use reqwest::Response;
use zeroize::Zeroizing;

/// Most that is read of an answer, in bytes. Key servers answer with some kilobytes at most.
pub(crate) const REPLY_LIMIT: usize = 1 << 20;

/// Room for what key servers usually answer.
const ROOM: usize = 16 * 1024;

/// Why the body of an answer is not there.
pub(crate) enum Unread {
    /// The connection failed, or took too long.
    Lost(reqwest::Error),
    /// It is longer than [`REPLY_LIMIT`].
    TooLong,
}

/// The body of an answer. What it says of its length is not believed.
pub(crate) async fn read_reply(mut response: Response) -> Result<Zeroizing<Vec<u8>>, Unread> {
    let mut body = Zeroizing::new(Vec::with_capacity(ROOM));
    while let Some(piece) = response.chunk().await.map_err(Unread::Lost)? {
        if body.len() + piece.len() > REPLY_LIMIT {
            return Err(Unread::TooLong);
        }
        body.extend_from_slice(&piece);
    }
    Ok(body)
}

/// The same as an error of the system, for clients that want one.
pub(crate) fn too_long() -> io::Error {
    io::Error::other(format!("it answered with more than {REPLY_LIMIT} bytes"))
}
