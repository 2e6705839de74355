//! Mechanisms, versions of keys, and outages, as only tokens have them.

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::softhsm::{SoftHsm, TOKEN};
use serde_json::{Value, json};

use super::{CONTEXT, OTHER, SECRET, says, unwrap, wrap};
use crate::Test;

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, run| Test { name, needs: &[Server::SoftHsm], run };
    vec![
        test("pkcs11::a_one_time_key_is_wrapped_where_there_is_no_gcm", one_time_key),
        test("pkcs11::golden_files_can_be_unwrapped", golden),
        test("pkcs11::versions_that_other_tools_make_are_found", rotation),
        test("pkcs11::two_servers_may_rotate_at_once", two_rotations),
        test("pkcs11::a_key_that_is_gone_or_another_is_refused", gone_or_another),
        test("pkcs11::a_token_that_may_not_be_written_says_how_to_rotate", write_protected),
        test("pkcs11::an_outage_is_no_refusal", outage),
    ]
}

/// Makes a key that can never leave the token, with these attributes.
pub(crate) fn make(hsm: &SoftHsm, label: &str, id: &str, attributes: &[&str]) -> Result<()> {
    let mut arguments = vec!["make", label, id, "sensitive=true", "extractable=false"];
    for attribute in ["encrypt", "decrypt", "wrap", "unwrap"] {
        if !attributes.iter().any(|given| given.starts_with(&format!("{attribute}="))) {
            arguments.push(match attribute {
                "encrypt" => "encrypt=false",
                "decrypt" => "decrypt=false",
                "wrap" => "wrap=false",
                _ => "unwrap=false",
            });
        }
    }
    arguments.extend(attributes);
    hsm.object(TOKEN, &arguments)
}

fn one_time_key() -> Result<()> {
    let hsm = SoftHsm::start()?;
    make(&hsm, "kw", "01", &["wrap=true", "unwrap=true"])?;
    let provider = hsm.provider(hsm.options());
    let (wrapped, _) = provider.wrap("kw", CONTEXT, SECRET)?;
    let bytes = STANDARD.decode(wrapped.as_str().context("text")?)?;
    // docs/formats.md: method 2, an id of one byte, 40 bytes of AES-KW.
    ensure!(bytes[9..14] == [2, 1, 1, 0, 40], "{bytes:02x?}");
    ensure!(provider.unwrap("kw", CONTEXT, &wrapped)? == SECRET);
    provider.refused("kw", OTHER, unwrap(&wrapped), "wrong_ciphertext")?;
    let version = provider.rotate("kw", &wrapped)?;
    let (newer, newest) = provider.wrap("kw", CONTEXT, SECRET)?;
    ensure!(version == 2 && newest == 2);
    ensure!(STANDARD.decode(newer.as_str().context("text")?)?[9] == 2, "another method");
    ensure!(provider.unwrap("kw", CONTEXT, &wrapped)? == SECRET);
    // A key that may do both wraps by itself.
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(STANDARD.decode(wrapped.as_str().context("text")?)?[9] == 1);
    Ok(())
}

/// A file made by vectors/generate.py, another implementation of the same format.
fn golden() -> Result<()> {
    let vectors = include_str!("../../../../keyring/vectors/pkcs11_wrapped_1.json");
    let vectors: Vec<Value> = serde_json::from_str(vectors)?;
    ensure!(vectors.len() == 4);
    for vector in vectors {
        let text = |name: &str| vector[name].as_str().context("text");
        let hsm = SoftHsm::start()?;
        let value = format!("value={}", text("kek")?);
        let id = Some(text("id")?).filter(|id| !id.is_empty()).unwrap_or("none");
        let uses: &[&str] = match vector["method"].as_u64() {
            Some(1) => &["encrypt=true", "decrypt=true"],
            _ => &["wrap=true", "unwrap=true"],
        };
        make(&hsm, text("key")?, id, &[uses, &[&value]].concat())?;
        let provider = hsm.provider(hsm.options());
        let outcome = provider.ask(text("key")?, text("context")?, unwrap(&vector["wrapped"]))?;
        let unwrapped = &outcome["unwrapped"];
        ensure!(unwrapped["plaintext"] == vector["plaintext"], "{vector} {outcome}");
        ensure!(unwrapped["key_version"] == vector["key_version"], "{outcome}");
    }
    Ok(())
}

fn rotation() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let provider = hsm.provider(hsm.options());
    let (first, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(provider.rotate("db-kek", &first)? == 2);
    let (second, version) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(version == 2);
    let keys = hsm.with_token(&["--list-objects", "--type=secrkey"])?;
    ensure!(keys.matches("never extractable").count() == 2, "{keys}");
    // Made by other tools, with a higher number: the same call finds it.
    hsm.with_token(&["--keygen", "--key-type=AES:32", "--sensitive", "--label=db-kek", "--id=0a"])?;
    let (third, version) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(version == 10 && provider.rotate("db-kek", &second)? == 10);
    ensure!(provider.rotate("db-kek", &third)? == 11);
    ensure!(provider.unwrap("db-kek", CONTEXT, &first)? == SECRET);
    Ok(())
}

