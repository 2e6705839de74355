//! The meaning of the server's refusals.
//!
//! Only reasons of a closed list say something about a key. Everything else is an outage, during
//! which unlocked keys stay unlocked. Servers differ in which reason they give, so what they say of
//! Encrypt and Decrypt is compared with the key's state (`keys`), and what they say of a ciphertext
//! is tried twice (`wrapping`).

use pagevault_keystore::protocol::ErrorClass;

use super::message::Refusal;
use super::names::{Operation, reason};
use super::ttlv::Malformed;
use crate::failure::Failure;
use crate::net::Cause;
use crate::options::printable;

/// Why a request has no answer.
#[derive(Debug)]
pub(super) enum NoAnswer {
    /// The server refuses it.
    Refused(Refusal),
    /// What came is not the answer to it.
    Foreign(Malformed),
    /// The server does not accept the client's certificate; a sentence.
    Certificate(String),
    /// Nothing was sent.
    Unconnected(Cause),
    /// There was no complete answer.
    Lost(Cause),
    /// It was not tried.
    Untried(Failure),
}

impl NoAnswer {
    /// The server's reason, if it refuses.
    pub(super) fn reason(&self) -> Option<u32> {
        match self {
            NoAnswer::Refused(refusal) => Some(refusal.reason),
            _ => None,
        }
    }

    /// Whether the connection can be used for another request.
    pub(super) fn leaves_connection(&self) -> bool {
        matches!(self, NoAnswer::Refused(_))
    }
}

impl From<Failure> for NoAnswer {
    fn from(failure: Failure) -> NoAnswer {
        NoAnswer::Untried(failure)
    }
}

