//! Databases whose files are copied below the storage manager: their keys go along.
//!
//! Both commands have the database locked and nobody else in it by then, and make the copy visible only when they
//! commit; so the keys are in the keystore and in WAL before.

use pgrx::pg_sys::Oid;

use crate::keys::copies;
use crate::pg::catalog;
use crate::pg::process::ProcessLocal;
use crate::pg::report::Result;

static TEMPLATE: ProcessLocal<Option<String>> = ProcessLocal::new(None);

/// CREATE DATABASE is about to be carried out. `template` is named if its files are copied as they are.
pub(crate) fn creating(template: Option<String>) {
    TEMPLATE.with(|slot| *slot = template);
}

/// A row for a new database was made; no file is there yet. The template is locked, so its name is its own.
pub(crate) fn created(database: Oid) -> Result<()> {
    let Some(template) = TEMPLATE.with(Option::take) else { return Ok(()) };
    let Some(template) = catalog::database_oid(&template) else { return Ok(()) };
    let default = catalog::tablespace_of_database(template);
    let new_default = catalog::new_tablespace_of_database(database);
    let (Some(default), Some(new_default)) = (default, new_default) else { return Ok(()) };
    let database = database.to_u32();
    copies::copy_keys(template.to_u32(), database, |file| {
        let moves = file.tablespace == default.to_u32();
        let tablespace = if moves { new_default.to_u32() } else { file.tablespace };
        Some(pagevault_keystore::RelFile { tablespace, database, ..file })
    })
}

/// The row of a database was changed. If that is its tablespace, what lay in the old one has been copied.
pub(crate) fn altered(database: Oid) -> Result<()> {
    let old = catalog::tablespace_of_database(database);
    let new = catalog::new_tablespace_of_database(database);
    let (Some(old), Some(new)) = (old, new) else { return Ok(()) };
    if old == new {
        return Ok(());
    }
    copies::copy_keys(database.to_u32(), database.to_u32(), |file| {
        (file.tablespace == old.to_u32())
            .then(|| pagevault_keystore::RelFile { tablespace: new.to_u32(), ..file })
    })
}
