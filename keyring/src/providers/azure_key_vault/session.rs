//! Requests to Key Vault and Managed HSM, REST API 7.4
//! (<https://learn.microsoft.com/rest/api/keyvault/keys>), and the checks of their replies.

use std::time::Instant;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use pagevault_keystore::protocol::ErrorClass;
use reqwest::{RequestBuilder, Url};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use zeroize::Zeroizing;

use super::auth::Credentials;
use super::failure::{self, Need, is_missing};
use super::key::{DeletedKey, KeyBundle, KeyItem, KeyItems, Usable, deleted, number, version_in};
use super::settings::Settings;
use crate::envelope::Method;
use crate::failure::Failure;
use crate::rest::{Rest, Service};

const VERSION: &str = "api-version=7.4";

/// Pages of a list of versions, each of 25.
const PAGES: usize = 40;

/// Maximum length of a wrapped one-time key: that of the largest RSA key, with room.
const WRAPPED_LIMIT: usize = 1024;

/// A client with an access token.
pub(super) struct Session {
    rest: Rest,
    token: Zeroizing<String>,
    pub(super) vault: Url,
    pub(super) service: Service,
}

/// A result of wrapping or unwrapping.
#[derive(Deserialize)]
struct Done {
    kid: String,
    value: String,
}

/// How the service calls a method.
fn algorithm(method: Method) -> Option<&'static str> {
    match method {
        Method::Oaep => Some("RSA-OAEP-256"),
        Method::Kw => Some("A256KW"),
        Method::Gcm | Method::Kwp => None,
    }
}

impl Session {
    /// Requests a token.
    pub(super) fn connect(
        settings: &Settings,
        credentials: &Credentials,
        deadline: Option<Instant>,
    ) -> Result<Session, Failure> {
        let rest = Rest::new(settings.ca_file.clone(), deadline)?;
        let token = credentials.token(&rest, settings)?;
        let vault = settings.vault.clone();
        let place = format!("Key Vault {}", vault.as_str().trim_end_matches('/'));
        Ok(Session { rest, token, vault, service: Service { whose: "a Key Vault", place } })
    }

    /// The reply to a request for `path` and query.
    fn ask<T: DeserializeOwned>(
        &self,
        request: impl FnOnce(&Rest, Url) -> Result<RequestBuilder, Failure>,
        path: &str,
        need: Need<'_>,
    ) -> Result<T, Failure> {
        let url = self.vault.join(path);
        let url = url.map_err(|_| self.service.wrong("The name is not part of an address."))?;
        let request = request(&self.rest, url)?.bearer_auth(self.token.as_str());
        let reply = self.rest.ask(&self.service, request)?;
        if !reply.is_success() {
            return Err(failure::of(&reply, &self.service, need));
        }
        reply.parse().ok_or_else(|| self.service.foreign(reply.status))
    }

    fn get<T: DeserializeOwned>(&self, path: &str, need: Need<'_>) -> Result<T, Failure> {
        self.ask(|rest, url| Ok(rest.get(url)), path, need)
    }

    /// Asks for a list of keys, to learn whether the credentials are accepted.
    pub(super) fn keys(&self) -> Result<(), Failure> {
        let need = Need { operation: "list", key: "(any)" };
        self.get::<Value>(&format!("keys?{VERSION}&maxresults=1"), need).map(drop)
    }

    /// The newest version of a key.
    pub(super) fn key(&self, name: &str) -> Result<KeyBundle, Failure> {
        let need = Need { operation: "get", key: name };
        let found = self.get(&format!("keys/{name}?{VERSION}"), need);
        found.map_err(|error| self.explain(error, name))
    }

    /// The newest version of a key, if it may wrap.
    pub(super) fn usable(&self, name: &str, bundle: &KeyBundle) -> Result<Usable, Failure> {
        let (version, number) = self.version(name, bundle)?;
        Ok(Usable { version, number, method: bundle.method(name)? })
    }

