//! The meaning of AWS's errors.
//!
//! The SDK has no types for many of them (throttling, signatures, expired tokens), so they are
//! classified by AWS's error code. A reply without a known code says nothing about the key,
//! whatever its HTTP status: a proxy or load balancer may have sent it. It counts as an outage.

use std::error::Error;

use aws_sdk_kms::config::http::HttpResponse;
use aws_sdk_kms::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_kms::operation::RequestId;
use pagevault_keystore::protocol::ErrorClass;

use crate::failure::Failure;
use crate::net::{Cause, cause_of};
use crate::options::printable;

/// A raw reply in the SDK's errors.
pub(super) type Reply = HttpResponse;

/// A request that failed.
#[derive(Debug)]
pub(super) struct Refused {
    /// AWS's error code, or empty.
    pub(super) code: String,
    /// Whether there was a reply.
    pub(super) answered: bool,
    pub(super) error: Failure,
}

impl From<Refused> for Failure {
    fn from(refused: Refused) -> Failure {
        refused.error
    }
}

impl Refused {
    /// From the SDK's error for one request, the address, the action, and the key.
    pub(super) fn new<E>(
        place: &str,
        action: &str,
        key: &str,
        error: &SdkError<E, Reply>,
    ) -> Refused
    where
        E: ProvideErrorMetadata + Error + 'static,
    {
        let unanswered = |error| Refused { code: String::new(), answered: false, error };
        let Some(response) = error.raw_response() else {
            return match error {
                SdkError::TimeoutError(_) => Refused::too_late(place),
                SdkError::DispatchFailure(failure) if failure.is_timeout() => {
                    Refused::too_late(place)
                }
                SdkError::DispatchFailure(failure) => match failure.as_connector_error() {
                    Some(error) => unanswered(cause_of(error).about(place)),
                    None => unanswered(cause_of(error).about(place)),
                },
                _ => unanswered(Failure::new(
                    ErrorClass::Internal,
                    format!("could not build a request to {place}"),
                )),
            };
        };
        let status = response.status().as_u16();
        let meta = error.as_service_error().map(ProvideErrorMetadata::meta);
        let code = meta.and_then(|meta| meta.code()).unwrap_or_default();
        // Some emulators and proxies add a namespace before the code or a type after it.
        let code = code.rsplit('#').next().unwrap_or_default();
        let said = meta.and_then(|meta| meta.message());
        let (class, retry) = classify(code, status, said.unwrap_or_default());
        let (message, hint) = message_and_hint(class, code, place, action, &printable(key));
        let said = said.filter(|_| may_be_repeated(code));
        let detail = detail(code, status, said, error.request_id());
        let error = Failure::new(class, message).with_detail(detail).with_hint(hint);
        let error = if retry { error.transient() } else { error };
        Refused { code: code.to_owned(), answered: true, error }
    }

    /// There was no reply in time.
    pub(super) fn too_late(place: &str) -> Refused {
        let error = Cause::too_late().about(place);
        Refused { code: String::new(), answered: false, error }
    }
}

/// AWS KMS uses this code for all failed requests for a key in a custom key store: also if the
/// proxy of an external key store cannot be reached or does not reply in time, or if the store is
/// disconnected (Developer Guide, "Troubleshooting external key stores"). Only the message
/// distinguishes these from a key that must not be used.
const INVALID_STATE: &str = "KMSInvalidStateException";

/// Messages with this code that refuse the key: its state, or a refusal by the external key
/// manager.
const REFUSALS: &[&str] = &[
    "pending deletion",
    "pending replica deletion",
    "pending import",
    "could not find the external key",
    "external key is not enabled",
    "denied access to the operation",
];

/// The error class, and whether a retry may help.
fn classify(code: &str, status: u16, said: &str) -> (ErrorClass, bool) {
    match meaning(code) {
        _ if code == INVALID_STATE && !REFUSALS.iter().any(|refusal| said.contains(refusal)) => {
            (ErrorClass::Unreachable, true)
        }
        // AWS KMS refuses with status 400; emulators also use 403 and 404.
        Some(meaning) if status < 500 => meaning,
        None if status == 429 => (ErrorClass::Throttled, true),
        _ => (ErrorClass::Unreachable, true),
    }
}

