//! The meaning of Key Vault's errors
//! (<https://learn.microsoft.com/azure/key-vault/general/rest-error-codes>).
//!
//! A reply of another form, or with a code that does not belong to its HTTP status, says nothing
//! about the key: a proxy or load balancer may have sent it. It counts as an outage. So does a
//! refusal by the vault's network rules.

use pagevault_keystore::protocol::ErrorClass;
use serde::Deserialize;

use crate::failure::Failure;
use crate::options::printable;
use crate::rest::{Reply, Service};

/// What a request needs, for messages.
#[derive(Clone, Copy)]
pub(super) struct Need<'a> {
    /// The operation, which is also the name of the permission.
    pub(super) operation: &'a str,
    /// The key, as in paths of requests.
    pub(super) key: &'a str,
}

#[derive(Deserialize)]
struct Body {
    error: Error,
}

#[derive(Deserialize)]
struct Error {
    code: String,
    #[serde(default)]
    message: String,
    #[serde(alias = "innerError")]
    innererror: Option<Inner>,
}

#[derive(Deserialize)]
struct Inner {
    code: Option<String>,
}

/// What a refusal means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meaning {
    Unauthenticated,
    Denied,
    Missing,
    Disabled,
    Foreign,
    Outage,
    Invalid,
}

/// Codes of the vault's network rules.
const NETWORK: [&str; 2] = ["ForbiddenByFirewall", "ForbiddenByConnection"];

/// Whether there is no such key or version.
pub(super) fn is_missing(error: &Failure) -> bool {
    error.class == ErrorClass::KeyMissing
}

/// Whether the credentials lack a permission.
pub(super) fn is_denial(error: &Failure) -> bool {
    error.class == ErrorClass::Denied
}

/// The failure for a reply that is not a success.
pub(super) fn of(reply: &Reply, service: &Service, need: Need<'_>) -> Failure {
    let status = reply.status;
    if status == 429 {
        return service.throttled("It answered with HTTP status 429.".to_owned());
    }
    let Some(Body { error }) = reply.parse::<Body>() else { return service.foreign(status) };
    if status >= 500 {
        return service.unavailable(detail(&error));
    }
    match meaning(status, &error, need.operation) {
        Some(meaning) => failure(meaning, &error, service, need),
        None => service.foreign(status),
    }
}

fn meaning(status: u16, error: &Error, operation: &str) -> Option<Meaning> {
    let inner = error.innererror.as_ref().and_then(|inner| inner.code.as_deref());
    let inner = inner.unwrap_or_default();
    let said = |text: &str| error.message.contains(text);
    Some(match (status, error.code.as_str()) {
        (401, "Unauthorized") => Meaning::Unauthenticated,
        (403, "Forbidden") if NETWORK.contains(&inner) => Meaning::Outage,
        (403, "Forbidden")
            if inner.starts_with("Key")
                || said("disabled key")
                || said("expired key")
                || said("not yet valid key") =>
        {
            Meaning::Disabled
        }
        (403, "Forbidden" | "AccessDenied") => Meaning::Denied,
        (404, "KeyNotFound") => Meaning::Missing,
        // What is sent was checked, and is what a wrap has returned: it was damaged since, or is of
        // another key.
        (400, "BadParameter") if operation == "unwrapKey" => Meaning::Foreign,
        (400, "BadParameter") => Meaning::Invalid,
        // The key is being deleted or restored.
        (409, "Conflict") => Meaning::Outage,
        _ => return None,
    })
}

