//! A server with fixed replies, for behaviour that no key server or emulator shows on demand.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use serde_json::Value;

/// Listens until the process ends.
pub struct Canned {
    /// `http://127.0.0.1:<port>`.
    pub endpoint: String,
    seen: Arc<Mutex<Vec<Request>>>,
    sent: Arc<AtomicU64>,
}

enum Flow {
    Whole(String),
    Silent,
    Endless(String, String, Duration),
}

/// A request.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its first line and its headers, as received.
    pub head: String,
    /// AWS's name of the requested action, in lower case (`describekey`).
    pub action: String,
    /// Its JSON body.
    pub body: Value,
}

impl Canned {
    /// Replies to each request with an AWS error: HTTP status and code.
    ///
    /// # Errors
    /// When no port is free.
    pub fn error(status: u16, code: &str) -> Result<Canned> {
        let body = format!("{{\"__type\":\"{code}\",\"message\":\"said by the server\"}}");
        Canned::answer(status, "application/x-amz-json-1.1", body)
    }

    /// Replies to each request with this content.
    ///
    /// # Errors
    /// When no port is free.
    pub fn answer(status: u16, kind: &str, body: String) -> Result<Canned> {
        let answer = http(status, kind, &body);
        Canned::start(move |_| Some(answer.clone()))
    }

    /// Redirects each request to another address.
    ///
    /// # Errors
    /// When no port is free.
    pub fn redirect(to: &str) -> Result<Canned> {
        Canned::redirect_at(0, to)
    }

