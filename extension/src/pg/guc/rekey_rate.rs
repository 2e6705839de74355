//! `pagevault.rekey_rate`: an amount of data per second, or `auto`.

use std::ffi::{CStr, CString, c_char, c_void};

use pgrx::guc::{GucContext, GucFlags, GucRegistry, GucSetting};
use pgrx::pg_sys;

use crate::pg::text::ServerText;

static RATE: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c"auto"));

/// How fast rekey workers rewrite pages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RekeyRate {
    /// As fast as others do not mind.
    Auto,
    Unlimited,
    /// Bytes per second.
    Limit(f64),
}

pub(super) fn define() {
    // SAFETY: the function has the signature of a check hook, and raises no error.
    unsafe {
        GucRegistry::define_string_guc_with_hooks(
            c"pagevault.rekey_rate",
            c"Amount of data that each rekey worker rewrites per second at most, such as \"32MB\", or \"auto\".",
            c"auto: at full speed while nobody else uses the server, and slower when commits take longer, processors are busy, others write WAL, or a standby falls behind. 0 means no limit. A change applies to running jobs.",
            &RATE,
            GucContext::Sighup,
            GucFlags::default(),
            Some(is_rate),
            None,
            None,
        );
    }
}

/// Contract: called by guc.c with a new value of the setting; must not raise errors.
unsafe extern "C-unwind" fn is_rate(
    value: *mut *mut c_char,
    _extra: *mut *mut c_void,
    _source: pg_sys::GucSource::Type,
) -> bool {
    // SAFETY: an argument of the server: a NUL-terminated text, or null.
    let text = unsafe { ServerText::copied(*value) };
    text.is_none_or(|text| parse(text.as_c_str()).is_some())
}

/// Amounts as those of settings with the unit kB (`parse_int`, guc.c).
fn parse(text: &CStr) -> Option<RekeyRate> {
    if text.to_bytes().eq_ignore_ascii_case(b"auto") {
        return Some(RekeyRate::Auto);
    }
    let mut kilobytes = 0;
    // SAFETY: the text is NUL-terminated; the function writes the number, and raises no error. Its
    // hint is not wanted.
    let parsed = unsafe {
        pg_sys::parse_int(
            text.as_ptr(),
            &raw mut kilobytes,
            pg_sys::GUC_UNIT_KB as i32,
            std::ptr::null_mut(),
        )
    };
    match kilobytes {
        _ if !parsed => None,
        0 => Some(RekeyRate::Unlimited),
        _ => (kilobytes > 0).then(|| RekeyRate::Limit(f64::from(kilobytes) * 1024.0)),
    }
}

/// `pagevault.rekey_rate`
pub(crate) fn rekey_rate() -> RekeyRate {
    RATE.get().and_then(|text| parse(&text)).unwrap_or(RekeyRate::Auto)
}
