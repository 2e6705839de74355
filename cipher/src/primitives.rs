//! Where the primitives come from: AES-256-XTS, AES-256-GCM, HMAC, SHA-256, HKDF, random bytes.
//!
//! This is the only place that knows the two builds. Both files have the same items, and both give
//! the same bytes: whatever one build has sealed, the other opens.
//!
//! | file | build | origin |
//! |---|---|---|
//! | `ordinary` | without features | the RustCrypto crates, and the kernels in [`crate::xts`] |
//! | `validated` | feature `fips` | AWS-LC, with a FIPS 140-3 certificate, linked statically |
//!
//! What the module does not have stays what it is in both builds, and is not for new keys in the
//! second ([`CipherId::is_for_new_keys`]): AES-128-XTS and the POLYVAL tag.
//!
//! [`CipherId::is_for_new_keys`]: crate::CipherId::is_for_new_keys

#[cfg(not(feature = "fips"))]
mod ordinary;
#[cfg(not(feature = "fips"))]
use ordinary as chosen;

#[cfg(feature = "fips")]
mod ffi;
#[cfg(feature = "fips")]
mod validated;
#[cfg(feature = "fips")]
use validated as chosen;

pub(crate) use chosen::{Gcm, PageHmac, Xts, fill_random, hkdf, hmac, sha256};
pub use chosen::{module, reserve};

/// A validated cryptographic module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Module {
    /// Its name and version, as it reports them.
    pub name: &'static str,
    /// Number of the certificate (CMVP) of the branch that it was built from. Whether that covers
    /// this version and this machine, the certificate says: docs/fips.md.
    pub certificate: u32,
    /// Whether it says of itself that it is in FIPS mode: it has tested itself when it was loaded.
    pub is_in_fips_mode: bool,
}

#[cfg(all(test, feature = "fips"))]
mod tests;
