//! Cache of policy facts for the current subtransaction.
//!
//! Each time a file is created, the policy is evaluated for every relation that the transaction has
//! locked. So a command that gives new storage to many relations, or a transaction that creates
//! many, looks up the same facts repeatedly. The cache is cleared at the end of the
//! (sub)transaction, and when this session changes a fact. No other session can change a relation
//! that this one has locked in this way. Schemas, tablespaces and databases are not locked: when
//! another session commits a label, the cache is cleared.

use std::collections::{HashMap, HashSet};

use pagevault_cipher::CipherId;
use pagevault_core::policy::storage::Answer;
use pagevault_keystore::{KeyGroup, RelFile};
use pgrx::pg_sys::Oid;

use super::label::{self, Label};
use crate::keys::store::key_groups;
use crate::pg::guc;
use crate::pg::inheritance;
use crate::pg::labels::Object;
use crate::pg::process::{self, ProcessLocal};
use crate::pg::relation::{self, Facts};
use crate::pg::report::Result;
use crate::shmem;

/// Validity of cached facts: one subtransaction, one value of `pagevault.default_encryption` and of
/// `pagevault.cipher`, and no change of a label.
pub(crate) type Moment = ((u32, u32), bool, Option<CipherId>, u32);

/// The present moment. Facts that are looked up after this call may be cached for it.
pub(crate) fn moment() -> Moment {
    (process::transaction(), guc::default_encryption(), guc::cipher(), shmem::label_changes())
}

#[derive(Default)]
struct Memo {
    of: Moment,
    labels: HashMap<Object, Option<Label>>,
    /// The key groups that labels name; `Some(None)`: one that does not exist.
    key_groups: HashMap<Object, Option<Option<KeyGroup>>>,
    parents: HashMap<Oid, Option<Oid>>,
    owners: HashMap<Oid, Option<Oid>>,
    /// Answers of locked relations about new files in a tablespace.
    answers: HashMap<Oid, Known>,
    /// Locked relations that this subtransaction, or one around it, has dropped.
    dropped: HashSet<Oid>,
}

/// The answer of a relation.
struct Known {
    tablespace: Oid,
    /// The file of the relation.
    present: RelFile,
    answer: Answer,
    /// The relations on which the answer depends: those that it follows, and partitioned tables.
    leaders: Vec<Oid>,
}

static MEMO: ProcessLocal<Option<Memo>> = ProcessLocal::new(None);

/// Clears the cache.
pub(crate) fn forget() {
    MEMO.with(|memo| *memo = None);
}

/// Removes the facts of a relation that this session has altered, with the answers of what follows
/// it or is below it.
pub(crate) fn forget_relation(oid: Oid) {
    MEMO.with(|memo| {
        if let Some(memo) = memo {
            memo.parents.remove(&oid);
            memo.owners.remove(&oid);
            memo.answers.retain(|of, known| *of != oid && !known.leaders.contains(&oid));
        }
    });
}

/// Called when this session has encrypted a file, perhaps of a relation with a cached answer.
pub(crate) fn forget_answers() {
    MEMO.with(|memo| {
        if let Some(memo) = memo {
            memo.answers.clear();
        }
    });
}

/// The cached answer of a locked relation about a new file, which is not its present one.
pub(crate) fn answer(relation: Oid, file: RelFile) -> Option<Answer> {
    let of = moment();
    MEMO.with(|memo| {
        let memo = memo.as_ref().filter(|memo| memo.of == of)?;
        let known = memo.answers.get(&relation)?;
        let fits = known.tablespace == Oid::from(file.tablespace) && known.present != file;
        fits.then_some(known.answer)
    })
}

/// Caches the answer of `locked` for [`answer`], which was found since `of`.
pub(crate) fn set_answer(
    of: Moment,
    locked: &Facts,
    new: RelFile,
    answer: Answer,
    leaders: Vec<Oid>,
) {
    let (tablespace, present) = (new.tablespace.into(), locked.file);
    let known = Known { tablespace, present, answer, leaders };
    put(of, |memo| memo.answers.insert(locked.oid, known));
}

/// Whether [`set_dropped`] was called for a relation.
pub(crate) fn is_dropped(relation: Oid) -> bool {
    let of = moment();
    MEMO.with(|memo| {
        memo.as_ref().is_some_and(|memo| memo.of == of && memo.dropped.contains(&relation))
    })
}

/// Caches that a locked relation does not exist, which was found since `of`. The locks of dropped
/// relations last until the end of the transaction, and each look-up reads the catalog.
pub(crate) fn set_dropped(of: Moment, relation: Oid) {
    put(of, |memo| memo.dropped.insert(relation));
}

/// The label of an object.
pub(crate) fn label_of(object: Object) -> Result<Option<Label>> {
    remember(
        |memo| memo.labels.get(&object).copied(),
        || object.label().as_ref().map(label::of_text).transpose(),
        |memo, label| memo.labels.insert(object, label),
    )
}

/// The key group that the label of an object names; `Some(None)` if there is none of that name.
pub(crate) fn key_group_at(object: Object) -> Result<Option<Option<KeyGroup>>> {
    remember(
        |memo| memo.key_groups.get(&object).copied(),
        || {
            let name = object.label().as_ref().map(label::key_group_in).transpose()?.flatten();
            name.map(|name| key_groups::named(&name)).transpose()
        },
        |memo, group| memo.key_groups.insert(object, group),
    )
}

/// The partitioned table of a partition.
pub(crate) fn parent_of(partition: Oid) -> Result<Option<Oid>> {
    remember(
        |memo| memo.parents.get(&partition).copied(),
        || Ok(inheritance::partition_parent(partition)),
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

/// `look_up` may raise an ERROR or call this function again; so the cache is not borrowed
/// meanwhile.
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
