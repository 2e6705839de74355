//! Why a data key cannot be had.

use pagevault_keystore::RelFile;

use crate::keys::store::directory;

/// Why a data key cannot be had.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyError {
    /// The database key that wraps the data key is not unwrapped; `scope` is its database or 0.
    Locked { scope: u32 },
    /// The database key is unwrapped, but users are refused: its master key was revoked.
    Refused { scope: u32 },
    /// The keystore has no data key of this epoch for this file.
    NoKey { epoch: u16 },
    /// The data key of this epoch was destroyed on purpose.
    Destroyed,
    /// Recovery has not replayed the key yet, nor those of too many other files.
    TooManyMissing,
    /// The wrapped data key does not open: the keystore is damaged or not this cluster's.
    Damaged { epoch: u16 },
}

impl KeyError {
    /// Why a file has no data key of an epoch.
    pub(crate) fn of_missing_key(file: RelFile, epoch: u16) -> KeyError {
        match directory::destroyed_at(file, epoch) {
            Some(_) => KeyError::Destroyed,
            None => KeyError::NoKey { epoch },
        }
    }
}
