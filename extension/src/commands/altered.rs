//! Relations that begin to follow another one, or move, without new storage.
//!
//! The object access hook notes them during their command. They are handled when the command ends
//! and the catalogs show the result. Each command handles its own relations: a nested command, from
//! a function or an event trigger, would come too early, and its errors may be caught.
//!
//! - A sequence follows the table that owns it. ALTER SEQUENCE ... OWNED BY creates no storage, and
//!   pg_dump writes it after the table's label. CREATE SEQUENCE ... OWNED BY creates the storage
//!   before the owner is recorded.
//! - An empty table that is attached follows the partitioned table; pg_dump restores partitions in
//!   this way. A table with pages keeps its state. The same holds for detaching. Sequences of
//!   partitioned tables, which have no state, follow.
//! - SET TABLESPACE gives a table new files, with its TOAST table, and these are encrypted if the
//!   policy requires it there. Its indexes and owned sequences follow it, but keep their files. Of
//!   a partitioned table only sequences follow: partitions stay where they are.
//! - `pagevault.enforce_encryption` refuses plaintext relations that move to a place where the
//!   policy requires encryption.
//!
//! For a new partition, the parent is known before its file has a block, and the decision is made
//! at once.

use pagevault_core::policy::Sealing;
use pagevault_keystore::{KeyGroup, RelFile};
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::Oid;

use super::enforce::Former;
use super::storage::set_sealing_of_empty_file;
use super::{enforce, requests, storage};
use crate::keys::store::directory;
use crate::pg::guc;
use crate::pg::inheritance;
use crate::pg::nesting::{Mark, Notes};
use crate::pg::process::{self, ProcessLocal};
use crate::pg::relation::{self, Facts, RelationKind};
use crate::pg::relation_files;
use crate::pg::report::{Report, Result};
use crate::policy::{self, described, memo};
use crate::rekey::{JobKind, at_once, jobs};
use crate::shmem;

/// A relation to handle, and the reason.
#[derive(Clone, Copy)]
pub(crate) enum Altered {
    /// With its former owner.
    Sequence(Oid, Option<Oid>),
    Attached(Oid),
    /// With the schema and the tablespace in which it was before.
    Relation(Oid, Oid, Oid),
    /// A new file that may belong to relations of different key groups: to this one, which is in
    /// this group. It is in none.
    InDoubt(RelFile, Oid, Option<KeyGroup>),
    /// Its label puts it into another key group.
    Relabelled(Oid),
}

static ALTERED: ProcessLocal<Notes<Altered>> = ProcessLocal::new(Notes::new());
static CREATED: ProcessLocal<Oid> = ProcessLocal::new(Oid::INVALID);

/// Called when a relation with storage has been created.
pub(super) fn note_created(facts: &Facts) {
    CREATED.with(|created| *created = facts.oid);
    if facts.kind == RelationKind::Sequence {
        note(Altered::Sequence(facts.oid, None));
    }
}

/// The current command alters a relation. The catalogs still show its former state.
pub(crate) fn relation_altered(oid: Oid) {
    memo::forget_relation(oid);
    let Some(facts) = relation::facts(oid) else { return };
    if facts.kind == RelationKind::Sequence {
        note(Altered::Sequence(oid, relation::owner_of_sequence(oid)));
    }
    use RelationKind::{MaterializedView, PartitionedTable, Table};
    let leads = matches!(facts.kind, Table | MaterializedView | PartitionedTable);
    if leads || guc::enforce_encryption() {
        note(Altered::Relation(oid, facts.schema, facts.tablespace));
    }
}

/// The current command gives a relation a parent, as a partition or by inheritance, or removes it.
pub(crate) fn parent_changed(child: Oid, parent: Oid) -> Result<()> {
    memo::forget_relation(child);
    if !relation::facts(parent).is_some_and(|parent| parent.kind == RelationKind::PartitionedTable)
    {
        return Ok(());
    }
    match relation::facts(child) {
        Some(facts) if is_new(&facts) => {
            let (policy, relation) = (policy::policy(), described(&facts));
            let label_changes = shmem::label_changes();
            let wanted = policy.for_new_partition(parent.to_u32(), &relation)?;
            if wanted.is_none() {
                storage::note_plaintext(child, label_changes);
            }
            set_sealing_of_empty_file(facts.file, wanted)
        }
        _ => {
            note(Altered::Attached(child));
            Ok(())
        }
    }
}

/// A part of detaching a partition in several transactions (CONCURRENTLY, FINALIZE).
#[derive(Clone, Copy)]
pub(crate) struct Detaching {
    /// What the statement names, if it exists.
    pub(crate) partition: Option<Oid>,
    /// None of its transactions has begun.
    pub(crate) begins: bool,
}

