//! The connection for all operations of a request, and the version that both sides speak.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Instant;

use pagevault_keystore::protocol::ErrorClass;
use rustls::ClientConfig;

use super::connection::Connection;
use super::failure::{self, NoAnswer};
use super::message::{self, Login, Version, read_reply};
use super::names::reason;
use super::operations::{self, Abilities, Call};
use super::settings::{Address, Settings};
use super::ttlv::{Items, Malformed};
use crate::failure::Failure;
use crate::findings::Findings;
use crate::net::client_config;
use crate::trust::{FileKind, read};

pub(super) struct Session {
    pub(super) settings: Settings,
    pub(super) deadline: Option<Instant>,
    open: RefCell<Option<Open>>,
    /// Index of the address that is used.
    current: Cell<usize>,
    /// The server's time in its last reply.
    time: Cell<Option<i64>>,
}

/// A connection and its version.
struct Open {
    connection: Connection,
    login: Option<Login>,
    version: Version,
}

/// What a connection needs from files.
struct Files {
    config: Arc<ClientConfig>,
    login: Option<Login>,
}

impl Session {
    pub(super) fn new(settings: Settings, deadline: Option<Instant>) -> Session {
        Session {
            settings,
            deadline,
            open: RefCell::new(None),
            current: Cell::new(0),
            time: Cell::new(None),
        }
    }

    fn address(&self) -> &Address {
        &self.settings.addresses[self.current.get()]
    }

    /// The current server, for messages.
    pub(super) fn shown(&self) -> String {
        self.address().shown()
    }

    /// The server's time in its last reply, in seconds since 1970.
    pub(super) fn time(&self) -> Option<i64> {
        self.time.get()
    }

