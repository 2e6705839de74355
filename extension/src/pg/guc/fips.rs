//! The setting that requires a validated cryptographic module.

use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting};

static REQUIRE_FIPS: GucSetting<bool> = GucSetting::<bool>::new(false);

/// Defines the setting.
pub(super) fn define() {
    GucRegistry::define_bool_guc(
        c"pagevault.require_fips",
        c"Refuses to start without a cryptographic module that has a FIPS 140-3 certificate, and refuses data that it cannot decrypt.",
        c"Needs the package postgresql-NN-pagevault-fips. Data under aes-128-xts and aes-256-xts-auth is refused, because the module has neither.",
        &REQUIRE_FIPS,
        GucContext::Postmaster,
        GucFlags::default(),
    );
}

/// `pagevault.require_fips`
pub(crate) fn require_fips() -> bool {
    REQUIRE_FIPS.get()
}
