//! Google Cloud KMS, by a server after its published description.

mod access;
mod replies;
mod rotation;
mod server;

use anyhow::{Result, ensure};
use pagevault_tests::key_servers::gcp::Gcp;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::rest::Fault;
use serde_json::json;

use crate::Test;
use crate::contract::{Group, KEY, NEXT, State, Subject};

pub(crate) fn tests() -> Vec<Test> {
    [
        access::TESTS.to_vec(),
        replies::TESTS.to_vec(),
        rotation::TESTS.to_vec(),
        server::TESTS.to_vec(),
    ]
    .concat()
}

/// A reply of Google with an error.
pub(crate) fn error(status: u16, code: &str, message: &str) -> Fault {
    let body = json!({"error": {"code": status, "message": message, "status": code}});
    Fault::Reply(status, body.to_string())
}

impl Subject for Gcp {
    const NAME: &str = "gcp_kms";
    const NAMES_IN_ADDRESSES: bool = true;

    fn start(_: Group) -> Result<Gcp> {
        Gcp::start()
    }

    fn provider(&self) -> Provider {
        Gcp::provider(self, self.options())
    }

    fn bring(&mut self, state: State) -> Result<()> {
        let fault = |times, fault| self.server.fault("/cryptoKeys/", times, fault);
        let set = |state| self.with_key(KEY, |key| key.set_state(1, state));
        match state {
            State::Disabled => set("DISABLED")?,
            State::Enabled => set("ENABLED")?,
            State::Deleted => set("DESTROY_SCHEDULED")?,
            State::Destroyed => self.drop_key(KEY),
            State::Throttled(times) => {
                fault(times, error(429, "RESOURCE_EXHAUSTED", "Quota exceeded for quota metric."));
            }
            State::Failing(times) => fault(times, error(503, "UNAVAILABLE", "Try again.")),
            State::Silent => fault(usize::MAX, Fault::Silence),
            State::Away => self.server.stop(),
            State::AnotherKey => fault(usize::MAX, about_the_next_key()),
            State::Repaired => self.server.repair(),
        }
        Ok(())
    }

    fn uses(&mut self) -> Result<usize> {
        Ok(self.server.paths().iter().filter(|path| path.contains("/cryptoKeys/")).count())
    }
}

/// Replies name [`NEXT`] instead of [`KEY`].
pub(crate) fn about_the_next_key() -> Fault {
    Fault::Change(|reply| {
        let other = reply.to_string().replace(KEY, NEXT);
        *reply = serde_json::from_str(&other).unwrap_or_default();
    })
}

/// Fails unless no request was sent.
fn nothing_sent(gcp: &Gcp) -> Result<()> {
    let paths = gcp.server.paths();
    ensure!(paths.is_empty(), "{paths:?}");
    Ok(())
}
