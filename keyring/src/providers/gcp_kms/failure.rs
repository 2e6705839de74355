//! The meaning of Cloud KMS's errors.
//!
//! Errors have the form of google.rpc.Status (AIP-193): an HTTP status, a canonical code that
//! belongs to it, and details. A reply of another form says nothing about the key, whatever its
//! HTTP status: a proxy or load balancer may have sent it. It counts as an outage.

use pagevault_keystore::protocol::ErrorClass;
use serde::Deserialize;
use serde_json::Value;

use crate::failure::Failure;
use crate::options::printable;
use crate::rest::{Reply, Service};

/// What a request needs, for messages.
#[derive(Clone, Copy)]
pub(super) struct Need<'a> {
    /// The permission of IAM.
    pub(super) permission: &'a str,
    /// The key or the key ring.
    pub(super) on: &'a str,
}

#[derive(Deserialize)]
struct Body {
    error: Status,
}

#[derive(Deserialize)]
struct Status {
    code: u16,
    #[serde(default)]
    message: String,
    status: String,
    #[serde(default)]
    details: Vec<Value>,
}

/// Canonical codes and their HTTP statuses (google/rpc/code.proto).
const CODES: &[(&str, u16)] = &[
    ("INVALID_ARGUMENT", 400),
    ("FAILED_PRECONDITION", 400),
    ("OUT_OF_RANGE", 400),
    ("UNAUTHENTICATED", 401),
    ("PERMISSION_DENIED", 403),
    ("NOT_FOUND", 404),
    ("ABORTED", 409),
    ("ALREADY_EXISTS", 409),
    ("RESOURCE_EXHAUSTED", 429),
    ("CANCELLED", 499),
    ("UNKNOWN", 500),
    ("INTERNAL", 500),
    ("DATA_LOSS", 500),
    ("UNIMPLEMENTED", 501),
    ("UNAVAILABLE", 503),
    ("DEADLINE_EXCEEDED", 504),
];

/// Reasons that are no decision about the key: an unpaid bill, and the rules of a perimeter (VPC
/// Service Controls) about where requests may come from.
const ELSEWHERE: [&str; 2] = ["BILLING_DISABLED", "SECURITY_POLICY_VIOLATED"];

/// What a refusal means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meaning {
    Unauthenticated,
    Denied,
    Missing,
    /// The version of the key is in a state in which it must not be used.
    Disabled,
    /// The key material no longer exists.
    Destroyed,
    Foreign,
    Throttled,
    Outage,
    Invalid,
}

/// Whether the credentials lack a permission.
pub(super) fn is_denial(error: &Failure) -> bool {
    error.class == ErrorClass::Denied
}

/// The failure for a reply that is not a success.
pub(super) fn of(reply: &Reply, service: &Service, need: Need<'_>) -> Failure {
    let Some(Body { error }) = reply.parse::<Body>() else { return service.foreign(reply.status) };
    let is_googles = error.code == reply.status
        && CODES.iter().any(|(code, status)| *code == error.status && *status == reply.status);
    if !is_googles {
        return service.foreign(reply.status);
    }
    failure(meaning(&error), &error, service, need)
}

fn meaning(error: &Status) -> Meaning {
    let said = |text: &str| error.message.contains(text);
    match error.status.as_str() {
        "UNAUTHENTICATED" => Meaning::Unauthenticated,
        "PERMISSION_DENIED" if reason(error).is_some_and(|why| ELSEWHERE.contains(&why)) => {
            Meaning::Outage
        }
        "PERMISSION_DENIED" => Meaning::Denied,
        "NOT_FOUND" if said("Method not found") => Meaning::Invalid,
        "NOT_FOUND" => Meaning::Missing,
        "FAILED_PRECONDITION" => state_of(&error.message),
        "INVALID_ARGUMENT" if said("Decryption failed") => Meaning::Foreign,
        // The data were changed on their way: the checksums differ.
        "INVALID_ARGUMENT" if said("checksum") || said("crc32c") => Meaning::Outage,
        "INVALID_ARGUMENT" | "OUT_OF_RANGE" | "UNIMPLEMENTED" => Meaning::Invalid,
        "RESOURCE_EXHAUSTED" => Meaning::Throttled,
        _ => Meaning::Outage,
    }
}

