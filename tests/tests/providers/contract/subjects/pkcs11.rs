//! SoftHSM, with keys that wrap by AES-GCM, and with keys that wrap a one-time key by AES-KW.

use std::fs;

use anyhow::Result;
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::softhsm::{SoftHsm, TOKEN};
use serde_json::Value;

use super::super::{Group, KEY, NEXT, Point, State, Subject};
use crate::pkcs11::make;

const LACKS: &[(Point, &str)] = &[
    (Point::Deleted, "a token destroys keys at once"),
    (Point::AnotherKeyIsTold, "the answer of a token names no key"),
];

struct Token {
    hsm: SoftHsm,
    uses: &'static [&'static str; 2],
    options: Value,
    state: State,
}

impl Token {
    fn start(uses: &'static [&'static str; 2]) -> Result<Token> {
        let hsm = SoftHsm::start()?;
        let options = hsm.options();
        let token = Token { hsm, uses, options, state: State::Repaired };
        token.hsm.drop_key(KEY)?;
        token.make_keys()?;
        Ok(token)
    }

    fn make_keys(&self) -> Result<()> {
        let attributes = self.uses.map(|name| format!("{name}=true"));
        let attributes: Vec<&str> = attributes.iter().map(String::as_str).collect();
        for name in [KEY, NEXT] {
            make(&self.hsm, name, "01", &attributes)?;
        }
        Ok(())
    }

    /// A defect of the module, which counts its sessions.
    fn fault(&mut self, fault: &str, times: usize) -> Result<()> {
        let calls = self.hsm.path("calls");
        let _ = fs::remove_file(&calls);
        let (calls, times) = (calls.display().to_string(), times.to_string());
        let mut variables = vec![("FAULT", fault), ("CALLS", calls.as_str())];
        if times != usize::MAX.to_string() {
            variables.push(("TIMES", &times));
        }
        self.options = self.hsm.faulty(&variables)?;
        Ok(())
    }

    fn permit(&self, permitted: bool) -> Result<()> {
        let attributes = self.uses.map(|name| format!("{name}={permitted}"));
        let [first, second] = attributes.each_ref().map(String::as_str);
        self.hsm.object(TOKEN, &["set", KEY, "01", first, second])
    }

    fn bring(&mut self, state: State) -> Result<()> {
        let path = |name: &str| self.hsm.path(name);
        match state {
            State::Disabled => self.permit(false)?,
            State::Enabled => self.permit(true)?,
            State::Destroyed => self.hsm.drop_key(KEY)?,
            // CKR_SESSION_COUNT.
            State::Throttled(times) => self.fault("OpenSession=b1", times)?,
            // CKR_TOKEN_NOT_PRESENT.
            State::Failing(times) => self.fault("OpenSession=e0", times)?,
            State::Silent => self.fault("Login=hang", usize::MAX)?,
            State::Away => {
                fs::rename(path("tokens"), path("unplugged"))?;
                self.hsm.make_directory("tokens")?;
            }
            State::AnotherKey => {
                fs::rename(path("tokens"), path("unplugged"))?;
                self.hsm.make_directory("tokens")?;
                self.hsm.make_token(TOKEN)?;
                self.make_keys()?;
            }
            State::Repaired if self.state == State::AnotherKey => {
                fs::remove_dir_all(path("tokens"))?;
                fs::rename(path("unplugged"), path("tokens"))?;
            }
            State::Repaired => self.options = self.hsm.options(),
            State::Deleted => super::super::subject::never(state)?,
        }
        self.state = state;
        Ok(())
    }

    /// Number of sessions since the last defect.
    fn uses(&self) -> usize {
        fs::metadata(self.hsm.path("calls")).map_or(0, |calls| calls.len() as usize)
    }
}

/// A key that encrypts.
pub(super) struct Gcm(Token);

/// A key that wraps.
pub(super) struct KeyWrap(Token);

macro_rules! subject {
    ($type:ident, $name:literal, $uses:expr) => {
        impl Subject for $type {
            const NAME: &str = $name;
            const NEEDS: &[Server] = &[Server::SoftHsm];
            const LACKS: &[(Point, &str)] = LACKS;

            fn start(_: Group) -> Result<$type> {
                Token::start($uses).map($type)
            }

            fn provider(&self) -> Provider {
                self.0.hsm.provider(self.0.options.clone())
            }

            fn bring(&mut self, state: State) -> Result<()> {
                self.0.bring(state)
            }

            fn uses(&mut self) -> Result<usize> {
                Ok(self.0.uses())
            }
        }
    };
}

subject!(Gcm, "pkcs11", &["encrypt", "decrypt"]);
subject!(KeyWrap, "pkcs11_key_wrap", &["wrap", "unwrap"]);
