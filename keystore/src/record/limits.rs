//! Limits of record fields.

use pagevault_cipher::wrap;

use super::{
    MAX_KEY_GROUP_NAME, MAX_MASTER_KEYS, MAX_NAME, MAX_OPTIONS, MAX_WRAPPED_DATA_KEY,
    MAX_WRAPPED_DATABASE_KEY, Record, Wrapping, wrapped_len,
};
use crate::error::Problem;
use crate::former;
use crate::interim;
use crate::job::{JobId, MAX_ERROR, MAX_NUMBER};
use crate::rel_file::RelFile;
use crate::wal::{self, Switch};

/// Shortest wrapped data key of any cipher, known or unknown: one byte of key.
const MIN_WRAPPED_DATA_KEY: usize = wrap::OVERHEAD + 1;

/// A number that is not a version of a data key.
pub(super) const NOT_A_DATA_KEY_VERSION: Problem =
    Problem::Field("data key version", "outside 1 to 8191");

/// Whether a text can be the name of a key group: lower-case ASCII letters, digits, `_` and `-`,
/// beginning with a letter or a digit. So it is one word of a label in every encoding.
pub fn is_key_group_name(text: &str) -> bool {
    let is_plain = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    let first = text.bytes().next();
    text.len() <= MAX_KEY_GROUP_NAME
        && first.is_some_and(is_plain)
        && text.bytes().all(|c| is_plain(c) || c == b'_' || c == b'-')
}

impl Record {
    /// Checks all limits. A record that passes can be encoded, and decodes to the same record.
    pub fn validate(&self) -> Result<(), Problem> {
        match self {
            Self::Provider { name, kind, options, .. } => {
                check_name("provider name", name)?;
                check_name("provider kind", kind)?;
                check(options.len() <= MAX_OPTIONS, "provider options", "too long")
            }
            Self::DropProvider { name } => check_name("provider name", name),
            Self::DatabaseKey { key, .. } => {
                check(key.others.len() < MAX_MASTER_KEYS, "database key", "too many master keys")?;
                key.wrappings().try_for_each(check_wrapping)?;
                let mut others = key.others.iter();
                while let Some(Wrapping { provider, master_key, .. }) = others.next() {
                    let is_again = |other: &Wrapping| other.is_by(provider, master_key);
                    let once = !is_again(&key.first) && !others.clone().any(is_again);
                    check(once, "database key", "the same master key twice")?;
                }
                Ok(())
            }
            Self::DataKey { file, cipher, wrapped, .. } => {
                check_file(file)?;
                check(*cipher > 0, "cipher", "must not be 0")?;
                let right = match wrapped_len(*cipher) {
                    Some(length) => wrapped.len() == length,
                    None => (MIN_WRAPPED_DATA_KEY..=MAX_WRAPPED_DATA_KEY).contains(&wrapped.len()),
                };
                check(right, "wrapped data key", "wrong length for its cipher")
            }
            Self::Current { file, .. } | Self::Plaintext { file, .. } => check_file(file),
            Self::WalSwitch(Switch { step, phase, .. }) => {
                check(*step > 0, "WAL switch", "must have a number")?;
                check(phase.version.is_some(), "WAL key version", "must not be 0")
            }
            Self::Destroyed { file, .. } => {
                check_file(file)?;
                let is_of_wal = wal::is_key_place(*file) && interim::group_at(*file).is_none();
                check(!is_of_wal, "destroyed file", "must not be that of WAL keys")
            }
            Self::Rewriting { file, phase, .. }
            | Self::Switched { file, phase, .. }
            | Self::SealedOnly { file, phase } => {
                check_file(file)?;
                phase.version.map(|_| ()).ok_or(NOT_A_DATA_KEY_VERSION)
            }
            Self::Job { job, request } => {
                check_job(job)?;
                check(request.relation != 0, "relation", "must not be 0")
            }
            Self::JobStep { job, step } => {
                check_job(job)?;
                check(step.step > 0, "step", "must not be 0")?;
                check(step.error.len() <= MAX_ERROR, "error", "too long")
            }
            Self::JobBegun { job, relation } => {
                check_job(job)?;
                check(*relation != 0, "relation", "must not be 0")
            }
            Self::FormerFiles(former::Range { first, last, gone, .. }) => {
                check(*first > 0, "relation file number", "must not be 0")?;
                check(first <= last, "relation file numbers", "first is after last")?;
                check(gone.0 > 0, "address", "must not be 0")
            }
            Self::KeysForgotten { by, .. } => check(by.0 > 0, "address", "must not be 0"),
            Self::KeyGroup { name, .. } => {
                check(is_key_group_name(name), "key group name", "not of the required form")
            }
            Self::EndedKeyGroup { .. } => Ok(()),
            Self::JobsForgotten { database, through, .. } => {
                check_job(&JobId { database: *database, number: *through })
            }
        }
    }
}

fn check(right: bool, field: &'static str, what: &'static str) -> Result<(), Problem> {
    if right { Ok(()) } else { Err(Problem::Field(field, what)) }
}

/// Names appear in messages and logs, so control characters are refused.
fn check_name(field: &'static str, name: &str) -> Result<(), Problem> {
    check(!name.is_empty(), field, "empty")?;
    check(name.len() <= MAX_NAME, field, "too long")?;
    check(!name.chars().any(char::is_control), field, "has a control character")
}

fn check_wrapping(
    Wrapping { provider, master_key, wrapped, .. }: &Wrapping,
) -> Result<(), Problem> {
    check_name("provider name", provider)?;
    check_name("master key name", master_key)?;
    check(!wrapped.is_empty(), "wrapped database key", "empty")?;
    check(wrapped.len() <= MAX_WRAPPED_DATABASE_KEY, "wrapped database key", "too long")
}

fn check_job(job: &JobId) -> Result<(), Problem> {
    check(job.database != 0, "database of a job", "must not be 0")?;
    check((1..=MAX_NUMBER).contains(&job.number), "number of a job", "out of range")
}

fn check_file(file: &RelFile) -> Result<(), Problem> {
    check(file.relation != 0, "relation file number", "must not be 0")
}
