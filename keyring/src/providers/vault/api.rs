//! Requests to Vault and its replies. Replies have a limited size, and are distinguished from those
//! of other servers.
//!
//! The types of requests and replies are those of the crate `vaultrs`. This module sends the
//! requests itself, because the crate's client reads replies of any size, and takes settings from
//! the environment.

use std::rc::Rc;

use reqwest::Url;
use reqwest::header::LOCATION;
use rustify::Endpoint;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use vaultrs::api::{AuthInfo, EndpointMiddleware, EndpointResult};
use zeroize::Zeroizing;

use super::nodes::Nodes;
use crate::net::{Cause, Unread, cause_of, read_reply};

/// Why a request has no result.
#[derive(Debug)]
pub(super) enum NoAnswer {
    /// Vault refuses: HTTP status and its messages, which may be none.
    Refused { status: u16, says: Vec<String> },
    /// A reply with this HTTP status that is not Vault's: for example that of a proxy or load
    /// balancer. It is not repeated.
    Foreign(u16),
    /// The reply is larger than any of Vault's.
    TooLong,
    /// No connection was established, so nothing was sent.
    Unconnected(Cause),
    /// There was no reply.
    Lost(Cause),
    /// A redirection, with its destination if that is a URL.
    Redirected { status: u16, location: Option<Url> },
    /// The request could not be built.
    Unsent,
}

/// Vault's reply to a request that failed (`RespondError` in sdk/logical/response_util.go of Vault
/// and OpenBao).
#[derive(Deserialize)]
struct Errors {
    errors: Vec<String>,
}

/// A client of Vault.
pub(super) struct Api {
    http: reqwest::Client,
    nodes: Rc<Nodes>,
    middle: EndpointMiddleware,
}

impl Api {
    /// A client without a token.
    pub(super) fn new(http: reqwest::Client, nodes: Rc<Nodes>, namespace: Option<String>) -> Api {
        let (token, version) = (String::new(), "v1".to_owned());
        let middle = EndpointMiddleware { token, version, wrap: None, namespace };
        Api { http, nodes, middle }
    }

    /// Sets the token of further requests.
    pub(super) fn set_token(&mut self, token: &str) {
        token.clone_into(&mut self.middle.token);
    }

    /// Sends a request and returns the data of the reply.
    pub(super) async fn ask<E: Endpoint>(&self, endpoint: E) -> Result<E::Response, NoAnswer> {
        let (status, body) = self.send(endpoint).await?;
        let answer: EndpointResult<E::Response> = parse(status, &body)?;
        answer.data.ok_or(NoAnswer::Foreign(status))
    }

    /// Sends a login request and returns the token.
    pub(super) async fn log_in<E: Endpoint>(
        &self,
        endpoint: E,
    ) -> Result<Zeroizing<String>, NoAnswer> {
        let (status, body) = self.send(endpoint).await?;
        let answer: EndpointResult<serde_json::Value> = parse(status, &body)?;
        let AuthInfo { client_token, .. } = answer.auth.ok_or(NoAnswer::Foreign(status))?;
        Ok(Zeroizing::new(client_token))
    }

    /// Sends a request whose reply has no data.
    pub(super) async fn send_command<E: Endpoint>(&self, endpoint: E) -> Result<(), NoAnswer> {
        self.send(endpoint).await.map(drop)
    }

    /// Status and body of a successful reply, of the first server that serves.
    async fn send<E: Endpoint>(&self, endpoint: E) -> Result<(u16, Zeroizing<Vec<u8>>), NoAnswer> {
        let endpoint = endpoint.with_middleware(&self.middle);
        let mut round = self.nodes.round();
        loop {
            let request = endpoint.request(self.nodes.url().as_str());
            let request = request.map_err(|_| NoAnswer::Unsent)?;
            let request = reqwest::Request::try_from(request).map_err(|_| NoAnswer::Unsent)?;
            match self.exchange(request).await {
                Err(error) if self.nodes.advance(&mut round, &error) => {}
                answered => return answered,
            }
        }
    }

    /// Sends a request to one server.
    async fn exchange(
        &self,
        request: reqwest::Request,
    ) -> Result<(u16, Zeroizing<Vec<u8>>), NoAnswer> {
        let response = self.http.execute(request).await.map_err(lost)?;
        let status = response.status();
        if status.is_redirection() {
            let location = response.headers().get(LOCATION).and_then(|value| value.to_str().ok());
            let location = location.and_then(|location| Url::parse(location).ok());
            return Err(NoAnswer::Redirected { status: status.as_u16(), location });
        }
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

/// The result of a request builder.
pub(super) fn built<E, F>(built: Result<E, F>) -> Result<E, NoAnswer> {
    built.map_err(|_| NoAnswer::Unsent)
}

fn lost(error: reqwest::Error) -> NoAnswer {
    let cause = cause_of(&error);
    if error.is_connect() { NoAnswer::Unconnected(cause) } else { NoAnswer::Lost(cause) }
}

fn parse<T: DeserializeOwned>(status: u16, body: &[u8]) -> Result<T, NoAnswer> {
    serde_json::from_slice(body).map_err(|_| NoAnswer::Foreign(status))
}
