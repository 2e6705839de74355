//! Settings of the rotation of keys by age.

use std::ffi::{CStr, CString, c_char, c_void};
use std::time::Duration;

use pagevault_core::rotation::Window;
use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting, pg_sys};

use crate::pg::clock;
use crate::pg::text::ServerText;

static MASTER_KEY: GucSetting<i32> = GucSetting::<i32>::new(0);
static DATABASE_KEY: GucSetting<i32> = GucSetting::<i32>::new(0);
static WAL_KEY: GucSetting<i32> = GucSetting::<i32>::new(0);
static DATA_KEY: GucSetting<i32> = GucSetting::<i32>::new(0);
static WINDOW: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));

/// Kinds of keys, in the order in which they are rotated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum KeyKind {
    Master,
    Database,
    Wal,
    Data,
}

impl KeyKind {
    /// The name in SQL.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Master => "master",
            Self::Database => "database",
            Self::Wal => "wal",
            Self::Data => "data",
        }
    }
}

/// Defines the settings.
pub(super) fn define() {
    define_age(
        c"pagevault.rotate_master_key_after",
        c"Age at which the server rotates master keys by itself.",
        c"The provider must permit it. 0 turns this off.",
        &MASTER_KEY,
    );
    define_age(
        c"pagevault.rotate_database_key_after",
        c"Age at which the server rotates database keys by itself.",
        c"All data keys are wrapped again; no page is rewritten. 0 turns this off.",
        &DATABASE_KEY,
    );
    define_age(
        c"pagevault.rotate_wal_key_after",
        c"Age at which the server rotates the WAL key by itself.",
        c"Applies while WAL is encrypted. 0 turns this off.",
        &WAL_KEY,
    );
    define_age(
        c"pagevault.rotate_data_key_after",
        c"Age at which the server gives relations new data keys by itself.",
        c"By jobs, one at a time, which rewrite all pages. 0 turns this off.",
        &DATA_KEY,
    );
    // SAFETY: the function has the signature of a check hook, and raises no error.
    unsafe {
        GucRegistry::define_string_guc_with_hooks(
            c"pagevault.rotation_window",
            c"When the server may rotate keys by itself, as in \"22:00-06:00\" or \"Mon-Fri 01:00-05:00, Sun\".",
            c"In the time zone log_timezone. Outside, jobs that rewrite pages for a new data key wait. If empty, always.",
            &WINDOW,
            GucContext::Sighup,
            GucFlags::default(),
            Some(is_window),
            None,
            None,
        );
    }
}

fn define_age(
    name: &'static CStr,
    short: &'static CStr,
    long: &'static CStr,
    setting: &'static GucSetting<i32>,
) {
    GucRegistry::define_int_guc(
        name,
        short,
        long,
        setting,
        0,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::UNIT_S,
    );
}

/// Contract: called by guc.c with a new value of the setting; must not raise errors.
unsafe extern "C-unwind" fn is_window(
    value: *mut *mut c_char,
    _extra: *mut *mut c_void,
    _source: pg_sys::GucSource::Type,
) -> bool {
    // SAFETY: an argument of the server: a NUL-terminated text, or null.
    let text = unsafe { ServerText::copied(*value) };
    let error = text.and_then(|text| text.to_string().parse::<Window>().err());
    if let Some(error) = &error {
        explain(&error.to_string());
    }
    error.is_none()
}

/// The DETAIL of the error that guc.c reports (`GUC_check_errdetail`, guc.h).
fn explain(detail: &str) {
    let detail = CString::new(detail).unwrap_or_default();
    // SAFETY: the context of texts for error messages; guc.c reads the copy before it resets that.
    unsafe {
        pg_sys::GUC_check_errdetail_string =
            pg_sys::MemoryContextStrdup(pg_sys::ErrorContext, detail.as_ptr());
    }
}

/// `pagevault.rotate_..._key_after` of this kind, unless it is off.
pub(crate) fn rotate_after(kind: KeyKind) -> Option<Duration> {
    let setting = match kind {
        KeyKind::Master => &MASTER_KEY,
        KeyKind::Database => &DATABASE_KEY,
        KeyKind::Wal => &WAL_KEY,
        KeyKind::Data => &DATA_KEY,
    };
    Some(super::seconds(setting)).filter(|age| !age.is_zero())
}

/// `pagevault.rotation_window`
pub(crate) fn rotation_window() -> String {
    WINDOW.get().map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Whether `pagevault.rotation_window` is open now.
pub(crate) fn is_rotation_window_open() -> bool {
    let (weekday, minute) = clock::local_minute();
    rotation_window().parse::<Window>().is_ok_and(|window| window.is_open(weekday, minute))
}
