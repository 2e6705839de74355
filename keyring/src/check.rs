//! Trying out a provider and a key as the server uses them: behind `pagevault-keyring check` and
//! `pagevault.check_provider()`.

use pagevault_cipher::Secret32;
use pagevault_keystore::protocol::ErrorClass;

use crate::provider::{Finding, Provider, ProviderError};

/// What test secrets are bound to; no keystore has this context.
const CONTEXT: &str = "pagevault/1/check/0";
const OTHER_CONTEXT: &str = "pagevault/1/check/1";

/// Looks at everything around the provider and, if there is a `key`, uses it. Ends with the first
/// failure.
pub fn check(provider: &dyn Provider, key: Option<&str>) -> Vec<Finding> {
    let mut findings = provider.examine();
    if let Some(key) = key
        && findings.iter().all(|finding| finding.result.is_ok())
    {
        // What went wrong is the last finding.
        let _ = use_key(provider, key, &mut findings);
    }
    findings
}

fn use_key(provider: &dyn Provider, key: &str, findings: &mut Vec<Finding>) -> Result<(), ()> {
    let mut note = |what: &str, result: Result<String, ProviderError>| {
        let ended = result.as_ref().map(drop).map_err(drop);
        findings.push(Finding { what: what.to_owned(), result });
        ended
    };
    let described = provider.describe(key).map(|info| {
        format!(
            "version {} wraps, versions from {} on unwrap; {}",
            info.key_version, info.oldest_version, info.summary
        )
    });
    note("the key is there", described)?;

    let tried = round_trip(provider, key);
    let told = tried.as_ref().map(|_| "a test key came back unharmed".to_owned());
    note("the key wraps and unwraps", told.map_err(Clone::clone))?;
    let wrapped = tried.map_err(drop)?;

    let bound = match provider.unwrap(key, OTHER_CONTEXT, &wrapped) {
        Err(error) if error.class == ErrorClass::WrongCiphertext => {
            Ok("a test key does not open for another database".to_owned())
        }
        Err(error) => Err(error),
        Ok(_) => Err(ProviderError::new(
            ErrorClass::Insecure,
            "a key wrapped for one database opens for another",
        )),
    };
    note("wrapped keys are bound to their database", bound)
}

/// Wraps a random key, unwraps it, and returns it wrapped.
fn round_trip(provider: &dyn Provider, key: &str) -> Result<Vec<u8>, ProviderError> {
    let secret = Secret32::random()
        .map_err(|error| ProviderError::new(ErrorClass::Internal, error.to_string()))?;
    let wrapped = provider.wrap(key, CONTEXT, secret.expose())?.wrapped;
    let unwrapped = provider.unwrap(key, CONTEXT, &wrapped)?;
    if unwrapped.plaintext.as_slice() != secret.expose() {
        return Err(ProviderError::new(
            ErrorClass::Internal,
            "the key that came back is not the one that was wrapped",
        ));
    }
    Ok(wrapped)
}
