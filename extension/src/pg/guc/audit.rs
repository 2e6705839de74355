//! Settings of the audit trail.

use std::ffi::{CString, OsString, c_char, c_void};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting};

use crate::pg::audit_destination::Destination;
use crate::pg::text::ServerText;

static AUDIT_DESTINATION: GucSetting<Option<CString>> =
    GucSetting::<Option<CString>>::new(Some(c"log"));
static AUDIT_FILE: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));
static AUDIT_SYSLOG_SOCKET: GucSetting<Option<CString>> =
    GucSetting::<Option<CString>>::new(Some(c"/dev/log"));

/// Defines the settings of the audit trail.
pub(super) fn define() {
    // SAFETY: the function has the signature of a check hook, and raises no error.
    unsafe {
        GucRegistry::define_string_guc_with_hooks(
            c"pagevault.audit_destination",
            c"Where lines of the audit trail go: any of log, file and syslog.",
            c"Lines that cannot be written to a destination go to the server log, with the reason.",
            &AUDIT_DESTINATION,
            GucContext::Sighup,
            GucFlags::default(),
            Some(is_destination),
            None,
            None,
        );
    }
    GucRegistry::define_string_guc(
        c"pagevault.audit_file",
        c"File to which lines of the audit trail are appended.",
        c"The file is opened for each line, so it can be rotated by renaming. A relative name is below the data directory.",
        &AUDIT_FILE,
        GucContext::Sighup,
        GucFlags::SUPERUSER_ONLY,
    );
    GucRegistry::define_string_guc(
        c"pagevault.audit_syslog_socket",
        c"Socket of the syslog server.",
        c"Facility and name are those of syslog_facility and syslog_ident.",
        &AUDIT_SYSLOG_SOCKET,
        GucContext::Sighup,
        GucFlags::SUPERUSER_ONLY,
    );
}

/// Contract: called by guc.c with a new value of the setting; must not raise errors.
unsafe extern "C-unwind" fn is_destination(
    value: *mut *mut c_char,
    _extra: *mut *mut c_void,
    _source: pgrx::pg_sys::GucSource::Type,
) -> bool {
    // SAFETY: an argument of the server: a NUL-terminated text.
    let text = unsafe { ServerText::copied(*value) };
    text.is_some_and(|text| Destination::parse(&text.to_string()).is_some())
}

/// `pagevault.audit_destination`
pub(crate) fn audit_destination() -> Destination {
    let text = AUDIT_DESTINATION.get().map(|text| text.to_string_lossy().into_owned());
    let log = Destination { log: true, ..Destination::default() };
    text.and_then(|text| Destination::parse(&text)).unwrap_or(log)
}

/// `pagevault.audit_file`
pub(crate) fn audit_file() -> PathBuf {
    path(&AUDIT_FILE)
}

/// `pagevault.audit_syslog_socket`
pub(crate) fn audit_syslog_socket() -> PathBuf {
    path(&AUDIT_SYSLOG_SOCKET)
}

fn path(setting: &GucSetting<Option<CString>>) -> PathBuf {
    let text = setting.get().map(CString::into_bytes).unwrap_or_default();
    PathBuf::from(OsString::from_vec(text))
}
