//! The SQL functions: argument checks and calls, one file for each subject.

mod drift;
mod encrypt;
mod former_keys;
mod key_ages;
mod key_groups;
mod keys;
mod providers;
mod rekey;
mod shred;
mod stats;
mod status;

use crate::audit::{self, Operation};
use crate::pg::report::{Report, Result};
use crate::pg::text::excerpt;
use crate::pg::{locks, process, relation, xact};
use crate::{preload, roles};

/// Names of arguments, for messages.
const PROVIDER: &str = "name of a key provider";
const KEY: &str = "name of a master key";

/// Runs the work of an SQL function between two lines of the audit trail.
fn audited<T>(function: &'static str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    audit::audited(Operation::function(function), work)
}

/// Like [`audited`], for a relation.
fn audited_on<T>(
    function: &'static str,
    relation: pgrx::pg_sys::Oid,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let name = relation::facts(relation).map(|facts| relation::quoted_name(&facts));
    let name = name.unwrap_or_else(|| format!("relation {}", relation.to_u32()));
    audit::audited(Operation::function(function).on(name), work)
}

/// Like [`audited`], with a master key.
fn audited_with<T>(
    function: &'static str,
    provider: &[u8],
    key: &[u8],
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let shown = |name| Some(excerpt(name));
    let operation = Operation::function(function);
    let (provider, master_key) = (shown(provider), shown(key));
    audit::audited(Operation { provider, master_key, ..operation }, work)
}

/// Checks common to all functions that change keys. Takes the lock that serialises key management.
fn require_key_admin(action: &str) -> Result<()> {
    require_key_admin_unlocked(action)?;
    locks::lock_key_management();
    Ok(())
}

/// The checks alone, for functions that wait for other locks first.
fn require_key_admin_unlocked(action: &str) -> Result<()> {
    preload::require_active()?;
    roles::require_admin(action)?;
    require_primary(action)
}

/// Refuses an operation that writes keys or jobs, on a standby or in a read-only transaction.
fn require_primary(action: &str) -> Result<()> {
    if process::in_recovery() {
        return Err(Report::new(
            pgrx::PgSqlErrorCode::ERRCODE_READ_ONLY_SQL_TRANSACTION,
            format!("cannot {action} during recovery"),
        )
        .hint("Do this on the primary; standbys follow through WAL."));
    }
    if xact::is_read_only() {
        return Err(Report::new(
            pgrx::PgSqlErrorCode::ERRCODE_READ_ONLY_SQL_TRANSACTION,
            format!("cannot {action} in a read-only transaction"),
        )
        .hint("SET transaction_read_only = off, or default_transaction_read_only, if that is what you want."));
    }
    Ok(())
}
