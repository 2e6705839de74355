//! Proxies between the server and its key server, and key servers that are not active: none of
//! their replies says anything about a key. With `revoked_key_action = lock`, a reply mistaken for
//! that would lock all data.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagevault_tests::Installation;
use pagevault_tests::key_servers::canned::Canned;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::kms::{Credentials, REGION, without_ambient_credentials};
use pagevault_tests::key_servers::vault::Vault;
use pagevault_tests::key_servers::{Server, write_file};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::Test;

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, run| Test { name, needs: &[], run };
    vec![
        test("proxies::what_is_not_vaults_is_an_outage", pages_before_vault),
        test("proxies::what_is_not_of_aws_kms_is_an_outage", pages_before_aws_kms),
        test("proxies::a_vault_that_does_not_serve_is_an_outage", inactive),
        test("proxies::what_vault_says_of_a_key_is_believed_where_only_vault_says_it", refusals),
        test("proxies::a_token_that_is_known_a_moment_later_is_no_denial", known_late),
        test("proxies::answers_are_read_up_to_a_limit", endless),
        test("proxies::answers_that_drip_end_in_time", dripping),
        test("proxies::answers_are_not_decompressed", compressed),
        Test {
            name: "proxies::a_standby_without_its_leader_is_an_outage",
            needs: &[Server::Vault],
            run: standby,
        },
    ]
}

const CONTEXT: &str = "pagevault/1/00112233445566778899aabbccddeeff/5";
const HTML: &str = "text/html";
const JSON: &str = "application/json";
const PAGE: &str = "<html><head><title>403 Forbidden</title></head><body>hunter2</body></html>";

/// Vault's replies to a lookup of one's own token, and to a forbidden request.
const TOKEN: &str = r#"{"request_id":"","lease_id":"","renewable":false,"lease_duration":0,
    "data":{"accessor":"","creation_time":0,"creation_ttl":0,"display_name":"","entity_id":"",
    "expire_time":null,"explicit_max_ttl":0,"id":"","num_uses":0,"orphan":true,"path":"",
    "policies":[],"ttl":0},"wrap_info":null,"warnings":null,"auth":null}"#;
const DENIED: &str = r#"{"errors":["1 error occurred:\n\t* permission denied\n\n"]}"#;

/// Replies of load balancers, proxies and gateways: content type, and content.
const ANSWERS: &[(&str, &str)] = &[
    (HTML, PAGE),
    (HTML, ""),
    (JSON, ""),
    (JSON, "{\"errors\":[\"permission den"),
    (JSON, "{\"errors\":[]}"),
    (JSON, "{\"errors\":[\"forbidden by policy 17\"]}"),
    (JSON, "{\"errors\":[{\"status\":404,\"message\":\"encryption key not found\"}]}"),
    (JSON, "{\"message\":\"no Route matched with those values\"}"),
    (JSON, "{\"message\":\"Forbidden\"}"),
    (JSON, "[\"permission denied\"]"),
    (JSON, "null"),
    ("text/plain", "encryption key not found"),
];

const STATUSES: &[u16] = &[200, 400, 401, 403, 404, 502];

/// A Vault provider with a token, whose requests go to `canned`.
fn vault(canned: &Canned) -> Result<(Provider, TempDir)> {
    let directory = tempfile::Builder::new().prefix("pagevault-canned-").tempdir()?;
    Installation::get()?.give(directory.path())?;
    let token = write_file(&directory.path().join("token"), "hvs.token", 0o600)?;
    let mut provider = Provider::new(
        "vault",
        json!({"address": canned.endpoint, "insecure_loopback_http": true,
            "auth": {"token_file": token}}),
    );
    // Possibly temporary failures are retried until then.
    provider.deadline_ms = 700;
    Ok((provider, directory))
}

fn aws_kms(canned: &Canned, credentials: &Credentials) -> Provider {
    let options = json!({"region": REGION, "endpoint": canned.endpoint,
        "insecure_loopback_http": true, "credentials_file": credentials.path()});
    let mut provider = without_ambient_credentials(Provider::new("aws_kms", options));
    provider.deadline_ms = 700;
    provider
}

fn unwrap_by_vault() -> Value {
    // vault:v1:AAAA
    json!({"unwrap": {"wrapped": "dmF1bHQ6djE6QUFBQQ=="}})
}

fn unwrap_by_aws_kms() -> Value {
    let arn = format!("arn:aws:kms:{REGION}:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab");
    json!({"unwrap": {"wrapped": crate::aws_kms::wrapped_by(&arn, 1, b"ciphertext")}})
}

