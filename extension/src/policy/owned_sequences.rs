//! Sequences that become owned by an encrypted table after they were made.
//!
//! ALTER SEQUENCE ... OWNED BY makes no storage, and pg_dump writes it after the table's label; CREATE
//! SEQUENCE ... OWNED BY makes it before it names the table. The object access hook notes such sequences; when
//! their command is over and the catalogs show the owner, those whose table is encrypted follow it.

use pgrx::pg_sys::Oid;

use crate::keys::shared;
use crate::pg::process::ProcessLocal;
use crate::pg::relation::{self, Kind};
use crate::pg::report::Result;
use crate::rewrite;

static TOUCHED: ProcessLocal<Vec<Oid>> = ProcessLocal::new(Vec::new());

/// A relation was made or altered by the current command.
pub(crate) fn relation_touched(oid: Oid) {
    if shared::anything_sealed() && relation::facts(oid).is_some_and(|f| f.kind == Kind::Sequence) {
        TOUCHED.with(|touched| touched.push(oid));
    }
}

/// True if there is something for [`follow`] to do.
pub(crate) fn any_touched() -> bool {
    TOUCHED.with(|touched| !touched.is_empty())
}

/// Encrypts such sequences whose owner is encrypted. What an aborted command left behind is
/// looked at as well and found to be gone or right.
pub(crate) fn follow() -> Result<()> {
    let touched = TOUCHED.with(std::mem::take);
    for sequence in touched {
        let Some(facts) = relation::facts_after_command(sequence) else { continue };
        let owner = relation::owner_of_sequence(sequence).and_then(relation::facts);
        let sealed = owner.is_some_and(|table| shared::is_sealed(table.file));
        if sealed && !facts.temporary && !shared::is_sealed(facts.file) {
            rewrite::encrypt(sequence, None)?;
        }
    }
    Ok(())
}
