//! A service that passes requests on to another server, so that a test can change its replies, stop
//! it, or have it fail.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::rest::{Answer, Asked, Service};

/// Where requests go.
pub struct Forward {
    to: To,
}

enum To {
    Address(String),
    Socket(PathBuf),
}

impl Forward {
    /// To a server at `http://HOST:PORT`.
    #[must_use]
    pub fn to_address(endpoint: &str) -> Forward {
        Forward { to: To::Address(endpoint.trim_start_matches("http://").to_owned()) }
    }

    /// To a server at a Unix socket.
    #[must_use]
    pub fn to_socket(path: &Path) -> Forward {
        Forward { to: To::Socket(path.to_owned()) }
    }

    fn exchange(&self, asked: &Asked) -> Result<Answer> {
        let mut reply = Vec::new();
        match &self.to {
            To::Address(address) => send(TcpStream::connect(address)?, asked, &mut reply)?,
            To::Socket(path) => send(UnixStream::connect(path)?, asked, &mut reply)?,
        }
        let end = reply.windows(4).position(|bytes| bytes == b"\r\n\r\n").context("no headers")?;
        let head = String::from_utf8_lossy(&reply[..end]).to_ascii_lowercase();
        let status = head.split(' ').nth(1).context("no status")?.parse()?;
        let body = if head.contains("transfer-encoding: chunked") {
            whole(&reply[end + 4..])?
        } else {
            String::from_utf8(reply[end + 4..].to_vec())?
        };
        // A text is passed on as it is.
        let body = serde_json::from_str(&body).unwrap_or(Value::String(body));
        Ok(Answer::new(status, body))
    }
}

impl Service for Forward {
    fn answer(&mut self, asked: &Asked) -> Answer {
        self.exchange(asked).unwrap_or_else(|error| Answer::new(502, json!(format!("{error:#}"))))
    }
}

fn send(mut stream: impl Read + Write, asked: &Asked, reply: &mut Vec<u8>) -> Result<()> {
    let mut head = format!("{} {} HTTP/1.1\r\n", asked.method, asked.path);
    for (name, value) in &asked.headers {
        if !matches!(name.as_str(), "connection" | "content-length") {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
    }
    head.push_str(&format!("connection: close\r\ncontent-length: {}\r\n\r\n", asked.body.len()));
    stream.write_all(head.as_bytes())?;
    stream.write_all(&asked.body)?;
    stream.read_to_end(reply)?;
    Ok(())
}

/// The content of chunks.
fn whole(mut chunks: &[u8]) -> Result<String> {
    let mut body = Vec::new();
    loop {
        let line = chunks.windows(2).position(|bytes| bytes == b"\r\n").context("no chunk")?;
        let length = usize::from_str_radix(std::str::from_utf8(&chunks[..line])?.trim(), 16)?;
        if length == 0 {
            return Ok(String::from_utf8(body)?);
        }
        let rest = chunks.get(line + 2..).context("no chunk")?;
        body.extend_from_slice(rest.get(..length).context("a chunk was cut off")?);
        chunks = rest.get(length + 2..).context("a chunk was cut off")?;
    }
}
