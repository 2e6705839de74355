//! Failures as the helper reports them: to the server in its reply, to operators on the command
//! line.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why something was not done, in the parts of a PostgreSQL error.
///
/// No part may contain key material: all of them appear in the server's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(deny_unknown_fields)]
#[error("{message}")]
pub struct Failure {
    /// Kind of the cause; decides what the caller does, and the SQLSTATE.
    pub class: ErrorClass,
    /// In lower case without a full stop; names provider and key.
    pub message: String,
    /// The facts, in whole sentences.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// The remedy, in whole sentences.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// The same operation may succeed later without any intervention.
    pub retry: bool,
}

/// Kinds of causes that callers distinguish.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorClass {
    /// No connection, or no such file.
    Unreachable,
    /// The TLS handshake failed.
    Tls,
    /// The provider could not authenticate the client.
    Unauthenticated,
    /// The provider denies access to an authenticated client.
    Denied,
    /// No such master key, or no such version.
    KeyMissing,
    /// The master key exists, but is disabled.
    KeyDisabled,
    /// The provider itself is sealed (as Vault can be).
    Sealed,
    /// Too many requests.
    Throttled,
    /// The deadline has passed.
    Deadline,
    /// Not wrapped by this key, or for another context.
    WrongCiphertext,
    /// The unwrapped database key does not match its key check value. Only the server, which has
    /// that value, can detect this.
    WrongKey,
    /// An option is missing, unknown or invalid.
    BadOptions,
    /// The request itself is invalid.
    BadRequest,
    /// Refused because keys would not be safe: because of a file's mode, owner or location.
    Insecure,
    /// A bug in the helper.
    Internal,
}

impl ErrorClass {
    /// Whether a failure of this class means that use of a key was withdrawn, as opposed to an
    /// outage: the provider was asked, knows us, and refuses to unwrap with this key.
    #[must_use]
    pub fn is_revocation(self) -> bool {
        matches!(
            self,
            Self::Denied
                | Self::KeyMissing
                | Self::KeyDisabled
                | Self::WrongCiphertext
                | Self::WrongKey
        )
    }
}

impl Failure {
    /// A failure without detail and hint that is not worth a retry.
    pub fn new(class: ErrorClass, message: impl Into<String>) -> Self {
        Self { class, message: message.into(), detail: None, hint: None, retry: false }
    }

    /// Adds a detail, unless it is empty.
    #[must_use]
    pub fn with_detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = given(detail);
        self
    }

    /// Adds a hint, unless it is empty.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = given(hint);
        self
    }

    /// The detail; empty if there is none.
    pub fn detail(&self) -> &str {
        self.detail.as_deref().unwrap_or_default()
    }

    /// The hint; empty if there is none.
    pub fn hint(&self) -> &str {
        self.hint.as_deref().unwrap_or_default()
    }

    /// Marks the failure as worth a retry.
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
