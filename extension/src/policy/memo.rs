//! Catalog look-ups of the current subtransaction, remembered.
//!
//! Whenever a file is created every relation that the transaction has locked is asked, so a command that
//! gives many relations new storage asks the same again and again. What is remembered is forgotten at the
//! end of the (sub)transaction, and when this session changes a label, an owner or a partition.

use std::collections::HashMap;

use pgrx::pg_sys::Oid;

use super::label::{self, Label};
use crate::pg::labels::Object;
use crate::pg::process::{self, ProcessLocal};
use crate::pg::relation;
use crate::pg::report::Result;

#[derive(Default)]
struct Memo {
    /// Of which subtransaction; see [`process::transaction`].
    of: (u32, u32),
    labels: HashMap<Object, Option<Label>>,
    parents: HashMap<Oid, Option<Oid>>,
    owners: HashMap<Oid, Option<Oid>>,
}

static MEMO: ProcessLocal<Option<Memo>> = ProcessLocal::new(None);

/// Forgets everything.
pub(super) fn forget() {
    MEMO.with(|memo| *memo = None);
}

/// The label of an object.
pub(super) fn label_of(object: Object) -> Result<Option<Label>> {
    remember(
        |memo| memo.labels.get(&object).copied(),
        || object.label().as_deref().map(label::parse).transpose(),
        |memo, label| memo.labels.insert(object, label),
    )
}

/// The partitioned table of a partition.
pub(super) fn parent_of(partition: Oid) -> Result<Option<Oid>> {
    remember(
        |memo| memo.parents.get(&partition).copied(),
        || Ok(relation::partition_parent(partition)),
        |memo, parent| memo.parents.insert(partition, parent),
    )
}

/// The table that owns a sequence.
pub(super) fn owner_of(sequence: Oid) -> Result<Option<Oid>> {
    remember(
        |memo| memo.owners.get(&sequence).copied(),
        || Ok(relation::owner_of_sequence(sequence)),
        |memo, owner| memo.owners.insert(sequence, owner),
    )
}

/// `look_up` may raise, and may come back here; so it runs while the memo is not held.
fn remember<T: Copy, R>(
    get: impl FnOnce(&Memo) -> Option<T>,
    look_up: impl FnOnce() -> Result<T>,
    put: impl FnOnce(&mut Memo, T) -> R,
) -> Result<T> {
    let of = process::transaction();
    let known = MEMO.with(|memo| memo.as_ref().filter(|memo| memo.of == of).and_then(get));
    if let Some(known) = known {
        return Ok(known);
    }
    let found = look_up()?;
    MEMO.with(|memo| {
        if memo.as_ref().is_none_or(|memo| memo.of != of) {
            *memo = Some(Memo { of, ..Memo::default() });
        }
        if let Some(memo) = memo {
            put(memo, found);
        }
    });
    Ok(found)
}
