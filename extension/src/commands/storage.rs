//! New storage: it is written as the policy requires from its first block on. The decision is made
//! at two points:
//!
//! 1. `mdcreate` ([`creating_storage`]): a file is created. For TRUNCATE, REINDEX, SET TABLESPACE
//!    and other replacements of a relation's storage, no other hook is called for the file. So the
//!    answer is derived from the relations that this backend has locked for rewriting. When in
//!    doubt, the file is encrypted.
//! 2. `object_access_hook` ([`relation_created`]): a new relation exists, its file is still empty.
//!    Its kind, name and table are known, and the first decision is corrected if necessary. The
//!    parent of a partition is known a little later ([`super::altered`]).

use pagevault_core::policy::Sealing;
use pagevault_core::policy::relation::SHARED;
use pagevault_core::policy::storage::{Answer, Makes};
use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::Oid;

use super::{altered, databases};
use crate::keys::store::directory;
use crate::keys::usage::data_keys::{self, Pages};
use crate::pg::nesting::{Mark, Notes};
use crate::pg::process::ProcessLocal;
use crate::pg::relation::{self, Facts, RelationKind};
use crate::pg::report::{Report, Result};
use crate::pg::{locks, process, relation_files};
use crate::policy::{described, leaders, memo, pending, policy};
use crate::shmem;

/// The last file that this process was to create.
static NEW_FILE: ProcessLocal<Option<RelFile>> = ProcessLocal::new(None);

/// Called before a file of a permanent relation is created.
pub(crate) fn creating_storage(file: RelFile) -> Result<()> {
    NEW_FILE.set(Some(file));
    // Also if the file is known: a number that is used again must not inherit the old file's key.
    begin(file, sealing_for_new_storage(file)?)
}

/// Starts writing a file encrypted so under a new key, or as plaintext.
///
/// The file is new, but its access method may have written pages already.
fn begin(file: RelFile, sealing: Option<Sealing>) -> Result<()> {
    let pages = if relation_files::is_empty(file) { Pages::None } else { Pages::Logged };
    match sealing {
        Some(sealing) => {
            // No answer depends on a new file, which is no relation's yet. Clearing the answers for
            // each would take a time that grows with the square of their number.
            if pages != Pages::None {
                memo::forget_answers();
            }
            if file.database == process::my_database() {
                pending::note_encryption();
            }
            match pages {
                Pages::None => data_keys::new_version(file, sealing).map(|_| ()),
                _ => data_keys::next_version(file, sealing, pages),
            }
        }
        None => data_keys::write_plaintext(file, pages),
    }
}

/// What the commands under way make, the innermost last. Those before the first that makes new
/// relations are left out.
static COMMANDS: ProcessLocal<Notes<Makes>> = ProcessLocal::new(Notes::new());

/// A utility command begins.
pub(crate) fn command_begins(makes: Makes) -> Mark {
    COMMANDS.with(|commands| {
        let mark = commands.mark();
        if makes == Makes::Relations || commands.any_since(Mark::START) {
            commands.push(makes);
        }
        mark
    })
}

/// The command that began at `mark` has ended.
pub(crate) fn command_ends(mark: Mark) {
    COMMANDS.with(|commands| {
        if commands.any_since(mark) {
            commands.drain_since(mark);
        }
    });
}

/// Called when a (sub)transaction is rolled back.
pub(crate) fn with_commands(at_end: impl FnOnce(&mut Notes<Makes>)) {
    COMMANDS.with(at_end);
}

