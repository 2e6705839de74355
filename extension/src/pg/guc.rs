//! Settings.

use std::ffi::CString;

use pagevault_cipher::CipherId;
use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting};

static DEFAULT_ENCRYPTION: GucSetting<bool> = GucSetting::<bool>::new(false);
static CIPHER: GucSetting<Option<CString>> =
    GucSetting::<Option<CString>>::new(Some(c"aes-256-xts"));
static KEYRING_COMMAND: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));
static UNLOCK_TIMEOUT: GucSetting<i32> = GucSetting::<i32>::new(30);
static KEYRING_TIMEOUT: GucSetting<i32> = GucSetting::<i32>::new(30);
static MAX_KEYS: GucSetting<i32> = GucSetting::<i32>::new(1_000_000);

/// Defines every setting; from `_PG_init`.
pub(crate) fn define() {
    GucRegistry::define_bool_guc(
        c"pagevault.default_encryption",
        c"Encrypts every relation created from now on.",
        c"Applies where neither the relation nor what it belongs to says otherwise. System catalogs are not affected.",
        &DEFAULT_ENCRYPTION,
        GucContext::Suset,
        GucFlags::default(),
    );
    GucRegistry::define_string_guc(
        c"pagevault.cipher",
        c"Cipher of new data keys: aes-256-xts or aes-128-xts.",
        c"Existing data keys keep the cipher they were made with.",
        &CIPHER,
        GucContext::Suset,
        GucFlags::default(),
    );
    GucRegistry::define_string_guc(
        c"pagevault.keyring_command",
        c"Program that talks to key providers.",
        c"Empty means pagevault-keyring beside the server's own binary.",
        &KEYRING_COMMAND,
        GucContext::Sighup,
        GucFlags::default(),
    );
    GucRegistry::define_int_guc(
        c"pagevault.keyring_timeout",
        c"Longest time that one request to a key provider may take.",
        c"",
        &KEYRING_TIMEOUT,
        1,
        3600,
        GucContext::Suset,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_int_guc(
        c"pagevault.unlock_timeout",
        c"Time for which server start keeps asking key providers before it goes on locked.",
        c"When crash recovery needs keys the server does not start without them.",
        &UNLOCK_TIMEOUT,
        0,
        86_400,
        GucContext::Postmaster,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_int_guc(
        c"pagevault.max_keys",
        c"Most data keys that the server can hold.",
        c"Reserves address space; memory is used only for keys that exist.",
        &MAX_KEYS,
        1_000,
        16_000_000,
        GucContext::Postmaster,
        GucFlags::default(),
    );
    // SAFETY: reserves our prefix so that misspelt settings are refused; plain C string.
    unsafe { pgrx::pg_sys::MarkGUCPrefixReserved(c"pagevault".as_ptr()) };
}

/// `pagevault.default_encryption`
pub(crate) fn default_encryption() -> bool {
    DEFAULT_ENCRYPTION.get()
}

/// `pagevault.cipher`; an unknown name is an error to report to the user.
pub(crate) fn cipher() -> Result<CipherId, String> {
    let name = CIPHER.get().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    name.parse().map_err(|_| name)
}

/// `pagevault.keyring_command`, empty for the default.
pub(crate) fn keyring_command() -> String {
    KEYRING_COMMAND.get().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default()
}

/// `pagevault.keyring_timeout` in seconds.
pub(crate) fn keyring_timeout() -> u64 {
    KEYRING_TIMEOUT.get().max(1) as u64
}

/// `pagevault.unlock_timeout` in seconds.
pub(crate) fn unlock_timeout() -> u64 {
    UNLOCK_TIMEOUT.get().max(0) as u64
}

/// `pagevault.max_keys`
pub(crate) fn max_keys() -> usize {
    MAX_KEYS.get().max(1_000) as usize
}
