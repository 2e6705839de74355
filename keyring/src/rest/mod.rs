//! JSON over HTTPS, for services that have no client of their own in this program: Google Cloud KMS
//! and Azure Key Vault, the services that issue access tokens for them, and IAM Identity Center.
//!
//! | file | subject |
//! |---|---|
//! | `oauth` | requests for access tokens |
//! | `assertion` | signed tokens (JWT) |
//! | `metadata` | the address of a machine's metadata service |
//!
//! Each request is sent once, to one server: there are no redirections, no proxies and nothing from
//! the environment. Replies have a limited size.

pub(crate) mod assertion;
pub(crate) mod metadata;
pub(crate) mod oauth;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use pagevault_keystore::protocol::ErrorClass;
use reqwest::header::{CONTENT_TYPE, HeaderMap};
use reqwest::redirect::Policy;
use reqwest::{Client, RequestBuilder, Url};
use serde::Serialize;
use serde::de::DeserializeOwned;
use zeroize::Zeroizing;

use crate::failure::Failure;
use crate::net::{
    CONNECT_TIME, Cause, Network, REPLY_LIMIT, REQUEST_TIME, Trust, Unread, cause_of,
    client_config, in_time, read_reply,
};

/// Initial capacity of a request's body.
const BODY_CAPACITY: usize = 4096;

/// A server, for messages.
pub(crate) struct Service {
    /// Whose replies are expected, with an article: "a Cloud KMS".
    pub(crate) whose: &'static str,
    /// Name and address: "Cloud KMS at https://...".
    pub(crate) place: String,
}

/// A complete reply.
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Zeroizing<Vec<u8>>,
}

/// A client, and the limits of its requests.
pub(crate) struct Rest {
    network: Network,
    http: Client,
    deadline: Option<Instant>,
}

impl Rest {
    /// A client that trusts `ca_file`, or else the system's authorities.
    pub(crate) fn new(
        ca_file: Option<PathBuf>,
        deadline: Option<Instant>,
    ) -> Result<Rest, Failure> {
        let network = Network::new(deadline)?;
        let http = Client::builder()
            .tls_backend_preconfigured(client_config(&Trust { ca_file, identity: None })?)
            .redirect(Policy::none())
            .no_proxy()
            .connect_timeout(CONNECT_TIME)
            .timeout(REQUEST_TIME)
            .build()
            .map_err(|_| Failure::new(ErrorClass::Internal, "could not make an HTTP client"))?;
        Ok(Rest { network, http, deadline })
    }

    /// A request without a body.
    pub(crate) fn get(&self, url: Url) -> RequestBuilder {
        self.http.get(url)
    }

    /// A request with JSON. The client keeps a copy of the body that cannot be wiped.
    pub(crate) fn post(&self, url: Url, body: &impl Serialize) -> Result<RequestBuilder, Failure> {
        let mut text = Zeroizing::new(Vec::with_capacity(BODY_CAPACITY));
        serde_json::to_writer(&mut *text, body)
            .map_err(|_| Failure::new(ErrorClass::Internal, "could not build a request"))?;
        let request = self.http.post(url).header(CONTENT_TYPE, "application/json");
        Ok(request.body(text.to_vec()))
    }

    /// A request with a form (`application/x-www-form-urlencoded`).
    pub(crate) fn post_form(&self, url: Url, form: &[(&str, &str)]) -> RequestBuilder {
        let request = self.http.post(url).header(CONTENT_TYPE, "application/x-www-form-urlencoded");
        request.body(encoded(form).to_string())
    }

    /// The reply of `service`, whatever its status.
    pub(crate) fn ask(&self, service: &Service, request: RequestBuilder) -> Result<Reply, Failure> {
        let lost = |error: reqwest::Error| cause_of(&error).about(&service.place);
        let asked = async {
            let response = request.send().await.map_err(lost)?;
            let (status, headers) = (response.status().as_u16(), response.headers().clone());
            let body = read_reply(response).await.map_err(|unread| match unread {
                Unread::Lost(error) => lost(error),
                Unread::TooLong => service.too_long(),
            })?;
            Ok(Reply { status, headers, body })
        };
        self.network.run(async {
            let reply = in_time(self.deadline, REQUEST_TIME, asked).await;
            reply.unwrap_or_else(|| Err(Cause::too_late().about(&service.place)))
        })
    }

