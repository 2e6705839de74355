//! New versions of keys: by Re-key, and by Create and a link.

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::pykmip::PyKmip;
use serde_json::{Value, json};

use crate::Test;
use crate::pkcs11::{CONTEXT, SECRET, says};

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, run| Test { name, needs: &[Server::PyKmip], run };
    vec![
        test("kmip::rotation_adds_a_version_and_old_ones_unwrap", re_key),
        test("kmip::without_re_key_new_versions_are_linked", linked),
        test("kmip::a_key_that_was_replaced_at_the_server_is_adopted", adopted),
        test("kmip::two_servers_may_rotate_at_once", at_once),
        test("kmip::an_interrupted_rotation_is_completed_by_the_next", interrupted),
    ]
}

/// The identifier of the key that wrapped, which has one digit.
fn id(wrapped: &Value) -> Result<char> {
    Ok(STANDARD.decode(wrapped.as_str().context("text")?)?[11].into())
}

fn re_key() -> Result<()> {
    let server = PyKmip::start()?;
    let mut all = Vec::new();
    for version in ["1.4", "2.0", "1.4"] {
        let mut options = server.options();
        options["version"] = json!(version);
        let provider = server.provider(options);
        let (wrapped, old) = provider.wrap("db-kek", CONTEXT, SECRET)?;
        let new = provider.rotate("db-kek", &wrapped)?;
        ensure!(new > old, "{new}");
        // It has a newer version: nothing is made.
        ensure!(provider.rotate("db-kek", &wrapped)? == new);
        all.push(wrapped);
    }
    let provider = server.provider(server.options());
    let (newest, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    all.push(newest);
    let ids: Vec<char> = all.iter().map(id).collect::<Result<_>>()?;
    ensure!(ids == ['1', '2', '3', '4'], "{ids:?}");
    for wrapped in &all {
        ensure!(provider.unwrap("db-kek", CONTEXT, wrapped)? == SECRET);
    }
    Ok(())
}

fn linked() -> Result<()> {
    let server = PyKmip::start()?;
    for (name, version) in [("id:1", "1.4"), ("db-kek", "2.0"), ("id:1", "2.0")] {
        server.behave(&json!({"extractable": true, "links": true}))?;
        let mut options = server.options();
        options["version"] = json!(version);
        let provider = server.provider(options.clone());
        let (wrapped, old) = provider.wrap(name, CONTEXT, SECRET)?;
        let new = provider.rotate(name, &wrapped)?;
        ensure!(new > old && provider.rotate(name, &wrapped)? == new, "{new}");
        let (newer, version) = provider.wrap(name, CONTEXT, SECRET)?;
        ensure!(version == new && id(&newer)? > id(&wrapped)?);
        for wrapped in [&wrapped, &newer] {
            ensure!(provider.unwrap(name, CONTEXT, wrapped)? == SECRET);
        }
        // The new key cannot leave the server either.
        ensure!(server.administer(json!(["get", id(&newer)?.to_string()])).is_err());
    }
    // Where the client may not add links, it does not begin.
    server.behave(&json!({"extractable": true, "links": true, "without": ["AddAttribute"]}))?;
    let provider = server.provider(server.options());
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    let rotate = json!({"rotate": {"wrapped": wrapped}});
    let failure = provider.refused("db-kek", "", rotate, "denied")?;
    says(&failure, "Re-key")
}

fn adopted() -> Result<()> {
    let server = PyKmip::start()?;
    let provider = server.provider(server.options());
    let (first, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    let second = provider.rotate("db-kek", &first)?;
    // By its identifier, the old key leads to the new one.
    let (by_id, version) = provider.wrap("id:1", CONTEXT, SECRET)?;
    ensure!(version == second && id(&by_id)? == '2');
    ensure!(provider.rotate("id:1", &first)? == second);
    // The new version is revoked: neither it nor the old one wraps, and rotation makes another.
    server.administer(json!(["revoke", "2", "KEY_COMPROMISE"]))?;
    for name in ["db-kek", "id:1"] {
        let wrap = json!({"wrap": {"plaintext": SECRET}});
        let failure = provider.refused(name, CONTEXT, wrap, "key_disabled")?;
        says(&failure, "Compromised")?;
    }
    ensure!(provider.unwrap("db-kek", CONTEXT, &first)? == SECRET);
    let third = provider.rotate("db-kek", &first)?;
    let (newest, version) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(third > second && version == third && id(&newest)? == '3');
    Ok(())
}

fn at_once() -> Result<()> {
    let server = PyKmip::start()?;
    let mut provider = server.provider(server.options());
    provider.deadline_ms = 60_000;
    let (first, old) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    let made = std::thread::scope(|scope| {
        let rotate = || scope.spawn(|| provider.rotate("id:1", &first));
        [rotate(), rotate(), rotate()].map(|one| one.join())
    });
    for version in made {
        let version = version.map_err(|_| anyhow::anyhow!("panic"))??;
        ensure!(version > old, "{version}");
    }
    let (second, _) = provider.wrap("id:1", CONTEXT, SECRET)?;
    let (again, _) = provider.wrap("id:1", CONTEXT, SECRET)?;
    ensure!(id(&second)? == id(&again)?, "they do not agree on one of them");
    Ok(())
}

fn interrupted() -> Result<()> {
    let server = PyKmip::start()?;
    let mut provider = server.provider(server.options());
    provider.deadline_ms = 6000;
    let (first, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    // General Failure, until the deadline.
    server.also(&json!({"pre_active": true, "refuse": {"Activate": [256, 1000]}}))?;
    let rotate = json!({"rotate": {"wrapped": first}});
    provider.refused("db-kek", "", rotate, "unreachable")?;
    ensure!(provider.unwrap("db-kek", CONTEXT, &first)? == SECRET);
    server.also(&json!({"pre_active": true}))?;
    provider.deadline_ms = 60_000;
    provider.rotate("db-kek", &first)?;
    let (second, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(id(&second)? == '2', "it made another key");
    // With links: a key that is not linked is no version.
    server.behave(&json!({"extractable": true, "links": true,
        "refuse": {"AddAttribute": [12, 1]}}))?;
    let rotate = json!({"rotate": {"wrapped": second}});
    provider.refused("db-kek", "", rotate, "denied")?;
    let (still, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(id(&still)? == '2');
    provider.rotate("db-kek", &second)?;
    let (newest, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(id(&newest)? == '4');
    Ok(())
}
