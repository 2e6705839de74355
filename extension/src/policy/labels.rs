//! The security label provider: `SECURITY LABEL FOR pagevault ON TABLE x IS 'encrypted'`.

use pgrx::PgSqlErrorCode;
use pgrx::pg_sys;

use super::decision::{self, Decision, Source};
use super::label::{self, Label};
use super::{catalogs, enforce, memo};
use crate::keys::data_keys;
use crate::pg::labels::Object;
use crate::pg::process;
use crate::pg::relation::{self, Facts, Kind};
use crate::pg::report::{Report, Result};
use crate::rekey::requests;
use crate::roles;

/// The command that puts a label (in quotes, or NULL) on a relation.
pub(crate) fn statement(facts: &Facts, label: &str) -> String {
    statement_on(&relation::label_target(facts), label)
}

/// As [`statement`], on what SECURITY LABEL calls `target`.
pub(crate) fn statement_on(target: &str, label: &str) -> String {
    format!("SECURITY LABEL FOR pagevault ON {target} IS {label}")
}

/// A label is about to be set (`Some`) or removed (`None`). The server has checked that the caller owns the
/// object.
pub(crate) fn relabelled(object: Object, column: i32, text: Option<&str>) -> Result<()> {
    if column != 0 {
        return Err(unsupported("a column", "Label the table: pages hold all columns of a row."));
    }
    let label = text.map(label::parse).transpose()?;
    let outcome = match object.class {
        pg_sys::RelationRelationId => match relation::facts(object.oid) {
            Some(facts) => relation_relabelled(&facts, label),
            None => Ok(()),
        },
        _ => surroundings_relabelled(object, label),
    };
    memo::forget();
    outcome
}

/// True if the label of this database says encrypted.
pub(crate) fn database_is_labelled_encrypted() -> Result<bool> {
    let label = Object::my_database().label().as_deref().map(label::parse).transpose()?;
    Ok(matches!(label, Some(Label::Encrypted(_))))
}

fn relation_relabelled(facts: &Facts, label: Option<Label>) -> Result<()> {
    let name = relation::qualified_name(facts.oid);
    if label.is_some() {
        check_relation(facts, &name)?;
    }
    // pg_upgrade brings a file that is as the label says, or as the job that is in the way to that. It comes later:
    // what there is now holds no rows.
    if process::is_binary_upgrade() {
        return Ok(());
    }
    let outer = decision::wanted_without_own_label(facts, facts.tablespace)?;
    check_loss(Object::relation(facts.oid), &name, label, outer)?;
    match label {
        None => Ok(()),
        Some(Label::Encrypted(_)) if facts.kind == Kind::PartitionedTable => {
            data_keys::require_master_key(process::my_database())?;
            catalogs::note_encryption();
            Ok(())
        }
        Some(Label::Plain) if facts.kind == Kind::PartitionedTable => Ok(()),
        Some(Label::Encrypted(cipher)) => requests::encrypt(facts, cipher).map(|_| ()),
        Some(Label::Plain) => requests::decrypt(facts).map(|_| ()),
    }
}

fn check_relation(facts: &Facts, name: &str) -> Result<()> {
    match facts.kind {
        kind if decision::takes_labels(kind) => {}
        Kind::Index | Kind::Toast => {
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
        .detail("Temporary relations are sealed under a key of this server start as soon as anything in the cluster is encrypted."));
    }
    Ok(())
}

/// A schema, tablespace or database: decides for storage that is made from now on.
fn surroundings_relabelled(object: Object, label: Option<Label>) -> Result<()> {
    let here = Object::my_database();
    let (outer, database) = match object.class {
        pg_sys::NamespaceRelationId => (decision::wanted_of_database()?, here.oid),
        pg_sys::TableSpaceRelationId => (decision::wanted_of_database()?, here.oid),
        pg_sys::DatabaseRelationId => (decision::setting(), object.oid),
        _ if label.is_none() => return Ok(()),
        _ => return Err(unsupported("this kind of object", LABEL_THESE)),
    };
    if label.is_some() {
        check_surroundings(object)?;
    }
    if process::is_binary_upgrade() {
        if matches!(label, Some(Label::Encrypted(_))) && object == here {
            catalogs::note_database_label();
        }
        return Ok(());
    }
    check_loss(object, &object.describe(), label, outer)?;
    match label {
        Some(Label::Encrypted(_)) => {
            data_keys::require_master_key(database.to_u32())?;
            match object.class {
                pg_sys::NamespaceRelationId => catalogs::note_encryption(),
                pg_sys::DatabaseRelationId if object == here => catalogs::note_database_label(),
                _ => {}
            }
            Ok(())
        }
        Some(Label::Plain) | None => Ok(()),
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

/// Anyone may add encryption to what they own; to take it away is the administrator's. `outer` is what
/// holds where the object has no label.
fn check_loss(
    object: Object,
    name: &str,
    label: Option<Label>,
    outer: Option<Decision>,
) -> Result<()> {
    let old = object.label().as_deref().map(label::parse).transpose()?;
    let says_encrypted = matches!(old, Some(Label::Encrypted(_)));
    if label == Some(Label::Plain) || (label.is_none() && says_encrypted) {
        roles::require_admin(&format!("remove the encryption of {name}"))?;
        let labelled =
            |label: Option<Label>| label.map(|l| Decision::new(l, Source::Around(object)));
        enforce::refuse_loss(name, labelled(old).or(outer), labelled(label).or(outer))?;
    }
    Ok(())
}

fn unsupported(what: &str, hint: &str) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
        format!("pagevault labels cannot be put on {what}"),
    )
    .hint(hint)
}
