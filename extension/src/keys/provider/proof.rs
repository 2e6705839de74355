//! Verifies that the provider has unwrapped the right database key, before the key is used
//! ([`CheckValue`]). A wrong key becomes a failure of the operation, so it is reported, audited and
//! treated like other failures.

use pagevault_cipher::{KeyVersion, Secret32};
use pagevault_keystore::protocol::{ErrorClass, Failure, Outcome};
use pagevault_keystore::{CheckValue, Scope};
use pgrx::PgSqlErrorCode;

use super::refusal::{self, Subject};
use crate::keys::store::key_groups;
use crate::pg::report::{Report, Result, internal};
use crate::shmem;

/// The properties of the database key that an unwrapping must return.
#[derive(Clone, Copy)]
pub(crate) struct Expects {
    pub(crate) scope: Scope,
    pub(crate) version: KeyVersion,
    pub(crate) check: CheckValue,
}

/// The check value of a new database key.
pub(crate) fn check_value(scope: Scope, version: KeyVersion, key: &Secret32) -> Result<CheckValue> {
    Ok(CheckValue::of(key, &keystore_id()?, scope, version))
}

/// The outcome; a failure if it is a database key other than the expected one.
pub(crate) fn proven(outcome: Outcome, subject: &Subject, expects: Option<Expects>) -> Outcome {
    let Outcome::Unwrapped { plaintext, .. } = &outcome else { return outcome };
    let key = plaintext.expose().try_into().ok().map(Secret32::from_bytes);
    let id = keystore_id().ok();
    let is_right = expects.zip(key).zip(id).is_some_and(|((expects, key), id)| {
        expects.check.fits(&key, &id, expects.scope, expects.version)
    });
    if is_right {
        return outcome;
    }
    let Subject { provider, key, .. } = subject;
    let whose = expects.map_or_else(
        || "a database key".to_owned(),
        |Expects { scope, version, .. }| {
            format!("version {version} of the key of {}", key_groups::describe(scope))
        },
    );
    Outcome::Failed(Failure {
        class: ErrorClass::WrongKey,
        message: format!("master key \"{key}\" of provider \"{provider}\": it gives a wrong key"),
        detail: Some(format!("It does not fit the check value of {whose}, and is not used.")),
        hint: None,
        retry: false,
    })
}

/// Refuses to wrap a key in memory that is not the key of its record.
///
/// # Errors
/// If the check value does not fit. The key was verified before it came into memory, so it has
/// changed there.
pub(crate) fn require_right(expects: Expects, key: &Secret32) -> Result<()> {
    let Expects { scope, version, check } = expects;
    if check.fits(key, &keystore_id()?, scope, version) {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_DATA_CORRUPTED,
        format!(
            "version {version} of the key of {} is not the right one in memory",
            key_groups::describe(scope)
        ),
    )
    .detail("It does not fit its check value. Nothing was changed.")
    .hint(refusal::hint(ErrorClass::WrongKey)))
}

fn keystore_id() -> Result<[u8; 16]> {
    let id = shmem::required()?.control.keystore_id();
    id.ok_or_else(|| internal("the keystore has no identity yet".into()))
}
