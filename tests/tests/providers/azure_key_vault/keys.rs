//! Types, states and versions of keys.

use anyhow::{Result, ensure};
use pagevault_tests::key_servers::azure::KeyVault;
use serde_json::json;

use crate::Test;
use crate::contract::{CONTEXT, KEY, NEXT, SECRET, bytes, rotate, says, unwrap, wrap};

pub(super) const TESTS: &[Test] = &[
    Test { name: "azure_key_vault::requests_name_the_version", needs: &[], run: requests },
    Test { name: "azure_key_vault::types_and_operations_are_required", needs: &[], run: types },
    Test { name: "azure_key_vault::a_disabled_key_does_not_wrap", needs: &[], run: disabled },
    Test { name: "azure_key_vault::an_expired_key_still_unwraps", needs: &[], run: expired },
    Test { name: "azure_key_vault::a_deleted_key_can_be_recovered", needs: &[], run: recovered },
    Test { name: "azure_key_vault::a_rotation_elsewhere_is_followed", needs: &[], run: elsewhere },
    Test { name: "azure_key_vault::names_are_not_case_sensitive", needs: &[], run: names },
];

fn requests() -> Result<()> {
    for (kty, method, alg) in [("RSA", 4, "RSA-OAEP-256"), ("oct-HSM", 2, "A256KW")] {
        let vault = KeyVault::start(kty)?;
        let provider = vault.provider(vault.options());
        let (wrapped, version) = provider.wrap(KEY, CONTEXT, SECRET)?;
        ensure!(version > 20_260_101_000_000, "{version} is no time");
        // docs/formats.md: method, length of the version's name, the name.
        let stored = bytes(&wrapped)?;
        ensure!(stored[9..11] == [method, 32], "{stored:02x?}");
        let name = std::str::from_utf8(&stored[11..43])?.to_owned();
        let seen = vault.server.seen();
        let paths: Vec<&str> = seen.iter().map(|asked| asked.path.as_str()).collect();
        let wrapkey = format!("/keys/{KEY}/{name}/wrapkey?api-version=7.4");
        let get = format!("/keys/{KEY}?api-version=7.4");
        ensure!(paths[1..] == [get.as_str(), &wrapkey], "{paths:?}");
        // A one-time key, and not the secret itself.
        let body = seen[2].json();
        ensure!(body["alg"] == alg && body["value"].as_str().map(str::len) == Some(43), "{body}");
        provider.unwrap(KEY, CONTEXT, &wrapped)?;
        let paths = vault.server.paths();
        let unwrapkey = format!("POST /keys/{KEY}/{name}/unwrapkey?api-version=7.4");
        ensure!(paths.len() == 2 && paths[1] == unwrapkey, "{paths:?}");
    }
    Ok(())
}

fn types() -> Result<()> {
    let vault = KeyVault::start("RSA-HSM")?;
    let provider = vault.provider(vault.options());
    provider.wrap(KEY, CONTEXT, SECRET)?;
    vault.make_key("curve", "EC")?;
    let failure = provider.refused("curve", CONTEXT, wrap(), "bad_options")?;
    says(&failure, "Its type is EC")?;
    for operations in [vec!["wrapKey"], vec!["unwrapKey", "sign"], vec![]] {
        vault.with_key(NEXT, |key| key.set_operations(operations.clone()))?;
        let failure = provider.refused(NEXT, CONTEXT, wrap(), "key_disabled")?;
        says(&failure, "permitted operations lack")?;
    }
    Ok(())
}

/// The service itself lets it.
fn disabled() -> Result<()> {
    let vault = KeyVault::start("RSA")?;
    let provider = vault.provider(vault.options());
    provider.wrap(KEY, CONTEXT, SECRET)?;
    vault.with_key(KEY, |key| key.set_enabled(0, false))?;
    let _ = vault.server.seen();
    let failure = provider.refused(KEY, CONTEXT, wrap(), "key_disabled")?;
    says(&failure, "is disabled")?;
    ensure!(!vault.server.paths().iter().any(|path| path.contains("wrapkey")));
    // A newer version is enabled: it wraps, and the former is still refused.
    vault.add_version(KEY)?;
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    ensure!(provider.unwrap(KEY, CONTEXT, &wrapped)? == SECRET);
    Ok(())
}

