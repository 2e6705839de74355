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

use crate::contract::{self, KEY, Subject};
use crate::{Test, contract::NEXT};

pub(crate) fn tests() -> Vec<Test> {
    let contract = contract::tests::<Gcp>();
    [
        contract,
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
    const KIND: &str = "gcp_kms";

    fn start() -> Result<Gcp> {
        Gcp::start()
    }

    fn provider(&self) -> Provider {
        Gcp::provider(self, self.options())
    }

    fn disable(&self) -> Result<()> {
        self.with_key(KEY, |key| key.set_state(1, "DISABLED"))
    }

    fn enable(&self) -> Result<()> {
        self.with_key(KEY, |key| key.set_state(1, "ENABLED"))
    }

    fn delete(&self) -> Result<()> {
        self.with_key(KEY, |key| key.set_state(1, "DESTROY_SCHEDULED"))
    }

    fn destroy(&self) -> Result<()> {
        self.drop_key(KEY);
        Ok(())
    }

    fn throttle(&self, times: usize) {
        let fault = error(429, "RESOURCE_EXHAUSTED", "Quota exceeded for quota metric.");
        self.server.fault("/cryptoKeys/", times, fault);
    }

    fn fail(&self, times: usize) {
        self.server.fault("/cryptoKeys/", times, error(503, "UNAVAILABLE", "Try again."));
    }

    fn silence(&self) {
        self.server.fault("/cryptoKeys/", usize::MAX, Fault::Silence);
    }

    fn stop(&mut self) {
        self.server.stop();
    }

    fn answer_for_another_key(&self) {
        let change = Fault::Change(|reply| {
            let other = reply.to_string().replace(KEY, NEXT);
            *reply = serde_json::from_str(&other).unwrap_or_default();
        });
        self.server.fault("/cryptoKeys/", usize::MAX, change);
    }

    fn repair(&self) {
        self.server.repair();
    }

    fn uses(&self) -> usize {
        self.server.paths().iter().filter(|path| path.contains("/cryptoKeys/")).count()
    }
}

/// Fails unless no request was sent.
fn nothing_sent(gcp: &Gcp) -> Result<()> {
    let paths = gcp.server.paths();
    ensure!(paths.is_empty(), "{paths:?}");
    Ok(())
}