/// For example "... is not enabled, current state is: DISABLED." Other conditions, among them those
/// of an external key manager, say nothing about the key.
fn state_of(message: &str) -> Meaning {
    let state = message.split_once("current state is").map_or("", |(_, rest)| rest);
    let state = state.trim_start_matches([':', ' ']);
    let state = state.split(|c: char| !c.is_ascii_uppercase() && c != '_').next();
    match state {
        Some("DISABLED" | "DESTROY_SCHEDULED" | "PENDING_IMPORT" | "IMPORT_FAILED") => {
            Meaning::Disabled
        }
        Some("DESTROYED") => Meaning::Destroyed,
        _ if message.contains("has not been used in project") => Meaning::Denied,
        _ => Meaning::Outage,
    }
}

/// The reason in the details (google.rpc.ErrorInfo).
fn reason(error: &Status) -> Option<&str> {
    error.details.iter().find_map(|detail| detail.get("reason")?.as_str())
}

fn failure(meaning: Meaning, error: &Status, service: &Service, need: Need<'_>) -> Failure {
    let (place, on) = (&service.place, printable(need.on));
    let detail = detail(error);
    let (class, message, hint) = match meaning {
        Meaning::Outage => return service.unavailable(detail),
        Meaning::Throttled => return service.throttled(detail),
        Meaning::Unauthenticated => (
            ErrorClass::Unauthenticated,
            format!("{place} does not accept the credentials"),
            "Check the service account, and this machine's clock.".to_owned(),
        ),
        Meaning::Denied => (
            ErrorClass::Denied,
            format!("{place} does not allow {} on {on}", need.permission),
            match reason(error) {
                Some("SERVICE_DISABLED") => "Enable the API: gcloud services enable cloudkms.googleapis.com.".to_owned(),
                Some("ACCESS_TOKEN_SCOPE_INSUFFICIENT") => "Give the machine the scope https://www.googleapis.com/auth/cloudkms or cloud-platform.".to_owned(),
                _ => format!("Grant the service account a role with {} on the key: see docs/gcp-kms.md, \"Permissions\".", need.permission),
            },
        ),
        Meaning::Missing => (
            ErrorClass::KeyMissing,
            format!("{place} has no {on}"),
            "Check project, location, key ring and key.".to_owned(),
        ),
        Meaning::Destroyed => (
            ErrorClass::KeyMissing,
            format!("key material of {on} was destroyed"),
            "It cannot be restored. Use another master key that wraps the same database key, or an escrow bundle.".to_owned(),
        ),
        Meaning::Disabled => (
            ErrorClass::KeyDisabled,
            format!("version of key {on} cannot be used in its present state"),
            "Check it: gcloud kms keys versions list. Then enable it, or restore and enable it: gcloud kms keys versions restore, enable.".to_owned(),
        ),
        Meaning::Foreign => (
            ErrorClass::WrongCiphertext,
            format!("wrapped key cannot be unwrapped with {on}"),
            "Check that the keystore is the one of this cluster. If it is damaged, restore it from a backup.".to_owned(),
        ),
        Meaning::Invalid => (
            ErrorClass::BadOptions,
            format!("{place} rejected a request for {on} as invalid"),
            "Check the key's name and purpose, and that the endpoint is Cloud KMS.".to_owned(),
        ),
    };
    let detail = match meaning {
        Meaning::Foreign => format!(
            "It was wrapped by another key or for another database, or it is damaged. {detail}"
        ),
        _ => detail,
    };
    Failure::new(class, message).with_detail(detail).with_hint(hint)
}