fn outage(reply: &Value, what: &str) -> Result<()> {
    let class = reply["class"].as_str().unwrap_or_default();
    ensure!(matches!(class, "unreachable" | "deadline"), "{what}: {reply}");
    ensure!(!reply.to_string().contains("hunter2"), "{what}: {reply}");
    Ok(())
}

/// The failure in an outcome.
fn failed(outcome: &Value) -> Result<Value> {
    outcome.get("failed").cloned().with_context(|| format!("no failure: {outcome}"))
}

fn pages_before_vault() -> Result<()> {
    let actions = [
        unwrap_by_vault(),
        json!({"wrap": {"plaintext": "AAAA"}}),
        json!({"rewrap": {"from_key": "db-kek", "wrapped": "dmF1bHQ6djE6QUFBQQ=="}}),
        json!({"rotate": {"wrapped": "dmF1bHQ6djE6QUFBQQ=="}}),
    ];
    for (at, (kind, content)) in ANSWERS.iter().enumerate() {
        for (and, status) in STATUSES.iter().enumerate() {
            let canned = Canned::answer(*status, kind, (*content).to_owned())?;
            let (mut provider, _directory) = vault(&canned)?;
            provider.deadline_ms = 250;
            // Keys are revalidated by unwrapping; the other actions take turns.
            let other = &actions[1 + (at + and) % (actions.len() - 1)];
            for action in [&actions[0], other].into_iter().take(1 + and % 2) {
                let reply = failed(&provider.ask("db-kek", CONTEXT, action.clone())?)?;
                outage(&reply, &format!("{status} {content:?} to {action}"))?;
            }
        }
    }
    // Logging in needs a reply too.
    let canned = Canned::answer(400, HTML, PAGE.to_owned())?;
    let (mut provider, directory) = vault(&canned)?;
    let role = directory.path().join("token");
    provider.options["auth"] = json!({"approle": {"role_id_file": role, "secret_id_file": role}});
    let reply = provider.refused("db-kek", CONTEXT, unwrap_by_vault(), "unreachable")?;
    ensure!(
        reply["detail"].as_str().is_some_and(|text| text.contains("HTTP status is 400")),
        "{reply}"
    );
    ensure!(reply["retry"] == true && canned.requests() > 1, "{reply}");
    // A check reports it too.
    let reply = provider.ask("db-kek", CONTEXT, json!("check"))?;
    let last = reply["checked"]["findings"].as_array().and_then(|findings| findings.last());
    ensure!(last.is_some_and(|last| last["failure"]["class"] == "unreachable"), "{reply}");
    Ok(())
}

fn pages_before_aws_kms() -> Result<()> {
    let root = Credentials::root()?;
    for (kind, content) in ANSWERS.iter().chain(&[
        (JSON, "{\"__type\":\"ForbiddenException\",\"message\":\"hunter2\"}"),
        (JSON, "{\"__type\":\"com.example#NoSuchThing\"}"),
        ("text/xml", "<Error><Code>AccessDenied</Code></Error>"),
    ]) {
        for status in STATUSES {
            let canned = Canned::answer(*status, kind, (*content).to_owned())?;
            let mut provider = aws_kms(&canned, &root);
            provider.deadline_ms = 250;
            let reply = failed(&provider.ask("k", CONTEXT, unwrap_by_aws_kms())?)?;
            outage(&reply, &format!("{status} {content:?}"))?;
        }
    }
    Ok(())
}

/// Vault's replies while it is not active. Such a server needs a licence, or exists only for a
/// moment.
fn inactive() -> Result<()> {
    for (status, text) in [
        (400, "path disabled in replication DR secondary mode"),
        (400, "please forward to the active node"),
        (500, "local node not active but active cluster node not found"),
        (503, "Vault is in standby mode"),
        (429, "Vault is in standby mode"),
        (
            404,
            "no handler for route \"transit/decrypt/db-kek\". route entry found, but backend is nil.",
        ),
        (412, "required index state not present"),
        // A server that has not received the last rotation yet.
        (400, "invalid ciphertext: version is too new"),
        (400, "1 error occurred:\n\t* something that no release says yet\n\n"),
        (403, "lease count quota exceeded"),
    ] {
        let body = json!({"errors": [text]}).to_string();
        let canned = Canned::answer(status, JSON, body)?;
        let (provider, directory) = vault(&canned)?;
        let mut by_role = provider.clone();
        let file = directory.path().join("token");
        by_role.options["auth"] =
            json!({"approle": {"role_id_file": file, "secret_id_file": file}});
        for (how, provider) in [("token", provider), ("role", by_role)] {
            let reply = failed(&provider.ask("db-kek", CONTEXT, unwrap_by_vault())?)?;
            let is_login = how == "role" && !text.contains("DR") && !text.contains("forward");
            if !(is_login && reply["class"] == "unauthenticated") && reply["class"] != "throttled" {
                outage(&reply, text)?;
                ensure!(reply["retry"] == true, "{text}: {reply}");
            }
        }
    }
    let canned = Canned::answer(503, JSON, "{\"errors\":[\"Vault is sealed\"]}".into())?;
    vault(&canned)?.0.refused("db-kek", CONTEXT, unwrap_by_vault(), "sealed")?;
    Ok(())
}