    /// The same at a given port.
    ///
    /// # Errors
    /// When the port is not free.
    pub fn redirect_at(port: u16, to: &str) -> Result<Canned> {
        let answer = format!(
            "HTTP/1.1 307 Canned\r\nlocation: {to}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        );
        Canned::serve_at(port, move |_| Flow::Whole(answer.clone()))
    }

    /// Replies by action: HTTP status and JSON.
    ///
    /// # Errors
    /// When no port is free.
    pub fn actions(answers: impl Fn(&str) -> (u16, Value) + Send + 'static) -> Result<Canned> {
        Canned::start(move |action| {
            let (status, body) = answers(action);
            Some(http(status, "application/x-amz-json-1.1", &body.to_string()))
        })
    }

    /// Passes each request to the server at a Unix socket, with one more header.
    ///
    /// # Errors
    /// When no port is free.
    pub fn pass_on(socket: &Path, header: &str) -> Result<Canned> {
        let (socket, header) = (socket.to_owned(), header.to_owned());
        Canned::serve(move |asked| match exchange(&socket, &header, asked) {
            Ok(answer) => Flow::Whole(answer),
            Err(error) => Flow::Whole(http(502, "text/plain", &error.to_string())),
        })
    }

    /// Reads requests and never replies.
    ///
    /// # Errors
    /// When no port is free.
    pub fn silent() -> Result<Canned> {
        Canned::start(|_| None)
    }

    /// Replies by the path of the request: HTTP status, content type, content.
    ///
    /// # Errors
    /// When no port is free.
    pub fn paths(
        answers: impl Fn(&str) -> (u16, &'static str, String) + Send + 'static,
    ) -> Result<Canned> {
        Canned::serve(move |asked| {
            let path = asked.head.split(' ').nth(1).unwrap_or_default();
            let (status, kind, body) = answers(path);
            Flow::Whole(http(status, kind, &body))
        })
    }

    /// Replies to each request with this text, which includes the headers.
    ///
    /// # Errors
    /// When no port is free.
    pub fn text(answer: &str) -> Result<Canned> {
        let answer = answer.to_owned();
        Canned::serve(move |_| Flow::Whole(answer.clone()))
    }

    /// Begins each reply with `head`, and then sends `piece` for ever.
    ///
    /// # Errors
    /// When no port is free.
    pub fn endless(head: &str, piece: &str) -> Result<Canned> {
        Canned::pieces(head, piece, Duration::ZERO)
    }

    /// Like [`Canned::endless`], with one piece every tenth of a second.
    ///
    /// # Errors
    /// When no port is free.
    pub fn dripping(head: &str, piece: &str) -> Result<Canned> {
        Canned::pieces(head, piece, Duration::from_millis(100))
    }

    fn pieces(head: &str, piece: &str, pause: Duration) -> Result<Canned> {
        let (head, piece) = (head.to_owned(), piece.to_owned());
        Canned::serve(move |_| Flow::Endless(head.clone(), piece.clone(), pause))
    }

    fn start(answer: impl Fn(&str) -> Option<String> + Send + 'static) -> Result<Canned> {
        Canned::serve(move |asked| answer(&asked.action).map_or(Flow::Silent, Flow::Whole))
    }

    fn serve(answer: impl Fn(&Request) -> Flow + Send + 'static) -> Result<Canned> {
        Canned::serve_at(0, answer)
    }

    fn serve_at(port: u16, answer: impl Fn(&Request) -> Flow + Send + 'static) -> Result<Canned> {
        let listener = TcpListener::bind(("127.0.0.1", port))?;
        let endpoint = format!("http://{}", listener.local_addr()?);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (asked, sent) = (Arc::clone(&seen), Arc::new(AtomicU64::new(0)));
        let counted = Arc::clone(&sent);
        thread::spawn(move || {
            let mut open = Vec::new();
            for stream in listener.incoming().filter_map(Result::ok) {
                let Ok(request) = read_request(&stream) else { continue };
                let answer = answer(&request);
                asked.lock().unwrap_or_else(PoisonError::into_inner).push(request);
                match answer {
                    Flow::Whole(answer) => drop((&stream).write_all(answer.as_bytes())),
                    Flow::Silent => open.push(stream),
                    Flow::Endless(head, piece, pause) => {
                        let sent = Arc::clone(&counted);
                        thread::spawn(move || flow(&stream, &head, &piece, pause, &sent));
                    }
                }
            }
        });
        Ok(Canned { endpoint, seen, sent })
    }

    /// The received requests.
    #[must_use]
    pub fn seen(&self) -> Vec<Request> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Number of bytes of endless replies that were sent.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Number of received requests.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.seen().len()
    }
}

/// Sends until the connection is closed.
fn flow(mut stream: &TcpStream, head: &str, piece: &str, pause: Duration, sent: &AtomicU64) {
    let mut next = head.as_bytes();
    while stream.write_all(next).is_ok() {
        sent.fetch_add(next.len() as u64, Ordering::Relaxed);
        next = piece.as_bytes();
        thread::sleep(pause);
    }
}

fn http(status: u16, kind: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "HTTP/1.1 {status} Canned\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\
         x-amzn-requestid: canned-1\r\nconnection: close\r\n\r\n{body}"
    )
}

/// The reply of the server at `socket` to a request with one more header.
fn exchange(socket: &Path, header: &str, asked: &Request) -> std::io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    let body = if asked.body.is_null() { String::new() } else { asked.body.to_string() };
    let kept = asked.head.lines().filter(|line| {
        let line = line.to_ascii_lowercase();
        !line.is_empty() && !line.starts_with("content-length:") && !line.starts_with("connection:")
    });
    let head: String = kept.map(|line| format!("{line}\r\n")).collect();
    let length = body.len();
    let asked =
        format!("{head}{header}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}");
    stream.write_all(asked.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Reads a request with its body.
fn read_request(stream: &TcpStream) -> std::io::Result<Request> {
    let mut reader = BufReader::new(stream);
    let mut length = 0;
    let mut action = String::new();
    let mut head = String::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        head.push_str(&line);
        let line = line.trim_end().to_ascii_lowercase();
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap_or(0);
        }
        if let Some(value) = line.strip_prefix("x-amz-target: trentservice.") {
            action = value.to_owned();
        }
        if line.is_empty() {
            let mut body = Vec::new();
            reader.take(length).read_to_end(&mut body)?;
            let body = serde_json::from_slice(&body).unwrap_or_default();
            return Ok(Request { head, action, body });
        }
    }
}
