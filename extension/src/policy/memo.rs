//! Answers of the current subtransaction, remembered.
//!
//! Whenever a file is created every relation that the transaction has locked is asked, so a command
//! that gives many relations new storage, or a transaction that makes many, asks the same again and
//! again. What is remembered is forgotten at the end of the (sub)transaction, and when this session
//! changes it. Nobody else changes a relation that we have locked so. But what is around it is not
//! locked: when another session has committed a label, everything is forgotten.

use std::collections::HashMap;

use pgrx::pg_sys::Oid;

use super::label::{self, Label};
use crate::pg::labels::Object;
use crate::pg::process::{self, ProcessLocal};
use crate::pg::report::Result;
use crate::pg::{guc, relation};
use crate::shmem;

/// When answers hold: in one subtransaction, under one value of `pagevault.default_encryption`,
/// while no label changes.
pub(super) type Moment = ((u32, u32), bool, u32);

/// This one: what is looked up from here on may be remembered as its.
pub(super) fn moment() -> Moment {
    (process::transaction(), guc::default_encryption(), shmem::label_changes())
}

#[derive(Default)]
struct Memo {
    of: Moment,
    labels: HashMap<Object, Option<Label>>,
    parents: HashMap<Oid, Option<Oid>>,
    owners: HashMap<Oid, Option<Oid>>,
    /// Locked relations that want a file in this tablespace to be plain, or do not care.
    content: HashMap<Oid, (Oid, Content)>,
}

/// Why a locked relation does not want a new file to be sealed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// It is to be plain.
    Plain,
    /// It has no storage that lasts, or belongs to the cluster and the file to a database.
    WithoutStorage,
}

static MEMO: ProcessLocal<Option<Memo>> = ProcessLocal::new(None);

/// Forgets everything.
pub(super) fn forget() {
    MEMO.with(|memo| *memo = None);
}

/// This session altered a relation.
pub(super) fn forget_relation(oid: Oid) {
    MEMO.with(|memo| {
        if let Some(memo) = memo {
            memo.parents.remove(&oid);
            memo.owners.remove(&oid);
            memo.content.remove(&oid);
        }
    });
}

/// This session sealed a file, perhaps that of a relation that was content before.
pub(super) fn forget_content() {
    MEMO.with(|memo| {
        if let Some(memo) = memo {
            memo.content.clear();
        }
    });
}

/// What is remembered of a locked relation about new files in a tablespace.
pub(super) fn content_of(relation: Oid, tablespace: Oid) -> Option<Content> {
    let of = moment();
    MEMO.with(|memo| {
        let memo = memo.as_ref().filter(|memo| memo.of == of)?;
        memo.content.get(&relation).filter(|(space, _)| *space == tablespace).map(|(_, c)| *c)
    })
}

/// Remembers what [`content_of`] says; found since this moment.
pub(super) fn set_content(of: Moment, relation: Oid, tablespace: Oid, content: Content) {
    put(of, |memo| memo.content.insert(relation, (tablespace, content)));
}

/// The label of an object.
pub(super) fn label_of(object: Object) -> Result<Option<Label>> {
    remember(
        |memo| memo.labels.get(&object).copied(),
        || object.label().as_ref().map(label::of_text).transpose(),
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
