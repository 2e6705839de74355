//! Values of settings of type enum.

use pgrx::PostgresGucEnum;

/// The cipher of new data keys.
#[derive(Clone, Copy, PartialEq, Eq, PostgresGucEnum)]
pub(super) enum Cipher {
    /// One that authenticates pages, where the server's settings allow that.
    #[name = c"auto"]
    Auto,
    #[name = c"aes-256-xts"]
    Aes256Xts,
    #[name = c"aes-128-xts"]
    Aes128Xts,
    #[name = c"aes-256-xts-auth"]
    Aes256XtsAuth,
    #[name = c"aes-256-xts-hmac"]
    Aes256XtsHmac,
}

/// Which temporary data is encrypted.
#[derive(Clone, Copy, PartialEq, Eq, PostgresGucEnum)]
pub(crate) enum TempEncryption {
    /// All created while the cluster has a database key, without which nothing can be encrypted.
    #[name = c"auto"]
    Auto,
    /// All.
    #[name = c"on"]
    On,
    /// None.
    #[name = c"off"]
    Off,
}

/// What happens to data whose master key was revoked.
#[derive(Clone, Copy, PartialEq, Eq, PostgresGucEnum)]
pub(super) enum RevokedKeyAction {
    #[name = c"log"]
    Log,
    #[name = c"lock"]
    Lock,
}

/// How new WAL is written. A promoted standby or a restored backup continues like the primary
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
