//! Error reports for failures of providers: SQLSTATE, DETAIL with provider and key, HINT.
//!
//! | class | SQLSTATE | provider reachable |
//! |---|---|---|
//! | `unreachable` | 08001 `sqlclient_unable_to_establish_sqlconnection` | no |
//! | `tls` | 08P01 `protocol_violation` | no |
//! | `deadline` | 08006 `connection_failure` (57014 is a cancel by the user) | no |
//! | `sealed` | 57P03 `cannot_connect_now` | no: it answers, but is unusable |
//! | `throttled` | 53400 `configuration_limit_exceeded` | no: as above |
//! | `unauthenticated` | 28000 `invalid_authorization_specification` | yes |
//! | `denied` | 42501 `insufficient_privilege` | yes |
//! | `key_missing` | 42704 `undefined_object` | yes |
//! | `key_disabled` | 55000 `object_not_in_prerequisite_state` | yes |
//! | `wrong_ciphertext` | 22000 `data_exception` | yes |
//! | `wrong_key` | XX001 `data_corrupted` | yes |
//! | `bad_options` | 22023 `invalid_parameter_value` | no: it was not asked |
//! | `insecure` | F0000 `config_file_error` (as for a TLS key file's mode) | no: it was not asked |
//! | `bad_request` | 39000 `external_routine_invocation_exception` | no: it was not asked |
//! | `internal` | 38000 `external_routine_exception` | no: it was not asked |

use pagevault_keystore::protocol::{ErrorClass, Failure};
use pgrx::PgSqlErrorCode;

use crate::pg::report::Report;

/// The provider and master key of an operation, for messages.
#[derive(Clone)]
pub(crate) struct Subject {
    pub(crate) provider: String,
    pub(crate) kind: String,
    /// Empty if the operation concerns no key.
    pub(crate) key: String,
}

impl Subject {
    /// A sentence for DETAIL.
    pub(crate) fn sentence(&self) -> String {
        let Subject { provider, kind, key } = self;
        if key.is_empty() {
            format!("The key provider is \"{provider}\" of kind {kind}.")
        } else {
            format!(
                "The key provider is \"{provider}\" of kind {kind}, the master key is \"{key}\"."
            )
        }
    }
}

/// The report of a failure. `what` completes "could not ...".
pub(crate) fn report(what: &str, subject: &Subject, failure: &Failure) -> Report {
    let detail = match &failure.detail {
        Some(detail) => format!("{detail} {}", subject.sentence()),
        None => subject.sentence(),
    };
    let hint = failure.hint.clone().unwrap_or_else(|| hint(failure.class).to_owned());
    Report::new(sqlstate(failure.class), format!("could not {what}: {}", failure.message))
        .detail(detail)
        .hint(hint)
}

/// The SQLSTATE of each class; see the table above.
pub(crate) fn sqlstate(class: ErrorClass) -> PgSqlErrorCode {
    use PgSqlErrorCode as E;
    match class {
        ErrorClass::Unreachable => E::ERRCODE_SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION,
        ErrorClass::Tls => E::ERRCODE_PROTOCOL_VIOLATION,
        ErrorClass::Deadline => DEADLINE,
        ErrorClass::Sealed => E::ERRCODE_CANNOT_CONNECT_NOW,
        ErrorClass::Throttled => E::ERRCODE_CONFIGURATION_LIMIT_EXCEEDED,
        ErrorClass::Unauthenticated => E::ERRCODE_INVALID_AUTHORIZATION_SPECIFICATION,
        ErrorClass::Denied => E::ERRCODE_INSUFFICIENT_PRIVILEGE,
        ErrorClass::KeyMissing => E::ERRCODE_UNDEFINED_OBJECT,
        ErrorClass::KeyDisabled => E::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        ErrorClass::WrongCiphertext => E::ERRCODE_DATA_EXCEPTION,
        ErrorClass::WrongKey => E::ERRCODE_DATA_CORRUPTED,
        ErrorClass::BadOptions => E::ERRCODE_INVALID_PARAMETER_VALUE,
        ErrorClass::Insecure => E::ERRCODE_CONFIG_FILE_ERROR,
        ErrorClass::BadRequest => E::ERRCODE_EXTERNAL_ROUTINE_INVOCATION_EXCEPTION,
        ErrorClass::Internal => E::ERRCODE_EXTERNAL_ROUTINE_EXCEPTION,
    }
}

/// For an expired deadline, whether detected by the helper or by the server.
pub(crate) const DEADLINE: PgSqlErrorCode = PgSqlErrorCode::ERRCODE_CONNECTION_FAILURE;

/// The HINT if the provider has none.
pub(crate) fn hint(class: ErrorClass) -> &'static str {
    match class {
        ErrorClass::Unreachable => {
            "Check that the provider runs and that this host reaches it, then try again."
        }
        ErrorClass::Tls => "Check the provider's certificate, its name and the option \"ca_file\".",
        ErrorClass::Deadline => {
            "Check the provider and the network, or raise pagevault.keyring_timeout."
        }
        ErrorClass::Sealed => "Unseal the provider, then try again.",
        ErrorClass::Throttled => "Try again later, or have the provider's request quota raised.",
        ErrorClass::Unauthenticated => {
            "Check the credentials that the provider's options name, or renew them."
        }
        ErrorClass::Denied => "Grant the server the use of this key at the provider.",
        ErrorClass::KeyMissing => "Check the key's name, or restore the key at the provider.",
        ErrorClass::KeyDisabled => "Enable the key at the provider, or cancel its deletion.",
        ErrorClass::WrongCiphertext => {
            "Check that the provider holds the key that wrapped this, not another of the same name."
        }
        ErrorClass::WrongKey => {
            "Check that the provider's address and credentials lead to the right server, and that it holds the key that wrapped this. If the key files are damaged, restore the directory pagevault/ of the data directory from a backup."
        }
        ErrorClass::BadOptions => "Correct the provider's options.",
        ErrorClass::Insecure => "Close the access that is named, and consider rotating the key.",
        ErrorClass::BadRequest => {
            "Install the pagevault-keyring of the same release as the extension."
        }
        ErrorClass::Internal => "See the server log for what pagevault-keyring said.",
    }
}

/// Whether a failure of this class is an answer of the provider, so that it is reachable and
/// usable: the column "reachable". A sealed or throttling provider responds, but does not answer.
pub(crate) fn is_answer(class: ErrorClass) -> bool {
    matches!(
        class,
        ErrorClass::Unauthenticated
            | ErrorClass::Denied
            | ErrorClass::KeyMissing
            | ErrorClass::KeyDisabled
            | ErrorClass::WrongCiphertext
            | ErrorClass::WrongKey
    )
}

/// Whether a failure of this class means that use of a key was withdrawn, as opposed to an outage:
/// the provider was asked, knows us, and refuses to unwrap with this key.
pub(crate) fn is_revocation(class: ErrorClass) -> bool {
    class.is_revocation()
}
