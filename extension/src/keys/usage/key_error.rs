//! Why a data key cannot be had.

use pagevault_cipher::DataKeyVersion;
use pagevault_keystore::{RelFile, Scope};

use crate::keys::store::directory;

/// Why a data key cannot be had.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyError {
    /// The database key that wraps the data key, that of `scope`, is not unwrapped.
    Locked { scope: Scope },
    /// The database key is unwrapped, but users are refused: its master key was revoked.
    Refused { scope: Scope },
    /// The keystore has no data key of this version for this file.
    NoKey { version: DataKeyVersion },
    /// The data key of this version was destroyed on purpose.
    Destroyed,
    /// Recovery has not replayed the key yet, nor those of too many other files.
    TooManyMissing,
    /// The wrapped data key does not open: the keystore is damaged or not this cluster's.
    Damaged { version: DataKeyVersion },
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
