//! Keys in every state, keys of other kinds, and keys that are not ours.

use anyhow::{Result, ensure};
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::pykmip::PyKmip;
use serde_json::json;

use crate::Test;
use crate::pkcs11::{CONTEXT, SECRET, says, unwrap, wrap};

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, run| Test { name, needs: &[Server::PyKmip], run };
    vec![
        test("kmip::a_key_is_used_only_while_it_is_active", states),
        test("kmip::a_key_that_is_gone_or_another_is_refused", gone_or_another),
        test("kmip::a_key_that_can_leave_the_server_is_refused_with_the_reason", raw),
        test("kmip::keys_of_other_kinds_are_refused", other_kinds),
        test("kmip::keys_that_share_a_name_are_told_apart", same_name),
        test("kmip::answers_about_another_key_are_no_answers", other_key),
    ]
}

fn states() -> Result<()> {
    let server = PyKmip::start()?;
    let provider = server.provider(server.options());
    let (id, name) = (server.administer(json!(["make", "new", false, false]))?, "new");
    let failure = provider.refused(name, CONTEXT, wrap(), "key_disabled")?;
    says(&failure, "Pre-Active")?;
    server.administer(json!(["activate", id]))?;
    let (wrapped, _) = provider.wrap(name, CONTEXT, SECRET)?;
    // PyKMIP refuses, with Permission Denied, what the standard permits: to decrypt with them.
    for (reason, state) in
        [("CESSATION_OF_OPERATION", "Deactivated"), ("KEY_COMPROMISE", "Compromised")]
    {
        server.administer(json!(["revoke", id, reason]))?;
        for action in [wrap(), unwrap(&wrapped)] {
            let failure = provider.refused(name, CONTEXT, action, "key_disabled")?;
            says(&failure, state)?;
            ensure!(failure["retry"] == false, "{failure}");
        }
    }
    server.administer(json!(["destroy", id]))?;
    for action in [wrap(), unwrap(&wrapped)] {
        provider.refused(name, CONTEXT, action, "key_missing")?;
    }
    Ok(())
}

fn gone_or_another() -> Result<()> {
    let server = PyKmip::start()?;
    let provider = server.provider(server.options());
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    let calls = [json!(["revoke", "1", "CESSATION_OF_OPERATION"]), json!(["destroy", "1"])];
    server.administer_all(&calls)?;
    let rotate = json!({"rotate": {"wrapped": wrapped}});
    for action in [unwrap(&wrapped), rotate, wrap()] {
        provider.refused("db-kek", CONTEXT, action, "key_missing")?;
    }
    // A key with the same name is another one.
    server.make_key("db-kek")?;
    let failure = provider.refused("db-kek", CONTEXT, unwrap(&wrapped), "key_missing")?;
    says(&failure, "unique identifier 1")?;
    let (newer, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(provider.unwrap("db-kek", CONTEXT, &newer)? == SECRET);
    // Another server has keys with the same identifiers.
    let elsewhere = PyKmip::start()?;
    let other = elsewhere.provider(elsewhere.options());
    other.refused("db-kek", CONTEXT, unwrap(&wrapped), "wrong_ciphertext")?;
    ensure!(other.wrap("db-kek", CONTEXT, SECRET).is_ok());
    Ok(())
}

/// A key as Percona's pg_tde makes it: outside, registered, and fetched for use.
fn raw() -> Result<()> {
    let server = PyKmip::start()?;
    let value = "2a".repeat(32);
    let id = server.administer(json!(["register", "pg_tde-principal", value]))?;
    let provider = server.provider(server.options());
    let failure = provider.refused("pg_tde-principal", CONTEXT, wrap(), "insecure")?;
    says(&failure, "Master keys never leave")?;
    says(&failure, "Extractable is true")?;
    // It is still there for pg_tde.
    ensure!(server.administer(json!(["get", id]))? == value);
    let mut options = server.options();
    options["allow_extractable"] = json!(true);
    let (wrapped, _) = server.provider(options).wrap("pg_tde-principal", CONTEXT, SECRET)?;
    // What it has wrapped can be moved away.
    let (moved, _) = provider.rewrap("pg_tde-principal", "db-kek", CONTEXT, &wrapped)?;
    ensure!(provider.unwrap("db-kek", CONTEXT, &moved)? == SECRET);
    // The key of the other tests cannot be fetched.
    ensure!(server.administer(json!(["get", "1"])).is_err());
    let log = server.log()?;
    ensure!(log.matches("Processing operation: Get\n").count() == 1, "a key was fetched");
    Ok(())
}

fn other_kinds() -> Result<()> {
    let server = PyKmip::start()?;
    let provider = server.provider(server.options());
    let both = ["ENCRYPT", "DECRYPT"];
    server.administer_all(&[
        json!(["make", "short", false, true, 128, both]),
        json!(["make", "encrypts", false, true, 256, ["ENCRYPT"]]),
        json!(["make", "decrypts", false, true, 256, ["DECRYPT"]]),
        json!(["make", "triple", false, true, 192, both, "TRIPLE_DES"]),
    ])?;
    let (wrapped, _) = provider.wrap("short", CONTEXT, SECRET)?;
    ensure!(provider.unwrap("short", CONTEXT, &wrapped)? == SECRET);
    for name in ["encrypts", "decrypts"] {
        let failure = provider.refused(name, CONTEXT, wrap(), "key_disabled")?;
        says(&failure, "Cryptographic Usage Mask")?;
    }
    let failure = provider.refused("triple", CONTEXT, wrap(), "bad_options")?;
    says(&failure, "AES")
}

fn same_name() -> Result<()> {
    let server = PyKmip::start()?;
    let provider = server.provider(server.options());
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    // PyKMIP's names are not unique. This one is not linked with the first.
    server.make_key("db-kek")?;
    for action in [wrap(), json!({"rotate": {"wrapped": wrapped}})] {
        let failure = provider.refused("db-kek", CONTEXT, action, "bad_options")?;
        says(&failure, "unique identifiers are 1, 2")?;
    }
    ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    let (by_id, _) = provider.wrap("id:1", CONTEXT, SECRET)?;
    ensure!(provider.unwrap("id:1", CONTEXT, &by_id)? == SECRET);
    provider.refused("db-kek", CONTEXT, unwrap(&by_id), "wrong_ciphertext")?;
    let (moved, _) = provider.rewrap("db-kek", "id:1", CONTEXT, &wrapped)?;
    ensure!(provider.unwrap("id:1", CONTEXT, &moved)? == SECRET);
    // A key that this client may not see does not count.
    server.also(&json!({"denied": ["2"]}))?;
    let (own, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(provider.unwrap("id:1", CONTEXT, &moved)? == SECRET);
    ensure!(provider.unwrap("db-kek", CONTEXT, &own)? == SECRET);
    server.also(&json!({"denied": ["1", "2"]}))?;
    provider.refused("db-kek", CONTEXT, wrap(), "denied")?;
    Ok(())
}

fn other_key() -> Result<()> {
    let server = PyKmip::start()?;
    let mut provider = server.provider(server.options());
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    server.also(&json!({"other_key": true}))?;
    provider.deadline_ms = 3000;
    let failure = provider.refused("db-kek", CONTEXT, unwrap(&wrapped), "unreachable")?;
    says(&failure, "another key")
}