fn detail(error: &Status) -> String {
    let code = match reason(error) {
        Some(reason) => format!("{} ({})", error.status, printable(reason)),
        None => error.status.clone(),
    };
    let said = printable(error.message.lines().next().unwrap_or_default());
    match said.trim_end_matches('.') {
        "" => format!("It answered {code}."),
        said => format!("It answered {code}. {said}."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use zeroize::Zeroizing;

    fn failed(status: u16, body: &Value) -> Failure {
        let body = Zeroizing::new(body.to_string().into_bytes());
        let reply = Reply { status, headers: reqwest::header::HeaderMap::new(), body };
        let service = Service { whose: "a Cloud KMS", place: "Cloud KMS".to_owned() };
        of(&reply, &service, Need { permission: "cloudkms.x", on: "projects/p" })
    }

    fn error(status: u16, code: &str, message: &str, reason: Option<&str>) -> Value {
        let details: Vec<Value> = reason.iter().map(|reason| json!({"reason": reason})).collect();
        json!({"error": {"code": status, "message": message, "status": code, "details": details}})
    }

    #[test]
    fn each_error_has_its_class() {
        use ErrorClass::*;
        for (status, code, message, reason, class, retry) in [
            (401, "UNAUTHENTICATED", "x", None, Unauthenticated, false),
            (403, "PERMISSION_DENIED", "Permission denied", None, Denied, false),
            (403, "PERMISSION_DENIED", "x", Some("SERVICE_DISABLED"), Denied, false),
            (403, "PERMISSION_DENIED", "x", Some("BILLING_DISABLED"), Unreachable, true),
            (403, "PERMISSION_DENIED", "x", Some("SECURITY_POLICY_VIOLATED"), Unreachable, true),
            (404, "NOT_FOUND", "CryptoKey x not found.", None, KeyMissing, false),
            (404, "NOT_FOUND", "Method not found.", None, BadOptions, false),
            (
                400,
                "FAILED_PRECONDITION",
                "x is not enabled, current state is: DISABLED.",
                None,
                KeyDisabled,
                false,
            ),
            (
                400,
                "FAILED_PRECONDITION",
                "x, current state is: DESTROY_SCHEDULED.",
                None,
                KeyDisabled,
                false,
            ),
            (
                400,
                "FAILED_PRECONDITION",
                "x, current state is: DESTROYED.",
                None,
                KeyMissing,
                false,
            ),
            (
                400,
                "FAILED_PRECONDITION",
                "x, current state is: PENDING_GENERATION.",
                None,
                Unreachable,
                true,
            ),
            (
                400,
                "FAILED_PRECONDITION",
                "the external key manager is not there",
                None,
                Unreachable,
                true,
            ),
            (
                400,
                "INVALID_ARGUMENT",
                "Decryption failed: the ciphertext is invalid.",
                None,
                WrongCiphertext,
                false,
            ),
            (
                400,
                "INVALID_ARGUMENT",
                "The checksum in field ciphertext_crc32c did not match",
                None,
                Unreachable,
                true,
            ),
            (400, "INVALID_ARGUMENT", "Invalid resource name", None, BadOptions, false),
            (
                429,
                "RESOURCE_EXHAUSTED",
                "Quota exceeded",
                Some("RATE_LIMIT_EXCEEDED"),
                Throttled,
                true,
            ),
            (409, "ABORTED", "", None, Unreachable, true),
            (500, "INTERNAL", "", None, Unreachable, true),
            (503, "UNAVAILABLE", "", None, Unreachable, true),
            (504, "DEADLINE_EXCEEDED", "", None, Unreachable, true),
            (501, "UNIMPLEMENTED", "", None, BadOptions, false),
        ] {
            let error = failed(status, &error(status, code, message, reason));
            assert_eq!((error.class, error.retry), (class, retry), "{code} {message}");
            assert!(error.detail().contains(code) && !error.hint().is_empty());
        }
    }

    #[test]
    fn replies_of_others_are_outages() {
        for (status, body) in [
            (403, json!("denied")),
            (403, json!({"error": "access_denied"})),
            (403, json!({"error": {"code": 403, "message": "x"}})),
            // The code does not belong to the status.
            (403, error(404, "NOT_FOUND", "x", None)),
            (404, error(404, "PERMISSION_DENIED", "x", None)),
            (400, error(400, "NOT_FOUND", "x", None)),
            (404, error(404, "SOMETHING_NEW", "x", None)),
            (302, json!({})),
        ] {
            let error = failed(status, &body);
            assert_eq!((error.class, error.retry), (ErrorClass::Unreachable, true), "{body}");
        }
    }
}
