//! Names of providers and master keys.

use pagevault_keystore::record::MAX_NAME;
use pgrx::PgSqlErrorCode;

use crate::pg::report::{Report, Result};

/// Checks the name of a provider or key.
pub(crate) fn check_name(what: &str, name: &str, longest: usize) -> Result<()> {
    if name.is_empty() || name.len() > longest || name.chars().any(char::is_control) {
        return Err(Report::new(
            PgSqlErrorCode::ERRCODE_INVALID_NAME,
            format!("invalid name of a {what}"),
        )
        .detail(format!("A name has 1 to {longest} bytes and no control characters.")));
    }
    Ok(())
}

/// Checks the name of a master key.
pub(crate) fn check_key_name(name: &str) -> Result<()> {
    check_name("master key", name, MAX_NAME)
}
