//! Effects of removing a label from a schema, tablespace or database, on everything in it that has
//! no nearer label, also in other databases than the session's.
//!
//! Labels of tablespaces and databases, and settings of ALTER DATABASE, are in shared catalogs. A
//! setting of another database is the value set for that database, or else the value in this
//! session.

use pagevault_core::policy::Labelled;
use pagevault_core::policy::enforcement::{SchemaLoss, View, against_schema_label, forbidden_by};
use pagevault_core::policy::precedence::Change;
use pgrx::pg_sys::Oid;

use super::enforce;
use crate::keys::usage::data_keys;
use crate::pg::catalog::{self, Database};
use crate::pg::guc;
use crate::pg::labels::Object;
use crate::pg::report::Result;
use crate::policy::{Setting, Source, memo};

/// Labels and settings of all databases that can contain relations.
fn views() -> Result<Vec<(View, Database)>> {
    let defaults = catalog::settings_of_databases(c"pagevault.default_encryption");
    let enforced = catalog::settings_of_databases(c"pagevault.enforce_encryption");
    let set = |settings: &[(Oid, bool)], oid: Oid| -> Option<bool> {
        let mut values = settings.iter().filter(|(of, _)| *of == oid).map(|(_, on)| *on);
        let first = values.next()?;
        Some(first || values.any(|on| on))
    };
    let here = Object::my_database().oid.to_u32();
    let views = catalog::databases_in_use().into_iter().map(|database| {
        let oid = database.oid;
        let view = View::new(
            (oid.to_u32(), here),
            memo::label_of(Object::database(oid))?,
            (set(&defaults, oid), guc::default_encryption()),
            (set(&enforced, oid), guc::enforce_encryption()),
        );
        Ok((view, database))
    });
    views.collect()
}

/// Refuses to label a tablespace encrypted if some database without a master key could then create
/// nothing in it: the tablespace's owner would block other databases.
pub(super) fn require_master_keys() -> Result<()> {
    let mut databases = catalog::databases_in_use();
    // Report the current database first.
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

/// Refuses a change of a label that removes encryption where this is not permitted.
pub(super) fn refuse_loss(object: Labelled, change: Change) -> Result<()> {
    match object {
        Labelled::Relation(_) => Ok(()),
        Labelled::Schema(_) => schema(object, change),
        Labelled::Tablespace(_) | Labelled::Database(_) => shared(object, change),
    }
}

fn schema(object: Labelled, change: Change) -> Result<()> {
    if !guc::enforce_encryption() {
        return Ok(());
    }
    let here = Object::my_database();
    let database = (here.oid.to_u32(), memo::label_of(here)?);
    let label_of = |oid: Oid| Ok((oid.to_u32(), memo::label_of(Object::tablespace(oid))?));
    let tablespaces: Result<Vec<_>> = catalog::tablespaces().into_iter().map(label_of).collect();
    match against_schema_label(change, &tablespaces?, database, guc::default_encryption()) {
        None => Ok(()),
        Some(SchemaLoss(wanted)) => Err(enforce::loss(object, change, wanted, None)),
    }
}

fn shared(object: Labelled, change: Change) -> Result<()> {
    let (views, databases): (Vec<_>, Vec<_>) = views()?.into_iter().unzip();
    match forbidden_by(&views, Object::my_database().oid.to_u32(), object, change) {
        None => Ok(()),
        Some(view) => {
            let wanted = Some(Source::Setting(Setting::DefaultEncryption));
            let database = databases.iter().find(|known| known.oid.to_u32() == view.database);
            Err(enforce::loss(object, change, wanted, database))
        }
    }
}

fn view_of(database: Oid) -> Result<Option<View>> {
    let views = views()?.into_iter().map(|(view, _)| view);
    Ok(views.into_iter().find(|view| view.database == database.to_u32()))
}

/// Whether relations without labels of their own in a database are to be encrypted in a tablespace.
pub(super) fn is_wanted_in(database: Oid, tablespace: Oid) -> Result<bool> {
    let label = memo::label_of(Object::tablespace(tablespace))?;
    let of_session = || View {
        database: database.to_u32(),
        label: None,
        default_encryption: guc::default_encryption(),
        enforces: guc::enforce_encryption(),
    };
    Ok(view_of(database)?.unwrap_or_else(of_session).wants_encryption(label))
}

/// Whether `enforce_encryption` applies to a database.
pub(super) fn is_enforced_in(database: Oid) -> Result<bool> {
    Ok(view_of(database)?.map_or_else(guc::enforce_encryption, |view| view.enforces))
}
