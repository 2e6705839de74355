//! `vault` against a real Vault or OpenBao, over TLS.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use pagevault_tests::key_servers::canned::Canned;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::vault::Vault;
use pagevault_tests::key_servers::{Server, write_file};
use serde_json::{Value, json};

use crate::Test;

const CONTEXT: &str = "pagevault/1/00112233445566778899aabbccddeeff/0";
/// 32 recognizable bytes, in base64.
const SECRET: &str = "c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0ISEhISE=";

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, run| Test { name, needs: &[Server::Vault], run };
    vec![
        test("vault::each_way_to_log_in", each_way_to_log_in),
        test("vault::a_socket_is_spoken_to_if_it_is_ours", a_socket_is_spoken_to_if_it_is_ours),
        test("vault::refusals_have_a_class_a_cause_and_advice", refusals),
        test("vault::tokens_are_renewed_and_given_back", tokens),
        test("vault::nothing_secret_is_logged_or_sent_elsewhere", secrecy),
        Test {
            name: "vault::redirections_are_not_followed",
            needs: &[],
            run: redirections_are_not_followed,
        },
        test("vault::the_operator_can_try_it_out", check),
    ]
}

fn provider(options: Value) -> Provider {
    Provider::new("vault", options)
}

fn wrap() -> Value {
    json!({"wrap": {"plaintext": SECRET}})
}

fn each_way_to_log_in() -> Result<()> {
    let vault = Vault::start()?;
    let works = |options: Value| -> Result<()> {
        let provider = provider(options);
        let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
        ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
        Ok(())
    };
    let fails =
        |options: Value| provider(options).refused("db-kek", CONTEXT, wrap(), "unauthenticated");
    works(vault.approle()?)?;
    let wrong = vault.write("wrong", "00000000-0000-0000-0000-000000000000", 0o600)?;
    let mut options = vault.approle()?;
    options["auth"]["approle"]["secret_id_file"] = json!(wrong);
    fails(options)?;

    let token = vault.cli(&["token", "create", "-policy=db-kek", "-field=token"])?;
    works(vault.token("token", &token)?)?;
    fails(vault.token("no-token", "hvs.nobody")?)?;

    let (certificate, key) = vault.client_certificate("postgres")?;
    let cert_file = vault.write("client.pem", &certificate, 0o644)?;
    let key_file = vault.write("client.key", &key, 0o600)?;
    vault.cli(&["auth", "enable", "cert"])?;
    let authority = format!("certificate=@{}", vault.path("ca.pem").display());
    vault.cli(&[
        "write",
        "auth/cert/certs/postgres",
        &authority,
        "allowed_common_names=postgres",
        "token_policies=db-kek",
    ])?;
    let auth = |cert: &std::path::Path, key: &std::path::Path| {
        vault.options(json!({"cert": {"cert_file": cert, "key_file": key}}))
    };
    works(auth(&cert_file, &key_file))?;
    let (certificate, key) = vault.client_certificate("stranger")?;
    let cert_file = vault.write("stranger.pem", &certificate, 0o644)?;
    let key_file = vault.write("stranger.key", &key, 0o600)?;
    fails(auth(&cert_file, &key_file))?;
    Ok(())
}

/// For a Unix socket the kernel identifies the listening process; on a local port any user may
/// listen.
fn a_socket_is_spoken_to_if_it_is_ours() -> Result<()> {
    let mut vault = Vault::start()?;
    let mut options = vault.approle()?;
    options["address"] = json!(format!("unix://{}", vault.socket().display()));
    let provider = provider(options);
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    let reply = provider.ask("db-kek", CONTEXT, json!("check"))?;
    ensure!(!reply.to_string().contains("failure"), "{reply}");
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(vault.socket(), Some(65534), None)?;
        let reply = provider.refused("db-kek", CONTEXT, wrap(), "insecure")?;
        ensure!(
            reply["message"].as_str().is_some_and(|text| text.contains("belongs to another user"))
        );
        // Another process listens there, in a directory of the server user; only the kernel can
        // identify it.
        vault.stop();
        std::fs::remove_file(vault.socket())?;
        let _listener = std::os::unix::net::UnixListener::bind(vault.socket())?;
        std::os::unix::fs::chown(vault.socket(), Some(65534), None)?;
        provider.refused("db-kek", CONTEXT, wrap(), "insecure")?;
        std::fs::remove_file(vault.socket())?;
    }
    vault.stop();
    provider.refused("db-kek", CONTEXT, wrap(), "unreachable")?;
    Ok(())
}

