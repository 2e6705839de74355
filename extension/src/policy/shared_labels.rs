//! What is lost when a label is taken from a schema, a tablespace or a database: from everything in
//! it that has no label nearer, also in databases that this session is not in.
//!
//! Labels of tablespaces and databases, and what ALTER DATABASE sets, stand in catalogs that all
//! databases share. What settings say in another database is what is set for it there, or else what
//! holds in this session.

use pagevault_core::policy::precedence::{Change, Who, among};
use pgrx::pg_sys::{self, Oid};

use super::decision::{DEFAULT_ENCRYPTION, Source};
use super::label::Label;
use super::{enforce, memo};
use crate::keys::usage::data_keys;
use crate::pg::catalog::{self, Database};
use crate::pg::guc;
use crate::pg::labels::Object;
use crate::pg::report::Result;

/// What holds in one database.
struct View {
    database: Database,
    label: Option<Label>,
    default_encryption: bool,
    enforces: bool,
}

/// Of every database that anything can be in.
fn views() -> Result<Vec<View>> {
    let defaults = catalog::settings_of_databases(c"pagevault.default_encryption");
    let enforced = catalog::settings_of_databases(c"pagevault.enforce_encryption");
    let set = |settings: &[(Oid, bool)], oid: Oid| -> Option<bool> {
        let mut values = settings.iter().filter(|(of, _)| *of == oid).map(|(_, on)| *on);
        let first = values.next()?;
        Some(first || values.any(|on| on))
    };
    let views = catalog::databases_in_use().into_iter().map(|database| {
        let here = database.oid == Object::my_database().oid;
        let default = set(&defaults, database.oid).filter(|_| !here);
        Ok(View {
            label: memo::label_of(Object::database(database.oid))?,
            default_encryption: default.unwrap_or_else(guc::default_encryption),
            // Here a superuser may have turned it off. There it is not this session's to turn off.
            enforces: guc::enforce_encryption()
                || (!here && set(&enforced, database.oid) == Some(true)),
            database,
        })
    });
    views.collect()
}

/// Refuses to label a tablespace encrypted where nothing could be made in it any more from some
/// database: its owner would stop others there, whose databases may know nothing of this.
pub(super) fn require_master_keys() -> Result<()> {
    let mut databases = catalog::databases_in_use();
    // What is said of this one is said first.
    databases
        .sort_by_key(|database| (database.oid != Object::my_database().oid, database.oid.to_u32()));
    for Database { oid, name } in databases {
        data_keys::require_master_key(oid.to_u32()).map_err(|report| {
            if oid == Object::my_database().oid {
                return report;
            }
            report.detail(format!(
                "Neither database \"{name}\" nor the cluster has a master key. Databases share the tablespace."
            ))
        })?;
    }
    Ok(())
}

/// Refuses to change a label where that takes encryption away and is not to be.
pub(super) fn refuse_loss(object: Object, change: Change) -> Result<()> {
    match object.class {
        pg_sys::NamespaceRelationId => schema(object, change),
        pg_sys::TableSpaceRelationId => tablespace(object, change),
        pg_sys::DatabaseRelationId => database(object, change),
        _ => Ok(()),
    }
}

fn schema(object: Object, change: Change) -> Result<()> {
    if !guc::enforce_encryption() {
        return Ok(());
    }
    let database = memo::label_of(Object::my_database())?;
    let setting = guc::default_encryption();
    let mut places = vec![(None, None)];
    for oid in catalog::tablespaces() {
        places.push((Some(oid), memo::label_of(Object::tablespace(oid))?));
    }
    for (tablespace, label) in places {
        if change.of_schema_loses(&[label], database, setting) {
            let wanted = among(label, database, setting).map(|(_, who)| match (who, tablespace) {
                (Who::Tablespace, Some(oid)) => Source::Around(Object::tablespace(oid)),
                (Who::Setting, _) => Source::Setting(DEFAULT_ENCRYPTION),
                _ => Source::Around(Object::my_database()),
            });
            return Err(enforce::loss(object, change, wanted, None));
        }
    }
    Ok(())
}

fn tablespace(object: Object, change: Change) -> Result<()> {
    let loses = |view: &View| change.of_tablespace_loses(view.label, view.default_encryption);
    refuse_in(views()?.into_iter().filter(loses), object, change)
}

fn database(object: Object, change: Change) -> Result<()> {
    let loses = |view: &View| {
        view.database.oid == object.oid && change.of_database_loses(view.default_encryption)
    };
    refuse_in(views()?.into_iter().filter(loses), object, change)
}

/// Names this database if it is among them, else the oldest.
fn refuse_in(losing: impl Iterator<Item = View>, object: Object, change: Change) -> Result<()> {
    let elsewhere = |oid: Oid| oid != Object::my_database().oid;
    let first = losing
        .filter(|view| view.enforces)
        .min_by_key(|view| (elsewhere(view.database.oid), view.database.oid.to_u32()));
    match first {
        None => Ok(()),
        Some(view) => {
            let wanted = Some(Source::Setting(DEFAULT_ENCRYPTION));
            Err(enforce::loss(object, change, wanted, Some(&view.database)))
        }
    }
}

/// True if relations of a database without labels of their own are to be encrypted in a tablespace.
pub(super) fn is_wanted_in(database: Oid, tablespace: Oid) -> Result<bool> {
    let label = memo::label_of(Object::tablespace(tablespace))?;
    let view = views()?.into_iter().find(|view| view.database.oid == database);
    let said = match view {
        Some(view) => among(label, view.label, view.default_encryption),
        None => among(label, None, guc::default_encryption()),
    };
    Ok(said.is_some_and(|(label, _)| matches!(label, Label::Encrypted(_))))
}

/// True if nothing of a database may become plaintext where encryption is wanted.
pub(super) fn is_enforced_in(database: Oid) -> Result<bool> {
    let view = views()?.into_iter().find(|view| view.database.oid == database);
    Ok(view.map_or_else(guc::enforce_encryption, |view| view.enforces))
}