/// The meaning of the known codes.
fn meaning(code: &str) -> Option<(ErrorClass, bool)> {
    use ErrorClass::*;
    Some(match code {
        "ThrottlingException"
        | "Throttling"
        | "LimitExceededException"
        | "TooManyRequestsException"
        | "RequestLimitExceeded" => (Throttled, true),
        "KMSInternalException"
        | "DependencyTimeoutException"
        | "KeyUnavailableException"
        | "InternalFailure"
        | "ServiceUnavailable"
        | "ServiceUnavailableException"
        | "CloudHsmClusterNotActiveException"
        | "CustomKeyStoreInvalidStateException" => (Unreachable, true),
        // Not a refusal of the key; possibly from a server other than AWS KMS.
        _ if is_unsupported(code) => (BadOptions, false),
        "AccessDeniedException" | "AccessDenied" | "OptInRequired" | "NotAuthorized" => {
            (Denied, false)
        }
        "UnrecognizedClientException"
        | "InvalidClientTokenId"
        | "ExpiredTokenException"
        | "ExpiredToken"
        | "RequestExpired"
        | "InvalidSignatureException"
        | "SignatureDoesNotMatch"
        | "IncompleteSignature"
        | "IncompleteSignatureException"
        | "MissingAuthenticationToken"
        | "MissingAuthenticationTokenException"
        | "InvalidAccessKeyId"
        | "AuthFailure" => (Unauthenticated, false),
        "NotFoundException" => (KeyMissing, false),
        "DisabledException" | INVALID_STATE => (KeyDisabled, false),
        "InvalidCiphertextException" | "IncorrectKeyException" => (WrongCiphertext, false),
        "InvalidArnException"
        | "InvalidKeyUsageException"
        | "InvalidAliasNameException"
        | "ValidationException" => (BadOptions, false),
        _ => return None,
    })
}

/// Failures that no permission can fix.
pub(super) fn is_unsupported(code: &str) -> bool {
    matches!(code, "UnsupportedOperationException" | "UnknownOperationException" | "InvalidAction")
}

/// Message and hint.
fn message_and_hint(
    class: ErrorClass,
    code: &str,
    place: &str,
    action: &str,
    key: &str,
) -> (String, &'static str) {
    use ErrorClass as Class;
    match class {
        Class::Throttled => (
            format!("too many requests to {place}"),
            "The request is repeated until the time limit. If the error persists, ask for a higher request quota.",
        ),
        Class::Unreachable if meaning(code).is_none() => (
            format!("reply from {place} is not an AWS KMS reply"),
            "Check that the endpoint is AWS KMS, and check proxies and load balancers on the way to it.",
        ),
        Class::Unreachable => (
            format!("{place} is not available"),
            "The request is repeated until the time limit. Check the AWS Health Dashboard, and the custom key store if the key is in one.",
        ),
        Class::BadOptions if is_unsupported(code) => (
            format!("{place} does not support kms:{action} with {key}"),
            "Check the type of the key and, if the endpoint is not that of AWS, what it supports.",
        ),
        Class::Denied => (
            format!("{place} does not allow kms:{action} with {key}"),
            "Allow it in the policy of these credentials or of the key; a condition on \
             kms:EncryptionContext must match this database.",
        ),
        Class::Unauthenticated => (
            format!("{place} does not accept the credentials"),
            match code {
                "ExpiredTokenException" | "ExpiredToken" => {
                    "They have expired: renew them, or use a role that renews them by itself."
                }
                "InvalidSignatureException" | "SignatureDoesNotMatch" | "RequestExpired" => {
                    "Check the secret access key, and that this machine's clock is correct."
                }
                _ => {
                    "Check which credentials are used, and that they belong to the partition of this region."
                }
            },
        ),
        Class::KeyMissing => (
            format!("{place} has no key {key}"),
            "Check name, region and account. A key of another account must be given by its ARN.",
        ),
        Class::KeyDisabled => (
            match code {
                "DisabledException" => format!("key {key} is disabled"),
                _ => format!("key {key} cannot be used in its present state"),
            },
            "Check the key (aws kms describe-key), then enable it or cancel its deletion.",
        ),
        Class::WrongCiphertext => (
            format!("wrapped key cannot be unwrapped with {key}"),
            "Check that the keystore is the one of this cluster. If it is damaged, restore it from a \
             backup.",
        ),
        Class::BadOptions => (
            format!("{place} rejected kms:{action} with {key} as invalid"),
            "Check the key's name, its type, and that the endpoint is AWS KMS.",
        ),
        _ => (
            format!("could not read the reply of {place} to kms:{action}"),
            "Check that the endpoint is AWS KMS.",
        ),
    }
}

/// With these codes AWS's messages contain keys, states and principals. For signatures they repeat
/// headers, including the session token.
fn may_be_repeated(code: &str) -> bool {
    use ErrorClass::{BadOptions, Denied, KeyDisabled, KeyMissing, Throttled};
    let class = meaning(code).map(|(class, _)| class);
    matches!(class, Some(Denied | KeyMissing | KeyDisabled | BadOptions | Throttled))
}

fn detail(code: &str, status: u16, said: Option<&str>, request: Option<&str>) -> String {
    let mut detail = match code {
        "" => format!("It answered with HTTP status {status}."),
        code => format!("It answered {}.", printable(code)),
    };
    if code == "InvalidCiphertextException" || code == "IncorrectKeyException" {
        detail
            .push_str(" It was wrapped by another key or for another database, or it is damaged.");
    }
    if let Some(said) = said.filter(|said| !said.is_empty()) {
        detail.push_str(&format!(" {}.", printable(said).trim_end_matches('.')));
    }
    if let Some(request) = request {
        detail.push_str(&format!(" Request ID {}.", printable(request)));
    }
    detail
}

