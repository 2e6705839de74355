//! Why a data key is not available.

use pagevault_cipher::{CipherId, DataKeyVersion};
use pagevault_keystore::{RelFile, Scope};

use crate::keys::store::directory;

/// Why a data key is not available.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyError {
    /// The database key of `scope`, which wraps the data key, is not unwrapped.
    Locked { scope: Scope },
    /// The database key is unwrapped, but users are refused: its master key was revoked.
    Refused { scope: Scope },
    /// The keystore has no data key of this version for this file.
    NoKey { version: DataKeyVersion },
    /// The file could not be marked as one that may have pages under its interim key.
    NotMarked,
    /// The data key of this version was destroyed on purpose.
    Destroyed,
    /// Recovery has not replayed the key yet, and already waits for the keys of too many other
    /// files.
    TooManyMissing,
    /// The data key cannot be unwrapped: the keystore is damaged or not this cluster's.
    Damaged { version: DataKeyVersion },
    /// The data key is for a cipher that `pagevault.require_fips` refuses.
    Unapproved { cipher: CipherId },
}

impl KeyError {
    /// Why a file has no data key of a version.
    pub(crate) fn of_missing_key(file: RelFile, version: DataKeyVersion) -> KeyError {
        match directory::destroyed_at(file, version) {
            Some(_) => KeyError::Destroyed,
            None => KeyError::NoKey { version },
        }
    }
}
