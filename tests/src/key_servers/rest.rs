//! A server of JSON over HTTP in this process, also with TLS. Tests can replace and change its
//! replies.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context, Result, anyhow};
use openssl::pkey::PKey;
use openssl::ssl::{SslAcceptor, SslMethod};
use openssl::x509::X509;
use serde_json::Value;

/// A request.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// For example `POST`.
    pub method: String,
    /// Path and query.
    pub path: String,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Vec<u8>,
    /// `http` or `https`.
    pub scheme: &'static str,
}

impl Asked {
    /// Scheme, host and port, as the client knows them.
    #[must_use]
    pub fn origin(&self) -> String {
        format!("{}://{}", self.scheme, self.header("host"))
    }

    /// A header's value, or nothing.
    #[must_use]
    pub fn header(&self, name: &str) -> &str {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map_or("", |(_, value)| value)
    }

    /// The token of the header `Authorization`.
    #[must_use]
    pub fn bearer(&self) -> &str {
        self.header("authorization").strip_prefix("Bearer ").unwrap_or_default()
    }

    /// The body as JSON, or null.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// A field of a form in the body, or nothing.
    #[must_use]
    pub fn form(&self, name: &str) -> String {
        field(&String::from_utf8_lossy(&self.body), name)
    }

    /// A field of the query, or nothing.
    #[must_use]
    pub fn query(&self, name: &str) -> String {
        self.path.split_once('?').map_or_else(String::new, |(_, query)| field(query, name))
    }
}

fn field(form: &str, name: &str) -> String {
    let mut fields = form.split('&').filter_map(|field| field.split_once('='));
    fields.find(|(known, _)| *known == name).map_or_else(String::new, |(_, value)| decoded(value))
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let digit = |byte: Option<u8>| byte.and_then(|byte| char::from(byte).to_digit(16));
        match byte {
            b'%' => match (digit(rest.next()), digit(rest.next())) {
                (Some(high), Some(low)) => bytes.push((high * 16 + low) as u8),
                _ => bytes.push(b'?'),
            },
            b'+' => bytes.push(b' '),
            byte => bytes.push(byte),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A reply: HTTP status, JSON, further headers.
#[derive(Clone, Debug)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// The body; a string is a text, and not JSON.
    pub body: Value,
    /// One more header.
    pub header: Option<(&'static str, &'static str)>,
}

impl Answer {
    /// A reply without further headers.
    #[must_use]
    pub fn new(status: u16, body: Value) -> Answer {
        Answer { status, body, header: None }
    }
}

/// What a server does.
pub trait Service: Send + 'static {
    /// The reply to a request.
    fn answer(&mut self, asked: &Asked) -> Answer;
}

/// What happens to a request instead.
#[derive(Clone)]
pub enum Fault {
    /// Another reply: HTTP status and body, which need not be JSON.
    Reply(u16, String),
    /// No reply, while the connection stays open.
    Silence,
    /// The reply is changed.
    Change(fn(&mut Value)),
}

/// A change of a path.
pub type Rename = fn(&str) -> String;

struct Planned {
    part: String,
    left: usize,
    fault: Fault,
}

struct Shared {
    end: AtomicBool,
    faults: Mutex<Vec<Planned>>,
    seen: Mutex<Vec<Asked>>,
    silent: Mutex<Vec<Box<dyn Send>>>,
    tls: Option<SslAcceptor>,
    rename: Mutex<Option<Rename>>,
}

/// A server at a port of this machine; stops when dropped.
pub struct RestServer<S> {
    port: u16,
    state: Arc<Mutex<S>>,
    shared: Arc<Shared>,
    listening: Option<thread::JoinHandle<()>>,
}

impl<S: Service> RestServer<S> {
    /// Starts it.
    ///
    /// # Errors
    /// When no port is free.
    pub fn start(state: S) -> Result<RestServer<S>> {
        RestServer::serve(state, None)
    }

    /// Starts it with TLS, with a certificate and its key in PEM.
    ///
    /// # Errors
    /// When no port is free, or these are not usable.
    pub fn start_with_tls(state: S, certificate: &str, key: &str) -> Result<RestServer<S>> {
        let mut tls = SslAcceptor::mozilla_modern_v5(SslMethod::tls())?;
        tls.set_certificate(&*X509::from_pem(certificate.as_bytes())?)?;
        tls.set_private_key(&*PKey::private_key_from_pem(key.as_bytes())?)?;
        RestServer::serve(state, Some(tls.build()))
    }

