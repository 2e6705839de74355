//! `vault` with the addresses of several servers: standbys that redirect, servers that are down or
//! sealed. Requests carry a token, so they go to no address but these.

use std::net::TcpListener;

use anyhow::{Context, Result, ensure};
use pagevault_tests::Installation;
use pagevault_tests::key_servers::canned::Canned;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::vault::Vault;
use pagevault_tests::key_servers::{Server, free_port, write_file};
use serde_json::{Value, json};

use crate::Test;

const CONTEXT: &str = "pagevault/1/00112233445566778899aabbccddeeff/0";
/// 32 recognizable bytes, in base64.
const SECRET: &str = "c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0ISEhISE=";

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, run| Test { name, needs: &[Server::Vault], run };
    vec![
        test("vault_cluster::a_standby_that_redirects_leads_to_a_named_server", redirecting),
        test("vault_cluster::servers_that_do_not_serve_are_passed_over", passed_over),
        Test {
            name: "vault_cluster::no_request_goes_to_an_address_that_is_not_named",
            needs: &[],
            run: foreign,
        },
    ]
}

fn wrap() -> Value {
    json!({"wrap": {"plaintext": SECRET}})
}

fn at(vault: &Vault, addresses: Value) -> Result<Provider> {
    let mut options = vault.approle()?;
    let options_map = options.as_object_mut().context("no options")?;
    options_map.remove("address");
    options_map.insert("addresses".into(), addresses);
    options_map.insert("insecure_loopback_http".into(), json!(true));
    Ok(Provider::new("vault", options))
}

fn works(provider: &Provider) -> Result<()> {
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    Ok(())
}

/// A standby redirects what it may not forward. A client can ask for that (`NoRequestForwarding`,
/// http/handler.go of Vault and OpenBao); the standby does the same if forwarding fails.
fn redirecting() -> Result<()> {
    let leader = Vault::start()?;
    let standby = leader.join()?;
    let header = "X-Vault-No-Request-Forwarding: true";
    let redirecting = Canned::pass_on(&standby.socket(), header)?;

    let provider = at(&leader, json!([redirecting.endpoint, leader.address()]))?;
    works(&provider)?;
    ensure!(redirecting.requests() > 0, "the standby was not asked");

    // Without the leader's address, nothing goes there.
    let mut only = at(&leader, json!([redirecting.endpoint]))?;
    only.deadline_ms = 2_000;
    let failure = only.refused("db-kek", CONTEXT, wrap(), "unreachable")?;
    ensure!(
        failure["message"].as_str().is_some_and(|text| text.contains("redirects")),
        "{failure}"
    );
    ensure!(failure["detail"].as_str().is_some_and(|text| text.contains(&leader.address())));
    ensure!(failure["hint"].as_str().is_some_and(|text| text.contains("addresses")), "{failure}");
    Ok(())
}

fn passed_over() -> Result<()> {
    let mut leader = Vault::start()?;
    let mut standby = leader.join()?;
    let nobody = format!("https://127.0.0.1:{}", free_port()?);
    let three = at(&leader, json!([nobody, standby.address(), leader.address()]))?;
    works(&three)?;

    // A server that accepts connections and does not speak.
    let silent = TcpListener::bind("127.0.0.1:0")?;
    let address = format!("https://{}", silent.local_addr()?);
    let mut patient = at(&leader, json!([address, leader.address()]))?;
    patient.deadline_ms = 30_000;
    patient.wrap("db-kek", CONTEXT, SECRET)?;

    // A sealed standby, and what the check says of it.
    standby.stop();
    works(&three)?;
    standby.restart_sealed()?;
    works(&three)?;
    let reply = three.ask("db-kek", CONTEXT, json!("check"))?;
    ensure!(!reply.to_string().contains("\"class\""), "{reply}");
    let seen = reply["checked"]["findings"][0]["seen"].as_str().unwrap_or_default().to_owned();
    ensure!(seen.starts_with(&leader.address()), "{reply}");
    ensure!(seen.contains(&format!("not in service: {nobody}, {}", standby.address())), "{seen}");

    // None serves: that is an outage, and the check names the last.
    leader.stop();
    let mut brief = three.clone();
    brief.deadline_ms = 3_000;
    let outcome = brief.ask("db-kek", CONTEXT, wrap())?;
    let failure = &outcome["failed"];
    ensure!(matches!(failure["class"].as_str(), Some("unreachable" | "sealed")), "{outcome}");
    let reply = brief.ask("db-kek", CONTEXT, json!("check"))?;
    ensure!(reply["checked"]["findings"][0]["failure"]["class"] == "unreachable", "{reply}");
    Ok(())
}

/// A server that redirects elsewhere may be an attacker's, or be deceived.
fn foreign() -> Result<()> {
    let target = Canned::answer(200, "application/json", "{}".to_owned())?;
    let deceived = Canned::redirect(&format!("{}/v1/transit/encrypt/db-kek", target.endpoint))?;
    let other =
        Canned::answer(503, "application/json", r#"{"errors":["Vault is sealed"]}"#.into())?;
    let directory = tempfile::Builder::new().prefix("pagevault-canned-").tempdir()?;
    Installation::get()?.give(directory.path())?;
    let token = write_file(&directory.path().join("token"), "hvs.token", 0o600)?;
    let mut provider = Provider::new(
        "vault",
        json!({"addresses": [deceived.endpoint, other.endpoint], "insecure_loopback_http": true,
            "auth": {"token_file": token}}),
    );
    provider.deadline_ms = 2_000;
    provider.refused("db-kek", CONTEXT, wrap(), "sealed")?;
    ensure!(deceived.requests() > 0 && other.requests() > 0, "not asked");
    ensure!(target.requests() == 0, "it went to where the server pointed");

    // Redirections in a circle end.
    let (first, second) = (free_port()?, free_port()?);
    let address = |port: u16| format!("http://127.0.0.1:{port}");
    let circle = Canned::redirect_at(first, &address(second))?;
    let back = Canned::redirect_at(second, &address(first))?;
    provider.options["addresses"] = json!([address(first), address(second)]);
    let outcome = provider.ask_all("db-kek", CONTEXT, vec![wrap()])?;
    ensure!(outcome[0]["failed"]["class"] == "unreachable", "{outcome:?}");
    let (asked, returned) = (circle.requests(), back.requests());
    ensure!(asked.abs_diff(returned) <= 2 && asked > 0, "{asked} and {returned} requests");
    Ok(())
}
