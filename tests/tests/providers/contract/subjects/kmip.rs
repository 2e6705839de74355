//! PyKMIP, with AES-GCM and without.

use anyhow::Result;
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::pykmip::PyKmip;
use serde_json::{Value, json};

use super::super::subject::never;
use super::super::{Group, NEXT, Point, State, Subject};

const LACKS: &[(Point, &str)] = &[
    (Point::Enabled, "KMIP has no way back from the state Deactivated"),
    (Point::Deleted, "a server of KMIP destroys keys at once"),
];

struct KeyServer {
    server: PyKmip,
    /// What it always has.
    behaviour: Value,
    state: State,
    counted: usize,
}

impl KeyServer {
    fn start(behaviour: Value) -> Result<KeyServer> {
        let server = PyKmip::start()?;
        server.make_key(NEXT)?;
        let subject = KeyServer { server, behaviour, state: State::Repaired, counted: 0 };
        subject.also(json!({}))?;
        Ok(subject)
    }

    fn also(&self, more: Value) -> Result<()> {
        let mut behaviour = self.behaviour.clone();
        if let (Some(all), Some(more)) = (behaviour.as_object_mut(), more.as_object()) {
            all.extend(more.clone());
        }
        self.server.also(&behaviour)
    }

    /// Decrypt is refused for this reason.
    fn refuse(&self, reason: u32, times: usize) -> Result<()> {
        self.also(json!({"refuse": {"Decrypt": [reason, times.min(1_000_000)]}}))
    }

    fn bring(&mut self, state: State) -> Result<()> {
        // The key is the first of a new server.
        match state {
            State::Disabled => {
                self.server.administer(json!(["revoke", "1", "CESSATION_OF_OPERATION"]))?;
            }
            State::Destroyed => {
                self.server.administer(json!(["destroy", "1"]))?;
            }
            // Server Limit Exceeded, General Failure.
            State::Throttled(times) => self.refuse(58, times)?,
            State::Failing(times) => self.refuse(0x100, times)?,
            State::Silent => self.server.freeze()?,
            State::Away => self.server.stop(),
            State::AnotherKey => self.also(json!({"other_key": true}))?,
            State::Repaired if self.state == State::Silent => self.server.wake()?,
            State::Repaired => self.also(json!({}))?,
            State::Enabled | State::Deleted => never(state)?,
        }
        self.state = state;
        Ok(())
    }

    fn uses(&mut self) -> Result<usize> {
        let before = self.counted;
        self.counted = self.server.count("Decrypt")?;
        Ok(self.counted - before)
    }
}

/// A server with AES-GCM.
pub(super) struct Gcm(KeyServer);

/// One with AES-CBC only.
pub(super) struct Cbc(KeyServer);

macro_rules! subject {
    ($type:ident, $name:literal, $behaviour:expr) => {
        impl Subject for $type {
            const NAME: &str = $name;
            const NEEDS: &[Server] = &[Server::PyKmip];
            const LACKS: &[(Point, &str)] = LACKS;
            /// PyKMIP reads ASCII only.
            const STRANGE: &[&str] = &["a/b", "../db-kek", "db-kek?x=y", "db-kek:encrypt", "a b"];

            fn start(_: Group) -> Result<$type> {
                KeyServer::start($behaviour).map($type)
            }

            fn provider(&self) -> Provider {
                self.0.server.provider(self.0.server.options())
            }

            fn bring(&mut self, state: State) -> Result<()> {
                self.0.bring(state)
            }

            fn uses(&mut self) -> Result<usize> {
                self.0.uses()
            }
        }
    };
}

subject!(Gcm, "kmip", json!({}));
subject!(Cbc, "kmip_cbc", json!({"no_gcm": true}));