    fn serve(state: S, tls: Option<SslAcceptor>) -> Result<RestServer<S>> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let (state, shared) = (Arc::new(Mutex::new(state)), Arc::new(Shared::new(tls)));
        let mut server = RestServer {
            port,
            state: Arc::clone(&state),
            shared: Arc::clone(&shared),
            listening: None,
        };
        server.listening = Some(thread::spawn(move || {
            for stream in listener.incoming().filter_map(Result::ok) {
                if shared.end.load(Ordering::SeqCst) {
                    return;
                }
                let (state, shared) = (Arc::clone(&state), Arc::clone(&shared));
                thread::spawn(move || drop(accept(stream, &state, &shared)));
            }
        }));
        Ok(server)
    }

    /// `http://127.0.0.1:<port>`, or the same with `https`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        let scheme = if self.shared.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://127.0.0.1:{}", self.port)
    }

    /// `127.0.0.1:<port>`.
    #[must_use]
    pub fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// What the server knows.
    pub fn state(&self) -> MutexGuard<'_, S> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next `times` requests whose path contains `part` meet a fault. An earlier fault goes
    /// first.
    pub fn fault(&self, part: &str, times: usize, fault: Fault) {
        lock(&self.shared.faults).push(Planned { part: part.to_owned(), left: times, fault });
    }

    /// Paths of requests are changed so before they are answered.
    pub fn rename(&self, rename: Rename) {
        *lock(&self.shared.rename) = Some(rename);
    }

    /// No more faults, and paths as they are.
    pub fn repair(&self) {
        lock(&self.shared.faults).clear();
        *lock(&self.shared.rename) = None;
    }

    /// The requests since the last call.
    pub fn seen(&self) -> Vec<Asked> {
        std::mem::take(&mut *lock(&self.shared.seen))
    }

    /// Method and path of the requests since the last call.
    pub fn paths(&self) -> Vec<String> {
        self.seen().iter().map(|asked| format!("{} {}", asked.method, asked.path)).collect()
    }
}

impl<S> RestServer<S> {
    /// Ends it: nobody listens at its port any more.
    pub fn stop(&mut self) {
        self.shared.end.store(true, Ordering::SeqCst);
        let Some(listening) = self.listening.take() else { return };
        // Wakes the listener, which then ends.
        drop(TcpStream::connect(("127.0.0.1", self.port)));
        let _ = listening.join();
    }
}

impl<S> Drop for RestServer<S> {
    fn drop(&mut self) {
        self.stop();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn new(tls: Option<SslAcceptor>) -> Shared {
        Shared {
            end: AtomicBool::new(false),
            faults: Mutex::default(),
            seen: Mutex::default(),
            silent: Mutex::default(),
            tls,
            rename: Mutex::default(),
        }
    }

    fn fault_of(&self, asked: &Asked) -> Option<Fault> {
        let mut faults = lock(&self.faults);
        let planned =
            faults.iter_mut().find(|fault| fault.left > 0 && asked.path.contains(&fault.part))?;
        planned.left -= 1;
        Some(planned.fault.clone())
    }
}

fn accept<S: Service>(stream: TcpStream, state: &Mutex<S>, shared: &Shared) -> Result<()> {
    match &shared.tls {
        None => exchange(stream, "http", state, shared),
        Some(tls) => {
            let stream = tls.accept(stream).map_err(|_| anyhow!("no TLS"))?;
            exchange(stream, "https", state, shared)
        }
    }
}

fn exchange<S: Service>(
    mut stream: impl Read + Write + Send + 'static,
    scheme: &'static str,
    state: &Mutex<S>,
    shared: &Shared,
) -> Result<()> {
    let mut asked = read(&mut stream)?;
    asked.scheme = scheme;
    lock(&shared.seen).push(asked.clone());
    if let Some(rename) = *lock(&shared.rename) {
        asked.path = rename(&asked.path);
    }
    let (status, header, text) = match shared.fault_of(&asked) {
        Some(Fault::Silence) => {
            lock(&shared.silent).push(Box::new(stream));
            return Ok(());
        }
        Some(Fault::Reply(status, text)) => (status, None, text),
        fault => {
            let mut answer = lock(state).answer(&asked);
            if let Some(Fault::Change(change)) = fault {
                change(&mut answer.body);
            }
            // A text is sent as it is.
            let text = match &answer.body {
                Value::String(text) => text.clone(),
                body => body.to_string(),
            };
            (answer.status, answer.header, text)
        }
    };
    let header = header.map_or(String::new(), |(name, value)| format!("{name}: {value}\r\n"));
    let head = format!(
        "HTTP/1.1 {status} Test\r\ncontent-type: application/json\r\n{header}content-length: {}\r\nconnection: close\r\n\r\n",
        text.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(text.as_bytes())?;
    Ok(stream.flush()?)
}

fn read(stream: &mut impl Read) -> Result<Asked> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_ascii_whitespace();
    let mut asked = Asked {
        method: words.next().context("no request")?.to_owned(),
        path: words.next().context("no path")?.to_owned(),
        ..Asked::default()
    };
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        asked.headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let length = asked.header("content-length").parse().unwrap_or(0);
    reader.take(length).read_to_end(&mut asked.body)?;
    Ok(asked)
}