#[cfg(test)]
mod tests {
    use super::*;
    use aws_sdk_kms::error::ErrorMetadata;
    use aws_sdk_kms::operation::decrypt::DecryptError;

    fn refused(code: &str, message: &str, status: u16) -> Refused {
        let mut reply = Reply::new(status.try_into().unwrap(), "".into());
        reply.headers_mut().insert("x-amzn-requestid", "0a1b-2c3d");
        let meta = ErrorMetadata::builder().code(code).message(message).build();
        let error = SdkError::service_error(DecryptError::generic(meta), reply);
        Refused::new("AWS KMS in eu-central-1", "Decrypt", "alias/x", &error)
    }

    #[test]
    fn each_code_has_its_class_and_words() {
        use ErrorClass::*;
        for (code, class, retry) in [
            ("ThrottlingException", Throttled, true),
            ("LimitExceededException", Throttled, true),
            ("TooManyRequestsException", Throttled, true),
            ("KMSInternalException", Unreachable, true),
            ("DependencyTimeoutException", Unreachable, true),
            ("KeyUnavailableException", Unreachable, true),
            ("AccessDeniedException", Denied, false),
            ("UnrecognizedClientException", Unauthenticated, false),
            ("InvalidClientTokenId", Unauthenticated, false),
            ("ExpiredTokenException", Unauthenticated, false),
            ("InvalidSignatureException", Unauthenticated, false),
            ("MissingAuthenticationTokenException", Unauthenticated, false),
            ("NotFoundException", KeyMissing, false),
            ("DisabledException", KeyDisabled, false),
            ("KMSInvalidStateException", Unreachable, true),
            ("InvalidCiphertextException", WrongCiphertext, false),
            ("IncorrectKeyException", WrongCiphertext, false),
            ("InvalidArnException", BadOptions, false),
            ("UnknownOperationException", BadOptions, false),
            ("SomethingNew", Unreachable, true),
        ] {
            let Refused { code: told, answered, error } = refused(code, "", 400);
            assert_eq!((error.class, error.retry), (class, retry), "{code}");
            assert_eq!((told.as_str(), answered), (code, true));
            assert!(error.detail().contains(code) && error.detail().contains("0a1b-2c3d"));
            assert!(!error.hint().is_empty() && !error.message.ends_with('.'));
        }
    }

    #[test]
    fn without_a_known_code_it_is_an_outage() {
        use ErrorClass::*;
        for code in ["", "ForbiddenException", "SomethingNew"] {
            for status in [200, 301, 400, 401, 403, 404, 500, 502, 503] {
                assert_eq!(classify(code, status, ""), (Unreachable, true), "{code} {status}");
            }
            assert_eq!(classify(code, 429, ""), (Throttled, true));
        }
        // A server with an internal error does not decide about keys.
        for code in ["AccessDeniedException", "NotFoundException", "DisabledException"] {
            assert_eq!(classify(code, 503, ""), (Unreachable, true), "{code}");
        }
    }

    #[test]
    fn an_unreachable_external_key_store_is_an_outage() {
        use ErrorClass::*;
        for (said, class, retry) in [
            ("arn:x is pending deletion.", KeyDisabled, false),
            ("arn:x is pending import.", KeyDisabled, false),
            (
                "The external key store proxy rejected the request because the external key is not enabled in the external key manager.",
                KeyDisabled,
                false,
            ),
            (
                "The external key store proxy rejected the request because it could not find the external key.",
                KeyDisabled,
                false,
            ),
            (
                "The external key store proxy denied access to the operation. Verify that the user and the external key are both authorized.",
                KeyDisabled,
                false,
            ),
            (
                "AWS KMS rejected the request because the external key store proxy did not respond in time. Retry the request.",
                Unreachable,
                true,
            ),
            ("AWS KMS cannot communicate with the external key store proxy.", Unreachable, true),
            ("The external key store proxy is in an unhealthy state.", Unreachable, true),
            ("arn:x is unavailable.", Unreachable, true),
        ] {
            let Refused { error, .. } = refused("KMSInvalidStateException", said, 400);
            assert_eq!((error.class, error.retry), (class, retry), "{said}");
            assert!(error.detail().contains(said.trim_end_matches('.')), "{}", error.detail());
        }
    }

    #[test]
    fn messages_about_signatures_are_not_repeated() {
        let said = "The Canonical String should have been x-amz-security-token:SECRET";
        for code in ["InvalidSignatureException", "SignatureDoesNotMatch", "SomethingNew"] {
            assert!(!format!("{:?}", refused(code, said, 400)).contains("SECRET"));
        }
        let state = refused("KMSInvalidStateException", "arn:x is pending deletion.", 400);
        assert!(state.error.detail().contains("pending deletion"), "{}", state.error.detail());
    }
}
