//! The values that settings may have which take one of a few words.

use pgrx::PostgresGucEnum;

/// The ciphers of data keys.
#[derive(Clone, Copy, PartialEq, Eq, PostgresGucEnum)]
pub(super) enum Cipher {
    #[name = c"aes-256-xts"]
    Aes256Xts,
    #[name = c"aes-128-xts"]
    Aes128Xts,
}

/// Which temporary data is encrypted.
#[derive(Clone, Copy, PartialEq, Eq, PostgresGucEnum)]
pub(crate) enum TempEncryption {
    /// All that is made while the cluster has a database key, so that something can be encrypted.
    #[name = c"auto"]
    Auto,
    /// All.
    #[name = c"on"]
    On,
    /// None.
    #[name = c"off"]
    Off,
}

/// What becomes of data whose master key was revoked.
#[derive(Clone, Copy, PartialEq, Eq, PostgresGucEnum)]
pub(super) enum RevokedKeyAction {
    #[name = c"log"]
    Log,
    #[name = c"lock"]
    Lock,
}

/// How WAL is to be written. A primary that is made of a standby or a backup goes on as the one
/// before it, unless its own configuration says otherwise.
#[derive(Clone, Copy, PartialEq, Eq, PostgresGucEnum)]
pub(super) enum WalEncryption {
    #[name = c"keep"]
    Keep,
    #[name = c"on"]
    On,
    #[name = c"off"]
    Off,
}
