//! Settings of the anchor.

use std::ffi::CString;
use std::time::Duration;

use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting};

static ANCHOR: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));
static ANCHOR_INTERVAL: GucSetting<i32> = GucSetting::<i32>::new(300);
static ANCHOR_WAIT: GucSetting<i32> = GucSetting::<i32>::new(0);

/// Defines the settings of the anchor.
pub(super) fn define() {
    GucRegistry::define_string_guc(
        c"pagevault.anchor",
        c"File that describes the store in which this server notes what it has reached.",
        c"A start from an older data directory is refused then. If empty, there is no anchor.",
        &ANCHOR,
        GucContext::Sighup,
        GucFlags::SUPERUSER_ONLY,
    );
    GucRegistry::define_int_guc(
        c"pagevault.anchor_interval",
        c"Minimum time between two notes to the anchor.",
        c"A note is written only after a checkpoint.",
        &ANCHOR_INTERVAL,
        1,
        86_400,
        GucContext::Sighup,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_int_guc(
        c"pagevault.anchor_wait",
        c"How long a server start asks an anchor that cannot be read, before it goes on.",
        c"The last request may take pagevault.keyring_timeout longer.",
        &ANCHOR_WAIT,
        0,
        86_400,
        GucContext::Postmaster,
        GucFlags::UNIT_S,
    );
}

/// `pagevault.anchor`, if it is set.
pub(crate) fn anchor() -> Option<String> {
    let text = ANCHOR.get().map(|text| text.to_string_lossy().into_owned());
    text.filter(|text| !text.is_empty())
}

/// `pagevault.anchor_interval`
pub(crate) fn anchor_interval() -> Duration {
    Duration::from_secs(ANCHOR_INTERVAL.get().max(1) as u64)
}

/// `pagevault.anchor_wait`
pub(crate) fn anchor_wait() -> Duration {
    Duration::from_secs(ANCHOR_WAIT.get().max(0) as u64)
}