fn sealing_for_new_storage(file: RelFile) -> Result<Option<Sealing>> {
    if file.database != process::my_database() && file.database != SHARED {
        let original = databases::original_of(file).or_else(|| directory::namesake(file));
        let sealing = original.and_then(directory::current_sealing);
        let inherited =
            |known: Sealing| Sealing { cipher: policy().inherited(known.cipher), ..known };
        return Ok(sealing.map(inherited));
    }
    if process::creates_us() {
        return Ok(sealing_kept());
    }
    let mut answers = Vec::new();
    for oid in locks::relations_locked_for_rewrite() {
        answers.extend(answer_of(oid, file)?.map(|answer| (oid, answer)));
    }
    let makes = COMMANDS.with(|commands| commands.last().copied()).unwrap_or(Makes::Storage);
    let given = answers.iter().map(|(_, answer)| Ok(*answer));
    let new = policy().for_new_file(file, makes, given)?;
    if new.in_doubt {
        for (oid, answer) in answers {
            match answer {
                Answer::Encrypted(sealing) => altered::note_doubt(file, oid, sealing.group),
                Answer::Plaintext => altered::note_doubt(file, oid, None),
                Answer::NotApplicable => {}
            }
        }
    }
    Ok(new.sealing)
}

/// The sealing for a new file while CREATE EXTENSION makes us: there may be neither key nor label
/// yet, and [`relation_created`] decides about new relations. What event triggers rewrite meanwhile
/// stays encrypted.
fn sealing_kept() -> Option<Sealing> {
    let locked = locks::relations_locked_for_rewrite().into_iter().filter_map(relation::facts);
    let sealed = locked
        .filter(|locked| locked.is_stored() && !locked.is_shared())
        .filter_map(|locked| directory::current_sealing(locked.file));
    let inherited = |known: Sealing| Sealing { cipher: policy().inherited(known.cipher), ..known };
    sealed.map(inherited).max_by_key(|sealing| sealing.cipher.strength())
}

/// The answer of a locked relation for a new file. It is remembered, because the question is
/// repeated for each file of a command.
fn answer_of(oid: Oid, file: RelFile) -> Result<Option<Answer>> {
    if let Some(answer) = memo::answer(oid, file) {
        return Ok(Some(answer));
    }
    if memo::is_dropped(oid) {
        return Ok(None);
    }
    let moment = memo::moment();
    let Some(locked) = relation::facts(oid) else {
        memo::set_dropped(moment, oid);
        return Ok(None);
    };
    if locked.file == file {
        return Ok(None); // being created: decided when its kind is known
    }
    let answer = policy().asked(&described(&locked), file)?;
    // Answers of catalogs change with the first encrypted file of their database.
    if locked.user_made {
        memo::set_answer(moment, &locked, file, answer, leaders(&locked)?);
    }
    Ok(Some(answer))
}

/// Called when the current command has created a relation and its file is still empty.
pub(crate) fn relation_created(oid: Oid) -> Result<()> {
    let Some(facts) = relation::facts(oid) else { return Ok(()) };
    refuse_in_our_schema(&facts)?;
    if !facts.is_stored() || keeps_a_file(&facts) {
        return Ok(());
    }
    altered::note_created(&facts);
    let label_changes = shmem::label_changes();
    let wanted = policy().for_new_relation(&described(&facts))?;
    let label_changes = wanted.is_none().then_some(label_changes);
    if label_changes.is_some() || facts.rewrites.is_some() {
        let created = Created { oid, label_changes, rewrites: facts.rewrites };
        CREATED.with(|notes| notes.push(created));
    }
    set_sealing_of_empty_file(facts.file, wanted)
}

/// Whether a new index continues the file of a dropped one, with its pages: ALTER TABLE builds it
/// again although nothing in it changes (`TryReuseIndex`, tablecmds.c). If the transaction is
/// rolled back, the file is that of the former index again, but keys do not roll back.
fn keeps_a_file(facts: &Facts) -> bool {
    let is_new = NEW_FILE.with(Option::take) == Some(facts.file);
    facts.kind == RelationKind::Index && !(is_new && relation_files::is_empty(facts.file))
}

/// A command begins. The last file may be that of a relation which it changes.
pub(super) fn forget_new_file() {
    NEW_FILE.set(None);
}

