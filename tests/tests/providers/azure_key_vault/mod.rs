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
use crate::contract::{Group, KEY, State, Subject};
use crate::gcp_kms::about_the_next_key;

pub(crate) fn tests() -> Vec<Test> {
    [access::TESTS.to_vec(), keys::TESTS.to_vec(), replies::TESTS.to_vec(), server::TESTS.to_vec()]
        .concat()
}

/// A vault with RSA keys.
pub(crate) struct RsaVault(KeyVault);

/// A Managed HSM with AES keys.
pub(crate) struct ManagedHsm(KeyVault);

/// A reply of Key Vault with an error.
fn error(status: u16, code: &str, inner: &str) -> Fault {
    let error =
        json!({"code": code, "message": "said by the server", "innererror": {"code": inner}});
    Fault::Reply(status, json!({"error": error}).to_string())
}

fn bring(vault: &mut KeyVault, state: State) -> Result<()> {
    let fault = |times, fault| vault.server.fault("/keys/", times, fault);
    match state {
        State::Disabled => vault.with_key(KEY, |key| key.set_enabled(0, false))?,
        State::Enabled => vault.with_key(KEY, |key| key.set_enabled(0, true))?,
        State::Deleted => vault.with_key(KEY, |key| key.is_deleted = true)?,
        State::Destroyed => vault.purge(KEY),
        State::Throttled(times) => fault(times, error(429, "Throttled", "")),
        State::Failing(times) => fault(times, error(503, "ServiceUnavailable", "")),
        State::Silent => fault(usize::MAX, Fault::Silence),
        State::Away => vault.server.stop(),
        State::AnotherKey => fault(usize::MAX, about_the_next_key()),
        State::Repaired => vault.server.repair(),
    }
    Ok(())
}

/// The same for both kinds.
macro_rules! subject {
    ($type:ident, $name:literal, $kty:literal) => {
        impl Subject for $type {
            const NAME: &str = $name;
            const NAMES_IN_ADDRESSES: bool = true;

            fn start(_: Group) -> Result<$type> {
                KeyVault::start($kty).map($type)
            }

            fn provider(&self) -> Provider {
                self.0.provider(self.0.options())
            }

            fn bring(&mut self, state: State) -> Result<()> {
                bring(&mut self.0, state)
            }

            fn uses(&mut self) -> Result<usize> {
                let paths = self.0.server.paths();
                Ok(paths.iter().filter(|path| path.contains("/keys/")).count())
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
