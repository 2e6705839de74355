//! What every provider can do, and how it says that it cannot.

use std::fmt;
use std::path::PathBuf;
use std::time::Instant;

use pagevault_keystore::protocol::{ErrorClass, Failure};
use zeroize::Zeroizing;

use crate::findings::Findings;

/// Something that wraps and unwraps with a master key: a key file, Vault, a KMS, a command.
///
/// An implementation makes one attempt per call and reports what came of it; trying again and
/// keeping the deadline is done above, once for all of them.
pub trait Provider {
    /// Wraps `plaintext` with the newest version of `key`. `context` is bound as associated data:
    /// [`unwrap`](Provider::unwrap) succeeds under the same context only.
    fn wrap(&self, key: &str, context: &str, plaintext: &[u8]) -> Result<Wrapped, ProviderError>;

    /// Unwraps what [`wrap`](Provider::wrap) made, with whichever version of `key` made it.
    fn unwrap(&self, key: &str, context: &str, wrapped: &[u8]) -> Result<Unwrapped, ProviderError>;

    /// Wraps again under the newest version of `key` what `from_key` of this provider wrapped.
    ///
    /// A provider that can do this by itself overrides it, so that the plaintext stays there.
    fn rewrap(
        &self,
        from_key: &str,
        key: &str,
        context: &str,
        wrapped: &[u8],
    ) -> Result<Wrapped, ProviderError> {
        let unwrapped = self.unwrap(from_key, context, wrapped)?;
        self.wrap(key, context, &unwrapped.plaintext)
    }

    /// Makes sure that `key` has a version newer than the one that wrapped `wrapped`, and returns
    /// the newest. If it has one already, because somebody rotated it elsewhere, pointed its name
    /// at another key, or a rotation was cut short, that one will do. Older versions keep
    /// unwrapping.
    fn rotate(&self, key: &str, wrapped: &[u8]) -> Result<u64, ProviderError>;

    /// Tells about `key` without using it.
    fn describe(&self, key: &str) -> Result<KeyInfo, ProviderError>;

    /// Looks at everything around the key (place, permissions, address, credentials). `None` after
    /// a failure.
    fn examine(&self, findings: &mut Findings) -> Option<()>;

    /// Refuses options that can never be right. What may come later, such as a key file that does
    /// not exist yet, is no error.
    fn check_options(&self) -> Result<(), ProviderError>;
}

/// What a provider may know of the request it serves.
#[derive(Debug, Clone)]
pub struct Environment {
    /// The server's data directory. No key may lie in it.
    pub data_directory: Option<PathBuf>,
    /// When the caller stops waiting. A provider that talks to others bounds its calls by it.
    pub deadline: Option<Instant>,
    /// Whether this provider may run programs.
    pub programs: bool,
}

/// A wrapped key.
pub struct Wrapped {
    /// The provider's own format.
    pub wrapped: Vec<u8>,
    /// The version of the master key that wrapped it.
    pub key_version: u64,
}

/// An unwrapped key.
pub struct Unwrapped {
    /// The secret, wiped on drop.
    pub plaintext: Zeroizing<Vec<u8>>,
    /// The version of the master key that had wrapped it.
    pub key_version: u64,
}

/// What may be known of a master key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyInfo {
    /// The version that wraps now.
    pub key_version: u64,
    /// The oldest version that still unwraps.
    pub oldest_version: u64,
    /// Where the key is and what protects it, in one line.
    pub summary: String,
}

/// A failure in four parts, as PostgreSQL reports them, and a class that decides behaviour.
///
/// None of the parts may hold key material: they end in the server's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProviderError {
    /// What kind of failure it is.
    pub class: ErrorClass,
    /// What happened: lower case, no full stop.
    pub message: String,
    /// The cause in whole sentences, or empty.
    pub detail: String,
    /// What to do about it in whole sentences, or empty.
    pub hint: String,
    /// Whether the same attempt may succeed soon with nobody changing anything.
    pub retry: bool,
}

impl ProviderError {
    /// An error without detail and hint that is not worth trying again.
    pub fn new(class: ErrorClass, message: impl Into<String>) -> ProviderError {
        ProviderError {
            class,
            message: message.into(),
            detail: String::new(),
            hint: String::new(),
            retry: false,
        }
    }

    /// The same error with a cause.
    #[must_use]
    pub fn with_detail(mut self, detail: impl Into<String>) -> ProviderError {
        self.detail = detail.into();
        self
    }

    /// The same error with advice.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> ProviderError {
        self.hint = hint.into();
        self
    }

    /// The same error, worth trying again.
    #[must_use]
    pub fn transient(mut self) -> ProviderError {
        self.retry = true;
        self
    }
}

impl fmt::Display for ProviderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ProviderError {}

impl From<ProviderError> for Failure {
    fn from(error: ProviderError) -> Failure {
        let given = |text: String| if text.is_empty() { None } else { Some(text) };
        Failure {
            class: error.class,
            message: error.message,
            detail: given(error.detail),
            hint: given(error.hint),
            retry: error.retry,
        }
    }
}
