//! A session with Vault: log in once, send requests, revoke the token.

use std::cell::OnceCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;

use pagevault_keystore::protocol::ErrorClass;
use reqwest::redirect::Policy;
use serde::Deserialize;
use vaultrs::api::token::requests::{
    LookupTokenSelfRequest, RenewTokenSelfRequest, RevokeTokenSelfRequest,
};
use vaultrs::api::token::responses::LookupTokenResponse;

use super::api::{Api, NoAnswer, built};
use super::auth::Auth;
use super::failure::{self, Known};
use super::nodes::Nodes;
use crate::failure::Failure;
use crate::findings::Findings;
use crate::net::{
    CONNECT_TIME, Network, REQUEST_TIME, Trust, Unread, cause_of, client_config, read_reply, socket,
};

/// Addresses and trusted authorities of Vault.
pub(super) struct Server {
    pub(super) nodes: Rc<Nodes>,
    pub(super) namespace: Option<String>,
    pub(super) ca_file: Option<PathBuf>,
}

impl Server {
    /// The current address, for messages.
    pub(super) fn shown(&self) -> &str {
        self.nodes.shown()
    }

    /// A warning about an unprotected connection.
    fn warning(&self) -> &'static str {
        match (self.nodes.url().scheme(), self.nodes.socket()) {
            ("http", None) => "; UNENCRYPTED, and the server is not authenticated",
            _ => "",
        }
    }
}

/// A connection that logs in when it is first needed.
pub(super) struct Session {
    pub(super) server: Server,
    auth: Auth,
    network: Network,
    api: OnceCell<Api>,
}

/// The permission that an operation needs in Vault's policy, for messages.
pub(super) struct Need<'a> {
    pub(super) capability: &'a str,
    pub(super) path: &'a str,
}

impl Session {
    pub(super) fn new(
        server: Server,
        auth: Auth,
        deadline: Option<Instant>,
    ) -> Result<Session, Failure> {
        let network = Network::new(deadline)?;
        Ok(Session { server, auth, network, api: OnceCell::new() })
    }

    /// Sends a request that needs `capability` on `path`. Repeats it once if Vault denies it to a
    /// token that it knows.
    pub(super) fn run<T>(
        &self,
        capability: &str,
        path: &str,
        ask: impl AsyncFn(&Api) -> Result<T, NoAnswer>,
    ) -> Result<T, Failure> {
        self.answer(ask)?.map_err(|(error, known)| {
            let need = Need { capability, path };
            failure::of_request(error, &self.server, &self.auth, &need, known)
        })
    }

    /// Like [`Session::run`], for something that may not exist: `None` if Vault itself says that
    /// there is nothing at this path, which has an engine.
    pub(super) fn find<T>(
        &self,
        capability: &str,
        path: &str,
        ask: impl AsyncFn(&Api) -> Result<T, NoAnswer>,
    ) -> Result<Option<T>, Failure> {
        match self.answer(ask)? {
            Ok(answer) => Ok(Some(answer)),
            Err((error, Some(Known::Token | Known::Nothing))) if failure::is_nothing(&error) => {
                Ok(None)
            }
            Err((error, known)) => {
                let need = Need { capability, path };
                Err(failure::of_request(error, &self.server, &self.auth, &need, known))
            }
        }
    }

    /// The answer to a request; or why there is none, with what a second request has told.
    fn answer<T>(
        &self,
        ask: impl AsyncFn(&Api) -> Result<T, NoAnswer>,
    ) -> Result<Result<T, (NoAnswer, Option<Known>)>, Failure> {
        let api = self.api()?;
        self.network.run(async {
            let mut error = match ask(api).await {
                Ok(answer) => return Ok(Ok(answer)),
                Err(error) => error,
            };
            // Vault gives the same reply for an unknown token and for a missing permission.
            let mut known = clarify(api, &error).await;
            if failure::is_denial(&error) && matches!(known, Some(Known::Token)) {
                // The cluster's server that was asked may learn of the token, or of its policy, a
                // moment later than the server that issued it.
                error = match ask(api).await {
                    Ok(answer) => return Ok(Ok(answer)),
                    Err(error) => error,
                };
                if !failure::is_denial(&error) {
                    known = clarify(api, &error).await;
                }
            }
            Ok(Err((error, known)))
        })
    }

