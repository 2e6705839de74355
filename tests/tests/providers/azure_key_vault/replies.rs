//! Checks of replies, errors of the service, and replies of others.

use anyhow::{Context, Result, ensure};
use pagevault_tests::key_servers::azure::KeyVault;
use pagevault_tests::key_servers::rest::Fault;
use serde_json::{Value, json};

use super::error;
use crate::Test;
use crate::contract::{CONTEXT, KEY, SECRET, says, unwrap, wrap};

pub(super) const TESTS: &[Test] = &[
    Test { name: "azure_key_vault::replies_that_do_not_fit_are_not_used", needs: &[], run: unfit },
    Test { name: "azure_key_vault::each_error_has_its_class", needs: &[], run: errors },
    Test { name: "azure_key_vault::replies_of_others_are_outages", needs: &[], run: others },
    Test { name: "azure_key_vault::golden_files_can_be_parsed", needs: &[], run: golden },
];

type Change = fn(&mut Value);

fn unfit() -> Result<()> {
    let vault = KeyVault::start("RSA")?;
    let mut provider = vault.provider(vault.options());
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    provider.deadline_ms = 3000;
    let changes: [(&str, Change); 7] = [
        ("/wrapkey", |reply| reply["value"] = json!("")),
        ("/wrapkey", |reply| reply["value"] = json!("AAAA")),
        ("/wrapkey", |reply| reply["value"] = json!("!")),
        ("/wrapkey", |reply| reply["value"] = json!("A".repeat(3000))),
        ("/wrapkey", |reply| reply["kid"] = json!("https://evil.example.com/keys/db-kek/1")),
        ("/unwrapkey", |reply| reply["kid"] = json!("db-kek")),
        ("/unwrapkey", |reply| reply["value"] = json!("!")),
    ];
    for (number, (path, change)) in changes.into_iter().enumerate() {
        vault.server.fault(path, usize::MAX, Fault::Change(change));
        let action = if path == "/wrapkey" { wrap() } else { unwrap(&wrapped) };
        let failure = provider.refused(KEY, CONTEXT, action, "unreachable")?;
        ensure!(failure["retry"] == true, "{number}: {failure}");
        says(&failure, "does not fit the request")?;
        vault.server.repair();
    }
    // A one-time key of another length, or another one, opens nothing.
    for value in ["AAAA", "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"] {
        let change: Change = if value.len() == 4 {
            |reply| reply["value"] = json!("AAAA")
        } else {
            |reply| reply["value"] = json!("A".repeat(43))
        };
        vault.server.fault("/unwrapkey", usize::MAX, Fault::Change(change));
        provider.refused(KEY, CONTEXT, unwrap(&wrapped), "wrong_ciphertext")?;
        vault.server.repair();
    }
    // A rotation whose reply is lost is found by the next attempt, and not repeated.
    vault.server.fault("/rotate", usize::MAX, Fault::Change(|reply| *reply = json!({})));
    provider.rotate(KEY, &wrapped)?;
    ensure!(vault.with_key(KEY, |key| key.count())? == 2, "it was rotated twice");
    Ok(())
}

fn errors() -> Result<()> {
    let vault = KeyVault::start("RSA")?;
    let mut provider = vault.provider(vault.options());
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    provider.deadline_ms = 2000;
    for (status, code, inner, class, retry) in [
        (401, "Unauthorized", "", "unauthenticated", false),
        (403, "Forbidden", "AccessDenied", "denied", false),
        (403, "Forbidden", "ForbiddenByRbac", "denied", false),
        (403, "Forbidden", "ForbiddenByFirewall", "unreachable", true),
        (403, "Forbidden", "KeyDisabled", "key_disabled", false),
        (404, "KeyNotFound", "", "key_missing", false),
        (400, "BadParameter", "", "wrong_ciphertext", false),
        (409, "Conflict", "ObjectIsBeingRecovered", "unreachable", true),
        (429, "Throttled", "", "throttled", true),
        (500, "InternalServerError", "", "unreachable", true),
        (503, "ServiceUnavailable", "", "unreachable", true),
    ] {
        vault.server.fault("/unwrapkey", usize::MAX, error(status, code, inner));
        let failure = provider.refused(KEY, CONTEXT, unwrap(&wrapped), class)?;
        ensure!(failure["retry"] == retry, "{code} {inner}: {failure}");
        vault.server.repair();
    }
    vault.server.fault("/wrapkey", usize::MAX, error(400, "BadParameter", ""));
    provider.refused(KEY, CONTEXT, wrap(), "bad_options")?;
    Ok(())
}

/// What is not Azure's says nothing about the key, whatever its status.
fn others() -> Result<()> {
    let vault = KeyVault::start("RSA")?;
    let mut provider = vault.provider(vault.options());
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    provider.deadline_ms = 2000;
    let long = format!("{{\"x\": \"{}\"}}", "x".repeat(2 << 20));
    for (status, body) in [
        (200, "<html>".to_owned()),
        (200, "{}".to_owned()),
        (200, long),
        (302, String::new()),
        (400, "<html>".to_owned()),
        (401, "login".to_owned()),
        (403, "{\"error\": \"denied\"}".to_owned()),
        (404, "default backend - 404".to_owned()),
        (404, "{\"error\": {\"code\": \"Forbidden\", \"message\": \"x\"}}".to_owned()),
        (502, String::new()),
    ] {
        for path in ["/unwrapkey", "/oauth2/"] {
            vault.server.fault(path, usize::MAX, Fault::Reply(status, body.clone()));
            let failure = provider.refused(KEY, CONTEXT, unwrap(&wrapped), "unreachable")?;
            ensure!(failure["retry"] == true, "{status} {path}: {failure}");
            vault.server.repair();
        }
    }
    Ok(())
}

/// They name versions that this vault does not have.
fn golden() -> Result<()> {
    let vault = KeyVault::start("RSA")?;
    let provider = vault.provider(vault.options());
    let vectors = include_str!("../../../../keyring/vectors/azure_key_vault_wrapped_1.json");
    let vectors: Vec<Value> = serde_json::from_str(vectors)?;
    for vector in vectors {
        let _ = vault.server.seen();
        provider.refused(KEY, CONTEXT, unwrap(&vector["wrapped"]), "key_missing")?;
        let version = vector["version"].as_str().context("no version")?;
        let paths = vault.server.paths();
        ensure!(paths[1].contains(&format!("/{version}/unwrapkey")), "{paths:?}");
    }
    Ok(())
}
