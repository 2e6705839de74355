//! Databases whose files are copied below the storage manager: their keys go along.
//!
//! Both commands have the database locked and nobody else in it by then, and make the copy visible
//! only when they commit; so the keys are in the keystore and in WAL before.

use pagevault_keystore::{RelFile, Scope};
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{self, Oid};

use super::{enforce, shared_labels};
use crate::keys::store::persist;
use crate::keys::usage::copies;
use crate::pg::catalog;
use crate::pg::process::{self, ProcessLocal};
use crate::pg::report::{Report, Result};
use crate::pg::text::ServerText;
use crate::verify;

/// What CREATE DATABASE copies, and how.
struct Template {
    name: ServerText,
    /// Its files are copied as they are.
    raw: bool,
}

static TEMPLATE: ProcessLocal<Option<Template>> = ProcessLocal::new(None);

/// A database, and the one that it is copied from, each with its default tablespace.
#[derive(Clone, Copy)]
struct DatabaseCopy {
    from: u32,
    to: u32,
    tablespace: u32,
    new_tablespace: u32,
}

/// The last one that this session made.
static COPY: ProcessLocal<Option<DatabaseCopy>> = ProcessLocal::new(None);

/// CREATE DATABASE is about to be carried out; `raw` if it copies files as they are.
pub(crate) fn creating(template: ServerText, raw: bool) {
    TEMPLATE.with(|slot| *slot = Some(Template { name: template, raw }));
}

/// A row for a new database was made; no file is there yet. The template is locked, so its name is
/// its own.
pub(crate) fn created(database: Oid) -> Result<()> {
    refuse_number_of_another(database)?;
    let Some(Template { name, raw }) = TEMPLATE.with(Option::take) else { return Ok(()) };
    let Some(template) = catalog::database_oid(&name) else { return Ok(()) };
    let tablespace = catalog::tablespace_of_database(template);
    let new_tablespace = catalog::new_tablespace_of_database(database);
    let (Some(tablespace), Some(new_tablespace)) = (tablespace, new_tablespace) else {
        return Ok(());
    };
    let copy = DatabaseCopy {
        from: template.to_u32(),
        to: database.to_u32(),
        tablespace: tablespace.to_u32(),
        new_tablespace: new_tablespace.to_u32(),
    };
    COPY.with(|slot| *slot = Some(copy));
    if process::is_binary_upgrade() {
        return Ok(()); // it is made of initdb's template; what it held comes with keys of its own
    }
    refuse_plaintext_copies(copy)?;
    if !raw {
        return Ok(()); // each file will be created and written as any other
    }
    copies::copy_keys(copy.from, copy.to, |file| {
        let moves = file.tablespace == copy.tablespace;
        let tablespace = if moves { copy.new_tablespace } else { file.tablespace };
        Some(RelFile { tablespace, database: copy.to, ..file })
    })
}

/// Whoever may create databases may choose their OIDs (createdb in dbcommands.c). The keys of a
/// database that is gone are kept under its own, and not missed as long as nothing is there
/// ([`crate::keys::provider::gone`]); a new one would make its provider needed again, at the next
/// start by everybody, and write files that are copied as they are under keys of its files.
fn refuse_number_of_another(database: Oid) -> Result<()> {
    let scope = Scope::database(database.to_u32());
    // There the keys come before their database.
    if process::is_binary_upgrade() || !persist::has_keys_of(scope)? {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("database OID {scope} is that of a database that is gone"),
    )
    .detail("Its keys are kept for old backups, and would be those of the new database.")
    .hint("Choose another OID. If you chose none, try again."))
}

/// The file of the template that a file of a new database is copied from.
pub(super) fn original_of(file: RelFile) -> Option<RelFile> {
    let copy = COPY.with(|copy| *copy).filter(|copy| copy.to == file.database)?;
    let moved = file.tablespace == copy.new_tablespace;
    let tablespace = if moved { copy.tablespace } else { file.tablespace };
    Some(RelFile { tablespace, database: copy.from, ..file })
}

/// The row of a database was changed. If that is its tablespace, what lay in the old one has been
/// copied.
pub(crate) fn altered(database: Oid) -> Result<()> {
    let old = catalog::tablespace_of_database(database);
    let new = catalog::new_tablespace_of_database(database);
    let (Some(old), Some(new)) = (old, new) else { return Ok(()) };
    if old == new {
        return Ok(());
    }
    if !process::is_binary_upgrade() {
        refuse_plaintext_in(database, database, old, new)?;
    }
    copies::copy_keys(database.to_u32(), database.to_u32(), |file| {
        (file.tablespace == old.to_u32()).then(|| RelFile { tablespace: new.to_u32(), ..file })
    })
}

/// Both commands bring files to other places as they are: `pagevault.enforce_encryption` asks what
/// is wanted there. The new database has no label yet, and no settings of its own.
fn refuse_plaintext_copies(copy: DatabaseCopy) -> Result<()> {
    for tablespace in catalog::tablespaces() {
        let moves = tablespace.to_u32() == copy.tablespace;
        let to = if moves { copy.new_tablespace.into() } else { tablespace };
        refuse_plaintext_in(copy.from.into(), copy.to.into(), tablespace, to)?;
    }
    Ok(())
}

/// Refuses files in plaintext of a database and tablespace that are copied to others where
/// encryption is enforced. Of a database that is not this one it is not known which of its files
/// are catalogs that were rewritten; a label on it covers them too.
fn refuse_plaintext_in(from: Oid, to: Oid, old: Oid, new: Oid) -> Result<()> {
    if !shared_labels::is_enforced_in(to)? || !shared_labels::is_wanted_in(to, new)? {
        return Ok(());
    }
    let first = pg_sys::FirstNormalObjectId; // smaller numbers are those of initdb's catalogs
    let files = verify::plaintext_files_in(from.to_u32(), old.to_u32(), first)?;
    if files == 0 {
        return Ok(());
    }
    let name = catalog::new_database_name(to).unwrap_or_default();
    Err(enforce::plaintext_files(&name.to_string(), new, files))
}