    /// How to log in.
    pub(super) fn auth(&self) -> &Auth {
        &self.auth
    }

    /// The answer to a request without a login, with this token or none.
    pub(super) fn without_login<T>(
        &self,
        token: Option<&str>,
        ask: impl AsyncFn(&Api) -> Result<T, NoAnswer>,
    ) -> Result<Result<T, NoAnswer>, Failure> {
        let mut api = self.client()?;
        api.set_token(token.unwrap_or_default());
        self.network.run(async { Ok(ask(&api).await) })
    }

    /// Checks the files with credentials and certificates, if they exist.
    pub(super) fn check_files(&self) -> Result<(), Failure> {
        self.auth.check_files()?;
        let missing = |path: &PathBuf| !path.exists();
        let trust = self.trust();
        let files = trust.ca_file.iter().chain(trust.identity.iter().flat_map(|(c, k)| [c, k]));
        if files.clone().any(missing) { Ok(()) } else { client_config(&trust).map(drop) }
    }

    fn trust(&self) -> Trust {
        Trust { ca_file: self.server.ca_file.clone(), identity: self.auth.identity() }
    }

    /// An HTTP client. It takes nothing from the environment and follows no redirections by itself,
    /// which would carry the token to any address: see `nodes`.
    fn http(&self) -> Result<reqwest::Client, Failure> {
        let mut builder = reqwest::Client::builder();
        if let Some(path) = self.server.nodes.socket() {
            builder = builder.unix_socket(socket::trusted(path)?);
        }
        builder
            .tls_backend_preconfigured(client_config(&self.trust())?)
            .redirect(Policy::none())
            .no_proxy()
            .connect_timeout(CONNECT_TIME)
            .timeout(REQUEST_TIME)
            .build()
            .map_err(|_| Failure::new(ErrorClass::Internal, "could not make an HTTP client"))
    }

    /// A client that has not logged in.
    fn client(&self) -> Result<Api, Failure> {
        let nodes = Rc::clone(&self.server.nodes);
        Ok(Api::new(self.http()?, nodes, self.server.namespace.clone()))
    }

    /// The client, logged in.
    fn api(&self) -> Result<&Api, Failure> {
        if let Some(api) = self.api.get() {
            return Ok(api);
        }
        let credentials = self.auth.read()?;
        let mut api = self.client()?;
        self.network.run(async {
            let token = self.auth.token(&api, &credentials).await;
            let token = token.map_err(|e| failure::of_login(e, &self.server, &self.auth))?;
            api.set_token(&token);
            if !self.auth.token_is_ours() {
                renew(&api).await;
            }
            Ok(())
        })?;
        Ok(self.api.get_or_init(|| api))
    }

    /// Examines the connection, the server's state and the credentials.
    pub(super) fn examine(&self, findings: &mut Findings) -> Option<()> {
        let (health, _) = findings.note(
            "the server is reachable and trusted",
            self.health(),
            |(health, away)| {
                let (shown, warning) = (self.server.shown(), self.server.warning());
                let away = match away.as_slice() {
                    [] => String::new(),
                    away => format!("; not in service: {}", away.join(", ")),
                };
                format!("{shown} answers, version {}{warning}{away}", health.version)
            },
        )?;
        let open = if health.is_open() { Ok(()) } else { Err(failure::sealed(&self.server)) };
        findings.note("the server is unsealed", open, |()| "yes".to_owned())?;
        findings.note("the credentials can be read", self.auth.read(), |_| {
            format!("for {}", self.auth.shown())
        })?;
        findings.note("the credentials are accepted", self.known(), String::clone)?;
        Some(())
    }