/// A relation that this transaction has created in plaintext, or that is transient.
pub(crate) struct Created {
    oid: Oid,
    /// The number of changes of labels until then, if it was created in plaintext.
    label_changes: Option<u32>,
    /// The relation that it will replace.
    rewrites: Option<Oid>,
}

static CREATED: ProcessLocal<Notes<Created>> = ProcessLocal::new(Notes::new());

/// Called when a relation was created before there was anything to decide.
pub(crate) fn created_without_keys(oid: Oid) {
    note_plaintext(oid, shmem::label_changes());
}

/// This transaction has created a relation in plaintext, after so many changes of labels.
pub(super) fn note_plaintext(oid: Oid, label_changes: u32) {
    let created = Created { oid, label_changes: Some(label_changes), rewrites: None };
    CREATED.with(|notes| notes.push(created));
}

/// Called at the end of (sub)transactions.
pub(crate) fn with_notes(at_end: impl FnOnce(&mut Notes<Created>)) {
    CREATED.with(at_end);
}

/// Whether labels have changed since this transaction created a relation in plaintext.
pub(crate) fn must_reconsider() -> bool {
    let now = shmem::label_changes();
    CREATED.with(|notes| notes.any(|created| created.label_changes.is_some_and(|was| was != now)))
}

/// Whether a command of this session is filling new storage for a relation. Functions that it calls
/// see the relation with its former storage.
pub(super) fn is_being_rewritten(relation: Oid) -> bool {
    let transient = CREATED.with(|notes| {
        notes.find_last(|created| created.rewrites == Some(relation)).map(|created| created.oid)
    });
    // A command that has ended has dropped it.
    transient.and_then(relation::facts).is_some()
}

/// Called before a commit: encrypts relations that this transaction has created, and for which a
/// label requires it that another session has set meanwhile. That session cannot see them, nor can
/// its jobs.
pub(crate) fn reconsider() -> Result<()> {
    let created = CREATED.with(|notes| notes.drain_since(Mark::START));
    relation::accept_invalidations();
    for Created { oid, .. } in created.into_iter().filter(|it| it.label_changes.is_some()) {
        if let Some(facts) = relation::facts_after_command(oid)
            && facts.is_stored()
        {
            altered::encrypt_if_required(&facts)?;
        }
    }
    Ok(())
}

/// The schema pagevault is first in the search path of a role called pagevault, which usually means
/// another schema.
fn refuse_in_our_schema(facts: &Facts) -> Result<()> {
    let leads = matches!(
        facts.kind,
        RelationKind::Table
            | RelationKind::MaterializedView
            | RelationKind::Sequence
            | RelationKind::PartitionedTable
    );
    let is_new = leads && facts.rewrites.is_none() && !facts.temporary;
    if !is_new || process::creates_us() || !relation::is_our_schema(facts.schema) {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
        format!("permission denied to create {}", relation::quoted_name(facts)),
    )
    .detail("The schema pagevault is the extension's.")
    .hint(
        "Name another schema. Of a role called pagevault this one is the first in the search path.",
    ))
}

/// pg_upgrade has created a relation, and will bring its file, and perhaps statistics of it, later.
pub(crate) fn relation_reserved(oid: Oid) {
    if relation::facts(oid)
        .is_some_and(|facts| facts.is_stored() && directory::is_sealed(facts.file))
    {
        pending::note_encryption();
    }
}

/// Starts writing the file of a new relation encrypted so, or as plaintext.
pub(super) fn set_sealing_of_empty_file(file: RelFile, wanted: Option<Sealing>) -> Result<()> {
    if wanted == directory::current_sealing(file) {
        return Ok(());
    }
    memo::forget_answers();
    let guessed = directory::current_version(file);
    let guessed = guessed.filter(|_| directory::current_key_group(file).is_some());
    begin(file, wanted)?;
    match guessed {
        Some(version) if relation_files::is_empty(file) => data_keys::discard_unused(file, version),
        _ => Ok(()),
    }
}
