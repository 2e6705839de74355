//! Vault or OpenBao, behind a server that passes requests on to its socket, with faults.

use anyhow::Result;
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::forward::Forward;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::rest::{Fault, RestServer};
use pagevault_tests::key_servers::vault::{POLICY, Vault};
use serde_json::{Value, json};

use super::super::{Group, KEY, NEXT, Point, State, Subject};

pub(super) struct OfVault {
    vault: Vault,
    front: RestServer<Forward>,
    options: Value,
}

fn error(status: u16, text: &str) -> Fault {
    Fault::Reply(status, json!({"errors": [text]}).to_string())
}

impl Subject for OfVault {
    const NAME: &str = "vault";
    const NEEDS: &[Server] = &[Server::Vault];
    const NAMES_IN_ADDRESSES: bool = true;
    /// There is no other state than that of a version which may no longer decrypt.
    const DISABLED_WRAPS: bool = true;

    fn start(_: Group) -> Result<OfVault> {
        let vault = Vault::start()?;
        // Otherwise a missing key is one that the role may not see.
        vault.write_policy("typo", &POLICY.replace(KEY, "typo"))?;
        vault.make_key(NEXT)?;
        let front = RestServer::start(Forward::to_socket(&vault.socket()))?;
        let auth = vault.approle()?["auth"].take();
        let options =
            json!({"address": front.endpoint(), "insecure_loopback_http": true, "auth": auth});
        Ok(OfVault { vault, front, options })
    }

    fn provider(&self) -> Provider {
        Provider::new("vault", self.options.clone())
    }

    fn cannot(&self, point: Point) -> Option<&'static str> {
        (point == Point::Deleted && !self.vault.is_openbao())
            .then_some("HashiCorp's Vault deletes keys for ever, if they permit it at all")
    }

    fn bring(&mut self, state: State) -> Result<()> {
        let key = format!("transit/keys/{KEY}");
        let write = |path: &str, value: &str| {
            let path = format!("{key}/{path}");
            self.vault.cli(&["write", &path, value]).map(drop)
        };
        match state {
            State::Disabled => {
                self.vault.cli(&["write", "-f", &format!("{key}/rotate")])?;
                write("config", "min_decryption_version=2")?;
            }
            State::Enabled => write("config", "min_decryption_version=1")?,
            State::Deleted => {
                self.vault.cli(&["delete", &format!("{key}/soft-delete")])?;
            }
            State::Destroyed => {
                if self.vault.is_openbao() {
                    self.vault.cli(&["write", "-f", &format!("{key}/soft-delete-restore")])?;
                }
                write("config", "deletion_allowed=true")?;
                self.vault.cli(&["delete", &key])?;
            }
            State::Throttled(times) => {
                let fault = error(429, "request path \"transit\": rate limit quota exceeded");
                self.front.fault("/transit/", times, fault);
            }
            State::Failing(times) => {
                self.front.fault("/transit/", times, error(500, "internal error"));
            }
            State::Silent => self.front.fault("/transit/", usize::MAX, Fault::Silence),
            State::Away => self.front.stop(),
            State::AnotherKey => {
                self.front.rename(|path| path.replace("/db-kek", "/db-next"));
            }
            State::Repaired => self.front.repair(),
        }
        Ok(())
    }

    fn uses(&mut self) -> Result<usize> {
        Ok(self.front.paths().iter().filter(|path| path.contains("/transit/")).count())
    }
}
