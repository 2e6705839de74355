//! How a scope is called, and what lies in it: the cluster is scope 0, a database its OID.

use pagevault_keystore::record::MAX_NAME;
use pgrx::PgSqlErrorCode;

use crate::pg::report::{Report, Result};

/// Whose key a scope's is, in messages that are also written where no catalog can be read.
pub(crate) fn name(scope: u32) -> String {
    if scope == 0 { "the cluster".to_owned() } else { format!("database {scope}") }
}

/// Refuses what cannot be the name of a provider or of a key.
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

/// Refuses what no provider takes for the name of a key.
pub(crate) fn check_key_name(name: &str) -> Result<()> {
    check_name("master key", name, MAX_NAME)
}
