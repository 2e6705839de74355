//! Requests to Vault and its answers: of bounded size, and told apart from those of others on the
//! way.
//!
//! Requests and answers are those of the crate `vaultrs`; sending is done here. Its own client
//! reads answers of any size, and takes its settings from the environment.

use reqwest::Url;
use rustify::Endpoint;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use vaultrs::api::{AuthInfo, EndpointMiddleware, EndpointResult};
use zeroize::Zeroizing;

use crate::net::{Cause, Unread, cause_of, read_reply};

/// Why there is no answer to a request.
#[derive(Debug)]
pub(super) enum NoAnswer {
    /// Vault refuses: the HTTP status and its own words, which may be none.
    Refused { status: u16, says: Vec<String> },
    /// The answer, of this HTTP status, is none of Vault's: that of a proxy or a load balancer,
    /// say. It is not repeated.
    Foreign(u16),
    /// There is more of it than any answer of Vault has.
    TooLong,
    /// Nothing came back.
    Lost(Cause),
    /// The request could not be formed.
    Unsent,
}

/// What Vault answers when it does not do what was asked
/// (`RespondError` in sdk/logical/response_util.go of Vault and OpenBao).
#[derive(Deserialize)]
struct Errors {
    errors: Vec<String>,
}

/// The way to Vault.
pub(super) struct Api {
    http: reqwest::Client,
    base: String,
    middle: EndpointMiddleware,
}

impl Api {
    /// A client without a token.
    pub(super) fn new(http: reqwest::Client, address: &Url, namespace: Option<String>) -> Api {
        let (token, version) = (String::new(), "v1".to_owned());
        let middle = EndpointMiddleware { token, version, wrap: None, namespace };
        Api { http, base: address.to_string(), middle }
    }

    /// From now on requests carry this token.
    pub(super) fn set_token(&mut self, token: &str) {
        token.clone_into(&mut self.middle.token);
    }

    /// What Vault answers to a request.
    pub(super) async fn ask<E: Endpoint>(&self, endpoint: E) -> Result<E::Response, NoAnswer> {
        let (status, body) = self.send(endpoint).await?;
        let answer: EndpointResult<E::Response> = parse(status, &body)?;
        answer.data.ok_or(NoAnswer::Foreign(status))
    }

    /// The token that Vault gives.
    pub(super) async fn log_in<E: Endpoint>(
        &self,
        endpoint: E,
    ) -> Result<Zeroizing<String>, NoAnswer> {
        let (status, body) = self.send(endpoint).await?;
        let answer: EndpointResult<serde_json::Value> = parse(status, &body)?;
        let AuthInfo { client_token, .. } = answer.auth.ok_or(NoAnswer::Foreign(status))?;
        Ok(Zeroizing::new(client_token))
    }

    /// Has Vault do something of which it need not say more than that it is done.
    pub(super) async fn tell<E: Endpoint>(&self, endpoint: E) -> Result<(), NoAnswer> {
        self.send(endpoint).await.map(drop)
    }

    /// Status and body of an answer that says that all is well.
    async fn send<E: Endpoint>(&self, endpoint: E) -> Result<(u16, Zeroizing<Vec<u8>>), NoAnswer> {
        let request = endpoint.with_middleware(&self.middle).request(&self.base);
        let request = request.map_err(|_| NoAnswer::Unsent)?;
        let request = reqwest::Request::try_from(request).map_err(|_| NoAnswer::Unsent)?;
        let response = self.http.execute(request).await.map_err(lost)?;
        let status = response.status();
        let body = read_reply(response).await.map_err(|unread| match unread {
            Unread::Lost(error) => lost(error),
            Unread::TooLong => NoAnswer::TooLong,
        })?;
        if status.is_success() {
            return Ok((status.as_u16(), body));
        }
        let Errors { errors } = parse(status.as_u16(), &body)?;
        Err(NoAnswer::Refused { status: status.as_u16(), says: errors })
    }
}

/// A request as its builder made it.
pub(super) fn formed<E, F>(built: Result<E, F>) -> Result<E, NoAnswer> {
    built.map_err(|_| NoAnswer::Unsent)
}

fn lost(error: reqwest::Error) -> NoAnswer {
    NoAnswer::Lost(cause_of(&error))
}

fn parse<T: DeserializeOwned>(status: u16, body: &[u8]) -> Result<T, NoAnswer> {
    serde_json::from_slice(body).map_err(|_| NoAnswer::Foreign(status))
}
