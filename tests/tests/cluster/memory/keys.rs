//! All keys of a cluster, unwrapped with an escrow bundle and the key files, as an operator could
//! do.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Command;

use age::x25519::Identity;
use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pagevault_cipher::wrap::{self, WrapKey};
use pagevault_keystore::{KeyVersion, Record, Scope, data_key_aad, log};
use pagevault_tests::installation::run;
use pagevault_tests::memory::Pieces;
use pagevault_tests::{Cluster, Installation};

/// Adds all current keys of the cluster.
pub(super) fn add_keys(cluster: &Cluster, pieces: &mut Pieces) -> Result<()> {
    let keys = database_keys(cluster)?;
    for (scope, version, key) in &keys {
        let name = format!("database key {scope}/{version}");
        pieces.add(&name, key);
        pieces.add(&format!("{name} in base64"), STANDARD.encode(key).as_bytes());
        // Intermediate values of HMAC, and so of HKDF (RFC 2104).
        pieces.add(&format!("{name} ^ ipad"), &key.map(|byte| byte ^ 0x36));
        pieces.add(&format!("{name} ^ opad"), &key.map(|byte| byte ^ 0x5c));
    }
    let wrapping = |scope: Scope, version: KeyVersion| {
        let key = (scope.number(), version.get());
        let found = keys.iter().find(|(s, v, _)| (*s, *v) == key);
        found.map(|(_, _, key)| WrapKey::new(key)).context("a database key is missing")
    };
    let directory = cluster.data_directory().join("pagevault");
    let mut data_keys = 0;
    for entry in fs::read_dir(&directory)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some(home) = log::scope_of(&name) else { continue };
        for record in log::replay(&fs::read(&path)?, home)?.records {
            let Record::DataKey { file, version, cipher, scope, key_version, wrapped, .. } = record
            else {
                continue;
            };
            let mut key = vec![0; wrapped.len() - wrap::OVERHEAD];
            let aad = data_key_aad(file, version, cipher);
            wrap::unwrap(&wrapping(scope, key_version)?, &aad, &wrapped, &mut key)?;
            pieces.add(&format!("data key of {file}, version {version}"), &key);
            data_keys += 1;
        }
    }
    ensure!(data_keys > 0, "no data key is known");
    Ok(())
}

/// The helper that makes bundles: beside a server for FIPS the ordinary one (tools/test-fips).
fn exporting(cluster: &Cluster) -> Result<Command> {
    let Some(pg_config) = std::env::var_os("PAGEVAULT_ORDINARY_PG_CONFIG") else {
        return Ok(cluster.program("pagevault-keyring"));
    };
    Ok(Installation::of_pg_config(Path::new(&pg_config))?.command("pagevault-keyring"))
}

/// Scope, version and key.
fn database_keys(cluster: &Cluster) -> Result<Vec<(u32, u32, [u8; 32])>> {
    let identity = Identity::generate();
    let bundle = cluster.directory().join("all.keys");
    let _ = fs::remove_file(&bundle);
    let mut export = exporting(cluster)?;
    export.args(["escrow", "export"]).arg(cluster.data_directory()).arg("--output").arg(&bundle);
    run(export.args(["--recipient", &identity.to_public().to_string()]))?;
    let decryptor = age::Decryptor::new(fs::File::open(&bundle)?)?;
    let mut text = String::new();
    decryptor.decrypt([&identity as &dyn age::Identity].into_iter())?.read_to_string(&mut text)?;
    let bundle: serde_json::Value = serde_json::from_str(&text)?;
    let keys = bundle["keys"].as_array().context("keys")?.iter().map(|key| {
        let number =
            |name: &str| -> Result<u32> { Ok(key[name].as_u64().context("a number")?.try_into()?) };
        let bytes = STANDARD.decode(key["key"].as_str().context("a text")?)?;
        let bytes = bytes.try_into().ok().context("a key of 32 bytes")?;
        Ok((number("scope")?, number("version")?, bytes))
    });
    keys.collect()
}