fn two_rotations() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let provider = hsm.provider(hsm.options());
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    // What two servers make that do not see each other's key: ids of the same number.
    for random in ["1111111111111111", "2222222222222222"] {
        let id = format!("0000000000000002{random}");
        make(&hsm, "db-kek", &id, &["encrypt=true", "decrypt=true"])?;
    }
    let (second, version) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    let (again, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(version == 2 && provider.rotate("db-kek", &wrapped)? == 2);
    let id = |wrapped: &Value| -> Result<Vec<u8>> {
        Ok(STANDARD.decode(wrapped.as_str().context("text")?)?[11..27].to_vec())
    };
    ensure!(id(&second)? == id(&again)?, "they do not agree on one of them");
    // At the same time.
    let made = std::thread::scope(|scope| {
        let rotate = || scope.spawn(|| provider.rotate("db-kek", &second));
        [rotate(), rotate(), rotate()].map(|one| one.join())
    });
    for version in made {
        let version = version.map_err(|_| anyhow::anyhow!("panic"))??;
        ensure!((3..=5).contains(&version), "{version}");
    }
    let (newest, version) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(version >= 3);
    for wrapped in [&wrapped, &second, &newest] {
        ensure!(provider.unwrap("db-kek", CONTEXT, wrapped)? == SECRET);
    }
    Ok(())
}

fn gone_or_another() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let provider = hsm.provider(hsm.options());
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(provider.rotate("db-kek", &wrapped)? == 2);
    // The version that wrapped it is gone, the other is not.
    hsm.object(TOKEN, &["drop", "db-kek", "01"])?;
    let failure = provider.refused("db-kek", CONTEXT, unwrap(&wrapped), "key_missing")?;
    says(&failure, "id 01")?;
    // Another key with the same name and id.
    hsm.make_key("db-kek")?;
    provider.refused("db-kek", CONTEXT, unwrap(&wrapped), "wrong_ciphertext")?;
    provider.refused("", CONTEXT, wrap(), "bad_request")?;

    // A key of the same name in another token.
    hsm.make_token("elsewhere")?;
    let mut other = hsm.options();
    other["token"] = json!("elsewhere");
    let other = hsm.provider(other);
    other.refused("db-kek", CONTEXT, unwrap(&wrapped), "key_missing")?;
    hsm.object("elsewhere", &["make", "db-kek", "01", "sensitive=true", "extractable=false"])?;
    other.refused("db-kek", CONTEXT, unwrap(&wrapped), "wrong_ciphertext")?;
    Ok(())
}

fn write_protected() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let (wrapped, _) = hsm.provider(hsm.options()).wrap("db-kek", CONTEXT, SECRET)?;
    let rotate = json!({"rotate": {"wrapped": wrapped}});
    // CKR_TOKEN_WRITE_PROTECTED, CKR_SESSION_READ_ONLY, CKR_TEMPLATE_INCONSISTENT.
    for fault in ["GenerateKey=e2", "GenerateKey=b5", "GenerateKey=d1"] {
        let provider = hsm.provider(hsm.faulty(&[("FAULT", fault)])?);
        let failure = provider.refused("db-kek", "", rotate.clone(), "denied")?;
        says(&failure, "--keygen --key-type AES:32 --sensitive --label 'db-kek' --id 00000002")?;
        ensure!(failure["retry"] == false, "{failure}");
    }
    Ok(())
}

fn outage() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let (wrapped, _) = hsm.provider(hsm.options()).wrap("db-kek", CONTEXT, SECRET)?;
    // CKR_GENERAL_ERROR, CKR_DEVICE_ERROR, CKR_DEVICE_REMOVED, CKR_ENCRYPTED_DATA_INVALID of a
    // vendor's own number: the key cannot even unwrap what it wraps.
    for fault in ["Decrypt=5", "Decrypt=30", "Decrypt=32", "Decrypt=80000040"] {
        let mut provider = hsm.provider(hsm.faulty(&[("FAULT", fault)])?);
        provider.deadline_ms = 1000;
        let failure = provider.refused("db-kek", CONTEXT, unwrap(&wrapped), "unreachable")?;
        ensure!(failure["retry"] == true, "{fault}: {failure}");
    }
    for fault in ["FindObjectsInit=5", "OpenSession=e0", "Initialize=30"] {
        let mut provider = hsm.provider(hsm.faulty(&[("FAULT", fault)])?);
        provider.deadline_ms = 1000;
        let failure = provider.refused("db-kek", CONTEXT, unwrap(&wrapped), "unreachable")?;
        ensure!(failure["retry"] == true, "{fault}: {failure}");
    }
    // It fails once, and then no more: that is no refusal either.
    let calls = hsm.path("calls");
    let path = calls.to_str().context("path")?;
    for fault in ["Decrypt=5", "DecryptInit=30"] {
        let _ = std::fs::remove_file(&calls);
        let faults = [("FAULT", fault), ("TIMES", "1"), ("CALLS", path)];
        let provider = hsm.provider(hsm.faulty(&faults)?);
        ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET, "{fault}");
        ensure!(std::fs::metadata(&calls)?.len() > 2, "the test proves nothing");
    }
    // The token is gone, and comes back during the request.
    std::fs::rename(hsm.path("tokens"), hsm.path("unplugged"))?;
    hsm.make_directory("tokens")?;
    let mut provider = hsm.provider(hsm.options());
    provider.deadline_ms = 1000;
    let failure = provider.refused("db-kek", CONTEXT, wrap(), "unreachable")?;
    says(&failure, "there is no token with label")?;
    provider.deadline_ms = 60_000;
    let unwrapped = std::thread::scope(|scope| -> Result<String> {
        let asking = scope.spawn(|| provider.unwrap("db-kek", CONTEXT, &wrapped));
        std::fs::remove_dir(hsm.path("tokens"))?;
        std::fs::rename(hsm.path("unplugged"), hsm.path("tokens"))?;
        asking.join().map_err(|_| anyhow::anyhow!("panic"))?
    })?;
    ensure!(unwrapped == SECRET);
    Ok(())
}
