//! The provider `pkcs11` with tokens in software (SoftHSM2).

mod contract;
mod keys;
mod login;
mod modules;
mod others;
mod server;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pagevault_tests::key_servers::helper::Provider;
use serde_json::{Value, json};

use crate::Test;

pub(crate) const CONTEXT: &str = "pagevault/1/00112233445566778899aabbccddeeff/0";
pub(crate) const OTHER: &str = "pagevault/1/00112233445566778899aabbccddeeff/5";
/// 32 recognizable bytes, in base64.
pub(crate) const SECRET: &str = "c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0ISEhISE=";

pub(crate) fn tests() -> Vec<Test> {
    [
        contract::tests(),
        keys::tests(),
        login::tests(),
        modules::tests(),
        server::tests(),
        others::tests(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

pub(crate) fn wrap() -> Value {
    json!({"wrap": {"plaintext": SECRET}})
}

pub(crate) fn unwrap(wrapped: &Value) -> Value {
    json!({"unwrap": {"wrapped": wrapped}})
}

/// Fails unless a failure's text contains `part`.
pub(crate) fn says(failure: &Value, part: &str) -> Result<()> {
    let text = failure.to_string();
    ensure!(text.contains(part), "it does not say {part:?}: {text}");
    Ok(())
}

/// The findings of `check`: what was expected, and whether it was so.
pub(crate) fn findings(outcome: &Value) -> Result<Vec<(String, bool)>> {
    let findings =
        outcome["checked"]["findings"].as_array().with_context(|| outcome.to_string())?;
    findings
        .iter()
        .map(|finding| {
            let what = finding["what"].as_str().context("what")?;
            Ok((what.to_owned(), finding["failure"].is_null()))
        })
        .collect()
}

/// The number of a process that a faulty module writes to a file.
pub(crate) fn written(file: &Path) -> Result<String> {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        match std::fs::read_to_string(file) {
            Ok(text) if !text.is_empty() => return Ok(text),
            _ if Instant::now() > end => bail!("the module wrote nothing"),
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// A wrapped key in every shortened form, with two changes of each byte, with more behind it, and
/// what is none.
pub(crate) fn damaged(wrapped: &[u8]) -> Vec<Vec<u8>> {
    let mut wrong: Vec<Vec<u8>> = (0..wrapped.len()).map(|n| wrapped[..n].to_vec()).collect();
    for (at, bit) in (0..wrapped.len()).flat_map(|at| [(at, 1), (at, 0x80)]) {
        let mut changed = wrapped.to_vec();
        changed[at] ^= bit;
        wrong.push(changed);
    }
    wrong.push([wrapped, &[0]].concat());
    wrong.push([wrapped, &[0; 100_000]].concat());
    wrong.extend([vec![0xff; 32], b"vault:v1:abcd".to_vec()]);
    wrong
}

/// Unwraps all of these in one request; each must be refused.
pub(crate) fn all_refused(provider: &Provider, wrapped: Vec<Vec<u8>>) -> Result<()> {
    let actions = wrapped.iter().map(|bytes| unwrap(&json!(STANDARD.encode(bytes)))).collect();
    for (outcome, bytes) in provider.ask_all("db-kek", CONTEXT, actions)?.iter().zip(&wrapped) {
        let class = outcome["failed"]["class"].as_str();
        // Another identifier is that of a key that the server or token does not have.
        let refused = matches!(class, Some("wrong_ciphertext" | "key_missing"));
        let begin = &bytes[..bytes.len().min(20)];
        ensure!(refused, "{} bytes, {begin:02x?}: {outcome}", bytes.len());
    }
    Ok(())
}