    /// Vault's information about the token.
    fn known(&self) -> Result<String, Failure> {
        let api = self.api()?;
        self.network.run(async {
            match lookup(api).await {
                Ok(token) => Ok(describe_token(token.ttl, token.renewable, &token.policies)),
                Err(error) if self.auth.token_is_ours() && failure::is_denial(&error) => {
                    Ok("logged in; the token may not look up its own properties".to_owned())
                }
                Err(error) => Err(failure::of_login(error, &self.server, &self.auth)),
            }
        })
    }

    /// The health of the first server that answers and is unsealed, which becomes the current one;
    /// or else of the last. With it the addresses of those that do not serve.
    fn health(&self) -> Result<(Health, Vec<String>), Failure> {
        let http = self.http()?;
        let mut away = Vec::new();
        for left in (0..self.server.nodes.count()).rev() {
            let health = self.health_of(&http);
            if left == 0 || health.as_ref().is_ok_and(Health::is_open) {
                return health.map(|health| (health, away));
            }
            away.push(self.server.shown().to_owned());
            self.server.nodes.next();
        }
        Err(Failure::new(ErrorClass::Internal, "no address"))
    }

    /// Not requested through the crate's types, which require fields that OpenBao does not send.
    fn health_of(&self, http: &reqwest::Client) -> Result<Health, Failure> {
        let url = format!("{}v1/sys/health", self.server.nodes.url());
        self.network.run(async {
            let unreached = |error: reqwest::Error| cause_of(&error).about(self.server.shown());
            let answer = http.get(url).send().await.map_err(unreached)?;
            let status = answer.status().as_u16();
            let body = read_reply(answer).await.map_err(|unread| match unread {
                Unread::Lost(error) => unreached(error),
                Unread::TooLong => failure::of_outage(NoAnswer::TooLong, &self.server),
            })?;
            serde_json::from_slice(&body)
                .map_err(|_| failure::of_outage(NoAnswer::Foreign(status), &self.server))
        })
    }
}

#[derive(Deserialize)]
struct Health {
    initialized: bool,
    sealed: bool,
    #[serde(default)]
    version: String,
}

impl Health {
    fn is_open(&self) -> bool {
        self.initialized && !self.sealed
    }
}

fn describe_token(ttl: u64, renewable: Option<bool>, policies: &[String]) -> String {
    let life = match (ttl, renewable) {
        (0, _) => "does not expire".to_owned(),
        (seconds, Some(true)) => format!("expires in {seconds} s and is renewed in time"),
        (seconds, _) => format!("expires in {seconds} s and cannot be renewed"),
    };
    format!("the token {life}; policies: {}", policies.join(", "))
}

/// Vault's information about the token.
async fn lookup(api: &Api) -> Result<LookupTokenResponse, NoAnswer> {
    api.ask(built(LookupTokenSelfRequest::builder().build())?).await
}

/// The second request after an unclear error; `None` if the error is clear.
async fn clarify(api: &Api, error: &NoAnswer) -> Option<Known> {
    if !failure::is_unclear(error) {
        return None;
    }
    Some(match lookup(api).await {
        Ok(_) => Known::Token,
        Err(error) if failure::is_denial(&error) => Known::Nothing,
        Err(error) => Known::Unasked(error),
    })
}

/// Renews a token that has less than half of its lifetime left. An agent can do this better. A
/// token without one stays alive by requests at `pagevault.revalidate_interval`.
async fn renew(api: &Api) {
    let Ok(token) = lookup(api).await else { return };
    if token.renewable == Some(true)
        && token.ttl > 0
        && token.ttl < token.creation_ttl / 2
        && let Ok(request) = built(RenewTokenSelfRequest::builder().build())
    {
        // The token is still valid. A failure to renew it will be noticed when it has expired.
        let _ = api.send_command(request).await;
    }
}

impl Drop for Session {
    /// Revokes a token that was issued for this process.
    fn drop(&mut self) {
        if let Some(api) = self.api.get()
            && self.auth.token_is_ours()
            && let Ok(request) = built(RevokeTokenSelfRequest::builder().build())
        {
            let _ = self.network.run(async {
                let _ = api.send_command(request).await;
                Ok(())
            });
        }
    }
}