/// The first transaction of such a command has not been committed.
static DETACHES: ProcessLocal<bool> = ProcessLocal::new(false);

/// What is not to be detached is refused before the first transaction: after it, the partition's
/// rows are away, and the partition can only be detached wholly. [`follow`] does not refuse it
/// then. That is checked again before the commit, for what the command has found under its lock.
pub(crate) fn detaching(detaching: Detaching) -> Result<()> {
    if !detaching.begins {
        return Ok(());
    }
    detaching.partition.map_or(Ok(()), enforce::refuse_detaching)?;
    DETACHES.set(true);
    Ok(())
}

/// Whether there is something for [`before_commit`] to do.
pub(crate) fn detaches() -> bool {
    DETACHES.get()
}

/// Called before a transaction commits.
pub(crate) fn before_commit() -> Result<()> {
    if DETACHES.replace(false) { enforce::refuse_detaching_begun() } else { Ok(()) }
}

/// Called when a transaction is rolled back.
pub(crate) fn rolled_back() {
    DETACHES.set(false);
    ALTERED.with(Notes::clear);
}

/// True from the creation of a table by the present command until it gets its first block, a TOAST
/// table or an index.
fn is_new(facts: &Facts) -> bool {
    CREATED.with(|created| *created == facts.oid)
        && facts.is_stored()
        && facts.toast.is_none()
        && relation::is_empty(facts.oid)
}

/// The label of a relation is about to put it into another key group.
pub(super) fn note_relabelled(oid: Oid) {
    note(Altered::Relabelled(oid));
}

/// A file was created, and it is not known which of several locked relations gets it. One of them,
/// and its key group.
pub(super) fn note_doubt(file: RelFile, oid: Oid, group: Option<KeyGroup>) {
    note(Altered::InDoubt(file, oid, group));
}

fn note(altered: Altered) {
    ALTERED.with(|notes| notes.push(altered));
}

/// Marks the beginning of a command. What an earlier one has created is not new any more.
pub(crate) fn mark() -> Mark {
    CREATED.set(Oid::INVALID);
    storage::forget_new_file();
    ALTERED.with(|notes| notes.mark())
}

/// Whether there is something for [`follow`] to do.
pub(crate) fn any_since(mark: Mark) -> bool {
    ALTERED.with(|notes| notes.any_since(mark))
}

/// Called at the end of (sub)transactions.
pub(crate) fn with_notes(at_end: impl FnOnce(&mut Notes<Altered>)) {
    ALTERED.with(at_end);
}

/// Handles the relations noted since the beginning of the command; `detached`: the partition that
/// it was to detach in steps. Returns the number of the rekey job that a new label needs, if any.
pub(crate) fn follow(mark: Mark, detached: Option<Oid>) -> Result<Option<i64>> {
    let list = ALTERED.with(|notes| notes.drain_since(mark));
    if !process::runs_transactions() {
        return Ok(None);
    }
    let mut of_label = None;
    for altered in &list {
        if let Altered::InDoubt(file, oid, group) = *altered {
            into_its_group(file, oid, group)?;
        }
    }
    for altered in list {
        match altered {
            Altered::Sequence(oid, owner) => {
                // An owner remembered during its creation is outdated.
                memo::forget_relation(oid);
                let Some(sequence) = relation::facts_after_command(oid) else { continue };
                // It may have lost its owner, too.
                if sequence.is_stored() {
                    if relation::owner_of_sequence(oid) != owner {
                        enforce::refuse_moved_exception(&sequence, Former::Owned)?;
                    }
                    encrypt_if_required(&sequence)?;
                }
            }
            Altered::Attached(oid) => {
                let Some(altered) = relation::facts_after_command(oid) else { continue };
                let is_detached = detached == Some(oid) && !altered.is_partition;
                if altered.is_partition && guc::enforce_encryption() {
                    enforce::refuse_attached_exceptions(oid)?;
                }
                let members = enforce::with_sequences_of_partitioned(oid);
                for partition in members.iter().filter(|member| member.is_stored()) {
                    let is_sequence = partition.kind == RelationKind::Sequence;
                    if !is_sequence {
                        refuse_decryption(partition)?;
                    }
                    let follows = is_sequence || relation::is_empty(partition.oid);
                    if follows {
                        encrypt_if_required(partition)?;
                    }
                    if !is_detached {
                        enforce::refuse_plaintext(partition, partition.schema)?;
                    }
                }
            }
            Altered::InDoubt(file, oid, group) => require_right_key_group(file, oid, group)?,
            Altered::Relabelled(oid) => {
                memo::forget();
                if let Some(facts) = relation::facts_after_command(oid) {
                    of_label = requests::reconcile(&facts)?;
                }
            }
            Altered::Relation(oid, schema, tablespace) => {
                let Some(relation) = relation::facts_after_command(oid) else { continue };
                let is_moved = relation.tablespace != tablespace;
                if is_moved {
                    encrypt_followers(&relation)?;
                }
                if !guc::enforce_encryption() || !is_moved && relation.schema == schema {
                    continue;
                }
                if !is_moved || inheritance::half_detached(oid).is_some() {
                    enforce::refuse_plaintext(&relation, schema)?;
                }
                if is_moved {
                    enforce::refuse_sequences_of_moved(&relation)?;
                }
                enforce::refuse_moved_exception(&relation, Former::Place(schema, tablespace))?;
            }
        }
    }
    Ok(of_label)
}