fn failure(meaning: Meaning, error: &Error, service: &Service, need: Need<'_>) -> Failure {
    let (place, key) = (&service.place, printable(need.key));
    let detail = detail(error);
    let (class, message, hint) = match meaning {
        Meaning::Outage => return service.unavailable(detail),
        Meaning::Unauthenticated => (
            ErrorClass::Unauthenticated,
            format!("{place} does not accept the credentials"),
            "Check that the identity belongs to the tenant of the vault.".to_owned(),
        ),
        Meaning::Denied => (
            ErrorClass::Denied,
            format!("{place} does not allow {} with key {key}", need.operation),
            "Give the identity the role \"Key Vault Crypto Service Encryption User\" on the key: see docs/azure-key-vault.md, \"Permissions\".".to_owned(),
        ),
        Meaning::Missing => (
            ErrorClass::KeyMissing,
            format!("{place} has no key {key}"),
            "Check the option \"vault\" and the name of the key. A version that was purged cannot be restored.".to_owned(),
        ),
        Meaning::Disabled => (
            ErrorClass::KeyDisabled,
            format!("key {key} may not be used for {} at present", need.operation),
            "Check it: az keyvault key show. Then enable it, or change its expiry.".to_owned(),
        ),
        Meaning::Foreign => (
            ErrorClass::WrongCiphertext,
            format!("wrapped key cannot be unwrapped with key {key}"),
            "Check that the keystore is the one of this cluster. If it is damaged, restore it from a backup.".to_owned(),
        ),
        Meaning::Invalid => (
            ErrorClass::BadOptions,
            format!("{place} rejected {} with key {key} as invalid", need.operation),
            "Check the type and the size of the key, and what it permits.".to_owned(),
        ),
    };
    Failure::new(class, message).with_detail(detail).with_hint(hint)
}

fn detail(error: &Error) -> String {
    let inner = error.innererror.as_ref().and_then(|inner| inner.code.as_deref());
    let code = match inner {
        Some(inner) => format!("{} ({})", printable(&error.code), printable(inner)),
        None => printable(&error.code),
    };
    let said = printable(error.message.lines().next().unwrap_or_default());
    match said.trim_end_matches('.') {
        "" => format!("It answered {code}."),
        said => format!("It answered {code}. {said}."),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use zeroize::Zeroizing;

    use super::*;

    fn failed(status: u16, body: &Value, operation: &str) -> Failure {
        let body = Zeroizing::new(body.to_string().into_bytes());
        let reply = Reply { status, headers: reqwest::header::HeaderMap::new(), body };
        let service = Service { whose: "a Key Vault", place: "Key Vault".to_owned() };
        of(&reply, &service, Need { operation, key: "k" })
    }

    fn said(code: &str, message: &str, inner: &str) -> Value {
        json!({"error": {"code": code, "message": message, "innererror": {"code": inner}}})
    }

    #[test]
    fn each_error_has_its_class() {
        use ErrorClass::*;
        for (status, code, message, inner, class, retry) in [
            (401, "Unauthorized", "AKV10022: Invalid audience.", "", Unauthenticated, false),
            (403, "Forbidden", "no permission", "AccessDenied", Denied, false),
            (403, "Forbidden", "Caller is not authorized", "ForbiddenByRbac", Denied, false),
            (403, "Forbidden", "Client address", "ForbiddenByFirewall", Unreachable, true),
            (403, "Forbidden", "x", "KeyDisabled", KeyDisabled, false),
            (
                403,
                "Forbidden",
                "Operation wrapKey is not allowed on an expired key.",
                "",
                KeyDisabled,
                false,
            ),
            (404, "KeyNotFound", "A key with (name/id) k was not found", "", KeyMissing, false),
            (409, "Conflict", "x", "ObjectIsBeingRecovered", Unreachable, true),
            (429, "Throttled", "x", "", Throttled, true),
            (500, "InternalServerError", "x", "", Unreachable, true),
        ] {
            let error = failed(status, &said(code, message, inner), "wrapKey");
            assert_eq!((error.class, error.retry), (class, retry), "{code} {inner}");
            assert!(!error.detail().is_empty() && !error.hint().is_empty());
        }
        let bad = said("BadParameter", "The parameter is incorrect.", "");
        assert_eq!(failed(400, &bad, "unwrapKey").class, WrongCiphertext);
        assert_eq!(failed(400, &bad, "wrapKey").class, BadOptions);
    }

    #[test]
    fn replies_of_others_are_outages() {
        for (status, body) in [
            (403, json!("denied")),
            (403, json!({"error": "access_denied"})),
            (403, said("KeyNotFound", "x", "")),
            (404, said("Forbidden", "x", "AccessDenied")),
            (404, said("ResourceNotFound", "x", "")),
            (400, said("KeyNotFound", "x", "")),
            (302, json!({})),
        ] {
            let error = failed(status, &body, "unwrapKey");
            assert_eq!((error.class, error.retry), (ErrorClass::Unreachable, true), "{body}");
        }
    }
}
