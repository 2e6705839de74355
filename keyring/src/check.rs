//! Tests a provider and a key in the way the server uses them: for `pagevault-keyring check` and
//! `pagevault.check_provider()`.

use pagevault_cipher::Secret32;
use pagevault_keystore::protocol::{ErrorClass, Finding};

use crate::failure::Failure;
use crate::findings::Findings;
use crate::provider::Provider;

/// Context of the test secrets; no keystore has it.
const CONTEXT: &str = "pagevault/1/check/0";
const OTHER_CONTEXT: &str = "pagevault/1/check/1";

/// Examines the provider and, if there is a `key`, uses it. Ends with the first failure.
pub fn check(provider: &dyn Provider, key: Option<&str>) -> Vec<Finding> {
    let mut findings = Findings::default();
    if provider.examine(&mut findings).is_some()
        && let Some(key) = key
    {
        // A failure is the last finding.
        let _ = use_key(provider, key, &mut findings);
    }
    findings.into_vec()
}

fn use_key(provider: &dyn Provider, key: &str, findings: &mut Findings) -> Option<()> {
    findings.note("the key exists", provider.describe(key), |info| {
        let oldest = info.oldest_version.map(|n| format!(", unwraps versions from {n} on"));
        format!(
            "wraps with version {}{}; {}",
            info.key_version,
            oldest.unwrap_or_default(),
            info.summary
        )
    })?;
    let wrapped = findings.note("the key wraps and unwraps", round_trip(provider, key), |_| {
        "a test key was wrapped and unwrapped".to_owned()
    })?;
    let refused = match provider.unwrap(key, OTHER_CONTEXT, &wrapped) {
        Err(error) if error.class == ErrorClass::WrongCiphertext => Ok(()),
        Err(error) => Err(error),
        Ok(_) => Err(Failure::new(
            ErrorClass::Insecure,
            "a key wrapped for one database can be unwrapped for another",
        )),
    };
    findings.note("wrapped keys are bound to their database", refused, |()| {
        "a test key cannot be unwrapped for another database".to_owned()
    })
}

/// Wraps a random key and unwraps it; returns it wrapped.
fn round_trip(provider: &dyn Provider, key: &str) -> Result<Vec<u8>, Failure> {
    let secret = Secret32::random()
        .map_err(|error| Failure::new(ErrorClass::Internal, error.to_string()))?;
    let wrapped = provider.wrap(key, CONTEXT, secret.expose())?.wrapped;
    let unwrapped = provider.unwrap(key, CONTEXT, &wrapped)?;
    if !secret.matches(&unwrapped.plaintext) {
        return Err(Failure::new(
            ErrorClass::Internal,
            "the unwrapped key differs from the one that was wrapped",
        ));
    }
    Ok(wrapped)
}
