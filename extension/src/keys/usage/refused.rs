//! Refused keys of scopes whose master key was revoked: errors for their users. For the beginning
//! and end of a revocation, see [`crate::keys::provider::revoked`].

use pagevault_keystore::Scope;
use pagevault_keystore::protocol::ErrorClass;
use pgrx::PgSqlErrorCode;

use super::withheld;
use crate::keys::store::{key_groups, persist};
use crate::pg::locks::KeystoreLock;
use crate::pg::process;
use crate::pg::report::{Report, Result};
use crate::shmem;

/// An error if the scope's key is refused; for operations that protect more data with it or reveal
/// more.
pub(crate) fn require_usable(scope: Scope) -> Result<()> {
    match shmem::secrets() {
        Some(secrets) if secrets.is_refused(scope) => {
            Err(refuses(&format!("the key of {}", key_groups::describe(scope)), "", scope))
        }
        _ => Ok(()),
    }
}

/// The report for an object that is locked because its key is refused. `place` is a further
/// sentence of DETAIL, after a space, or empty.
pub(crate) fn refuses(what: &str, place: &str, scope: Scope) -> Report {
    withheld::note();
    let facts = facts(scope).unwrap_or_else(|| "Its master key was revoked.".to_owned());
    Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("{what} is locked"),
    )
    .detail(facts + place)
    .hint("Make the master key usable at its provider again; the server notices within pagevault.revalidate_interval, with pagevault.unlock() at once.")
}

/// Provider, key, time and cause of a revocation, as a sentence; `None` under the keystore lock,
/// for which this process would wait forever.
fn facts(scope: Scope) -> Option<String> {
    if KeystoreLock::is_held() {
        return None;
    }
    let (state, revocation) = {
        let lock = KeystoreLock::acquire();
        let revocation = shmem::secrets()?.revocation(scope)?;
        (persist::cluster_state(&lock).ok()?, revocation)
    };
    let (_, record) = state.current_database_key(scope)?;
    let by: Vec<_> = record
        .wrappings()
        .map(|by| format!("master key \"{}\" of provider \"{}\"", by.master_key, by.provider))
        .collect();
    Some(format!(
        "{} was refused, since {}: {}.",
        by.join(" and "),
        process::timestamp_text(revocation.since),
        in_words(revocation.cause)
    ))
}

/// A cause of revocation in words.
pub(crate) fn in_words(cause: ErrorClass) -> &'static str {
    match cause {
        ErrorClass::Denied => "its use is denied",
        ErrorClass::KeyMissing => "the key does not exist there",
        ErrorClass::KeyDisabled => "the key is disabled or pending deletion",
        ErrorClass::WrongKey => "it gives another database key than the one that was wrapped",
        _ => "the key there is not the one that wrapped the database key",
    }
}
