//! Names of the relations that files belong to, for page errors.
//!
//! The storage manager knows a file only by its numbers. Its relation is in catalogs, which cannot
//! be read when a page cannot be read: I/O on a buffer is in progress and other buffers may be
//! locked, so reading `pg_class` could deadlock with ourselves or raise another error instead; and
//! in recovery there is no relation cache. So relations are noted before their pages are read,
//! where catalogs can be read ([`crate::hooks::naming`]), and only while anything is locked,
//! refused or destroyed. Errors use these notes, in the memory of this process; without a note they
//! contain the path of the file.
//!
//! A file belongs to one relation as long as it exists, but its number may be reused later. So
//! notes are removed at the end of the transaction. VACUUM and similar commands commit in between;
//! notes for such a command are removed when it ends.

use std::collections::{HashMap, HashSet};

use pagevault_keystore::RelFile;
use pgrx::pg_sys::Oid;

use crate::pg::compat;
use crate::pg::process::ProcessLocal;

/// Maximum number of relations looked up, and of files noted; errors of further ones contain paths.
const LIMIT: usize = 1000;

/// The name of a file in messages.
#[derive(Clone)]
pub(crate) struct Name {
    /// The table, or another relation that belongs to none.
    pub(crate) relation: String,
    /// Which part of the relation the file is, if not its own: `index "orders_pkey"`.
    pub(crate) part: Option<String>,
}

#[derive(Default)]
struct Names {
    /// The local transaction ID for which they were noted.
    transaction: u32,
    /// Whether they are valid until the end of the command, although it commits in between.
    of_command: bool,
    /// Arguments of earlier [`is_new`] calls.
    seen: HashSet<(Oid, Option<RelFile>)>,
    files: HashMap<RelFile, Name>,
}

static NAMES: ProcessLocal<Option<Names>> = ProcessLocal::new(None);

/// True if a relation was not yet looked up in this transaction: once for each of its files, and
/// once for its inheritors (`None`).
pub(crate) fn is_new(oid: Oid, file: Option<RelFile>) -> bool {
    with_names(|names| {
        names.files.len().max(names.seen.len()) < LIMIT && names.seen.insert((oid, file))
    })
}

/// Notes the name of a file. A relation's own name replaces its name as a part of another relation.
pub(crate) fn note(file: RelFile, name: Name) {
    with_names(|names| {
        if names.files.len() < LIMIT && (name.part.is_none() || !names.files.contains_key(&file)) {
            names.files.insert(file, name);
        }
    });
}

/// Keeps the notes of this transaction beyond its end, until [`forget`].
pub(crate) fn keep_for_command() {
    with_names(|names| names.of_command = true);
}

/// Removes all notes: the command has ended, or a transaction was rolled back.
pub(crate) fn forget() {
    NAMES.with(|names| *names = None);
}

/// The name of a file, if noted.
pub(super) fn of(file: RelFile) -> Option<Name> {
    NAMES.with(|names| {
        let names = names.as_ref()?;
        let holds = names.of_command || names.transaction == compat::local_transaction();
        names.files.get(&file).filter(|_| holds).cloned()
    })
}

/// Calls `act` with the notes of the current transaction.
fn with_names<R>(act: impl FnOnce(&mut Names) -> R) -> R {
    let transaction = compat::local_transaction();
    NAMES.with(|names| {
        let names = names.get_or_insert_default();
        if names.transaction != transaction {
            *names = Names { transaction, ..Names::default() };
        }
        act(names)
    })
}
