//! How the helper says that something was not done: to the server in its reply, to operators on the
//! command line.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why something was not done, in the parts of a PostgreSQL error.
///
/// None of them may hold key material: they end in the server's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(deny_unknown_fields)]
#[error("{message}")]
pub struct Failure {
    /// The kind of cause, for decisions and the SQLSTATE.
    pub class: ErrorClass,
    /// Lower case, no full stop, names provider and key.
    pub message: String,
    /// A whole sentence with the facts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// A whole sentence with what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// The same operation may succeed later without anyone changing anything.
    pub retry: bool,
}

/// Kinds of cause that a caller may want to tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorClass {
    /// No connection, or no such file.
    Unreachable,
    /// Connection refused for reasons of TLS.
    Tls,
    /// The provider does not know who asks.
    Unauthenticated,
    /// The provider knows who asks and says no.
    Denied,
    /// No such master key, or no such version.
    KeyMissing,
    /// The master key exists and is switched off.
    KeyDisabled,
    /// The provider itself is sealed.
    Sealed,
    /// Too many requests.
    Throttled,
    /// Time ran out.
    Deadline,
    /// Not wrapped by this key, or not for this context.
    WrongCiphertext,
    /// The database key that was unwrapped does not fit its check value. Only who has that can
    /// tell, which is not the helper.
    WrongKey,
    /// An option is missing, unknown or wrong.
    BadOptions,
    /// The request itself is wrong.
    BadRequest,
    /// Refused because keys would not be safe: a file's mode, owner or place.
    Insecure,
    /// A defect of the helper.
    Internal,
}

impl Failure {
    /// One without detail and hint that is not worth trying again.
    pub fn new(class: ErrorClass, message: impl Into<String>) -> Self {
        Self { class, message: message.into(), detail: None, hint: None, retry: false }
    }

    /// The same with a detail; none if it is empty.
    #[must_use]
    pub fn with_detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = given(detail);
        self
    }

    /// The same with a hint; none if it is empty.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = given(hint);
        self
    }

    /// The detail, empty if there is none.
    pub fn detail(&self) -> &str {
        self.detail.as_deref().unwrap_or_default()
    }

    /// The hint, empty if there is none.
    pub fn hint(&self) -> &str {
        self.hint.as_deref().unwrap_or_default()
    }

    /// The same, worth trying again.
    #[must_use]
    pub fn transient(mut self) -> Self {
        self.retry = true;
        self
    }
}

fn given(text: impl Into<String>) -> Option<String> {
    Some(text.into()).filter(|text| !text.is_empty())
}

impl ErrorClass {
    /// The name in the protocol, such as `key_missing`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::Tls => "tls",
            Self::Unauthenticated => "unauthenticated",
            Self::Denied => "denied",
            Self::KeyMissing => "key_missing",
            Self::KeyDisabled => "key_disabled",
            Self::Sealed => "sealed",
            Self::Throttled => "throttled",
            Self::Deadline => "deadline",
            Self::WrongCiphertext => "wrong_ciphertext",
            Self::WrongKey => "wrong_key",
            Self::BadOptions => "bad_options",
            Self::BadRequest => "bad_request",
            Self::Insecure => "insecure",
            Self::Internal => "internal",
        }
    }
}

impl fmt::Display for ErrorClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
