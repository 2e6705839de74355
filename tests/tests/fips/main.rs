//! Servers with a validated cryptographic module (docs/fips.md): the module works inside them, what
//! it does not have is refused, and they share data with ordinary servers.
//!
//! `PAGEVAULT_PG_CONFIG` is that of a server with the module, `PAGEVAULT_ORDINARY_PG_CONFIG` that
//! of a server of the same major without (tools/test-fips).

mod helper;
mod refusals;
mod shared;
mod status;

use std::path::Path;

use anyhow::{Context, Result};
use pagevault_tests::Installation;

/// The server with the module.
fn validated() -> Result<&'static Installation> {
    Installation::get()
}

/// The one without.
fn ordinary() -> Result<&'static Installation> {
    let variable = "PAGEVAULT_ORDINARY_PG_CONFIG";
    let pg_config = std::env::var_os(variable).with_context(|| format!("{variable} is not set"))?;
    Installation::of_pg_config(Path::new(&pg_config))
}

/// The setting that requires the module.
const REQUIRED: &str = "pagevault.require_fips=on";