/// Class, whether another attempt may help, and advice.
type Meaning = (ErrorClass, bool, &'static str);

const CERTIFICATE: &str = "Register the certificate in \"cert_file\" at the key server, and check that it has not expired and that its authority is trusted there.";
const KEY_RIGHTS: &str = "Give the client of this certificate the right to do this with the key; see docs/kmip.md, \"Least privilege\".";
const AGAIN: &str = "Try again; if it persists, see the log of the key server.";
const GONE: &str =
    "Check that this client may see the key; else restore it from a backup of the key server.";
const LACKING: &str =
    "Enable this operation for the client; see docs/kmip.md, \"What the server must support\".";
const UNSUPPORTED: &str = "Master keys never leave the key server, so it must encrypt and decrypt itself: see docs/kmip.md, \"What the server must support\".";

/// What a reason means.
fn meaning(told: u32, operation: Operation) -> Meaning {
    use ErrorClass::{
        BadOptions, Denied, KeyDisabled, KeyMissing, Throttled, Unauthenticated, Unreachable,
    };
    match told {
        reason::AUTHENTICATION_NOT_SUCCESSFUL | reason::BAD_PASSWORD => {
            (Unauthenticated, false, CERTIFICATE)
        }
        reason::PERMISSION_DENIED | reason::NOT_AUTHORISED => (Denied, false, KEY_RIGHTS),
        reason::SERVER_LIMIT_EXCEEDED => {
            (Throttled, true, "The key server limits requests. Raise its limit if this persists.")
        }
        reason::OPERATION_NOT_SUPPORTED | reason::FEATURE_NOT_SUPPORTED => {
            let encrypts = matches!(operation, Operation::Encrypt | Operation::Decrypt);
            (BadOptions, false, if encrypts { UNSUPPORTED } else { LACKING })
        }
        reason::UNSUPPORTED_VERSION => (
            BadOptions,
            false,
            "Leave out the option \"version\", or set it to one that the key server supports.",
        ),
        reason::ITEM_NOT_FOUND | reason::OBJECT_NOT_FOUND | reason::OBJECT_DESTROYED
            if concerns_key(operation) =>
        {
            (KeyMissing, false, GONE)
        }
        reason::WRONG_STATE
        | reason::OBJECT_ARCHIVED
        | reason::INCOMPATIBLE_USAGE_MASK
        | reason::USAGE_LIMIT_EXCEEDED
            if concerns_key(operation) =>
        {
            (
                KeyDisabled,
                false,
                "Check the key's state, usage mask and usage limits at the key server.",
            )
        }
        _ => (Unreachable, true, AGAIN),
    }
}

/// Whether an operation is on a key.
fn concerns_key(operation: Operation) -> bool {
    !matches!(operation, Operation::DiscoverVersions | Operation::Query | Operation::Locate)
}

/// The failure of an operation on `what`, a key or nothing.
pub(super) fn of(error: NoAnswer, server: &str, operation: Operation, what: &str) -> Failure {
    match error {
        NoAnswer::Refused(refusal) => {
            let (class, retry, hint) = meaning(refusal.reason, operation);
            let about = if what.is_empty() { String::new() } else { format!(" for {what}") };
            let failure = Failure::new(
                class,
                format!("key server at {server} refuses {}{about}", operation.name()),
            )
            .with_detail(said(&refusal))
            .with_hint(hint);
            if retry { failure.transient() } else { failure }
        }
        NoAnswer::Foreign(Malformed(why)) => {
            Failure::new(ErrorClass::Unreachable, format!("{server} did not answer the request"))
                .with_detail(format!("Something was received, but {why}."))
                .with_hint("Check that the address is that of a key server that speaks KMIP (TTLV over TLS, usually port 5696).")
                .transient()
        }
        NoAnswer::Certificate(detail) => Failure::new(
            ErrorClass::Unauthenticated,
            format!("key server at {server} does not accept the client certificate"),
        )
        .with_detail(detail)
        .with_hint(CERTIFICATE),
        NoAnswer::Unconnected(cause) | NoAnswer::Lost(cause) => cause.about(server),
        NoAnswer::Untried(failure) => failure,
    }
}

/// What the server says, as a sentence.
fn said(refusal: &Refusal) -> String {
    let reason = reason::name(refusal.reason);
    match printable(refusal.message.trim().trim_end_matches('.')).as_str() {
        "" => format!("Its reason is {reason}."),
        message => format!("Its reason is {reason}: {message}."),
    }
}

/// Whether a server may mean by this that it does not encrypt in this way, and by others that it
/// does not accept a ciphertext.
pub(super) fn is_about_parameters(told: u32) -> bool {
    matches!(
        told,
        reason::MISSING_DATA
            | reason::INVALID_FIELD
            | reason::FEATURE_NOT_SUPPORTED
            | reason::CRYPTOGRAPHIC_FAILURE
            | reason::BAD_CRYPTOGRAPHIC_PARAMETERS
            | reason::UNSUPPORTED_PARAMETERS
    )
}

/// Whether a server may mean by this that it does not accept a ciphertext. The standard has no
/// reason for that.
pub(super) fn is_ambiguous(told: u32) -> bool {
    let known = [
        reason::INVALID_MESSAGE,
        reason::ILLEGAL_OPERATION,
        reason::GENERAL_FAILURE,
        reason::INTERNAL_SERVER_ERROR,
    ];
    is_about_parameters(told) || known.contains(&told) || reason::name(told).starts_with("0x")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(reason: u32, operation: Operation) -> Failure {
        let refusal = Refusal { reason, message: "because\nof this.".to_owned() };
        let failure = of(NoAnswer::Refused(refusal), "kmip:5696", operation, "key \"k\"");
        assert!(!failure.hint().is_empty() && failure.detail().contains("because\\nof this."));
        failure
    }

    #[test]
    fn what_says_nothing_about_the_key_is_an_outage() {
        for told in [
            0,
            reason::INVALID_MESSAGE,
            reason::INVALID_FIELD,
            reason::CRYPTOGRAPHIC_FAILURE,
            reason::ILLEGAL_OPERATION,
            reason::GENERAL_FAILURE,
            reason::INTERNAL_SERVER_ERROR,
            0x44,
            0x8000_0001,
        ] {
            for operation in [Operation::Locate, Operation::Encrypt, Operation::Decrypt] {
                let failure = failure(told, operation);
                assert_eq!((failure.class, failure.retry), (ErrorClass::Unreachable, true));
            }
        }
        // Without a key it says nothing about one.
        for told in [reason::ITEM_NOT_FOUND, reason::WRONG_STATE] {
            let failure = failure(told, Operation::Query);
            assert_eq!((failure.class, failure.retry), (ErrorClass::Unreachable, true));
        }
    }

    #[test]
    fn refusals_are_told_apart() {
        for (told, class, retry) in [
            (reason::ITEM_NOT_FOUND, ErrorClass::KeyMissing, false),
            (reason::OBJECT_DESTROYED, ErrorClass::KeyMissing, false),
            (reason::WRONG_STATE, ErrorClass::KeyDisabled, false),
            (reason::OBJECT_ARCHIVED, ErrorClass::KeyDisabled, false),
            (reason::USAGE_LIMIT_EXCEEDED, ErrorClass::KeyDisabled, false),
            (reason::PERMISSION_DENIED, ErrorClass::Denied, false),
            (reason::NOT_AUTHORISED, ErrorClass::Denied, false),
            (reason::AUTHENTICATION_NOT_SUCCESSFUL, ErrorClass::Unauthenticated, false),
            (reason::SERVER_LIMIT_EXCEEDED, ErrorClass::Throttled, true),
            (reason::OPERATION_NOT_SUPPORTED, ErrorClass::BadOptions, false),
        ] {
            let failure = failure(told, Operation::Decrypt);
            assert_eq!((failure.class, failure.retry), (class, retry), "{failure}");
        }
        let other = of(
            NoAnswer::Foreign(Malformed("it is about another key")),
            "kmip:5696",
            Operation::Decrypt,
            "",
        );
        assert_eq!((other.class, other.retry), (ErrorClass::Unreachable, true));
    }

    #[test]
    fn a_clear_refusal_is_not_taken_for_a_wrong_ciphertext() {
        for told in [
            reason::ITEM_NOT_FOUND,
            reason::PERMISSION_DENIED,
            reason::NOT_AUTHORISED,
            reason::WRONG_STATE,
            reason::OBJECT_ARCHIVED,
            reason::SERVER_LIMIT_EXCEEDED,
            reason::AUTHENTICATION_NOT_SUCCESSFUL,
        ] {
            assert!(!is_ambiguous(told), "{told}");
        }
        for told in [0, reason::CRYPTOGRAPHIC_FAILURE, reason::GENERAL_FAILURE, 0x8000_0001] {
            assert!(is_ambiguous(told), "{told}");
        }
    }
}
