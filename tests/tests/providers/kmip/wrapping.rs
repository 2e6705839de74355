//! Wrapping in the ways that servers and versions of the protocol have.

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::pykmip::PyKmip;
use serde_json::{Value, json};

use crate::Test;
use crate::pkcs11::{CONTEXT, OTHER, SECRET, findings, says, unwrap, wrap};

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, run| Test { name, needs: &[Server::PyKmip], run };
    vec![
        test("kmip::each_version_of_the_protocol_is_spoken", wraps_and_unwraps),
        test("kmip::servers_encrypt_in_the_way_that_they_support", ways),
        test("kmip::golden_files_can_be_unwrapped", golden),
        test("kmip::pykmip_as_it_is_is_enough", as_it_is),
    ]
}

fn wraps_and_unwraps() -> Result<()> {
    let server = PyKmip::start()?;
    server.make_key("db other")?;
    for version in [None, Some("1.4"), Some("2.0")] {
        let mut options = server.options();
        if let Some(version) = version {
            options["version"] = json!(version);
        }
        let provider = server.provider(options);
        let (wrapped, version) = provider.wrap("db-kek", CONTEXT, SECRET)?;
        ensure!((20_260_101_000_000..99_999_999_999_999).contains(&version), "{version}");
        ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
        provider.refused("db-kek", OTHER, unwrap(&wrapped), "wrong_ciphertext")?;
        provider.refused("db other", CONTEXT, unwrap(&wrapped), "wrong_ciphertext")?;
        let (moved, _) = provider.rewrap("db-kek", "db other", CONTEXT, &wrapped)?;
        ensure!(provider.unwrap("db other", CONTEXT, &moved)? == SECRET);
        provider.refused("db-kek", CONTEXT, unwrap(&moved), "wrong_ciphertext")?;
        for name in ["", "id:", "a\nb"] {
            provider.refused(name, CONTEXT, wrap(), "bad_request")?;
        }
        for name in ["typo", "id:77"] {
            let failure = provider.refused(name, CONTEXT, wrap(), "key_missing")?;
            says(&failure, name)?;
        }
    }
    // What one version wrapped, the other unwraps.
    let of = |version: &str| {
        let mut options = server.options();
        options["version"] = json!(version);
        server.provider(options)
    };
    let (wrapped, _) = of("1.4").wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(of("2.0").unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    let mut newer = of("2.1");
    newer.deadline_ms = 3000;
    let failure = newer.refused("db-kek", CONTEXT, wrap(), "unreachable")?;
    says(&failure, "Invalid Message")
}

/// Method, and length of the initialization vector, of what a server wraps.
fn way(server: &PyKmip, more: &Value) -> Result<(u8, u8)> {
    server.also(more)?;
    let provider = server.provider(server.options());
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    provider.refused("db-kek", OTHER, unwrap(&wrapped), "wrong_ciphertext")?;
    let bytes = STANDARD.decode(wrapped.as_str().context("text")?)?;
    // docs/formats.md: an identifier of one byte.
    ensure!(bytes[10] == 1, "{bytes:02x?}");
    Ok((bytes[9], bytes[12]))
}

fn ways() -> Result<()> {
    let server = PyKmip::start()?;
    ensure!(way(&server, &json!({}))? == (1, 12));
    ensure!(way(&server, &json!({"own_iv": true}))? == (1, 16));
    ensure!(way(&server, &json!({"no_gcm": true}))? == (2, 16));
    ensure!(way(&server, &json!({"no_gcm": true, "own_iv": true}))? == (2, 16));
    // A server that only gives out keys.
    server.also(&json!({"without": ["Encrypt", "Decrypt"]}))?;
    let provider = server.provider(server.options());
    let failure = provider.refused("db-kek", CONTEXT, wrap(), "bad_options")?;
    says(&failure, "Master keys never leave")?;
    let outcome = provider.ask("db-kek", "", json!("check"))?;
    let last = findings(&outcome)?.pop().context("no finding")?;
    ensure!(last == ("the server encrypts and decrypts".to_owned(), false), "{outcome}");
    says(&outcome, "Encrypt, Decrypt")
}

/// A file made by vectors/generate.py, another implementation of the same format.
fn golden() -> Result<()> {
    let vectors = include_str!("../../../../keyring/vectors/kmip_wrapped_1.json");
    let vectors: Vec<Value> = serde_json::from_str(vectors)?;
    ensure!(vectors.len() == 3);
    let server = PyKmip::bare()?;
    let first = &vectors[0];
    // Keys of a new server have the numbers from 1 on.
    let id = server.administer(json!(["register", "main", first["kek"]]))?;
    ensure!(id == "1", "{id}");
    server.behave(&json!({"no_gcm": false}))?;
    for vector in &vectors {
        ensure!(vector["kek"] == first["kek"] && vector["id"] == "1");
        let text = |name: &str| vector[name].as_str().context("text");
        let provider = server.provider(server.options());
        let outcome = provider.ask(text("key")?, text("context")?, unwrap(&vector["wrapped"]))?;
        let unwrapped = &outcome["unwrapped"];
        ensure!(unwrapped["plaintext"] == vector["plaintext"], "{vector} {outcome}");
        ensure!(unwrapped["key_version"] == vector["key_version"], "{outcome}");
    }
    Ok(())
}

/// Without any additions. It does not know the attribute Extractable.
fn as_it_is() -> Result<()> {
    let server = PyKmip::bare()?;
    server.administer(json!(["make", "db-kek"]))?;
    let failure =
        server.provider(server.options()).refused("db-kek", CONTEXT, wrap(), "insecure")?;
    says(&failure, "allow_extractable")?;
    let mut options = server.options();
    options["allow_extractable"] = json!(true);
    for version in ["1.4", "2.0"] {
        options["version"] = json!(version);
        let provider = server.provider(options.clone());
        let outcome = provider.ask("db-kek", "", json!("check"))?;
        ensure!(findings(&outcome)?.iter().all(|(_, well)| *well), "{outcome}");
        let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
        ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
        provider.refused("db-kek", OTHER, unwrap(&wrapped), "wrong_ciphertext")?;
        let rotate = json!({"rotate": {"wrapped": wrapped}});
        let failure = provider.refused("db-kek", "", rotate, "denied")?;
        says(&failure, "set_cluster_master_key")?;
    }
    Ok(())
}