/// Vault's own refusals, as in the tests with a real Vault in `vault.rs`, with other replies of the
/// server.
fn refusals() -> Result<()> {
    const NONE: &str = r#"{"errors":[]}"#;
    for (status, body, of_token, class) in [
        // Denied by a server that knows the token; by one that does not; by one without tokens.
        (403, DENIED, (200, JSON, TOKEN), "denied"),
        (403, DENIED, (403, JSON, DENIED), "unauthenticated"),
        (403, DENIED, (403, HTML, PAGE), "unreachable"),
        (403, DENIED, (502, HTML, PAGE), "unreachable"),
        (403, DENIED, (200, HTML, PAGE), "unreachable"),
        // Not found.
        (404, NONE, (200, JSON, TOKEN), "key_missing"),
        (404, NONE, (403, JSON, DENIED), "key_missing"),
        (404, NONE, (404, JSON, NONE), "unreachable"),
        (404, NONE, (502, HTML, PAGE), "unreachable"),
        (403, NONE, (200, JSON, TOKEN), "unreachable"),
        (
            404,
            "{\"errors\":[\"no handler for route \\\"x\\\". route entry not found.\"]}",
            (502, HTML, PAGE),
            "key_missing",
        ),
        (400, "{\"errors\":[\"encryption key not found\"]}", (502, HTML, PAGE), "key_missing"),
        (
            400,
            "{\"errors\":[\"refusing to use soft-deleted key\"]}",
            (502, HTML, PAGE),
            "key_disabled",
        ),
        (
            400,
            "{\"errors\":[\"invalid ciphertext: no prefix\"]}",
            (502, HTML, PAGE),
            "wrong_ciphertext",
        ),
        (
            400,
            "{\"errors\":[\"cipher: message authentication failed\"]}",
            (502, HTML, PAGE),
            "wrong_ciphertext",
        ),
        // The same text with another status is not Vault's.
        (404, "{\"errors\":[\"encryption key not found\"]}", (502, HTML, PAGE), "unreachable"),
        (502, "{\"errors\":[\"encryption key not found\"]}", (502, HTML, PAGE), "unreachable"),
    ] {
        let canned = Canned::paths(move |path| {
            let (status, kind, body) = match path.ends_with("lookup-self") {
                true => of_token,
                false => (status, JSON, body),
            };
            (status, kind, body.to_owned())
        })?;
        let (provider, _directory) = vault(&canned)?;
        let reply = failed(&provider.ask("db-kek", CONTEXT, unwrap_by_vault())?)?;
        ensure!(reply["class"] == class, "{status} {body} {of_token:?}: {reply}");
    }
    Ok(())
}

const OPENED: &str = r#"{"request_id":"","lease_id":"","renewable":false,"lease_duration":0,
    "data":{"plaintext":"AAAA"},"wrap_info":null,"warnings":null,"auth":null}"#;

/// Of several servers, one may receive a new token or policy slightly later than another that was
/// asked before.
fn known_late() -> Result<()> {
    let denials = AtomicUsize::new(0);
    let canned = Canned::paths(move |path| {
        let (status, body) = match path.ends_with("lookup-self") {
            true => (200, TOKEN),
            false if denials.fetch_add(1, Ordering::Relaxed) == 0 => (403, DENIED),
            false => (200, OPENED),
        };
        (status, JSON, body.to_owned())
    })?;
    let (provider, _directory) = vault(&canned)?;
    let reply = provider.ask("db-kek", CONTEXT, unwrap_by_vault())?;
    ensure!(reply["unwrapped"]["plaintext"] == "AAAA", "{reply}");
    Ok(())
}

/// Beginnings of endless replies, with their continuations.
fn heads() -> [(String, String); 4] {
    let piece = "x".repeat(64 * 1024);
    let head = |status: &str, more: &str| {
        format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{more}\r\n")
    };
    [
        // Until the connection closes, with a given length, and in chunks.
        (head("200 OK", "connection: close\r\n"), piece.clone()),
        (head("200 OK", "content-length: 1000000000000\r\n"), piece.clone()),
        (head("400 Bad", "transfer-encoding: chunked\r\n"), format!("10000\r\n{piece}\r\n")),
        // Endless headers.
        ("HTTP/1.1 200 OK\r\n".into(), format!("x: {}\r\n", "x".repeat(1000))),
    ]
}