fn expired() -> Result<()> {
    let vault = KeyVault::start("RSA")?;
    let provider = vault.provider(vault.options());
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    vault.with_key(KEY, |key| key.set_expires(Some(1_700_000_000)))?;
    let failure = provider.refused(KEY, CONTEXT, wrap(), "key_disabled")?;
    says(&failure, "expired")?;
    ensure!(provider.unwrap(KEY, CONTEXT, &wrapped)? == SECRET);
    vault.with_key(KEY, |key| key.set_expires(Some(4_102_444_800)))?;
    provider.wrap(KEY, CONTEXT, SECRET)?;
    let response = provider.ask(KEY, CONTEXT, json!("check"))?.to_string();
    ensure!(response.contains("wraps until 2100-01-01T00:00:00Z"), "{response}");
    Ok(())
}

fn recovered() -> Result<()> {
    let vault = KeyVault::start("RSA")?;
    let provider = vault.provider(vault.options());
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    vault.with_key(KEY, |key| key.is_deleted = true)?;
    for action in [wrap(), unwrap(&wrapped), rotate(&wrapped)] {
        let failure = provider.refused(KEY, CONTEXT, action, "key_disabled")?;
        says(&failure, "It can be recovered until 2027-01-01T00:00:00Z")?;
    }
    vault.with_key(KEY, |key| key.is_deleted = false)?;
    ensure!(provider.unwrap(KEY, CONTEXT, &wrapped)? == SECRET);
    // Another key of the same name.
    vault.purge(KEY);
    vault.make_key(KEY, "RSA")?;
    provider.refused(KEY, CONTEXT, unwrap(&wrapped), "key_missing")?;
    let version = provider.rotate(KEY, &wrapped)?;
    let (_, used) = provider.wrap(KEY, CONTEXT, SECRET)?;
    ensure!(version == used && vault.with_key(KEY, |key| key.count())? == 1);
    Ok(())
}

fn elsewhere() -> Result<()> {
    let vault = KeyVault::start("RSA")?;
    let provider = vault.provider(vault.options());
    let (wrapped, old) = provider.wrap(KEY, CONTEXT, SECRET)?;
    vault.add_version(KEY)?;
    let new = provider.rotate(KEY, &wrapped)?;
    ensure!(new > old && vault.with_key(KEY, |key| key.count())? == 2, "it was rotated again");
    let (again, version) = provider.rewrap(KEY, KEY, CONTEXT, &wrapped)?;
    ensure!(version == new);
    vault.with_key(KEY, |key| key.set_enabled(0, false))?;
    ensure!(provider.unwrap(KEY, CONTEXT, &again)? == SECRET);
    let failure = provider.refused(KEY, CONTEXT, unwrap(&wrapped), "key_disabled")?;
    says(&failure, "KeyDisabled")?;
    // Lists have several pages.
    for _ in 0..4 {
        vault.add_version(KEY)?;
    }
    vault.with_key(KEY, |key| key.set_enabled(0, true))?;
    let response = provider.ask(KEY, CONTEXT, json!("check"))?.to_string();
    ensure!(response.contains(&format!("unwraps versions from {old} on")), "{response}");
    Ok(())
}

fn names() -> Result<()> {
    let vault = KeyVault::start("RSA")?;
    let provider = vault.provider(vault.options());
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    // The service knows one key by both names.
    let upper = KEY.to_ascii_uppercase();
    vault.server.rename(|path| path.replace("/DB-KEK", "/db-kek"));
    ensure!(provider.unwrap(&upper, CONTEXT, &wrapped)? == SECRET);
    let (wrapped, _) = provider.wrap(&upper, CONTEXT, SECRET)?;
    ensure!(provider.unwrap(KEY, CONTEXT, &wrapped)? == SECRET);
    Ok(())
}
