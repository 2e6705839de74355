//! Relations that come to follow another, or move, without getting new storage.
//!
//! The object access hook notes them while their command runs; when it is over and the catalogs
//! show the outcome, they are looked at. Each command looks at its own: a command within it, of a
//! function or an event trigger, comes too early, and its errors may be caught.
//!
//! - Sequences follow the table that came to own them: ALTER SEQUENCE ... OWNED BY makes no
//!   storage, and pg_dump writes it after the table's label; CREATE SEQUENCE ... OWNED BY makes it
//!   before it names the table.
//! - An empty table that is attached follows the partitioned table; pg_dump restores partitions so.
//!   One with pages stays what it is. The same where one is detached.
//! - `pagevault.enforce_encryption` refuses plaintext relations that come to where encryption is
//!   wanted.
//!
//! A new partition is told its partitioned table before its file has a block, and decided at once.

use pgrx::pg_sys::Oid;

use super::enforce;
use super::storage::seal_empty_file;
use crate::pg::guc;
use crate::pg::nesting::{Mark, Notes};
use crate::pg::process::{self, ProcessLocal};
use crate::pg::relation::{self, Facts, RelationKind};
use crate::pg::report::Result;
use crate::policy::{described, memo, policy};
use crate::rekey::at_once;

/// What to look at, and why.
#[derive(Clone, Copy)]
pub(crate) enum Altered {
    Sequence(Oid),
    Attached(Oid),
    /// With the schema that it was in.
    Relation(Oid, Oid),
}

static ALTERED: ProcessLocal<Notes<Altered>> = ProcessLocal::new(Notes::new());
static CREATED: ProcessLocal<Oid> = ProcessLocal::new(Oid::INVALID);

/// A relation with storage was just created.
pub(super) fn note_created(facts: &Facts) {
    CREATED.with(|created| *created = facts.oid);
    if facts.kind == RelationKind::Sequence {
        note(Altered::Sequence(facts.oid));
    }
}

/// A relation was altered by the current command. The catalogs still show it as it was.
pub(crate) fn relation_altered(oid: Oid) {
    memo::forget_relation(oid);
    let Some(facts) = relation::facts(oid) else { return };
    if facts.kind == RelationKind::Sequence {
        note(Altered::Sequence(oid));
    }
    if guc::enforce_encryption() {
        note(Altered::Relation(oid, facts.schema));
    }
}

/// A relation got a parent by the current command, as a partition or by inheritance, or lost it.
pub(crate) fn parent_changed(child: Oid, parent: Oid) -> Result<()> {
    memo::forget_relation(child);
    if !relation::facts(parent).is_some_and(|parent| parent.kind == RelationKind::PartitionedTable)
    {
        return Ok(());
    }
    match relation::facts(child) {
        Some(facts) if is_new(&facts) => {
            let (policy, relation) = (policy(), described(&facts));
            let wanted =
                policy.wanted_below(Some(parent.to_u32()), &relation, relation.tablespace)?;
            seal_empty_file(facts.file, policy.cipher_by(wanted))
        }
        _ => {
            note(Altered::Attached(child));
            Ok(())
        }
    }
}

/// True from the creation of a table until the first block, a TOAST table or an index is made for
/// it.
fn is_new(facts: &Facts) -> bool {
    CREATED.with(|created| *created == facts.oid)
        && facts.is_stored()
        && facts.toast.is_none()
        && relation::is_empty(facts.oid)
}

fn note(altered: Altered) {
    ALTERED.with(|notes| notes.push(altered));
}

/// A command begins.
pub(crate) fn mark() -> Mark {
    ALTERED.with(|notes| notes.mark())
}

/// True if there is something for [`follow`] to do.
pub(crate) fn any_since(mark: Mark) -> bool {
    ALTERED.with(|notes| notes.any_since(mark))
}

/// The end of (sub)transactions.
pub(crate) fn with_notes(at_end: impl FnOnce(&mut Notes<Altered>)) {
    ALTERED.with(at_end);
}

/// Looks at what was altered since the command began.
pub(crate) fn follow(mark: Mark) -> Result<()> {
    let list = ALTERED.with(|notes| notes.take_since(mark));
    if !process::runs_transactions() {
        return Ok(());
    }
    for altered in list {
        match altered {
            Altered::Sequence(oid) => {
                // What was remembered while it was made, it had no owner yet.
                memo::forget_relation(oid);
                let Some(sequence) = relation::facts_after_command(oid) else { continue };
                if sequence.is_stored() && memo::owner_of(oid)?.is_some() {
                    encrypt_if_wanted(&sequence)?;
                }
            }
            Altered::Attached(oid) => {
                if relation::facts_after_command(oid).is_none() {
                    continue;
                }
                for partition in relation::with_partitions(oid).iter().filter(|p| p.is_stored()) {
                    if relation::is_empty(partition.oid) {
                        encrypt_if_wanted(partition)?;
                    }
                    enforce::refuse_plaintext(partition)?;
                }
            }
            Altered::Relation(oid, schema) => {
                if let Some(relation) = relation::facts_after_command(oid)
                    && relation.schema != schema
                {
                    enforce::refuse_plaintext(&relation)?;
                }
            }
        }
    }
    Ok(())
}

fn encrypt_if_wanted(facts: &Facts) -> Result<()> {
    let Some(cipher) = policy().for_altered(&described(facts))? else { return Ok(()) };
    memo::forget_unencrypted();
    at_once::encrypt(facts.oid, Some(cipher))
}
