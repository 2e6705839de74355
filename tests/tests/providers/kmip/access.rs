//! TLS, certificates, rights, and `check`.

use anyhow::{Context, Result, ensure};
use pagevault_tests::key_servers::certificates::Authority;
use pagevault_tests::key_servers::pykmip::PyKmip;
use pagevault_tests::key_servers::{Server, free_port};
use serde_json::{Value, json};

use crate::Test;
use crate::pkcs11::{CONTEXT, SECRET, findings, says, unwrap, wrap};

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, run| Test { name, needs: &[Server::PyKmip], run };
    vec![
        test("kmip::only_the_right_server_is_trusted", trusted),
        test("kmip::only_a_registered_client_is_accepted", clients),
        test("kmip::least_privilege_is_enough_and_less_is_told", least_privilege),
        test("kmip::check_says_what_is_missing", check),
        test("kmip::files_that_others_can_write_are_refused", files),
        test("kmip::the_first_server_that_answers_is_used", addresses),
    ]
}

fn trusted() -> Result<()> {
    let mut server = PyKmip::start()?;
    let provider = server.provider(server.options());
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    let mut by_name = server.options();
    by_name["address"] = json!(format!("localhost:{}", server.port()));
    ensure!(server.provider(by_name.clone()).unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    // Another authority.
    server.write("stranger.pem", Authority::new()?.pem(), 0o644)?;
    let mut options = server.options();
    options["ca_file"] = json!(server.path("stranger.pem"));
    let stranger = server.provider(options);
    let failure = stranger.refused("db-kek", CONTEXT, unwrap(&wrapped), "tls")?;
    says(&failure, "invalid peer certificate")?;
    // Without one, those of the system count.
    let mut options = server.options();
    options.as_object_mut().context("options")?.remove("ca_file");
    server.provider(options).refused("db-kek", CONTEXT, unwrap(&wrapped), "tls")?;
    // A certificate for another name.
    server.sign("server", &["localhost"])?;
    server.restart()?;
    let failure = provider.refused("db-kek", CONTEXT, unwrap(&wrapped), "tls")?;
    says(&failure, "not valid for name")?;
    ensure!(server.provider(by_name).unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    Ok(())
}

fn clients() -> Result<()> {
    let server = PyKmip::start()?;
    let provider = server.provider(server.options());
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    // A client of the same authority, who is not the owner of the key.
    server.sign("other", &[])?;
    let other = server.provider(server.options_of("other"));
    let rotate = json!({"rotate": {"wrapped": wrapped}});
    for (key, action, class) in [
        ("db-kek", unwrap(&wrapped), "denied"),
        ("id:1", wrap(), "denied"),
        ("id:1", rotate.clone(), "denied"),
        // It does not even see the name.
        ("db-kek", wrap(), "key_missing"),
        ("db-kek", rotate, "key_missing"),
    ] {
        other.refused(key, CONTEXT, action, class)?;
    }
    // What it calls by the same name is its own.
    let others = json!(["make", "db-kek", false]);
    for name in ["client.pem", "client.key"] {
        std::fs::rename(server.path(name), server.path(&format!("{name}.kept")))?;
        let from = server.path(&name.replace("client", "other"));
        server.write(name, &std::fs::read_to_string(from)?, 0o600)?;
    }
    ensure!(server.administer(others)? == "2");
    for name in ["client.pem", "client.key"] {
        std::fs::rename(server.path(&format!("{name}.kept")), server.path(name))?;
    }
    ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    let (own, _) = other.wrap("db-kek", CONTEXT, SECRET)?;
    for (of, wrapped) in [(&other, &wrapped), (&provider, &own)] {
        of.refused("db-kek", CONTEXT, unwrap(wrapped), "denied")?;
    }
    ensure!(provider.wrap("db-kek", CONTEXT, SECRET).is_ok(), "another client's key is in the way");

    // A client that the server's authority has not signed.
    let (certificate, key) = Authority::new()?.sign("client", &[])?;
    server.write("forged.pem", &certificate, 0o644)?;
    server.write("forged.key", &key, 0o600)?;
    let forged = server.provider(server.options_of("forged"));
    // The server closes the connection, and its alert may be lost with that.
    let outcome = forged.ask("db-kek", CONTEXT, unwrap(&wrapped))?;
    let class = &outcome["failed"]["class"];
    ensure!(class == "unauthenticated" || class == "unreachable", "{outcome}");
    // A user name and a password, in addition.
    server.write("password", "hunter2hunter2", 0o600)?;
    let mut options = server.options();
    options["username"] = json!("db");
    options["password_file"] = json!(server.path("password"));
    ensure!(server.provider(options).unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    server.also(&json!({"refuse": {"Decrypt": [3, 1]}}))?;
    provider.refused("db-kek", CONTEXT, unwrap(&wrapped), "unauthenticated")?;
    Ok(())
}

/// docs/kmip.md, "Least privilege".
fn least_privilege() -> Result<()> {
    let server = PyKmip::start()?;
    let provider = server.provider(server.options());
    let never = ["Get", "Register", "Create", "Activate", "AddAttribute", "Revoke", "Destroy"];
    server.also(&json!({"without": never}))?;
    let outcome = provider.ask("db-kek", "", json!("check"))?;
    ensure!(findings(&outcome)?.iter().all(|(_, well)| *well), "{outcome}");
    let (wrapped, version) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(provider.rotate("db-kek", &wrapped)? > version);
    ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    // Without Re-key only rotation fails, without Encrypt also wrapping.
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    let rotate = json!({"rotate": {"wrapped": wrapped}});
    let more = |more: &[&'static str]| {
        let all = [&never[..], more].concat();
        json!({"without": all})
    };
    server.also(&more(&["Rekey"]))?;
    provider.refused("db-kek", "", rotate, "denied")?;
    server.also(&more(&["Rekey", "Query"]))?;
    ensure!(provider.wrap("db-kek", CONTEXT, SECRET).is_ok());
    server.also(&more(&["Encrypt", "Locate", "GetAttributes", "Query", "Rekey"]))?;
    ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    server.also(&more(&["Encrypt"]))?;
    let failure = provider.refused("db-kek", CONTEXT, wrap(), "bad_options")?;
    says(&failure, "Encrypt")
}

/// The last finding of a check.
fn last(server: &PyKmip, options: Value, key: &str) -> Result<(String, bool)> {
    let mut provider = server.provider(options);
    provider.deadline_ms = 3000;
    let outcome = provider.ask(key, "", json!("check"))?;
    findings(&outcome)?.pop().with_context(|| outcome.to_string())
}

fn check() -> Result<()> {
    let mut server = PyKmip::start()?;
    let options = server.options();
    let good = last(&server, options.clone(), "db-kek")?;
    ensure!(good == ("wrapped keys are bound to their database".to_owned(), true), "{good:?}");
    let failed = |what: &str| (what.to_owned(), false);
    ensure!(last(&server, options.clone(), "typo")? == failed("the key exists"));
    server.also(&json!({"without": ["Decrypt"]}))?;
    let lacking = last(&server, options.clone(), "db-kek")?;
    ensure!(lacking == failed("the server encrypts and decrypts"), "{lacking:?}");
    server.also(&json!({"refuse": {"Query": [3, 9]}}))?;
    ensure!(last(&server, options.clone(), "db-kek")? == failed("the client is accepted"));
    server.also(&json!({"refuse": {"DiscoverVersions": [5, 9]}}))?;
    let version = last(&server, options.clone(), "db-kek")?;
    ensure!(version == failed("the server speaks a supported version"), "{version:?}");
    server.also(&json!({}))?;
    let mut without = options.clone();
    without["key_file"] = json!(server.path("none"));
    let unread = failed("the certificate and its key can be read");
    ensure!(last(&server, without, "db-kek")? == unread);
    server.stop();
    let away = last(&server, options, "db-kek")?;
    ensure!(away == failed("the server is reachable and trusted"), "{away:?}");
    Ok(())
}

fn files() -> Result<()> {
    let server = PyKmip::start()?;
    let (certificate, key) = ("client.pem", "client.key");
    server.write("password", "hunter2hunter2", 0o600)?;
    let mut options = server.options();
    options["username"] = json!("db");
    options["password_file"] = json!(server.path("password"));
    for (name, bad, good) in [
        (key, 0o644, 0o600),
        (certificate, 0o666, 0o644),
        ("ca.pem", 0o666, 0o644),
        ("password", 0o644, 0o600),
    ] {
        let content = std::fs::read_to_string(server.path(name))?;
        server.write(name, &content, bad)?;
        let provider = server.provider(options.clone());
        let failure = provider.refused("db-kek", CONTEXT, wrap(), "insecure")?;
        says(&failure, name)?;
        server.write(name, &content, good)?;
    }
    ensure!(server.provider(options).wrap("db-kek", CONTEXT, SECRET).is_ok());
    Ok(())
}

fn addresses() -> Result<()> {
    let mut server = PyKmip::start()?;
    let nobody = format!("127.0.0.1:{}", free_port()?);
    let mut options = server.options();
    let map = options.as_object_mut().context("options")?;
    map.remove("address");
    map.insert("addresses".to_owned(), json!([nobody, server.address()]));
    let mut provider = server.provider(options);
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    server.stop();
    provider.deadline_ms = 1000;
    let failure = provider.refused("db-kek", CONTEXT, unwrap(&wrapped), "unreachable")?;
    says(&failure, "refused")
}
