//! The security label provider: `SECURITY LABEL FOR pagevault ON TABLE x IS 'encrypted'`.

use pagevault_core::policy::Labelled;
use pagevault_core::policy::enforcement::takes_encryption_away;
use pagevault_core::policy::precedence::Change;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys;

use super::{altered, enforce, requests, shared_labels};
use crate::audit::statements;
use crate::fault;
use crate::keys::store::{directory, key_groups};
use crate::keys::usage::data_keys;
use crate::pg::inheritance;
use crate::pg::labels::Object;
use crate::pg::locks;
use crate::pg::nesting::{Mark, Notes};
use crate::pg::process::{self, ProcessLocal};
use crate::pg::relation::{self, Facts, RelationKind};
use crate::pg::report::{Report, Result};
use crate::pg::statement;
use crate::pg::text::ServerText;
use crate::policy::label::{self, Label};
use crate::policy::{labelled, memo, named_key_group, pending};
use crate::roles;
use crate::shmem;

/// The command that labels a relation encrypted, for messages.
pub(crate) fn statement(facts: &Facts) -> String {
    let (kind, name) = (relation::label_keyword(facts.kind), relation::quoted_name(facts));
    format!("SECURITY LABEL FOR pagevault ON {kind} {name} IS 'encrypted'")
}

/// A SECURITY LABEL statement for pagevault.
#[derive(Clone, Copy)]
pub(crate) struct Labelling {
    /// The intended object, if [`set`] issued the statement.
    meant_for: Option<Object>,
    begun: bool,
    /// The rekey job that it has requested.
    job: Option<i64>,
}

/// The statements in progress in this session, the innermost last: event triggers may set labels,
/// too.
static LABELLINGS: ProcessLocal<Notes<Labelling>> = ProcessLocal::new(Notes::new());

/// Marks the beginning of a command.
pub(crate) fn mark() -> Mark {
    LABELLINGS.with(|notes| notes.mark())
}

/// A SECURITY LABEL statement for pagevault begins: the one that [`set`] is about to run, or
/// another.
pub(crate) fn labelling_begins() {
    LABELLINGS.with(|notes| match notes.last() {
        Some(ours) if !ours.begun => ours.begun = true,
        _ => notes.push(Labelling { meant_for: None, begun: true, job: None }),
    });
}

/// Called at the end of the command.
pub(crate) fn command_ends(mark: Mark) {
    LABELLINGS.with(|notes| drop(notes.drain_since(mark)));
}

/// Called at the end of (sub)transactions.
pub(crate) fn with_notes(at_end: impl FnOnce(&mut Notes<Labelling>)) {
    LABELLINGS.with(at_end);
}

/// Sets a label (in quotes, or NULL) with the caller's rights, by a SECURITY LABEL statement, so
/// that event triggers and statement hooks run as usual. The statement contains the object's name,
/// which may pass to another object before the server looks it up; so the label provider compares
/// the objects. Returns the number of the rekey job, if one is needed.
pub(crate) fn set(object: Object, label: &str) -> Result<Option<i64>> {
    let Some(target) = object.label_target() else { return Err(gone(object)) };
    let statement = ServerText::join(&[
        b"SECURITY LABEL FOR pagevault ON ",
        target.bytes(),
        b" IS ",
        label.as_bytes(),
    ]);
    let before = mark();
    let ours = Labelling { meant_for: Some(object), begun: false, job: None };
    LABELLINGS.with(|notes| notes.push(ours));
    // On failure, the end of the (sub)transaction removes the note.
    let done = statement::run(statement.as_c_str());
    let job = LABELLINGS.with(|notes| notes.last().and_then(|ours| ours.job));
    command_ends(before);
    done.map(|()| job)
}

fn gone(object: Object) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT,
        format!("{} does not exist any more", object.describe()),
    )
}

fn renamed(object: Object) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_IN_USE,
        format!("{} was given another name meanwhile", object.describe()),
    )
    .hint("Try again.")
}

/// A label is about to be set (`Some`) or removed (`None`). The server has checked that the caller
/// owns the object.
pub(crate) fn relabelled(object: Object, column: i32, text: Option<ServerText>) -> Result<()> {
    let innermost = LABELLINGS.with(|notes| notes.last().copied());
    if let Some(meant) = innermost.and_then(|labelling| labelling.meant_for)
        && meant != object
    {
        return Err(renamed(meant));
    }
    if column != 0 {
        return Err(unsupported("a column", "Label the table: pages hold all columns of a row."));
    }
    if may_concern_key_groups(object, text.as_ref())? {
        locks::change_labels();
    }
    let relation = Some(object.oid).filter(|_| object.class == pg_sys::RelationRelationId);
    let facts = relation.and_then(relation::facts);
    let name = facts.as_ref().map(relation::quoted_name);
    let name = name.unwrap_or_else(|| object.describe().to_string());
    statements::is_about(name, object.label().map(|label| label.to_string()));
    let label = text.as_ref().map(label::of_text).transpose()?;
    // A view may have the label of the table that it was before CREATE RULE (15,
    // `DefineQueryRewrite` in rewriteDefine.c). It holds nothing, so its owner may remove it.
    let holds_nothing = facts.as_ref().is_some_and(|facts| !facts.kind.takes_labels());
    let is_idle = holds_nothing && label.is_none();
    let changes_group = !is_idle && changes_key_group(object, text.as_ref())?;
    let outcome = match (object.class, facts) {
        _ if is_idle => Ok(()),
        (_, Some(facts)) => apply_to_relation(&facts, label, changes_group).map(note_job),
        (pg_sys::RelationRelationId, None) => Ok(()),
        _ => apply_to_surroundings(object, label),
    };
    memo::forget();
    CHANGED.with(|changed| *changed = true);
    outcome
}

