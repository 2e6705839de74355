//! `pagevault.enforce`: nothing becomes plaintext where encryption is wanted.
//!
//! New storage follows the policy anyway. What is left to refuse is a policy that is taken away, and a
//! plaintext relation that is brought to where one holds.

use pgrx::PgSqlErrorCode;

use super::decision::{self, Decision, Source};
use super::labels;
use crate::keys::shared;
use crate::pg::guc;
use crate::pg::relation::{self, Facts};
use crate::pg::report::{Report, Result};

/// Refuses a relation that is written in plaintext although encryption is wanted of it.
pub(super) fn refuse_plaintext(facts: &Facts) -> Result<()> {
    if !guc::enforce() || !facts.is_stored() || shared::is_sealed(facts.file) {
        return Ok(());
    }
    match decision::wanted(facts)?.filter(Decision::is_encrypted) {
        None => Ok(()),
        Some(decision) => {
            let name = relation::quoted_name(facts);
            Err(refused(
                &format!("{name} would be in plaintext where encryption is enforced"),
                decision.source,
            )
            .hint(format!("Encrypt it first: {}.", labels::statement(facts, "'encrypted'"))))
        }
    }
}

/// Refuses a label that takes encryption away: before it `present` is in force, after it `after`.
pub(super) fn refuse_loss(
    object: &str,
    present: Option<Decision>,
    after: Option<Decision>,
) -> Result<()> {
    let Some(present) = present.filter(Decision::is_encrypted) else { return Ok(()) };
    if !guc::enforce() || after.is_some_and(|after| after.is_encrypted()) {
        return Ok(());
    }
    Err(refused(&format!("the encryption of {object} is enforced"), present.source)
        .hint("A superuser may SET pagevault.enforce = off."))
}

fn refused(message: &str, source: Source) -> Report {
    let detail = match source {
        Source::Own(_) | Source::Around(_) => {
            format!("The label of {} says encrypted.", source.describe())
        }
        Source::Leader(_) => format!("It follows {}, which is encrypted.", source.describe()),
        Source::Setting(name) => format!("{name} is on."),
    };
    Report::new(PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE, message).detail(detail)
}