fn refusals() -> Result<()> {
    let mut vault = Vault::start()?;
    let options = vault.approle()?;
    let good = provider(options.clone());
    let (wrapped, _) = good.wrap("db-kek", CONTEXT, SECRET)?;
    let with = |name: &str, value: Value| {
        let mut options = options.clone();
        options[name] = value;
        provider(options)
    };

    // denied: a token that Vault knows and that lacks permission.
    let failure = {
        vault.cli(&["write", "transit/keys/foreign", "derived=true"])?;
        good.refused("foreign", CONTEXT, wrap(), "denied")?
    };
    ensure!(failure["hint"].as_str().unwrap_or("").contains("transit/keys/foreign"), "{failure}");
    // key_missing: for a token with permission, and a mount that does not exist.
    let root = vault.cli(&["token", "create", "-policy=root", "-field=token"])?;
    let root = provider(vault.token("root", &root)?);
    root.refused("nokey", CONTEXT, wrap(), "key_missing")?;
    root.refused("no/key", CONTEXT, wrap(), "key_missing")?;
    let mut elsewhere = root.clone();
    elsewhere.options["mount"] = json!("elsewhere");
    elsewhere.refused("db-kek", CONTEXT, wrap(), "key_missing")?;
    // Wrapping with a misspelled name creates no key: it is missing afterwards too.
    for _ in 0..2 {
        root.refused("db-kekk", CONTEXT, wrap(), "key_missing")?;
    }
    // insecure: a key without context binding, credentials readable by others, an address without
    // TLS.
    vault.cli(&["write", "-f", "transit/keys/plain"])?;
    root.refused("plain", CONTEXT, wrap(), "insecure")?;
    let loose = vault.write("loose", "hvs.x", 0o644)?;
    provider(vault.options(json!({"token_file": loose}))).refused(
        "db-kek",
        CONTEXT,
        wrap(),
        "insecure",
    )?;
    with("address", json!("http://127.0.0.1:8200")).refused(
        "db-kek",
        CONTEXT,
        wrap(),
        "insecure",
    )?;
    with("address", json!("http://vault.example.com:8200")).refused(
        "db-kek",
        CONTEXT,
        wrap(),
        "insecure",
    )?;
    // tls: an untrusted authority, a name that is not the server's.
    let stranger = pagevault_tests::key_servers::certificates::Authority::new()?;
    let ca = vault.write("stranger-ca.pem", stranger.pem(), 0o644)?;
    with("ca_file", json!(ca)).refused("db-kek", CONTEXT, wrap(), "tls")?;
    let named = vault.address().replace("127.0.0.1", "localhost");
    with("address", json!(named)).refused("db-kek", CONTEXT, wrap(), "tls")?;
    let mut no_authority = options.clone();
    no_authority.as_object_mut().map(|options| options.remove("ca_file"));
    provider(no_authority).refused("db-kek", CONTEXT, wrap(), "tls")?;

    // throttled
    vault.limit_requests()?;
    let mut hasty = good.clone();
    hasty.deadline_ms = 5_000;
    hasty.ask("db-kek", CONTEXT, wrap())?;
    hasty.refused("db-kek", CONTEXT, wrap(), "throttled")?;
    vault.allow_requests()?;

    // sealed; works again afterwards without further action
    vault.seal()?;
    good.refused("db-kek", CONTEXT, wrap(), "sealed")?;
    vault.unseal()?;
    ensure!(good.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);

    // deadline: connections are accepted but get no reply
    vault.freeze()?;
    let mut brief = good.clone();
    brief.deadline_ms = 1_500;
    let start = Instant::now();
    let slow = brief.refused("db-kek", CONTEXT, wrap(), "deadline");
    vault.wake()?;
    slow?;
    ensure!(start.elapsed() < Duration::from_secs(15), "the deadline is not kept");

    // unreachable, and available again
    vault.stop();
    let mut brief = good.clone();
    brief.deadline_ms = 4_000;
    let failure = brief.refused("db-kek", CONTEXT, wrap(), "unreachable")?;
    ensure!(failure["retry"] == true, "{failure}");
    ensure!(failure.to_string().contains(&vault.address()), "{failure}");
    vault.restart()?;
    ensure!(good.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    Ok(())
}

fn tokens() -> Result<()> {
    let vault = Vault::start()?;
    // A short-lived token is renewed after half of its life.
    let token = vault.cli(&["token", "create", "-policy=db-kek", "-ttl=6s", "-field=token"])?;
    let short = provider(vault.token("token", &token)?);
    for _ in 0..6 {
        std::thread::sleep(Duration::from_secs(2));
        short.wrap("db-kek", CONTEXT, SECRET)?;
    }
    // A token that cannot be renewed expires; that is distinguished from a denial.
    let token = vault.cli(&[
        "token",
        "create",
        "-policy=db-kek",
        "-ttl=6s",
        "-renewable=false",
        "-field=token",
    ])?;
    let ending = provider(vault.token("ending", &token)?);
    ending.wrap("db-kek", CONTEXT, SECRET)?;
    std::thread::sleep(Duration::from_secs(7));
    ending.refused("db-kek", CONTEXT, wrap(), "unauthenticated")?;

    // Login tokens do not accumulate.
    let accessors = || -> Result<usize> {
        Ok(vault.cli(&["list", "-format=json", "auth/token/accessors"])?.matches('"').count())
    };
    let approle = provider(vault.approle()?);
    let before = accessors()?;
    for _ in 0..3 {
        approle.wrap("db-kek", CONTEXT, SECRET)?;
    }
    ensure!(accessors()? <= before, "tokens are left: {before}, now {}", accessors()?);
    Ok(())
}

fn secrecy() -> Result<()> {
    let vault = Vault::start()?;
    // Environment variables are ignored, above all the one that turns off verification of
    // certificates.
    let provider = provider(vault.approle()?)
        .env("VAULT_ADDR", "https://127.0.0.1:1")
        .env("VAULT_SKIP_VERIFY", "true")
        .env("VAULT_TOKEN", "hvs.environment")
        .env("HTTPS_PROXY", "http://127.0.0.1:1")
        .env("ALL_PROXY", "http://127.0.0.1:1");
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    let mut unverified = provider.clone();
    unverified.options.as_object_mut().map(|options| options.remove("ca_file"));
    unverified.refused("db-kek", CONTEXT, wrap(), "tls")?;

    let audit = vault.audit_log()?;
    ensure!(audit.contains("transit/decrypt/db-kek"), "no audit: the test would prove nothing");
    ensure!(!audit.contains(SECRET), "the audit log holds the key");
    Ok(())
}

/// Otherwise a redirection would send the token to another server.
fn redirections_are_not_followed() -> Result<()> {
    let target = Canned::answer(200, "application/json", "{}".to_owned())?;
    let standby = Canned::redirect(&target.endpoint)?;
    let directory = tempfile::Builder::new().prefix("pagevault-canned-").tempdir()?;
    pagevault_tests::Installation::get()?.give(directory.path())?;
    let token = write_file(&directory.path().join("token"), "hvs.token", 0o600)?;
    let mut provider = provider(
        json!({"address": standby.endpoint, "insecure_loopback_http": true, "namespace": "team/db",
        "auth": {"token_file": token}}),
    );
    provider.deadline_ms = 4_000;
    let reply = provider.refused("db-kek", CONTEXT, wrap(), "unreachable")?;
    ensure!(
        reply["message"].as_str().is_some_and(|text| text.contains("another address")),
        "{reply}"
    );
    ensure!(reply["retry"] == true && standby.requests() > 2, "not tried again: {reply}");
    ensure!(target.requests() == 0, "it went to where the server pointed");
    let asked = standby.seen();
    let head = asked.last().map(|request| request.head.to_ascii_lowercase()).unwrap_or_default();
    ensure!(head.contains("x-vault-token: hvs.token"), "{head}");
    ensure!(head.contains("x-vault-namespace: team/db"), "{head}");
    Ok(())
}

fn check() -> Result<()> {
    let vault = Vault::start()?;
    let check = |key: &str| -> Result<(bool, String)> {
        let output = pagevault_tests::Installation::get()?
            .command("pagevault-keyring")
            .args(["check", "--provider-kind", "vault", "--key", key, "--options"])
            .arg(vault.approle()?.to_string())
            .output()?;
        Ok((output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned()))
    };
    let (well, response) = check("db-kek")?;
    ensure!(well && response.contains("All checks passed"), "{response}");
    ensure!(response.contains("cannot be unwrapped for another database"), "{response}");
    let (well, response) = check("typo")?;
    ensure!(!well && response.contains("transit/keys/typo"), "{response}");
    vault.seal()?;
    let outcome = provider(vault.options(json!({"token_file": vault.path("token")}))).ask(
        "db-kek",
        CONTEXT,
        json!("check"),
    )?;
    let last = outcome["checked"]["findings"].as_array().and_then(|all| all.last().cloned());
    ensure!(last.as_ref().is_some_and(|last| last["failure"]["class"] == "sealed"), "{outcome}");
    Ok(())
}