/// The key groups that a label names, and that the present label of the object names.
fn key_groups_of(
    object: Object,
    text: Option<&ServerText>,
) -> Result<(Option<String>, Option<String>)> {
    let to = text.map(label::key_group_in).transpose()?.flatten();
    let from = object.label().as_ref().map(label::key_group_in).transpose()?.flatten();
    Ok((to, from))
}

/// Whether a label may change what is in key groups: [`changes_key_group`], or it takes out what no
/// label had put there ([`refuse_leaving`]). Others do not wait for a group that is being shredded,
/// nor does that wait for them.
fn may_concern_key_groups(object: Object, text: Option<&ServerText>) -> Result<bool> {
    let (to, from) = key_groups_of(object, text)?;
    Ok(to != from || to.is_none() && text.is_some() && roles::is_admin())
}

/// Whether a label puts an object into a key group, or takes it out of one. Only administrators
/// may: who holds the master key of a group can lock what is in it, and destroys it with the group.
fn changes_key_group(object: Object, text: Option<&ServerText>) -> Result<bool> {
    let (to, from) = key_groups_of(object, text)?;
    if process::is_binary_upgrade() {
        return Ok(to != from);
    }
    if to == from {
        if to.is_none() && text.is_some() && !roles::is_admin() {
            refuse_leaving(object)?;
        }
        return Ok(false);
    }
    if to.is_some() && object.class == pg_sys::DatabaseRelationId {
        return Err(Report::new(
            PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
            "the label of a database cannot name a key group",
        )
        .hint("A database can have a key of its own: pagevault.set_database_master_key()."));
    }
    let name = object.describe();
    roles::require_admin(&match to {
        Some(_) => format!("put {name} into a key group"),
        None => format!("take {name} out of its key group"),
    })?;
    let Some(to) = to else { return Ok(true) };
    let group = key_groups::named(&to)?.ok_or_else(|| {
        key_groups::missing(&to).hint("Create it with pagevault.create_key_group().")
    })?;
    data_keys::require_group_key(group)?;
    Ok(true)
}

/// Relations that no label puts into a group stay in that in which they are, until a label says
/// that they are encrypted and names no group. Only administrators may set it.
fn refuse_leaving(object: Object) -> Result<()> {
    let members = match object.class {
        pg_sys::RelationRelationId => inheritance::with_partitions(object.oid),
        _ => relation::all().into_iter().filter_map(relation::facts).collect(),
    };
    for facts in members {
        let is_below = match object.class {
            pg_sys::NamespaceRelationId => facts.schema == object.oid,
            pg_sys::TableSpaceRelationId => facts.file.tablespace == object.oid.to_u32(),
            _ => true,
        };
        if !is_below || !facts.is_stored() || directory::current_key_group(facts.file).is_none() {
            continue;
        }
        if named_key_group(&facts)?.is_none() {
            let name = relation::quoted_name(&facts);
            return roles::require_admin(&format!("take {name} out of its key group"));
        }
    }
    Ok(())
}

/// Notes the rekey job that the label in progress needs.
pub(crate) fn note_job(job: Option<i64>) {
    LABELLINGS.with(|notes| {
        if let Some(labelling) = notes.last() {
            labelling.job = job;
        }
    });
}

/// Whether this transaction has changed labels, even in a subtransaction that was rolled back.
static CHANGED: ProcessLocal<bool> = ProcessLocal::new(false);

/// Whether this transaction has committed changes of labels, and has not told other sessions yet.
static COMMITTED: ProcessLocal<bool> = ProcessLocal::new(false);

/// Called when the transaction has ended or is prepared. After a commit, other sessions see its
/// labels.
pub(crate) fn transaction_ended(has_committed: bool) {
    if CHANGED.take() && has_committed {
        shmem::count_label_change();
        COMMITTED.set(true);
        fault::point("labels.committed");
    }
}

/// Called when other sessions have been told what a commit has changed in catalogs. Before, a
/// session may read labels with a snapshot of its catalogs from before the commit, and remember
/// them for the new count.
pub(crate) fn invalidations_sent() {
    if COMMITTED.take() {
        shmem::count_label_change();
    }
}

/// Whether this database is labelled encrypted.
pub(crate) fn database_is_labelled_encrypted() -> Result<bool> {
    Ok(matches!(label_of(Object::my_database())?, Some(Label::Encrypted(_))))
}

