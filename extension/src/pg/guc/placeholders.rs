//! Settings in the configuration that no loaded library has defined (`GUC_CUSTOM_PLACEHOLDER`).

use std::ffi::c_char;

use pgrx::pg_sys;

use crate::pg::compat;
use crate::pg::text::ServerText;

/// A setting that is configured but not defined.
pub(super) struct Placeholder {
    /// As it is configured; guc.c compares names without regard to case.
    pub(super) name: String,
    pub(super) value: String,
    /// Where it is configured, as a part of a sentence.
    pub(super) place: String,
}

/// The placeholders whose names begin with `prefix`.
pub(super) fn find(prefix: &str) -> Vec<Placeholder> {
    let mut found = Vec::new();
    for_each(|name, setting| {
        let begins = name.get(..prefix.len()).is_some_and(|it| it.eq_ignore_ascii_case(prefix));
        if begins && setting.flags & pg_sys::GUC_CUSTOM_PLACEHOLDER as i32 != 0 {
            let file = text(setting.sourcefile);
            let place = if file.is_empty() {
                "on the command line".to_string()
            } else {
                format!("in \"{file}\" line {}", setting.sourceline)
            };
            found.push(Placeholder { name: name.to_string(), value: super::shown(name), place });
        }
    });
    found
}

/// True if the setting is defined and has its default because nothing has set it.
pub(super) fn is_at_default(wanted: &str) -> bool {
    let mut is = false;
    for_each(|name, setting| {
        is |=
            name.eq_ignore_ascii_case(wanted) && setting.source == pg_sys::GucSource::PGC_S_DEFAULT;
    });
    is
}

/// Visits every setting of this process with its name.
fn for_each(mut visit: impl FnMut(&str, &pg_sys::config_generic)) {
    let (settings, count) = compat::settings();
    for index in 0..count {
        // SAFETY: an array of that many pointers to settings, which live as long as the process.
        let setting = unsafe { &**settings.add(index) };
        visit(&text(setting.name), setting);
    }
}

/// A text in a setting's structure; empty if null.
fn text(text: *const c_char) -> String {
    // SAFETY: guc.c stores null or NUL-terminated texts in the structure; copied at once.
    unsafe { ServerText::copied(text) }.map_or(String::new(), |text| text.to_string())
}
