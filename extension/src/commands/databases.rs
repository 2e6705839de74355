//! Databases whose files are copied without the storage manager: their keys are copied, too.
//!
//! Both commands hold a lock on the database, which has no other sessions, and make the copy
//! visible only by their commit. So the keys are in the keystore and in WAL before that.

use pagevault_keystore::{RelFile, Scope};
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{self, Oid};

use super::{enforce, shared_labels};
use crate::fault;
use crate::keys::store::{persist, presence};
use crate::keys::usage::copies::Copying;
use crate::pg::process::{self, ProcessLocal};
use crate::pg::report::{Report, Result};
use crate::pg::text::ServerText;
use crate::pg::{catalog, compat};
use crate::verify;
use crate::writers::{self, Activity};

/// The template of CREATE DATABASE, and the way of copying.
struct Template {
    name: ServerText,
    /// Files are copied without decrypting them.
    raw: bool,
}

static TEMPLATE: ProcessLocal<Option<Template>> = ProcessLocal::new(None);

/// A database and its template, with the default tablespaces of both.
#[derive(Clone, Copy)]
struct DatabaseCopy {
    from: u32,
    to: u32,
    tablespace: u32,
    new_tablespace: u32,
}

/// The last copy made by this session.
static COPY: ProcessLocal<Option<DatabaseCopy>> = ProcessLocal::new(None);

/// CREATE DATABASE begins; `raw` if it copies files without decrypting them.
pub(crate) fn creating(template: ServerText, raw: bool) {
    TEMPLATE.with(|slot| *slot = Some(Template { name: template, raw }));
}

/// The row of a new database exists, but no file. The template is locked, so it still has this
/// name.
pub(crate) fn created(database: Oid) -> Result<()> {
    refuse_oid_of_dropped_database(database)?;
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
        return Ok(()); // a copy of initdb's template; the files moved later have their own keys
    }
    refuse_plaintext_copies(copy)?;
    if !raw {
        return Ok(()); // each file will be created and written like any other
    }
    let copy_of = |file: RelFile| {
        let moves = file.tablespace == copy.tablespace;
        let tablespace = if moves { copy.new_tablespace } else { file.tablespace };
        Some(RelFile { tablespace, database: copy.to, ..file })
    };
    // Until the transaction ends: the files of these keys do not exist yet.
    writers::begin(Activity::Creating, 0);
    Copying { from: copy.from, to: copy.to, copy_of, is_place: |_| true }.copy_keys()?;
    fault::point("database.keys_copied");
    Ok(())
}

/// Roles that may create databases may choose OIDs (createdb in dbcommands.c). The keys of a
/// dropped database stay recorded under its OID, and are not needed as long as nothing has that OID
/// ([`crate::keys::provider::gone`]). A new database with it would make the old provider necessary
/// at the next start, and raw copies would be written under keys of the old database's files.
fn refuse_oid_of_dropped_database(database: Oid) -> Result<()> {
    let scope = Scope::database(database.to_u32());
    // pg_upgrade adds keys before their databases.
    if process::is_binary_upgrade() || !persist::has_keys_of(scope)? && !presence::is_named(scope)?
    {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("database OID {scope} is that of a database that is gone"),
    )
    .detail("Its keys are kept for old backups, and would be those of the new database.")
    .hint("Choose another OID. If you chose none, try again."))
}

/// The template's file from which a file of a new database is copied.
pub(super) fn original_of(file: RelFile) -> Option<RelFile> {
    let copy = COPY.with(|copy| *copy).filter(|copy| copy.to == file.database)?;
    let moved = file.tablespace == copy.new_tablespace;
    let tablespace = if moved { copy.tablespace } else { file.tablespace };
    Some(RelFile { tablespace, database: copy.from, ..file })
}

/// ALTER DATABASE ... SET TABLESPACE begins. An error later would leave the copies of files on
/// standbys: the server records them in WAL before it changes the row (`movedb`, dbcommands.c).
pub(crate) fn altering(database: &ServerText, tablespace: &ServerText) -> Result<()> {
    let found = catalog::database_oid(database).zip(catalog::tablespace_oid(tablespace));
    let Some((database, new)) = found else { return Ok(()) };
    let Some(old) = catalog::tablespace_of_database(database) else { return Ok(()) };
    // The server refuses the others.
    if old == new || !compat::owns_database(database) {
        return Ok(());
    }
    if !process::is_binary_upgrade() {
        refuse_plaintext_in(database, database, old, new)?;
    }
    move_of(database, old, new).require_possible()
}

/// The row of a database was changed. If its tablespace changes, the files of the old one have been
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
    move_of(database, old, new).copy_keys()
}

fn move_of(
    database: Oid,
    old: Oid,
    new: Oid,
) -> Copying<impl Fn(RelFile) -> Option<RelFile>, impl Fn(RelFile) -> bool> {
    let (database, old, new) = (database.to_u32(), old.to_u32(), new.to_u32());
    let copy_of = move |file: RelFile| {
        (file.tablespace == old).then_some(RelFile { tablespace: new, ..file })
    };
    // Nothing else of the database is there: movedb requires that.
    let is_place = move |file: RelFile| file.tablespace == new;
    Copying { from: database, to: database, copy_of, is_place }
}

/// Both commands move raw files to other places; `pagevault.enforce_encryption` applies the policy
/// there. The new database has neither a label nor settings yet.
fn refuse_plaintext_copies(copy: DatabaseCopy) -> Result<()> {
    for tablespace in catalog::tablespaces() {
        let moves = tablespace.to_u32() == copy.tablespace;
        let to = if moves { copy.new_tablespace.into() } else { tablespace };
        refuse_plaintext_in(copy.from.into(), copy.to.into(), tablespace, to)?;
    }
    Ok(())
}

/// Refuses a raw copy of plaintext files of a database from the tablespace `old` to a place where
/// encryption is enforced. For another database than the current one it is unknown which files are
/// rewritten catalogs; a label on the database covers these, too.
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