    /// Makes a call that concerns `what`, and reads its answer. The connection is used again unless
    /// something was wrong with it: then the next attempt begins with a new one.
    pub(super) fn ask<T>(
        &self,
        call: &Call<'_>,
        what: &str,
        answer: impl FnOnce(Items<'_>, Version) -> Result<T, Malformed>,
    ) -> Result<T, Failure> {
        self.try_ask(call, answer)
            .map_err(|error| failure::of(error, &self.shown(), call.operation(), what))
    }

    /// Like [`Session::ask`], with the server's own reason.
    pub(super) fn try_ask<T>(
        &self,
        call: &Call<'_>,
        answer: impl FnOnce(Items<'_>, Version) -> Result<T, Malformed>,
    ) -> Result<T, NoAnswer> {
        let mut held = self.open.borrow_mut();
        let mut open = match held.take() {
            Some(open) => open,
            None => self.open()?,
        };
        let version = open.version;
        let answered = open.ask(self, call, version, |payload| answer(payload, version));
        if answered.as_ref().err().is_none_or(NoAnswer::leaves_connection) {
            *held = Some(open);
        }
        answered
    }

    /// The version in use, after a call.
    pub(super) fn version(&self) -> Option<Version> {
        self.open.borrow().as_ref().map(|open| open.version)
    }

    fn files(&self) -> Result<Files, Failure> {
        let config = Arc::new(client_config(&self.settings.trust)?);
        let login = self.settings.login.as_ref().map(|(username, file)| {
            let password = read::read(file, FileKind::Credentials)?;
            Ok::<_, Failure>(Login { username: username.clone(), password })
        });
        Ok(Files { config, login: login.transpose()? })
    }

    fn open(&self) -> Result<Open, NoAnswer> {
        let files = self.files()?;
        let connection = self.connect(&files)?;
        self.negotiate(connection, files.login)
    }

    /// A connection to the first server that accepts, beginning with the current one.
    fn connect(&self, files: &Files) -> Result<Connection, NoAnswer> {
        let count = self.settings.addresses.len();
        let mut left = count;
        loop {
            let opened = Connection::open(self.address(), &files.config, self.deadline);
            left -= 1;
            match opened {
                Err(NoAnswer::Unconnected(_)) if left > 0 => {
                    self.current.set((self.current.get() + 1) % count);
                }
                opened => return opened,
            }
        }
    }

    /// Finds the newest version that both sides know. A server may refuse a question in a version
    /// that it does not know.
    fn negotiate(&self, connection: Connection, login: Option<Login>) -> Result<Open, NoAnswer> {
        let mut open = Open { connection, login, version: Version::V1_4 };
        if let Some(version) = self.settings.version {
            open.version = version;
            return Ok(open);
        }
        let mut refused = None;
        for version in [Version::V1_4, Version::V2_1] {
            let call = Call::DiscoverVersions;
            match open.ask(self, &call, version, |payload| Ok(operations::versions(payload))) {
                Ok(versions) => {
                    open.version = *versions.first().ok_or_else(no_version)?;
                    return Ok(open);
                }
                Err(error) if is_about_version(&error) => refused = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(refused.unwrap_or_else(|| no_version().into()))
    }

    /// What the server can do.
    pub(super) fn abilities(&self) -> Result<Abilities, Failure> {
        self.ask(&Call::Query, "", |payload, _| operations::abilities(payload))
    }

    /// Examines files, connection, version and abilities.
    pub(super) fn examine(&self, findings: &mut Findings) -> Option<()> {
        self.open.replace(None);
        let files =
            findings.note("the certificate and its key can be read", self.files(), |_| {
                self.described_files()
            })?;
        let shown = |error| failure::of(error, &self.shown(), Call::Query.operation(), "");
        let connection = findings.note(
            "the server is reachable and trusted",
            self.connect(&files).map_err(shown),
            |connection| format!("{} answers, {}", self.shown(), connection.protocol()),
        )?;
        let opened = self.negotiate(connection, files.login).map_err(shown);
        let opened = findings.note("the server speaks a supported version", opened, |open| {
            format!("KMIP {}", open.version.name())
        })?;
        self.open.replace(Some(opened));
        let abilities = findings.note("the client is accepted", self.abilities(), |told| {
            match &told.vendor {
                vendor if vendor.is_empty() => "the server tells what it supports".to_owned(),
                vendor => crate::options::printable(vendor),
            }
        })?;
        let seen = |_: &()| super::rotation::described(&abilities).to_owned();
        findings.note("the server encrypts and decrypts", suffices(&abilities), seen)
    }

    fn described_files(&self) -> String {
        let mut told = match &self.settings.trust.identity {
            Some((certificate, key)) => {
                format!("certificate {}, key {}", certificate.display(), key.display())
            }
            None => String::new(),
        };
        if let Some((name, file)) = &self.settings.login {
            told += &format!("; password of {} in {}", name, file.display());
        }
        told
    }

    /// Refuses files that other users could have written, if they exist.
    pub(super) fn check_files(&self) -> Result<(), Failure> {
        let Settings { trust, login, .. } = &self.settings;
        let named = trust.ca_file.iter().chain(trust.identity.iter().flat_map(|(c, k)| [c, k]));
        let mut named = named.chain(login.iter().map(|(_, file)| file));
        if named.any(|path| !path.exists()) { Ok(()) } else { self.files().map(drop) }
    }
}

impl Open {
    fn ask<T>(
        &mut self,
        session: &Session,
        call: &Call<'_>,
        version: Version,
        answer: impl FnOnce(Items<'_>) -> Result<T, Malformed>,
    ) -> Result<T, NoAnswer> {
        let operation = call.operation();
        let request = message::request(version, self.login.as_ref(), operation, |payload| {
            call.write(version, payload);
        });
        let bytes = self.connection.exchange(&request, session.deadline)?;
        let reply = read_reply(&bytes, version, operation).map_err(NoAnswer::Foreign)?;
        session.time.set(reply.time);
        let payload = reply.result.map_err(NoAnswer::Refused)?;
        answer(payload).map_err(NoAnswer::Foreign)
    }
}

fn is_about_version(error: &NoAnswer) -> bool {
    match error {
        NoAnswer::Refused(refusal) => matches!(
            refusal.reason,
            reason::INVALID_MESSAGE
                | reason::OPERATION_NOT_SUPPORTED
                | reason::FEATURE_NOT_SUPPORTED
                | reason::UNSUPPORTED_VERSION
        ),
        NoAnswer::Foreign(_) => true,
        _ => false,
    }
}

fn no_version() -> Failure {
    Failure::new(ErrorClass::BadOptions, "key server speaks no supported version of KMIP")
        .with_detail("pagevault supports KMIP 1.4, 2.0 and 2.1.")
        .with_hint("Update the key server, or enable one of these versions there.")
}

/// Refuses a server that would have to give out master keys.
fn suffices(abilities: &Abilities) -> Result<(), Failure> {
    use super::names::Operation::{Decrypt, Encrypt, GetAttributes, Locate};
    let lacking: Vec<&str> = [Encrypt, Decrypt, Locate, GetAttributes]
        .into_iter()
        .filter(|operation| !abilities.has(*operation))
        .map(super::names::Operation::name)
        .collect();
    if lacking.is_empty() {
        return Ok(());
    }
    Err(Failure::new(ErrorClass::BadOptions, "key server does not support what pagevault needs")
        .with_detail(format!("It does not support, or does not permit to this client: {}. pagevault never asks for the value of a master key: master keys never leave the key server.", lacking.join(", ")))
        .with_hint("Enable these operations; see docs/kmip.md, \"What the server must support\"."))
}
