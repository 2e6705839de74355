//! A server with fixed answers: for what no key server and no emulator does on demand.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::Result;
use serde_json::Value;

/// Listens until the process ends.
pub struct Canned {
    /// `http://127.0.0.1:<port>`.
    pub endpoint: String,
    seen: Arc<Mutex<Vec<Asked>>>,
}

/// A request.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Its first line and its headers, as they came.
    pub head: String,
    /// AWS's name of what is asked for, in lower case (`describekey`).
    pub action: String,
    /// What it said in JSON.
    pub body: Value,
}

impl Canned {
    /// Answers each request with an error of AWS: HTTP status and code.
    ///
    /// # Errors
    /// When no port is free.
    pub fn error(status: u16, code: &str) -> Result<Canned> {
        let body = format!("{{\"__type\":\"{code}\",\"message\":\"said by the server\"}}");
        Canned::answer(status, "application/x-amz-json-1.1", body)
    }

    /// Answers each request with any content.
    ///
    /// # Errors
    /// When no port is free.
    pub fn answer(status: u16, kind: &str, body: String) -> Result<Canned> {
        let answer = http(status, kind, &body);
        Canned::start(move |_| Some(answer.clone()))
    }

    /// Points each request to another address.
    ///
    /// # Errors
    /// When no port is free.
    pub fn redirect(to: &str) -> Result<Canned> {
        let answer = format!(
            "HTTP/1.1 307 Canned\r\nlocation: {to}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        );
        Canned::start(move |_| Some(answer.clone()))
    }

    /// Answers by action: HTTP status and JSON.
    ///
    /// # Errors
    /// When no port is free.
    pub fn actions(answers: impl Fn(&str) -> (u16, Value) + Send + 'static) -> Result<Canned> {
        Canned::start(move |action| {
            let (status, body) = answers(action);
            Some(http(status, "application/x-amz-json-1.1", &body.to_string()))
        })
    }

    /// Reads requests and never answers.
    ///
    /// # Errors
    /// When no port is free.
    pub fn silent() -> Result<Canned> {
        Canned::start(|_| None)
    }

    fn start(answer: impl Fn(&str) -> Option<String> + Send + 'static) -> Result<Canned> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let endpoint = format!("http://{}", listener.local_addr()?);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let asked = Arc::clone(&seen);
        thread::spawn(move || {
            let mut open = Vec::new();
            for stream in listener.incoming().filter_map(Result::ok) {
                let Ok(request) = read_request(&stream) else { continue };
                let answer = answer(&request.action);
                asked.lock().unwrap_or_else(PoisonError::into_inner).push(request);
                match answer {
                    Some(answer) => drop((&stream).write_all(answer.as_bytes())),
                    None => open.push(stream),
                }
            }
        });
        Ok(Canned { endpoint, seen })
    }

    /// The requests that came.
    #[must_use]
    pub fn seen(&self) -> Vec<Asked> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How many requests came.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.seen().len()
    }
}

fn http(status: u16, kind: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "HTTP/1.1 {status} Canned\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\
         x-amzn-requestid: canned-1\r\nconnection: close\r\n\r\n{body}"
    )
}

/// Reads to the end of the body.
fn read_request(stream: &TcpStream) -> std::io::Result<Asked> {
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
            return Ok(Asked { head, action, body });
        }
    }
}
