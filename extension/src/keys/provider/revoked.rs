//! Scopes with a revoked master key: warnings, audit records, restoring access.

use pagevault_keystore::Scope;
use pagevault_keystore::protocol::ErrorClass;
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::refusal::Subject;
use crate::audit::{Operation, log_operation};
use crate::keys::store::key_groups;
use crate::keys::usage::refused::in_words;
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result};
use crate::pg::{guc, process};
use crate::shmem;
use crate::shmem::secrets::Revocation;

/// Restores full use of a scope, after its provider has unwrapped the right key or another provider
/// has wrapped it. Returns false, without effect, if the scope is in full use already.
pub(crate) fn restore(scope: Scope) -> Result<bool> {
    let secrets = &shmem::required()?.secrets;
    let restored = {
        let _lock = KeystoreLock::acquire();
        secrets.restore(scope)
    };
    if restored {
        audit(Change::Restored, scope, None);
        Report::new(
            PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
            format!("pagevault: the master key of {} is usable again", key_groups::describe(scope)),
        )
        .send(PgLogLevel::LOG);
    }
    Ok(restored)
}

/// A change of the state of a scope's key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    Revoked,
    Locked,
    Restored,
}

/// Records a change of the state of a scope's key in the audit trail.
pub(crate) fn audit(change: Change, scope: Scope, cause: Option<ErrorClass>) {
    let operation = Operation {
        action: "revocation",
        by: "revalidation",
        object: Some(key_groups::describe(scope)),
        from: cause.map(|cause| cause.name().to_owned()),
        ..Operation::default()
    };
    let outcome = match change {
        Change::Revoked => "revoked",
        Change::Locked => "locked",
        Change::Restored => "restored",
    };
    log_operation(&operation, outcome);
}

/// The report for an unwrapped database key that is not the one in use.
pub(crate) fn another_key(scope: Scope) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_DATA_EXCEPTION,
        format!(
            "the key of {} unwraps to another key than the one in use",
            key_groups::describe(scope)
        ),
    )
    .hint("Check that the provider holds the key that wrapped it, not another of the same name.")
}

fn was_revoked(Subject { provider, key, .. }: &Subject, cause: ErrorClass) -> Report {
    let why = in_words(cause);
    Report::new(
        PgSqlErrorCode::ERRCODE_WARNING,
        format!("pagevault: master key \"{key}\" of provider \"{provider}\" was revoked: {why}"),
    )
}

/// The warning that one of several master keys of a scope is refused.
pub(crate) fn one_of_several(
    scope: Scope,
    subject: &Subject,
    cause: ErrorClass,
    text: &str,
    another_answers: bool,
) -> Report {
    let whose = key_groups::describe(scope);
    let others = if another_answers {
        "Another master key unlocks it."
    } else {
        "The others could not be asked. Nothing is locked before all of them refuse."
    };
    was_revoked(subject, cause)
    .detail(format!("It wraps the key of {whose}: {text}. {others}"))
    .hint("Make the key usable again, or take it away with pagevault.drop_cluster_master_key() or pagevault.drop_database_master_key().")
}

/// The warning while a scope's master key is revoked: the cause, and the consequence with its time.
pub(crate) fn warning(
    scope: Scope,
    subject: &Subject,
    revocation: Revocation,
    cause: &str,
) -> Report {
    let whose = key_groups::describe(scope);
    let since = process::timestamp_text(revocation.since);
    let is_refused = shmem::secrets().is_some_and(|secrets| secrets.is_refused(scope));
    let consequence = if is_refused {
        "Relations encrypted under it are locked.".to_owned()
    } else if guc::locks_revoked_keys() {
        let lock_at = revocation.since + guc::revoked_key_grace().as_micros() as u64;
        format!(
            "Unless this changes, relations encrypted under it are locked from {} on.",
            process::timestamp_text(lock_at)
        )
    } else {
        "Nothing else happens while the server runs, because pagevault.revoked_key_action is \"log\"; after a restart they would be locked.".to_owned()
    };
    was_revoked(subject, revocation.cause)
    .detail(format!("It wraps the key of {whose} and has been refused since {since}: {cause}. {consequence}"))
    .hint("Make the key usable again, or move to another one with pagevault.set_cluster_master_key() or pagevault.set_database_master_key() before it is locked.")
}
