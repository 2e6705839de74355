//! The interface of all providers.

use std::path::PathBuf;
use std::time::Instant;

use zeroize::Zeroizing;

use crate::failure::Failure;
use crate::findings::Findings;

/// A provider wraps and unwraps with master keys: a key file, Vault, a KMS, a command.
///
/// An implementation makes one attempt per call and reports the result. The caller repeats attempts
/// and enforces the deadline, for all providers.
pub trait Provider {
    /// Wraps `plaintext` with the newest version of `key`. `context` is associated data:
    /// [`unwrap`](Provider::unwrap) succeeds only with the same context.
    fn wrap(&self, key: &str, context: &str, plaintext: &[u8]) -> Result<Wrapped, Failure>;

    /// Unwraps the result of [`wrap`](Provider::wrap), with the version of `key` that wrapped it.
    fn unwrap(&self, key: &str, context: &str, wrapped: &[u8]) -> Result<Unwrapped, Failure>;

    /// Wraps again with the newest version of `key` what `from_key` of this provider wrapped.
    ///
    /// A provider that can do this itself overrides it, so that the plaintext stays there.
    fn rewrap(
        &self,
        from_key: &str,
        key: &str,
        context: &str,
        wrapped: &[u8],
    ) -> Result<Wrapped, Failure> {
        let unwrapped = self.unwrap(from_key, context, wrapped)?;
        self.wrap(key, context, &unwrapped.plaintext)
    }

    /// Ensures that `key` has a version newer than the one that wrapped `wrapped`, and returns the
    /// newest. It may have one already: it was rotated elsewhere, its name now refers to another
    /// key, or an earlier rotation was interrupted. Then that version is used. Older versions still
    /// unwrap.
    fn rotate(&self, key: &str, wrapped: &[u8]) -> Result<u64, Failure>;

    /// Describes `key` without using it.
    fn describe(&self, key: &str) -> Result<KeyInfo, Failure>;

    /// Examines everything but the key (place, permissions, address, credentials). `None` after a
    /// failure.
    fn examine(&self, findings: &mut Findings) -> Option<()>;

    /// Refuses options that can never work. It is not an error if something may still be provided
    /// later, such as a key file that does not exist yet.
    fn check_options(&self) -> Result<(), Failure>;
}

/// The context of a request.
#[derive(Debug, Clone)]
pub struct Environment {
    /// The server's data directory. No key may be in it.
    pub data_directory: Option<PathBuf>,
    /// The deadline. A provider that uses the network limits its requests by it.
    pub deadline: Option<Instant>,
    /// Whether this provider may run programs.
    pub programs: bool,
    /// Whether errors repeat what programs print on standard error: only for a person who tries a
    /// provider out. It may contain any secret that a program has, and errors reach logs.
    pub repeats_programs: bool,
}

/// A wrapped key.
pub struct Wrapped {
    /// In the provider's own format.
    pub wrapped: Vec<u8>,
    /// The version of the master key that wrapped it.
    pub key_version: u64,
}

/// An unwrapped key.
pub struct Unwrapped {
    /// The secret; wiped on drop.
    pub plaintext: Zeroizing<Vec<u8>>,
    /// The version of the master key that had wrapped it.
    pub key_version: u64,
}

/// Public information about a master key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyInfo {
    /// The version that is used for wrapping.
    pub key_version: u64,
    /// The oldest version that can still unwrap, if the service tells.
    pub oldest_version: Option<u64>,
    /// Where the key is and what protects it, in one line.
    pub summary: String,
}
