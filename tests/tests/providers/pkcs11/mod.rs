//! The provider `pkcs11` with tokens in software (SoftHSM2).

mod keys;
mod login;
mod modules;
mod others;
mod server;
mod wrapping;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

pub(crate) use self::wrapping::make;
use crate::Test;

pub(crate) const CONTEXT: &str = "pagevault/1/00112233445566778899aabbccddeeff/0";
pub(crate) const OTHER: &str = "pagevault/1/00112233445566778899aabbccddeeff/5";
/// 32 recognizable bytes, in base64.
pub(crate) const SECRET: &str = "c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0ISEhISE=";

pub(crate) fn tests() -> Vec<Test> {
    [
        wrapping::tests(),
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
