//! The servers of a Vault cluster, and the one to which requests go.
//!
//! A standby forwards requests to the active server, or answers with a redirection to it
//! (`handleRequestForwarding`, http/handler.go of Vault and OpenBao). Requests carry a token or
//! credentials. So they follow a redirection to an address that the options name, and to no other;
//! path and query of the redirection are not used at all.

use std::cell::Cell;
use std::path::PathBuf;

use reqwest::Url;

use super::api::NoAnswer;
use super::failure;
use crate::failure::Failure;
use crate::options::{INSECURE_HTTP, Options, absolute_path, bad, server_address};

/// Maximum number of addresses.
const LIMIT: usize = 16;

/// The addresses, at least one.
pub(super) struct Nodes {
    all: Vec<Node>,
    current: Cell<usize>,
}

struct Node {
    url: Url,
    /// The address in messages.
    shown: String,
    /// The Unix socket to connect to.
    socket: Option<PathBuf>,
}

impl Nodes {
    /// From the options `address` or `addresses`.
    pub(super) fn from_options(options: &Options<'_>) -> Result<Nodes, Failure> {
        let allow_http = options.flag(INSECURE_HTTP)?;
        let all = match (options.text("address")?, options.texts("addresses")?) {
            (Some(address), None) => vec![Node::single(address, allow_http)?],
            (None, Some(addresses)) if (1..=LIMIT).contains(&addresses.len()) => {
                let node = |address: &&str| Node::tcp("addresses", address, allow_http);
                addresses.iter().map(node).collect::<Result<_, _>>()?
            }
            (None, Some(_)) => {
                return Err(bad(format!("option \"addresses\" must have 1 to {LIMIT} addresses")));
            }
            (Some(_), Some(_)) => {
                return Err(bad("options \"address\" and \"addresses\" exclude each other")
                    .with_hint("Give one address, or the addresses of all servers of a cluster."));
            }
            (None, None) => return Err(options.missing("address", "\"https://...\"")),
        };
        Ok(Nodes { all, current: Cell::new(0) })
    }

    fn current(&self) -> &Node {
        &self.all[self.current.get()]
    }

    /// The address of the current server.
    pub(super) fn url(&self) -> &Url {
        &self.current().url
    }

    /// The current server in messages.
    pub(super) fn shown(&self) -> &str {
        &self.current().shown
    }

    /// The Unix socket of the only server.
    pub(super) fn socket(&self) -> Option<&PathBuf> {
        self.current().socket.as_ref()
    }

    pub(super) fn count(&self) -> usize {
        self.all.len()
    }

    /// Makes the next server the current one.
    pub(super) fn next(&self) {
        self.current.set((self.current.get() + 1) % self.all.len());
    }

    /// The servers that can be asked in one round, beginning with the current one.
    pub(super) fn round(&self) -> Round {
        let (first, count) = (self.current.get(), self.all.len());
        Round((1..count).map(|step| (first + step) % count).collect())
    }

    /// Makes another server the current one after `error`: the one to which it redirects, or else
    /// the next of the round. False if the request may have been processed, or if all were asked.
    pub(super) fn advance(&self, round: &mut Round, error: &NoAnswer) -> bool {
        if !failure::is_unserved(error) || round.0.is_empty() {
            return false;
        }
        let named = match error {
            NoAnswer::Redirected { location: Some(location), .. } => {
                round.0.iter().position(|index| self.all[*index].is_at(location))
            }
            _ => None,
        };
        self.current.set(round.0.remove(named.unwrap_or(0)));
        true
    }
}

/// Indexes of the servers that have not been asked.
pub(super) struct Round(Vec<usize>);

impl Node {
    fn single(address: &str, allow_http: bool) -> Result<Node, Failure> {
        let Some(socket) = address.strip_prefix("unix://") else {
            return Node::tcp("address", address, allow_http);
        };
        // For the Host header of requests.
        let url = server_address("address", "http://localhost", true)?;
        Ok(Node { url, shown: shown(address), socket: Some(absolute_path(socket)?) })
    }

    fn tcp(option: &str, address: &str, allow_http: bool) -> Result<Node, Failure> {
        let url = server_address(option, address, allow_http)?;
        Ok(Node { url, shown: shown(address), socket: None })
    }

