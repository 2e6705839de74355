//! Answers of the current subtransaction, remembered.
//!
//! Whenever a file is created every relation that the transaction has locked is asked, so a command
//! that gives many relations new storage, or a transaction that makes many, asks the same again and
//! again. What is remembered is forgotten at the end of the (sub)transaction, and when this session
//! changes it. Nobody else changes a relation that we have locked so. But what is around it is not
//! locked: when another session has committed a label, everything is forgotten.

use std::collections::HashMap;

use pagevault_core::policy::storage::Answer;
use pgrx::pg_sys::Oid;

use super::label::{self, Label};
use crate::pg::guc;
use crate::pg::labels::Object;
use crate::pg::process::{self, ProcessLocal};
use crate::pg::relation;
use crate::pg::report::Result;
use crate::shmem;

/// When answers hold: in one subtransaction, under one value of `pagevault.default_encryption`,
/// while no label changes.
pub(crate) type Moment = ((u32, u32), bool, u32);

/// This one: what is looked up from here on may be remembered as its.
pub(crate) fn moment() -> Moment {
    (process::transaction(), guc::default_encryption(), shmem::label_changes())
}

#[derive(Default)]
struct Memo {
    of: Moment,
    labels: HashMap<Object, Option<Label>>,
    parents: HashMap<Oid, Option<Oid>>,
    owners: HashMap<Oid, Option<Oid>>,
    /// What locked relations have said of a file in this tablespace, if not that it is to be
    /// encrypted.
    unencrypted: HashMap<Oid, (Oid, Answer)>,
}

static MEMO: ProcessLocal<Option<Memo>> = ProcessLocal::new(None);

/// Forgets everything.
pub(crate) fn forget() {
    MEMO.with(|memo| *memo = None);
}

/// This session altered a relation.
pub(crate) fn forget_relation(oid: Oid) {
    MEMO.with(|memo| {
        if let Some(memo) = memo {
            memo.parents.remove(&oid);
            memo.owners.remove(&oid);
            memo.unencrypted.remove(&oid);
        }
    });
}

/// This session encrypted a file, perhaps that of a relation that wanted no encryption before.
pub(crate) fn forget_unencrypted() {
    MEMO.with(|memo| {
        if let Some(memo) = memo {
            memo.unencrypted.clear();
        }
    });
}

/// What a locked relation has said of new files in a tablespace, if it did not want them encrypted.
pub(crate) fn unencrypted(relation: Oid, tablespace: Oid) -> Option<Answer> {
    let of = moment();
    MEMO.with(|memo| {
        let memo = memo.as_ref().filter(|memo| memo.of == of)?;
        memo.unencrypted.get(&relation).filter(|(space, _)| *space == tablespace).map(|(_, a)| *a)
    })
}

/// Remembers what [`unencrypted`] says; found since this moment.
pub(crate) fn set_unencrypted(of: Moment, relation: Oid, tablespace: Oid, answer: Answer) {
    if !matches!(answer, Answer::Encrypted(_)) {
        put(of, |memo| memo.unencrypted.insert(relation, (tablespace, answer)));
    }
}

/// The label of an object.
pub(crate) fn label_of(object: Object) -> Result<Option<Label>> {
    remember(
        |memo| memo.labels.get(&object).copied(),
        || object.label().as_ref().map(label::of_text).transpose(),
        |memo, label| memo.labels.insert(object, label),
    )
}

/// The partitioned table of a partition.
pub(crate) fn parent_of(partition: Oid) -> Result<Option<Oid>> {
    remember(
        |memo| memo.parents.get(&partition).copied(),
        || Ok(relation::partition_parent(partition)),
        |memo, parent| memo.parents.insert(partition, parent),
    )
}

/// The table that owns a sequence.
pub(crate) fn owner_of(sequence: Oid) -> Result<Option<Oid>> {
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
    set: impl FnOnce(&mut Memo, T) -> R,
) -> Result<T> {
    let of = moment();
    let known = MEMO.with(|memo| memo.as_ref().filter(|memo| memo.of == of).and_then(get));
    if let Some(known) = known {
        return Ok(known);
    }
    let found = look_up()?;
    put(of, |memo| set(memo, found));
    Ok(found)
}

fn put<R>(of: Moment, set: impl FnOnce(&mut Memo) -> R) {
    MEMO.with(|memo| {
        if memo.as_ref().is_none_or(|memo| memo.of != of) {
            *memo = Some(Memo { of, ..Memo::default() });
        }
        if let Some(memo) = memo {
            set(memo);
        }
    });
}
