//! Settings of forgetting keys that nothing needs.

use std::ffi::CStr;
use std::time::Duration;

use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting};

static KEEP_FORMER_KEYS: GucSetting<i32> = GucSetting::<i32>::new(86_400);
static KEEP_FORMER_WAL_KEYS: GucSetting<i32> = GucSetting::<i32>::new(-1);

/// Defines the settings.
pub(super) fn define() {
    define_time(
        c"pagevault.keep_former_keys",
        c"How long keys are kept that nothing needs: those of relation files that are gone, and those that were replaced, but for WAL keys.",
        c"Base backups must not take longer, and pg_rewind must not go back further. -1 keeps them for ever.",
        &KEEP_FORMER_KEYS,
    );
    define_time(
        c"pagevault.keep_former_wal_keys",
        c"How long former WAL keys are kept that this server does not need.",
        c"-1 keeps them for ever: archives and WAL receivers may need them.",
        &KEEP_FORMER_WAL_KEYS,
    );
}

fn define_time(
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
        -1,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::UNIT_S,
    );
}

/// How long keys are kept that nothing needs; `None`: for ever.
#[derive(Clone, Copy)]
pub(crate) struct Keep {
    /// Of files that are gone, and replaced ones: `pagevault.keep_former_keys`.
    pub(crate) others: Option<Duration>,
    /// WAL keys: `pagevault.keep_former_wal_keys`.
    pub(crate) wal: Option<Duration>,
}

impl Keep {
    /// The present settings.
    pub(crate) fn now() -> Keep {
        let time =
            |setting: &GucSetting<i32>| u64::try_from(setting.get()).ok().map(Duration::from_secs);
        Keep { others: time(&KEEP_FORMER_KEYS), wal: time(&KEEP_FORMER_WAL_KEYS) }
    }

    /// The shorter time; `None`: nothing is forgotten.
    pub(crate) fn shorter(self) -> Option<Duration> {
        self.others.into_iter().chain(self.wal).min()
    }
}
