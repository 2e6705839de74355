//! What happens to a scope whose master key was revoked: it is warned of, refused, restored.

use pagevault_keystore::Scope;
use pagevault_keystore::protocol::ErrorClass;
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::refusal::Subject;
use crate::audit::{Operation, log_operation};
use crate::keys::usage::refused::in_words;
use crate::pg::locks::KeystoreLock;
use crate::pg::report::{Report, Result};
use crate::pg::{guc, process};
use crate::shmem;
use crate::shmem::secrets::Revocation;

/// Takes a scope back into full use, after its provider unwrapped the right key or another provider
/// wrapped it. Does nothing to a scope that is in full use, and returns false then.
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
            format!("pagevault: the master key of {} is usable again", scope.name()),
        )
        .send(PgLogLevel::LOG);
    }
    Ok(restored)
}

/// What became of a scope's key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    Revoked,
    Locked,
    Restored,
}

/// Tells the audit trail what became of a scope's key.
pub(crate) fn audit(change: Change, scope: Scope, cause: Option<ErrorClass>) {
    let operation = Operation {
        action: "revocation",
        by: "revalidation",
        object: Some(scope.name()),
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

/// The report for a key that unwraps, but to another database key than the one in use.
pub(crate) fn another_key(scope: Scope) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_DATA_EXCEPTION,
        format!("the key of {} unwraps to another key than the one in use", scope.name()),
    )
    .hint("Check that the provider holds the key that wrapped it, not another of the same name.")
}

/// The warning while a scope's master key is revoked: what was seen, and what will happen when.
pub(crate) fn warning(
    scope: Scope,
    subject: &Subject,
    revocation: Revocation,
    cause: &str,
) -> Report {
    let whose = scope.name();
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
    Report::new(
        PgSqlErrorCode::ERRCODE_WARNING,
        format!(
            "pagevault: master key \"{}\" of provider \"{}\" was revoked: {}",
            subject.key,
            subject.provider,
            in_words(revocation.cause)
        ),
    )
    .detail(format!("It wraps the key of {whose} and has been refused since {since}: {cause}. {consequence}"))
    .hint("Make the key usable again, or move to another one with pagevault.set_cluster_master_key() or pagevault.set_database_master_key() before it is locked.")
}
