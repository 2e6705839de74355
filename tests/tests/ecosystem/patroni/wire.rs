//! The network between nodes: connections go through gates, which a test can close.
//!
//! A gate knows where a connection comes from only if the client says so: a walreceiver by its
//! `application_name`. All others of a node reach out through gates of its own (etcd).

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;

/// What happens to bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Open,
    /// Like a cable that is cut: connections stay, and nothing arrives until the gate opens.
    Silent,
    /// Like a firewall that rejects: connections end, and new ones too.
    Closed,
}

/// How often a connection looks at its gate.
const LOOK: Duration = Duration::from_millis(50);

/// A port whose connections are passed on to another.
#[derive(Debug)]
pub(crate) struct Gate {
    pub(crate) port: u16,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    target: u16,
    way: Mutex<Way>,
    /// Ways of clients with an `application_name`.
    sources: Mutex<Vec<(String, Way)>>,
    end: AtomicBool,
}

impl Gate {
    /// An open gate in front of a port of this machine.
    pub(crate) fn before(target: u16) -> Result<Gate> {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let port = listener.local_addr()?.port();
        let state = Arc::new(State {
            target,
            way: Mutex::new(Way::Open),
            sources: Mutex::default(),
            end: AtomicBool::new(false),
        });
        let own = Arc::clone(&state);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                if own.end.load(Ordering::Relaxed) {
                    return;
                }
                let state = Arc::clone(&own);
                if let Ok(client) = client {
                    std::thread::spawn(move || pass(&state, client));
                }
            }
        });
        Ok(Gate { port, state })
    }

    pub(crate) fn set(&self, way: Way) {
        *lock(&self.state.way) = way;
    }

    /// The way of clients with this `application_name`.
    pub(crate) fn set_for(&self, name: &str, way: Way) {
        let mut sources = lock(&self.state.sources);
        sources.retain(|(known, _)| known != name);
        if way != Way::Open {
            sources.push((name.to_owned(), way));
        }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.state.end.store(true, Ordering::Relaxed);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

/// One connection; its client may be known.
struct Passage {
    state: Arc<State>,
    name: Mutex<Option<String>>,
}

impl Passage {
    /// Waits while the gate is silent. False if the connection ends.
    fn is_open(&self) -> bool {
        loop {
            if self.state.end.load(Ordering::Relaxed) {
                return false;
            }
            let named = lock(&self.name).clone().and_then(|name| {
                let sources = lock(&self.state.sources);
                sources.iter().find(|(known, _)| *known == name).map(|(_, way)| *way)
            });
            let way = *lock(&self.state.way);
            match (way, named.unwrap_or(Way::Open)) {
                (Way::Closed, _) | (_, Way::Closed) => return false,
                (Way::Open, Way::Open) => return true,
                _ => std::thread::sleep(LOOK),
            }
        }
    }

    /// Passes bytes on until an end.
    fn pump(&self, mut from: &TcpStream, mut to: &TcpStream, is_client: bool) -> Option<()> {
        let mut buffer = vec![0; 1 << 16];
        loop {
            let count = match from.read(&mut buffer) {
                Ok(0) => return Some(()),
                Ok(count) => count,
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
                {
                    self.is_open().then_some(())?;
                    continue;
                }
                Err(_) => return None,
            };
            if is_client && let Some(name) = application_name(&buffer[..count]) {
                *lock(&self.name) = Some(name);
            }
            // What came in while the gate was closed does not leave.
            self.is_open().then_some(())?;
            to.write_all(&buffer[..count]).ok()?;
        }
    }
}

fn pass(state: &Arc<State>, client: TcpStream) {
    let passage = Passage { state: Arc::clone(state), name: Mutex::default() };
    if !passage.is_open() {
        return;
    }
    let Ok(server) = TcpStream::connect(("127.0.0.1", state.target)) else { return };
    for stream in [&client, &server] {
        let _ = stream.set_nodelay(true);
        let _ = stream.set_read_timeout(Some(LOOK));
    }
    let one_way =
        |from: &TcpStream, to: &TcpStream, is_client| match passage.pump(from, to, is_client) {
            Some(()) => drop(to.shutdown(Shutdown::Write)),
            None => [from, to].into_iter().for_each(|stream| drop(stream.shutdown(Shutdown::Both))),
        };
    std::thread::scope(|scope| {
        scope.spawn(|| one_way(&client, &server, true));
        one_way(&server, &client, false);
    });
}

/// The `application_name` of a message with which a client of PostgreSQL begins.
fn application_name(message: &[u8]) -> Option<String> {
    // Length, then version 3.0.
    if message.get(4..8)? != [0, 3, 0, 0] {
        return None;
    }
    let mut words = message[8..].split(|byte| *byte == 0);
    while let Some(word) = words.next() {
        let value = words.next()?;
        if word == b"application_name" {
            return Some(String::from_utf8_lossy(value).into_owned());
        }
    }
    None
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
