//! What every provider can do.

use std::path::PathBuf;
use std::time::Instant;

use zeroize::Zeroizing;

use crate::failure::Failure;
use crate::findings::Findings;

/// Something that wraps and unwraps with a master key: a key file, Vault, a KMS, a command.
///
/// An implementation makes one attempt per call and reports what came of it; trying again and
/// keeping the deadline is done above, once for all of them.
pub trait Provider {
    /// Wraps `plaintext` with the newest version of `key`. `context` is bound as associated data:
    /// [`unwrap`](Provider::unwrap) succeeds under the same context only.
    fn wrap(&self, key: &str, context: &str, plaintext: &[u8]) -> Result<Wrapped, Failure>;

    /// Unwraps what [`wrap`](Provider::wrap) made, with whichever version of `key` made it.
    fn unwrap(&self, key: &str, context: &str, wrapped: &[u8]) -> Result<Unwrapped, Failure>;

    /// Wraps again under the newest version of `key` what `from_key` of this provider wrapped.
    ///
    /// A provider that can do this by itself overrides it, so that the plaintext stays there.
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

    /// Makes sure that `key` has a version newer than the one that wrapped `wrapped`, and returns
    /// the newest. If it has one already, because somebody rotated it elsewhere, pointed its name
    /// at another key, or a rotation was cut short, that one will do. Older versions keep
    /// unwrapping.
    fn rotate(&self, key: &str, wrapped: &[u8]) -> Result<u64, Failure>;

    /// Tells about `key` without using it.
    fn describe(&self, key: &str) -> Result<KeyInfo, Failure>;

    /// Looks at everything around the key (place, permissions, address, credentials). `None` after
    /// a failure.
    fn examine(&self, findings: &mut Findings) -> Option<()>;

    /// Refuses options that can never be right. What may come later, such as a key file that does
    /// not exist yet, is no error.
    fn check_options(&self) -> Result<(), Failure>;
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