/// Refuses an encrypted relation that has come below another one which a job is to decrypt: the job
/// was not meant for it.
fn refuse_decryption(facts: &Facts) -> Result<()> {
    if !directory::is_sealed(facts.file)
        || relation::is_empty(facts.oid)
        || relation::is_new_here(facts.oid)
    {
        return Ok(());
    }
    for leader in policy::leaders(facts)? {
        let Some(job) = jobs::unfinished_of_kind(leader, JobKind::Decrypt)? else { continue };
        let name = relation::quoted_name(facts);
        return Err(Report::new(
            PgSqlErrorCode::ERRCODE_OBJECT_IN_USE,
            format!("rekey job {job} would decrypt {name}"),
        )
        .detail(format!(
            "It decrypts {}, to which {name} would belong.",
            relation::qualified_name(leader)
        ))
        .hint("Wait until the job has ended, or let somebody cancel it who may."));
    }
    Ok(())
}

/// Encrypts a relation, and what follows it, at once. If that could be rolled back and concerns key
/// groups, what is in plaintext is under the key of the database until a job has put it into its
/// group.
pub(super) fn encrypt_if_required(facts: &Facts) -> Result<()> {
    let Some(sealing) = policy::policy().for_altered(&described(facts))? else { return Ok(()) };
    memo::forget_answers();
    if requests::moves_revocably(facts)? {
        at_once::encrypt_outside_groups(facts.oid, sealing.cipher)?;
        return requests::encrypt_if_wanted(facts).map(drop);
    }
    at_once::encrypt(facts.oid, Some(sealing.cipher))
}

/// Encrypts what follows a relation that was moved to another tablespace, at once or by a job.
fn encrypt_followers(moved: &Facts) -> Result<()> {
    let mut family = relation::family_unlocked(moved.oid);
    family.retain(Facts::is_stored);
    for member in &family {
        if policy::policy().for_altered(&described(member))?.is_none() {
            continue;
        }
        memo::forget_answers();
        let is_whole = moved.kind != RelationKind::PartitionedTable;
        let root = if is_whole { policy::root_of(moved)? } else { member.clone() };
        // A job may be at it already.
        if jobs::unfinished_of_kind(root.oid, JobKind::Encrypt)?.is_some()
            || requests::encrypt_if_wanted(&root)?.is_some()
        {
            let refuse = |member: &Facts| enforce::refuse_plaintext(member, member.schema);
            family.iter().try_for_each(refuse)?;
        }
        if is_whole {
            break;
        }
    }
    Ok(())
}

/// The relation, if it got the file in doubt and is in another key group than the file.
fn misplaced(file: RelFile, oid: Oid, group: Option<KeyGroup>) -> Option<Facts> {
    let facts = relation::facts_after_command(oid).filter(|facts| facts.file == file)?;
    (directory::current_key_group(file) != group).then_some(facts)
}

/// Brings new storage of a relation into its key group, and nothing else of the relation: this
/// transaction may be rolled back. Until then it was under the key of the database, as changes are
/// in WAL anyway.
fn into_its_group(file: RelFile, oid: Oid, group: Option<KeyGroup>) -> Result<()> {
    let Some(facts) = misplaced(file, oid, group) else { return Ok(()) };
    if relation_files::is_empty(file)
        && let Some(sealing) = directory::current_sealing(file)
    {
        set_sealing_of_empty_file(file, Some(Sealing { group, ..sealing }))?;
    }
    at_once::encrypt_alone(&facts)
}

/// Refuses new storage that is still not in the key group of its relation: no label says that it is
/// to be encrypted, and the relation was in the group because its former file was.
fn require_right_key_group(file: RelFile, oid: Oid, group: Option<KeyGroup>) -> Result<()> {
    let Some(facts) = misplaced(file, oid, group) else { return Ok(()) };
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
        format!(
            "new storage of {} cannot be told from that of another key group",
            relation::quoted_name(&facts)
        ),
    )
    .detail("This transaction has locked relations that are not all in the same key group, and gives them new storage.")
    .hint("Rewrite the relations of each key group in a transaction of their own."))
}
