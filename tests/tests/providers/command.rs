//! `command` with the example program of the user guide: a PKCS#11 token (SoftHSM).

use std::fs;

use anyhow::{Context, Result, ensure};
use pagevault_tests::Installation;
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::softhsm::{PIN, SoftHsm};
use serde_json::{Value, json};

use crate::Test;

const CONTEXT: &str = "pagevault/1/00112233445566778899aabbccddeeff/0";
const OTHER: &str = "pagevault/1/00112233445566778899aabbccddeeff/5";
/// 32 recognizable bytes, in base64.
const SECRET: &str = "c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0ISEhISE=";

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, run| Test { name, needs: &[Server::SoftHsm], run };
    vec![
        test("command::a_token_wraps_and_unwraps", a_token_wraps_and_unwraps),
        test("command::keys_never_leave_the_token", keys_never_leave_the_token),
        test("command::refusals_have_a_class_a_cause_and_advice", refusals),
        test("command::the_pin_is_in_no_command_line", the_pin_is_in_no_command_line),
        test("command::the_operator_can_try_it_out", check),
    ]
}

fn provider(token: &SoftHsm) -> Provider {
    let mut provider = Provider::new("command", token.options());
    // It must exist, because programs may not be in it.
    provider.data_directory = token.path("data");
    provider
}

fn unwrap(wrapped: &Value) -> Value {
    json!({"unwrap": {"wrapped": wrapped}})
}

fn wrap() -> Value {
    json!({"wrap": {"plaintext": SECRET}})
}

fn a_token_wraps_and_unwraps() -> Result<()> {
    let token = SoftHsm::start()?;
    token.make_key("db other")?;
    let provider = provider(&token);
    let (wrapped, version) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(version == 1 && provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    let (again, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(again != wrapped, "the same secret wrapped to the same bytes");

    // Bound to context and key; the token itself does not do that.
    provider.refused("db-kek", OTHER, unwrap(&wrapped), "wrong_ciphertext")?;
    provider.refused("db other", CONTEXT, unwrap(&wrapped), "wrong_ciphertext")?;
    provider.refused("db-kek", CONTEXT, unwrap(&json!("AAAA")), "wrong_ciphertext")?;

    // Without a program for rotation, a move to another key replaces rotation.
    let rotate = json!({"rotate": {"wrapped": wrapped}});
    let refused = provider.refused("db-kek", "", rotate, "bad_options")?;
    ensure!(
        refused["hint"].as_str().is_some_and(|hint| hint.contains("set_database_master_key()"))
    );
    let (moved, _) = provider.rewrap("db-kek", "db other", CONTEXT, &wrapped)?;
    ensure!(provider.unwrap("db other", CONTEXT, &moved)? == SECRET);
    Ok(())
}

fn keys_never_leave_the_token() -> Result<()> {
    let token = SoftHsm::start()?;
    let made = token.make_key("another")?;
    ensure!(made.contains("never extractable") && made.contains("always sensitive"), "{made}");
    let read = token.with_token(&["--read-object", "--type=secrkey", "--label=another"]);
    ensure!(read.is_err(), "the token gave a key away");
    Ok(())
}

fn refusals() -> Result<()> {
    let token = SoftHsm::start()?;
    let provider = provider(&token);
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    let says = |failure: &Value, text: &str| -> Result<()> {
        let detail = failure["detail"].as_str().context("detail")?;
        ensure!(detail.contains(text), "{failure}");
        Ok(())
    };

    let failure = provider.refused("typo", CONTEXT, wrap(), "key_missing")?;
    says(&failure, "Secret key not found")?;

    token.set_pin("1111")?;
    for action in [wrap(), unwrap(&wrapped)] {
        let failure = provider.refused("db-kek", CONTEXT, action, "unauthenticated")?;
        says(&failure, "CKR_PIN_INCORRECT")?;
    }
    fs::remove_file(token.path("pin"))?;
    let failure = provider.refused("db-kek", CONTEXT, wrap(), "unauthenticated")?;
    says(&failure, "cannot read ")?;
    token.set_pin(PIN)?;

    // A possibly temporary failure is retried until the deadline.
    let mut impatient = provider.clone();
    impatient.deadline_ms = 3000;
    token.configure("gone", token.module(), "")?;
    let failure = impatient.refused("db-kek", CONTEXT, wrap(), "unreachable")?;
    says(&failure, "No slot with token named")?;
    ensure!(failure["retry"] == true, "{failure}");
    token.configure("pagevault", "/nowhere.so", "")?;
    let failure = impatient.refused("db-kek", CONTEXT, wrap(), "unreachable")?;
    says(&failure, "Failed to load pkcs11 module")?;
    token.configure("pagevault", token.module(), "")?;
    fs::rename(token.path("tokens"), token.path("unplugged"))?;
    impatient.refused("db-kek", CONTEXT, wrap(), "unreachable")?;
    fs::rename(token.path("unplugged"), token.path("tokens"))?;
    ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);

    // Another key with the same name.
    token.with_token(&["--delete-object", "--type=secrkey", "--label=db-kek"])?;
    provider.refused("db-kek", CONTEXT, unwrap(&wrapped), "key_missing")?;
    token.make_key("db-kek")?;
    provider.refused("db-kek", CONTEXT, unwrap(&wrapped), "wrong_ciphertext")?;
    Ok(())
}

fn the_pin_is_in_no_command_line() -> Result<()> {
    let token = SoftHsm::start()?;
    // A pkcs11-tool that records its command line and runs the real one.
    let tool = pagevault_tests::installation::run(
        std::process::Command::new("sh").args(["-c", "command -v pkcs11-tool"]),
    )?;
    fs::create_dir(token.path("bin"))?;
    Installation::get()?.give(&token.path("bin"))?;
    let log = token.path("log");
    let script =
        format!("#!/bin/sh\necho \"$@\" >> {}\nexec {} \"$@\"\n", log.display(), tool.trim());
    token.write("bin/pkcs11-tool", &script, 0o755)?;
    let path = format!("PATH={}:$PATH", token.path("bin").display());
    token.configure("pagevault", token.module(), &path)?;

    let provider = provider(&token);
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    provider.unwrap("db-kek", CONTEXT, &wrapped)?;
    let log = fs::read_to_string(log)?;
    ensure!(log.lines().count() == 2 && log.contains("--decrypt"), "{log}");
    ensure!(!log.contains(PIN) && !log.contains(SECRET), "{log}");
    Ok(())
}

fn check() -> Result<()> {
    let token = SoftHsm::start()?;
    let check = |key: &str| -> Result<(bool, String)> {
        let output = Installation::get()?
            .command("pagevault-keyring")
            .args(["check", "--provider-kind", "command", "--key", key, "--options"])
            .arg(token.options().to_string())
            .output()?;
        Ok((output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned()))
    };
    let (well, response) = check("db-kek")?;
    ensure!(well && response.contains("All checks passed"), "{response}");
    let (well, response) = check("typo")?;
    ensure!(!well && response.contains("there is no such key"), "{response}");
    Ok(())
}
