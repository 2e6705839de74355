//! Azure Key Vault and Managed HSM, by a server after their published description.

mod access;
mod keys;
mod replies;
mod server;

use anyhow::{Result, ensure};
use pagevault_tests::key_servers::azure::KeyVault;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::rest::Fault;
use serde_json::json;

use crate::Test;
use crate::contract::{self, KEY, NEXT, Subject};

pub(crate) fn tests() -> Vec<Test> {
    [
        contract::tests::<RsaVault>(),
        contract::tests::<ManagedHsm>(),
        access::TESTS.to_vec(),
        keys::TESTS.to_vec(),
        replies::TESTS.to_vec(),
        server::TESTS.to_vec(),
    ]
    .concat()
}

/// A vault with RSA keys.
struct RsaVault(KeyVault);

/// A Managed HSM with AES keys.
struct ManagedHsm(KeyVault);

/// A reply of Key Vault with an error.
fn error(status: u16, code: &str, inner: &str) -> Fault {
    let error =
        json!({"code": code, "message": "said by the server", "innererror": {"code": inner}});
    Fault::Reply(status, json!({"error": error}).to_string())
}

/// The same for both kinds.
macro_rules! subject {
    ($name:ident, $kind:literal, $kty:literal) => {
        impl Subject for $name {
            const KIND: &str = $kind;

            fn start() -> Result<$name> {
                KeyVault::start($kty).map($name)
            }

            fn provider(&self) -> Provider {
                self.0.provider(self.0.options())
            }

            fn disable(&self) -> Result<()> {
                self.0.with_key(KEY, |key| key.set_enabled(0, false))
            }

            fn enable(&self) -> Result<()> {
                self.0.with_key(KEY, |key| key.set_enabled(0, true))
            }

            fn delete(&self) -> Result<()> {
                self.0.with_key(KEY, |key| key.is_deleted = true)
            }

            fn destroy(&self) -> Result<()> {
                self.0.purge(KEY);
                Ok(())
            }

            fn throttle(&self, times: usize) {
                self.0.server.fault("/keys/", times, error(429, "Throttled", ""));
            }

            fn fail(&self, times: usize) {
                self.0.server.fault("/keys/", times, error(503, "ServiceUnavailable", ""));
            }

            fn silence(&self) {
                self.0.server.fault("/keys/", usize::MAX, Fault::Silence);
            }

            fn stop(&mut self) {
                self.0.server.stop();
            }

            fn answer_for_another_key(&self) {
                let change = Fault::Change(|reply| {
                    let other = reply.to_string().replace(KEY, NEXT);
                    *reply = serde_json::from_str(&other).unwrap_or_default();
                });
                self.0.server.fault("/keys/", usize::MAX, change);
            }

            fn repair(&self) {
                self.0.server.repair();
            }

            fn uses(&self) -> usize {
                let paths = self.0.server.paths();
                paths.iter().filter(|path| path.contains("/keys/")).count()
            }
        }
    };
}

subject!(RsaVault, "azure_key_vault", "RSA");
subject!(ManagedHsm, "azure_managed_hsm", "oct-HSM");

/// Fails unless no request was sent.
fn nothing_sent(vault: &KeyVault) -> Result<()> {
    let paths = vault.server.paths();
    ensure!(paths.is_empty(), "{paths:?}");
    Ok(())
}