    /// Whether scheme, host and port are the same. Never true for a socket.
    fn is_at(&self, location: &Url) -> bool {
        self.socket.is_none() && self.url.origin() == location.origin()
    }
}

fn shown(address: &str) -> String {
    address.trim_end_matches('/').to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::net::Cause;

    fn parse(options: Value) -> Result<Nodes, Failure> {
        let known = ["address", "addresses", INSECURE_HTTP];
        Nodes::from_options(&Options::new("vault", options.as_object().unwrap(), &known).unwrap())
    }

    fn three() -> Nodes {
        parse(json!({"addresses": ["https://a:8200", "https://b:8200/", "https://c"]})).unwrap()
    }

    fn redirected(to: &str) -> NoAnswer {
        NoAnswer::Redirected { status: 307, location: Url::parse(to).ok() }
    }

    #[test]
    fn addresses_are_one_or_a_list() {
        assert_eq!(three().count(), 3);
        assert!(parse(json!({"address": "unix:///run/vault/socket"})).is_ok());
        let many = vec!["https://a"; LIMIT + 1];
        for wrong in [
            json!({}),
            json!({"address": "https://a", "addresses": ["https://b"]}),
            json!({"addresses": []}),
            json!({"addresses": many}),
            json!({"addresses": "https://a"}),
            json!({"addresses": ["https://a", 1]}),
            json!({"addresses": ["https://a", "http://b"]}),
            json!({"addresses": ["https://a", "http://127.0.0.1:8200"]}),
            json!({"addresses": ["https://a", "https://u:hunter2@b"]}),
            json!({"addresses": ["unix:///run/vault/socket", "https://a"]}),
        ] {
            let error = parse(wrong.clone()).err().unwrap_or_else(|| panic!("{wrong}"));
            assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
        }
    }

    #[test]
    fn redirections_lead_to_named_servers_only() {
        let nodes = three();
        let mut round = nodes.round();
        assert!(nodes.advance(&mut round, &redirected("https://C/v1/sys?x=y")));
        assert_eq!(nodes.shown(), "https://c");
        // Others are ignored: the next server of the round is asked.
        for foreign in [
            "https://evil",
            "http://b:8200/",
            "https://b:8201/",
            "https://b.evil:8200/",
            "https://evil@b.evil:8200/",
            "data:b",
        ] {
            let nodes = three();
            assert!(nodes.advance(&mut nodes.round(), &redirected(foreign)), "{foreign}");
            assert_eq!(nodes.shown(), "https://b:8200", "{foreign}");
            let only = parse(json!({"address": "https://a:8200"})).unwrap();
            assert!(!only.advance(&mut only.round(), &redirected(foreign)), "{foreign}");
            assert_eq!(only.shown(), "https://a:8200");
        }
    }

    #[test]
    fn each_server_is_asked_once_in_a_round() {
        let nodes = three();
        let mut round = nodes.round();
        let back = redirected("https://a:8200/");
        assert!(nodes.advance(&mut round, &back) && nodes.advance(&mut round, &back));
        assert!(!nodes.advance(&mut round, &back), "a circle of redirections");
        assert_eq!(nodes.shown(), "https://c");
        assert!(nodes.advance(&mut nodes.round(), &back));
        assert_eq!(nodes.shown(), "https://a:8200");
    }

    #[test]
    fn a_request_that_may_have_been_processed_is_not_sent_elsewhere() {
        let detail = "Connection reset.".to_owned();
        let cause = Cause {
            class: pagevault_keystore::protocol::ErrorClass::Unreachable,
            detail,
            retry: true,
        };
        let says = |text: &str| vec![text.to_owned()];
        for (error, elsewhere) in [
            (NoAnswer::Unconnected(cause.clone()), true),
            (NoAnswer::Lost(cause), false),
            (NoAnswer::Foreign(502), false),
            (NoAnswer::TooLong, false),
            (NoAnswer::Unsent, false),
            (NoAnswer::Refused { status: 403, says: says("permission denied") }, false),
            (NoAnswer::Refused { status: 500, says: says("internal error") }, false),
            (NoAnswer::Refused { status: 503, says: says("Vault is sealed") }, true),
            (NoAnswer::Refused { status: 400, says: says("Vault is in standby mode") }, true),
        ] {
            let nodes = three();
            assert_eq!(nodes.advance(&mut nodes.round(), &error), elsewhere, "{error:?}");
        }
    }
}
