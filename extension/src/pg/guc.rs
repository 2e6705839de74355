//! Settings.

use std::ffi::{CStr, CString, OsString, c_void};
use std::os::unix::ffi::OsStringExt;
use std::time::Duration;

use pagevault_cipher::CipherId;
use pgrx::prelude::PgLogLevel;
use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting, PgSqlErrorCode, pg_guard};

use self::choices::{Cipher, RevokedKeyAction, WalEncryption};
use self::placeholders::Placeholder;
use super::process::ProcessLocal;
use super::report::{Report, Result};
use super::session;
use super::text::ServerText;

pub(crate) use self::anchor::{anchor, anchor_interval, anchor_wait};
pub(crate) use self::audit::{audit_destination, audit_file, audit_syslog_socket};
pub(crate) use self::choices::TempEncryption;
pub(crate) use self::fips::require_fips;
pub(crate) use self::rekey_rate::{RekeyRate, rekey_rate};
pub(crate) use self::rotation::{KeyKind, is_rotation_window_open, rotate_after, rotation_window};

mod anchor;
mod audit;
mod choices;
mod fips;
pub(crate) mod forgetting;
pub(crate) mod page_images;
mod placeholders;
mod rekey_rate;
mod rotation;

/// Prefix of the names of pagevault's settings.
const PREFIX: &str = "pagevault.";

static DEFAULT_ENCRYPTION: GucSetting<bool> = GucSetting::<bool>::new(false);
static ENFORCE_ENCRYPTION: GucSetting<bool> = GucSetting::<bool>::new(false);
static DATA_CATALOG_ENCRYPTION: GucSetting<bool> = GucSetting::<bool>::new(true);
static RECOVERY_WAITS_FOR_KEYS: GucSetting<bool> = GucSetting::<bool>::new(true);
static SHARED_CATALOG_ENCRYPTION: GucSetting<bool> = GucSetting::<bool>::new(false);
static CIPHER: GucSetting<Cipher> = GucSetting::<Cipher>::new(Cipher::Auto);
static KEYRING_COMMAND: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));
static UNLOCK_TIMEOUT: GucSetting<i32> = GucSetting::<i32>::new(30);
static KEYRING_TIMEOUT: GucSetting<i32> = GucSetting::<i32>::new(30);
static WAL_ENCRYPTION: GucSetting<WalEncryption> =
    GucSetting::<WalEncryption>::new(WalEncryption::Keep);
static MAX_DATA_KEYS: GucSetting<i32> = GucSetting::<i32>::new(1_000_000);

static REKEY_WORKERS: GucSetting<i32> = GucSetting::<i32>::new(2);
static REKEY_THRESHOLD: GucSetting<i32> = GucSetting::<i32>::new(1024);

static WRITERS_TIMEOUT: GucSetting<i32> = GucSetting::<i32>::new(60_000);

static REVALIDATE_INTERVAL: GucSetting<i32> = GucSetting::<i32>::new(300);
static REVOKED_KEY_GRACE: GucSetting<i32> = GucSetting::<i32>::new(3600);
static REVOKED_KEY_ACTION: GucSetting<RevokedKeyAction> =
    GucSetting::<RevokedKeyAction>::new(RevokedKeyAction::Log);

static TEMP_ENCRYPTION: GucSetting<TempEncryption> =
    GucSetting::<TempEncryption>::new(TempEncryption::Auto);