    /// Waits.
    ///
    /// # Errors
    /// `deadline` if that is sooner.
    pub(crate) fn pause(&self, time: Duration) -> Result<(), Failure> {
        self.network.run(async {
            let waited = in_time(self.deadline, 2 * time, tokio::time::sleep(time)).await;
            waited.ok_or_else(|| {
                Failure::new(ErrorClass::Deadline, "the time limit was reached")
                    .with_detail("There was no time to ask again.")
                    .transient()
            })
        })
    }
}

impl Reply {
    /// Whether the request succeeded.
    pub(crate) fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// The body as JSON of this form, if it is.
    pub(crate) fn parse<T: DeserializeOwned>(&self) -> Option<T> {
        serde_json::from_slice(&self.body).ok()
    }
}

impl Service {
    /// The failure for a reply that is not the service's: for example that of a proxy.
    pub(crate) fn foreign(&self, status: u16) -> Failure {
        self.not_its_reply(format!("It answered with HTTP status {status}."))
    }

    fn too_long(&self) -> Failure {
        self.not_its_reply(format!("The reply has more than {REPLY_LIMIT} bytes."))
    }

    fn not_its_reply(&self, detail: String) -> Failure {
        Failure::new(
            ErrorClass::Unreachable,
            format!("reply from {} is not {} reply", self.place, self.whose),
        )
        .with_detail(detail)
        .with_hint("Check the address, and proxies and load balancers on the way to it.")
        .transient()
    }

    /// The failure for a reply whose parts are missing or contradict the request.
    pub(crate) fn wrong(&self, detail: &str) -> Failure {
        Failure::new(
            ErrorClass::Unreachable,
            format!("{} gave a reply that does not fit the request", self.place),
        )
        .with_detail(format!("{detail} Nothing of the reply was used."))
        .with_hint("Check the address, and proxies and load balancers on the way to it.")
        .transient()
    }

    /// Too many requests.
    pub(crate) fn throttled(&self, detail: String) -> Failure {
        Failure::new(ErrorClass::Throttled, format!("too many requests to {}", self.place))
            .with_detail(detail)
            .with_hint(
                "The request is repeated until the time limit. If the error persists, ask for a higher quota.",
            )
            .transient()
    }

    /// The service has a failure of its own.
    pub(crate) fn unavailable(&self, detail: String) -> Failure {
        Failure::new(ErrorClass::Unreachable, format!("{} is not available", self.place))
            .with_detail(detail)
            .with_hint(
                "The request is repeated until the time limit. Check the status page of the service.",
            )
            .transient()
    }
}

/// A form: names and values with percent-encoding of all but unreserved characters (RFC 3986
/// section 2.3). Wiped on drop.
fn encoded(form: &[(&str, &str)]) -> Zeroizing<String> {
    let room = form.iter().map(|(name, value)| 3 * (name.len() + value.len()) + 2).sum();
    // With full capacity: a string that grows leaves copies behind.
    let mut text = Zeroizing::new(String::with_capacity(room));
    for (name, value) in form {
        if !text.is_empty() {
            text.push('&');
        }
        push_encoded(&mut text, name);
        text.push('=');
        push_encoded(&mut text, value);
    }
    text
}

fn push_encoded(text: &mut String, part: &str) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    for byte in part.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            text.push(char::from(byte));
        } else {
            text.push('%');
            text.push(char::from(DIGITS[usize::from(byte >> 4)]));
            text.push(char::from(DIGITS[usize::from(byte & 15)]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_encoded() {
        let form = encoded(&[("grant_type", "urn:a b"), ("x", "a+b/c=&\u{e9}"), ("y", "")]);
        assert_eq!(*form, "grant_type=urn%3Aa%20b&x=a%2Bb%2Fc%3D%26%C3%A9&y=");
    }
}