    /// Name and number of a version.
    pub(super) fn version(&self, name: &str, bundle: &KeyBundle) -> Result<(String, u64), Failure> {
        let version = version_in(&self.vault, name, &bundle.key.kid);
        let version = version.ok_or_else(|| self.other_key())?;
        let number = number(bundle.attributes.created);
        Ok((version, number.ok_or_else(|| self.service.wrong("It has no time of creation."))?))
    }

    /// All versions of a key.
    pub(super) fn versions(&self, name: &str) -> Result<Vec<KeyItem>, Failure> {
        let need = Need { operation: "list", key: name };
        let mut path = format!("keys/{name}/versions?{VERSION}&maxresults=25");
        let mut found = Vec::new();
        for _ in 0..PAGES {
            let KeyItems { value, next_link } = self.get(&path, need)?;
            found.extend(value);
            // The token is sent to this address, too.
            let next = next_link.as_deref().and_then(|next| Url::parse(next).ok());
            let Some(next) = next.filter(|next| next.origin() == self.vault.origin()) else {
                break;
            };
            path = next.to_string();
        }
        Ok(found)
    }

    /// Makes a version by the key's rotation policy.
    pub(super) fn rotate(&self, name: &str) -> Result<KeyBundle, Failure> {
        let need = Need { operation: "rotate", key: name };
        let path = format!("keys/{name}/rotate?{VERSION}");
        let made = self.ask(|rest, url| rest.post(url, &json!({})), &path, need);
        made.map_err(|error| self.explain(error, name))
    }

    /// Wraps a one-time key with a version.
    pub(super) fn wrap(
        &self,
        name: &str,
        by: &Usable,
        once: &[u8; 32],
    ) -> Result<Vec<u8>, Failure> {
        let wrapped = self.apply("wrapKey", name, &by.version, by.method, once)?;
        if wrapped.len() > WRAPPED_LIMIT || wrapped.len() < once.len() {
            return Err(self.service.wrong("The length of the wrapped key is not possible."));
        }
        Ok(wrapped.to_vec())
    }

    /// Unwraps a one-time key with a version.
    pub(super) fn unwrap(
        &self,
        name: &str,
        version: &str,
        method: Method,
        once: &[u8],
    ) -> Result<Zeroizing<Vec<u8>>, Failure> {
        self.apply("unwrapKey", name, version, method, once)
            .map_err(|error| self.explain(error, name))
    }

    fn apply(
        &self,
        operation: &str,
        name: &str,
        version: &str,
        method: Method,
        data: &[u8],
    ) -> Result<Zeroizing<Vec<u8>>, Failure> {
        #[derive(serde::Serialize)]
        struct Body<'a> {
            alg: &'static str,
            value: &'a str,
        }
        let alg = algorithm(method).ok_or_else(|| {
            Failure::new(ErrorClass::WrongCiphertext, "wrapped key cannot be read")
                .with_detail("It was wrapped by a method that Key Vault does not have.")
                .with_hint("Check that the provider is the one that wrapped it.")
        })?;
        let value = Zeroizing::new(URL_SAFE_NO_PAD.encode(data));
        let path = format!("keys/{name}/{version}/{}?{VERSION}", operation.to_ascii_lowercase());
        let body = Body { alg, value: &value };
        let need = Need { operation, key: name };
        let done: Done = self.ask(|rest, url| rest.post(url, &body), &path, need)?;
        let value = Zeroizing::new(done.value);
        if version_in(&self.vault, name, &done.kid).as_deref() != Some(version) {
            return Err(self.other_key());
        }
        let bytes = URL_SAFE_NO_PAD.decode(value.trim_end_matches('=')).map(Zeroizing::new);
        bytes.map_err(|_| self.service.wrong("Its value is not base64url."))
    }

    /// Whether a missing key can be restored.
    fn explain(&self, error: Failure, name: &str) -> Failure {
        if !is_missing(&error) {
            return error;
        }
        let need = Need { operation: "get", key: name };
        match self.get::<DeletedKey>(&format!("deletedkeys/{name}?{VERSION}"), need) {
            Ok(found) => deleted(name, &found),
            Err(_) => error,
        }
    }

    fn other_key(&self) -> Failure {
        self.service.wrong("It is about another key.")
    }
}