/// Defines all settings; from `_PG_init`. Fails if the configuration contains an unknown setting
/// with our prefix, or an invalid value: see [`require_known`].
pub(crate) fn define(changed: Changed) -> Result<()> {
    let configured = placeholders::find(PREFIX);
    CHANGED.set(Some(changed));
    define_protection(
        c"pagevault.default_encryption",
        c"Encrypts every relation created from now on.",
        c"Applies unless a label of the relation, its schema, its tablespace or its database decides. System catalogs are not affected.",
        &DEFAULT_ENCRYPTION,
        assign_default_encryption,
    );
    define_protection(
        c"pagevault.enforce_encryption",
        c"Refuses commands that would leave a relation in plaintext although a label or setting requires encryption.",
        c"This applies to superusers too.",
        &ENFORCE_ENCRYPTION,
        assign_enforce_encryption,
    );
    define_protection(
        c"pagevault.data_catalog_encryption",
        c"Encrypts the catalogs that contain values of user tables as soon as any relation of the database is encrypted.",
        c"These are pg_statistic, pg_statistic_ext_data and pg_largeobject.",
        &DATA_CATALOG_ENCRYPTION,
        assign_data_catalog_encryption,
    );
    GucRegistry::define_bool_guc(
        c"pagevault.shared_catalog_encryption",
        c"Requires encryption of the catalogs that all databases share.",
        c"Nobody can log in then while the cluster's key is locked.",
        &SHARED_CATALOG_ENCRYPTION,
        GucContext::Sighup,
        GucFlags::default(),
    );
    GucRegistry::define_enum_guc(
        c"pagevault.wal_encryption",
        c"Whether new WAL is encrypted: on, off, or keep (no change).",
        c"Requires a master key of the cluster. Existing WAL is not rewritten.",
        &WAL_ENCRYPTION,
        GucContext::Sighup,
        GucFlags::default(),
    );
    GucRegistry::define_enum_guc(
        c"pagevault.cipher",
        c"Cipher of new data keys: auto, aes-256-xts, aes-128-xts, aes-256-xts-auth or aes-256-xts-hmac.",
        c"The last two authenticate pages. auto is aes-256-xts-auth (aes-256-xts-hmac in a build for FIPS), or aes-256-xts in a cluster without data checksums, with full_page_writes off or wal_level minimal. Existing data keys keep their cipher.",
        &CIPHER,
        GucContext::Suset,
        GucFlags::default(),
    );
    GucRegistry::define_string_guc(
        c"pagevault.keyring_command",
        c"Program that talks to key providers.",
        c"If empty, pagevault-keyring is looked for in ../bin from the directory of the library, beside the server's binary, and in PATH, and refused if other users could change it.",
        &KEYRING_COMMAND,
        GucContext::Sighup,
        GucFlags::SUPERUSER_ONLY,
    );
    GucRegistry::define_int_guc(
        c"pagevault.keyring_timeout",
        c"Maximum duration of one request to a key provider.",
        c"",
        &KEYRING_TIMEOUT,
        1,
        3600,
        GucContext::Suset,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_int_guc(
        c"pagevault.unlock_timeout",
        c"How long a server start asks key providers before it continues with locked keys.",
        c"The last request may take pagevault.keyring_timeout longer. If crash recovery needs keys, the server does not start without them.",
        &UNLOCK_TIMEOUT,
        0,
        86_400,
        GucContext::Postmaster,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_int_guc(
        c"pagevault.max_data_keys",
        c"Maximum number of data keys.",
        c"Reserves address space; only existing keys use memory.",
        &MAX_DATA_KEYS,
        1_000,
        16_000_000,
        GucContext::Postmaster,
        GucFlags::default(),
    );
    GucRegistry::define_bool_guc(
        c"pagevault.recovery_waits_for_keys",
        c"Whether a standby or a restore waits when it replays a new database key that no provider unwraps.",
        c"If off, it continues until the key is needed, and stops there. Turn it off with a reload to get past a key that is no longer needed.",
        &RECOVERY_WAITS_FOR_KEYS,
        GucContext::Sighup,
        GucFlags::default(),
    );
    GucRegistry::define_int_guc(
        c"pagevault.rekey_workers",
        c"Maximum number of background workers that rekey relations.",
        c"They count towards max_worker_processes. With 0, no job runs.",
        &REKEY_WORKERS,
        0,
        64,
        GucContext::Sighup,
        GucFlags::default(),
    );
    GucRegistry::define_int_guc(
        c"pagevault.rekey_threshold",
        c"Relations larger than this are encrypted and decrypted by background jobs, smaller ones at once.",
        c"With 0, every relation that is not empty gets a job.",
        &REKEY_THRESHOLD,
        0,
        i32::MAX,
        GucContext::Suset,
        GucFlags::UNIT_BLOCKS,
    );
    rekey_rate::define();
    GucRegistry::define_int_guc(
        c"pagevault.writers_timeout",
        c"Maximum wait for processes that are writing a page or creating a file while keys change.",
        c"After that a command fails and names the process; a rekey job logs the process and continues to wait. 0 means no limit.",
        &WRITERS_TIMEOUT,
        0,
        i32::MAX,
        GucContext::Suset,
        GucFlags::UNIT_MS,
    );
    fips::define();
    forgetting::define();
    GucRegistry::define_int_guc(
        c"pagevault.revalidate_interval",
        c"How often key providers are asked whether they still unwrap the keys in use.",
        c"0 turns this off.",
        &REVALIDATE_INTERVAL,
        0,
        604_800,
        GucContext::Sighup,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_int_guc(
        c"pagevault.revoked_key_grace",
        c"Time between the revocation of a master key and pagevault.revoked_key_action.",
        c"An outage of the provider is not a revocation.",
        &REVOKED_KEY_GRACE,
        0,
        2_592_000,
        GucContext::Sighup,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_enum_guc(
        c"pagevault.revoked_key_action",
        c"What happens when a master key stays revoked: log or lock.",
        c"Locked relations refuse access until the key is usable again. Keys stay in locked memory until the server stops.",
        &REVOKED_KEY_ACTION,
        GucContext::Sighup,
        GucFlags::default(),
    );
    GucRegistry::define_enum_guc(
        c"pagevault.temp_encryption",
        c"Encrypts temporary data: auto (as soon as the cluster has a master key), on or off.",
        c"This covers temporary tables, temporary files of queries, changes spilled by logical decoding, and the NOTIFY queue. It is decided for each file when the file is created.",
        &TEMP_ENCRYPTION,
        GucContext::Sighup,
        GucFlags::default(),
    );
    anchor::define();
    audit::define();
    rotation::define();
    require_known(&configured)?;
    // SAFETY: a C string constant. From now on the server refuses undefined names with this prefix.
    unsafe { pgrx::pg_sys::MarkGUCPrefixReserved(c"pagevault".as_ptr()) };
    Ok(())
}

/// Defines a setting that decides what is protected. Superusers may change it for their session;
/// changes are audited.
fn define_protection(
    name: &'static CStr,
    short: &'static CStr,
    long: &'static CStr,
    setting: &'static GucSetting<bool>,
    assign: unsafe extern "C-unwind" fn(bool, *mut c_void),
) {
    // SAFETY: the function has the signature of an assign hook, and raises no error.
    unsafe {
        GucRegistry::define_bool_guc_with_hooks(
            name,
            short,
            long,
            setting,
            GucContext::Suset,
            GucFlags::default(),
            None,
            Some(assign),
            None,
        );
    }
}

/// Contract: called by guc.c before the setting is changed, in any process and state; should not
/// raise errors. Uses catalogs only while a command runs or a session begins, and only what the
/// session has looked up already.
#[pg_guard]
unsafe extern "C-unwind" fn assign_default_encryption(new: bool, _extra: *mut c_void) {
    note_change("pagevault.default_encryption", DEFAULT_ENCRYPTION.get(), new);
}

/// Contract: as above.
#[pg_guard]
unsafe extern "C-unwind" fn assign_enforce_encryption(new: bool, _extra: *mut c_void) {
    note_change("pagevault.enforce_encryption", ENFORCE_ENCRYPTION.get(), new);
}

/// Contract: as above.
#[pg_guard]
unsafe extern "C-unwind" fn assign_data_catalog_encryption(new: bool, _extra: *mut c_void) {
    note_change("pagevault.data_catalog_encryption", DATA_CATALOG_ENCRYPTION.get(), new);
}

/// Called when this session changes a protection setting: its name, old value and new value.
pub(crate) type Changed = fn(&'static str, bool, bool);

static CHANGED: ProcessLocal<Option<Changed>> = ProcessLocal::new(None);

fn note_change(name: &'static str, old: bool, new: bool) {
    if old == new || !session::is_in_command() {
        return;
    }
    if let Some(report) = CHANGED.get() {
        report(name, old, new);
    }
}

/// Refuses a configuration with settings that the server would ignore.
///
/// Until a library has defined its settings they are placeholders with any name and value. If the
/// library does not define the name (`MarkGUCPrefixReserved`), or the value is invalid
/// (`define_custom_variable`, `reapply_stacked_values`), guc.c warns and uses the default. Data
/// would then lack the protection that the configuration demands.
fn require_known(configured: &[Placeholder]) -> Result<()> {
    let unknown = placeholders::find(PREFIX);
    let Some((problem, message)) = configured.iter().find_map(|setting| {
        let name = &setting.name;
        if unknown.iter().any(|left| left.name == *name) {
            Some((setting, format!("unrecognized configuration parameter \"{name}\"")))
        } else if placeholders::is_at_default(name) {
            let value = &setting.value;
            Some((setting, format!("invalid value for parameter \"{name}\": \"{value}\"")))
        } else {
            None
        }
    }) else {
        return Ok(());
    };
    Err(Report::new(PgSqlErrorCode::ERRCODE_CONFIG_FILE_ERROR, message)
        .detail(format!("It is set {}.", problem.place))
        .hint("Correct the setting, or remove it."))
}

/// Any setting in the form of SHOW; empty if it does not exist.
pub(crate) fn shown(name: &str) -> String {
    let Ok(name) = CString::new(name) else { return String::new() };
    // SAFETY: reads a setting; the text belongs to the server, and is copied at once.
    let text =
        unsafe { ServerText::copied(pgrx::pg_sys::GetConfigOption(name.as_ptr(), true, false)) };
    text.map_or(String::new(), |text| text.to_string())
}

/// `pagevault.default_encryption`
pub(crate) fn default_encryption() -> bool {
    DEFAULT_ENCRYPTION.get()
}

/// `pagevault.enforce_encryption`
pub(crate) fn enforce_encryption() -> bool {
    ENFORCE_ENCRYPTION.get()
}

/// `pagevault.data_catalog_encryption`
pub(crate) fn data_catalog_encryption() -> bool {
    DATA_CATALOG_ENCRYPTION.get()
}

/// `pagevault.shared_catalog_encryption`
pub(crate) fn shared_catalog_encryption() -> bool {
    SHARED_CATALOG_ENCRYPTION.get()
}

/// `pagevault.wal_encryption`; `None` to keep it as it is.
pub(crate) fn wal_encryption() -> Option<bool> {
    match WAL_ENCRYPTION.get() {
        WalEncryption::Keep => None,
        WalEncryption::On => Some(true),
        WalEncryption::Off => Some(false),
    }
}

/// Limits `wal_decode_buffer_size` to [`READ_AHEAD`](super::wal::READ_AHEAD), so that recovery
/// cannot read past a barrier in WAL; in the postmaster, while libraries are loaded. The reader's
/// setting matters, which the writer of a barrier does not know.
pub(crate) fn bound_read_ahead() {
    const SETTING: &CStr = c"wal_decode_buffer_size";
    const MOST: &CStr = c"4MB";
    const _: () = assert!(super::wal::READ_AHEAD == 4 << 20);
    // SAFETY: a plain global; a setting of the server, with a valid value, at a time when it may be
    // changed.
    let was = unsafe {
        let was = usize::try_from(pgrx::pg_sys::wal_decode_buffer_size).unwrap_or(0);
        if was <= super::wal::READ_AHEAD {
            return;
        }
        pgrx::pg_sys::SetConfigOption(
            SETTING.as_ptr(),
            MOST.as_ptr(),
            pgrx::pg_sys::GucContext::PGC_POSTMASTER,
            pgrx::pg_sys::GucSource::PGC_S_OVERRIDE,
        );
        was
    };
    Report::new(
        PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
        format!("pagevault: wal_decode_buffer_size is 4 MB, not {} MB", was >> 20),
    )
    .detail("Recovery must not read past a key of WAL that it has not replayed yet.")
    .send(PgLogLevel::LOG);
}

/// `pagevault.cipher`; `None` for `auto`.
pub(crate) fn cipher() -> Option<CipherId> {
    match CIPHER.get() {
        Cipher::Auto => None,
        Cipher::Aes256Xts => Some(CipherId::Aes256Xts),
        Cipher::Aes128Xts => Some(CipherId::Aes128Xts),
        Cipher::Aes256XtsAuth => Some(CipherId::Aes256XtsAuth),
        Cipher::Aes256XtsHmac => Some(CipherId::Aes256XtsHmac),
    }
}

/// `pagevault.keyring_command`, empty for the default.
pub(crate) fn keyring_command() -> OsString {
    KEYRING_COMMAND.get().map(|path| OsString::from_vec(path.into_bytes())).unwrap_or_default()
}

/// `pagevault.keyring_timeout` in seconds.
pub(crate) fn keyring_timeout() -> u64 {
    KEYRING_TIMEOUT.get().max(1) as u64
}

/// `pagevault.unlock_timeout` in seconds.
pub(crate) fn unlock_timeout() -> u64 {
    UNLOCK_TIMEOUT.get().max(0) as u64
}

/// `pagevault.rekey_workers`
pub(crate) fn rekey_workers() -> usize {
    REKEY_WORKERS.get().max(0) as usize
}

/// `pagevault.rekey_threshold` in pages.
pub(crate) fn rekey_threshold() -> u64 {
    REKEY_THRESHOLD.get().max(0) as u64
}

/// `pagevault.writers_timeout`, unless there is no limit.
pub(crate) fn writers_timeout() -> Option<Duration> {
    let milliseconds = WRITERS_TIMEOUT.get().max(0) as u64;
    Some(Duration::from_millis(milliseconds)).filter(|limit| !limit.is_zero())
}

/// `pagevault.recovery_waits_for_keys`
pub(crate) fn recovery_waits_for_keys() -> bool {
    RECOVERY_WAITS_FOR_KEYS.get()
}

/// `pagevault.temp_encryption`
#[inline]
pub(crate) fn temp_encryption() -> TempEncryption {
    TEMP_ENCRYPTION.get()
}

/// `pagevault.revalidate_interval`, unless it is off.
pub(crate) fn revalidate_interval() -> Option<Duration> {
    Some(seconds(&REVALIDATE_INTERVAL)).filter(|interval| !interval.is_zero())
}

/// `pagevault.revoked_key_grace`
pub(crate) fn revoked_key_grace() -> Duration {
    seconds(&REVOKED_KEY_GRACE)
}

/// True if `pagevault.revoked_key_action` is `lock`.
pub(crate) fn locks_revoked_keys() -> bool {
    REVOKED_KEY_ACTION.get() == RevokedKeyAction::Lock
}

fn seconds(setting: &GucSetting<i32>) -> Duration {
    Duration::from_secs(setting.get().max(0) as u64)
}

/// `pagevault.max_data_keys`
pub(crate) fn max_data_keys() -> usize {
    MAX_DATA_KEYS.get().max(1_000) as usize
}