fn endless() -> Result<()> {
    let root = Credentials::root()?;
    // Limit for the bytes in the kernel's buffers, for the request and the following check.
    const MOST: u64 = 32 << 20;
    for (head, piece) in heads() {
        let canned = Canned::endless(&head, &piece)?;
        let (mut provider, _directory) = vault(&canned)?;
        provider.deadline_ms = 5_000;
        let reply = failed(&provider.ask("db-kek", CONTEXT, unwrap_by_vault())?)?;
        ensure!(reply["class"] == "unreachable", "{head}: {reply}");
        ensure!(canned.sent() < MOST * canned.requests() as u64, "{head}: {}", canned.sent());
        // Not by the client of Vault's API.
        let reply = provider.ask("db-kek", CONTEXT, json!("check"))?;
        let first = &reply["checked"]["findings"][0]["failure"];
        ensure!(first["class"] == "unreachable", "{head}: {reply}");

        let canned = Canned::endless(&head, &piece)?;
        let mut provider = aws_kms(&canned, &root);
        provider.deadline_ms = 5_000;
        let reply = failed(&provider.ask("k", CONTEXT, unwrap_by_aws_kms())?)?;
        ensure!(reply["class"] == "unreachable", "{head}: {reply}");
        ensure!(canned.sent() < MOST * canned.requests() as u64, "{head}: {}", canned.sent());
    }
    // Credentials come over HTTP too.
    let (head, piece) = &heads()[1];
    let canned = Canned::endless(head, piece)?;
    let options = json!({"region": REGION, "endpoint": "http://127.0.0.1:9",
        "insecure_loopback_http": true});
    let mut provider = without_ambient_credentials(Provider::new("aws_kms", options))
        .env("AWS_CONTAINER_CREDENTIALS_FULL_URI", &canned.endpoint);
    provider.deadline_ms = 5_000;
    let reply = provider.refused("k", CONTEXT, unwrap_by_aws_kms(), "unauthenticated")?;
    ensure!(canned.requests() > 0 && canned.sent() < MOST * canned.requests() as u64, "{reply}");
    Ok(())
}

fn dripping() -> Result<()> {
    let root = Credentials::root()?;
    let heads = heads().map(|(head, _)| head);
    for (head, piece) in heads.iter().zip(["x", "x", "1\r\nx\r\n", "x: x\r\n"]) {
        let canned = Canned::dripping(head, piece)?;
        let (by_vault, _directory) = vault(&canned)?;
        for (mut provider, action) in
            [(by_vault, unwrap_by_vault()), (aws_kms(&canned, &root), unwrap_by_aws_kms())]
        {
            provider.deadline_ms = 1_500;
            let start = Instant::now();
            provider.refused("k", CONTEXT, action, "deadline")?;
            // It would take years.
            ensure!(start.elapsed() < Duration::from_secs(15), "{head}: {:?}", start.elapsed());
        }
    }
    Ok(())
}

/// A small compressed reply may be endless when decompressed.
fn compressed() -> Result<()> {
    let root = Credentials::root()?;
    let body = "{\"errors\":[\"encryption key not found\"],\"__type\":\"NotFoundException\"}";
    let answer = format!(
        "HTTP/1.1 400 Bad\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\n\
         connection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let canned = Canned::text(&answer)?;
    // The reply is read without decompression, and no compression is requested.
    vault(&canned)?.0.refused("db-kek", CONTEXT, unwrap_by_vault(), "key_missing")?;
    aws_kms(&canned, &root).refused("k", CONTEXT, unwrap_by_aws_kms(), "key_missing")?;
    for asked in canned.seen() {
        ensure!(!asked.head.to_ascii_lowercase().contains("accept-encoding"), "{}", asked.head);
    }
    Ok(())
}

/// Two servers of one cluster. Without the leader, the other can neither serve nor forward
/// requests.
fn standby() -> Result<()> {
    let mut leader = Vault::start()?;
    let follower = leader.join()?;
    let options = leader.approle()?;
    let mut provider = Provider::new("vault", options);
    provider.options["address"] = json!(follower.address());
    let secret = "c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0ISEhISE=";
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, secret)?;
    ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == secret, "it does not forward");
    leader.stop();
    provider.deadline_ms = 4_000;
    for _ in 0..3 {
        let reply =
            failed(&provider.ask("db-kek", CONTEXT, json!({"unwrap": {"wrapped": wrapped}}))?)?;
        outage(&reply, "a standby without its leader")?;
    }
    leader.restart()?;
    provider.deadline_ms = 20_000;
    ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == secret, "it does not forward again");
    Ok(())
}
