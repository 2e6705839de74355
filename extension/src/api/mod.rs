//! The SQL functions: argument checks and calls, one file per noun.

mod drift;
mod encrypt;
mod keys;
mod providers;
mod rekey;
mod shred;
mod stats;
mod status;

use crate::pg::report::{Report, Result};
use crate::pg::{locks, process};
use crate::{preload, roles};

/// Names of arguments, for messages.
const PROVIDER: &str = "name of a key provider";
const KEY: &str = "name of a master key";

/// What every function that changes keys asks first.
fn require_key_admin(action: &str) -> Result<()> {
    preload::require_active()?;
    roles::require_admin(action)?;
    require_primary(action)?;
    locks::lock_key_management();
    Ok(())
}

/// Refuses what writes keys or jobs, on a standby.
fn require_primary(action: &str) -> Result<()> {
    if process::in_recovery() {
        return Err(Report::new(
            pgrx::PgSqlErrorCode::ERRCODE_READ_ONLY_SQL_TRANSACTION,
            format!("cannot {action} during recovery"),
        )
        .hint("Do this on the primary; standbys follow through WAL."));
    }
    Ok(())
}