/// Returns the number of the rekey job, if one is needed. Where the key group changes, the relation
/// is encrypted when the command has ended: until then the catalogs show the former label.
fn apply_to_relation(
    facts: &Facts,
    label: Option<Label>,
    changes_group: bool,
) -> Result<Option<i64>> {
    let name = relation::qualified_name(facts.oid);
    if label.is_some() {
        check_relation(facts, &name)?;
    }
    // pg_upgrade brings the file later, in the state of the label, or of a job on the way to that
    // state. The present file has no rows.
    if process::is_binary_upgrade() {
        return Ok(None);
    }
    if loss(Object::relation(facts.oid), label)?.is_some() {
        roles::require_admin(&format!("remove the encryption of {name}"))?;
        enforce::refuse_loss(facts, &name, label)?;
    }
    match label {
        None => {
            if label_of(Object::relation(facts.oid))? == Some(Label::Plaintext) {
                enforce::refuse_removal(facts)?;
            }
            Ok(None)
        }
        Some(Label::Encrypted(_)) if facts.kind == RelationKind::PartitionedTable => {
            data_keys::require_master_key(process::my_database())?;
            pending::note_encryption();
            Ok(None)
        }
        Some(Label::Plaintext) if facts.kind == RelationKind::PartitionedTable => Ok(None),
        Some(Label::Encrypted(_)) if changes_group => {
            altered::note_relabelled(facts.oid);
            Ok(None)
        }
        Some(Label::Encrypted(cipher)) => requests::encrypt(facts, cipher),
        Some(Label::Plaintext) => requests::decrypt(facts),
    }
}

fn check_relation(facts: &Facts, name: &str) -> Result<()> {
    match facts.kind {
        kind if kind.takes_labels() => {}
        RelationKind::Index | RelationKind::Toast => {
            return Err(unsupported("an index or TOAST table", "Label its table; it follows."));
        }
        _ => return Err(unsupported("a relation without storage", "Label tables.")),
    }
    if !facts.user_made {
        return Err(unsupported(
            "a system catalog",
            "A label on the database covers its catalogs; pagevault.encrypt() encrypts one.",
        ));
    }
    if facts.temporary {
        return Err(Report::new(
            PgSqlErrorCode::ERRCODE_WRONG_OBJECT_TYPE,
            format!("\"{name}\" is a temporary relation"),
        )
        .detail("Temporary relations are encrypted under a key of this server start as soon as anything in the cluster is encrypted."));
    }
    Ok(())
}

/// Checks the label of a schema, tablespace or database. It decides about storage created from now
/// on.
fn apply_to_surroundings(object: Object, label: Option<Label>) -> Result<()> {
    let here = Object::my_database();
    let around = match labelled(object) {
        Some(around) if !matches!(around, Labelled::Relation(_)) => around,
        _ if label.is_none() => return Ok(()),
        _ => return Err(unsupported("this kind of object", LABEL_THESE)),
    };
    if label.is_some() {
        check_surroundings(object)?;
    }
    if process::is_binary_upgrade() {
        if matches!(label, Some(Label::Encrypted(_))) && object == here {
            pending::note_database_label();
        }
        return Ok(());
    }
    if let Some(change) = loss(object, label)? {
        roles::require_admin(&format!("remove the encryption of {}", object.describe()))?;
        shared_labels::refuse_loss(around, change)?;
    }
    match label {
        Some(Label::Encrypted(_)) => {
            match around {
                Labelled::Tablespace(_) => shared_labels::require_master_keys()?,
                Labelled::Database(oid) => data_keys::require_master_key(oid).map(|_| ())?,
                _ => data_keys::require_master_key(here.oid.to_u32()).map(|_| ())?,
            }
            match around {
                Labelled::Schema(_) => pending::note_encryption(),
                Labelled::Database(_) if object == here => pending::note_database_label(),
                _ => {}
            }
            Ok(())
        }
        Some(Label::Plaintext) | None => Ok(()),
    }
}

const LABEL_THESE: &str =
    "Label tables, materialized views, sequences, schemas, tablespaces or databases.";

fn check_surroundings(object: Object) -> Result<()> {
    match (object.class, object.oid.to_u32()) {
        (
            pg_sys::NamespaceRelationId,
            pg_sys::PG_CATALOG_NAMESPACE | pg_sys::PG_TOAST_NAMESPACE,
        ) => Err(unsupported("a schema of the system", "Label schemas with user tables.")),
        (pg_sys::TableSpaceRelationId, GLOBAL_TABLESPACE) => {
            Err(unsupported("the tablespace of shared catalogs", "Label other tablespaces."))
        }
        _ => Ok(()),
    }
}

/// `pg_global`
const GLOBAL_TABLESPACE: u32 = 1664;

/// The change of a label, if it removes encryption or makes an exception.
fn loss(object: Object, to: Option<Label>) -> Result<Option<Change>> {
    Ok(takes_encryption_away(label_of(object)?, to))
}

/// The present label of an object.
fn label_of(object: Object) -> Result<Option<Label>> {
    object.label().as_ref().map(label::of_text).transpose()
}

fn unsupported(what: &str, hint: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
        format!("pagevault labels cannot be put on {what}"),
    )
    .hint(hint)
}
