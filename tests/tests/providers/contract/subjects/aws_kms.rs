//! Emulators of AWS KMS, behind a server that passes requests on to them, with faults.

use std::ops::Range;
use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::forward::Forward;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::kms::{Credentials, Emulator};
use pagevault_tests::key_servers::rest::{Fault, RestServer};
use serde_json::{Value, json};

use super::super::{Group, KEY, NEXT, State, Subject};

pub(super) struct OfAws {
    kms: Emulator,
    /// One without keys.
    empty: Option<Emulator>,
    front: RestServer<Forward>,
    credentials: Credentials,
    key: String,
}

fn error(status: u16, code: &str) -> Fault {
    let body = json!({"__type": code, "message": "said by the server"});
    Fault::Reply(status, body.to_string())
}

fn alias(name: &str) -> String {
    format!("alias/{name}")
}

impl OfAws {
    fn call(&self, operation: &str, more: Value) -> Result<()> {
        let mut parameters = json!({"KeyId": self.key});
        if let (Some(all), Some(more)) = (parameters.as_object_mut(), more.as_object()) {
            all.extend(more.clone());
        }
        self.kms.aws("kms", operation, parameters).map(drop)
    }
}

impl Subject for OfAws {
    const NAME: &str = "aws_kms";
    const NEEDS: &[Server] = &[Server::Ministack, Server::Moto];
    /// Those of AWS itself.
    const LENGTHS: &[usize] = &[1, 31, 64, 4096];
    /// A wrapped key begins with the name of its master key. Another name may be one of another
    /// region, or of another account.
    const REFUSALS: &[&str] = &["wrong_ciphertext", "key_missing", "bad_options", "denied"];
    /// An alias may have moved to another key.
    const FOLLOWS_WRAPPED: bool = true;

    fn start(group: Group) -> Result<OfAws> {
        // Only ministack has states of keys, and only moto rotates, rewraps, and notices damage.
        let kms = match group {
            Group::States => Emulator::ministack()?,
            _ => Emulator::moto()?,
        };
        let keys = [KEY, NEXT].map(|name| -> Result<String> {
            let key = kms.create_key()?;
            let parameters = json!({"AliasName": alias(name), "TargetKeyId": key});
            kms.aws("kms", "create_alias", parameters)?;
            Ok(key)
        });
        let [key, next] = keys;
        next?;
        let front = RestServer::start(Forward::to_address(kms.endpoint()))?;
        Ok(OfAws { kms, empty: None, front, credentials: Credentials::root()?, key: key? })
    }

    fn provider(&self) -> Provider {
        let mut provider = self.kms.provider(&self.credentials);
        provider.options["endpoint"] = json!(self.front.endpoint());
        provider
    }

    fn key(&self) -> String {
        alias(KEY)
    }

    fn next(&self) -> String {
        alias(NEXT)
    }

    fn missing(&self) -> String {
        alias("typo")
    }

    /// moto finds a key by its id, and looks at no other part of its name.
    fn unread(&self) -> Range<usize> {
        let before = self.key.find(":key/").unwrap_or_default();
        3..3 + before + ":key/".len()
    }

    fn bring(&mut self, state: State) -> Result<()> {
        match state {
            State::Disabled => self.call("disable_key", json!({}))?,
            State::Enabled => self.call("enable_key", json!({}))?,
            State::Deleted => {
                self.call("schedule_key_deletion", json!({"PendingWindowInDays": 7}))?;
            }
            State::Destroyed => {
                // After seven days at least: so another server is asked, which never had the key.
                let empty = Emulator::ministack()?;
                *self.front.state() = Forward::to_address(empty.endpoint());
                self.empty = Some(empty);
            }
            State::Throttled(times) => {
                self.front.fault("/", times, error(400, "ThrottlingException"));
            }
            State::Failing(times) => {
                self.front.fault("/", times, error(500, "KMSInternalException"));
            }
            State::Silent => self.front.fault("/", usize::MAX, Fault::Silence),
            State::Away => self.front.stop(),
            State::AnotherKey => {
                let change = Fault::Change(|reply| {
                    let used = reply.get("CiphertextBlob").or(reply.get("Plaintext")).is_some();
                    if let (true, Some(arn)) = (used, reply["KeyId"].as_str()) {
                        let other = arn.split_at(arn.len() - 12).0.to_owned() + "000000000000";
                        reply["KeyId"] = json!(other);
                    }
                });
                self.front.fault("/", usize::MAX, change);
            }
            State::Repaired => self.front.repair(),
        }
        Ok(())
    }

    fn uses(&mut self) -> Result<usize> {
        Ok(self.front.paths().len())
    }

    /// Versions are times in seconds.
    fn wait_for_next_version(&self) {
        sleep(Duration::from_millis(1100));
    }
}
