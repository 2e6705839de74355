//! Which relations files belong to, for errors of pages.
//!
//! The storage manager knows a file by its numbers. Whose it is stands in catalogs, and where a
//! page cannot be read nobody may look there: I/O on a buffer is in progress and others may be
//! locked, so reading `pg_class` could wait for ourselves, or raise another error in the place of
//! this one; and in recovery there is no relation cache. So relations are noted before their pages
//! are read, where catalogs may be ([`crate::hooks::naming`]), and only while anything is locked,
//! refused or destroyed. Errors look here, in the memory of this process, and do with the path of
//! the file where nothing is noted.
//!
//! A file belongs to one relation as long as it is there, but its number may be used again later:
//! what is noted is forgotten at the end of the transaction. VACUUM and its like commit in between;
//! what is noted for such a command is forgotten at its end.

use std::collections::{HashMap, HashSet};

use pagevault_keystore::RelFile;
use pgrx::pg_sys::Oid;

use crate::pg::compat;
use crate::pg::process::ProcessLocal;

/// Most relations that are looked up, and most files that are noted; the others have their paths.
const MOST: usize = 1000;

/// What a file is called.
#[derive(Clone)]
pub(crate) struct Name {
    /// The table, or what else stands for itself.
    pub(crate) relation: String,
    /// What of it the file is, if not its own: `index "orders_pkey"`.
    pub(crate) part: Option<String>,
}

#[derive(Default)]
struct Names {
    /// The transaction in which they were noted.
    transaction: u32,
    /// They hold until the end of the command, although it commits in between.
    of_command: bool,
    /// See [`is_new`].
    seen: HashSet<(Oid, Option<RelFile>)>,
    files: HashMap<RelFile, Name>,
}

static NAMES: ProcessLocal<Option<Names>> = ProcessLocal::new(None);

/// True if a relation is still to be looked up in this transaction: once with each file that it
/// has, once for those that inherit from it (`None`).
pub(crate) fn is_new(oid: Oid, file: Option<RelFile>) -> bool {
    with_names(|names| {
        names.files.len().max(names.seen.len()) < MOST && names.seen.insert((oid, file))
    })
}

/// Notes what a file is called. The name of a relation itself takes the place of its name as a part
/// of another.
pub(crate) fn note(file: RelFile, name: Name) {
    with_names(|names| {
        if names.files.len() < MOST && (name.part.is_none() || !names.files.contains_key(&file)) {
            names.files.insert(file, name);
        }
    });
}

/// Keeps what is noted in this transaction beyond its end, until [`forget`].
pub(crate) fn keep_for_command() {
    with_names(|names| names.of_command = true);
}

/// The command has ended, or a transaction was rolled back.
pub(crate) fn forget() {
    NAMES.with(|names| *names = None);
}

/// What a file is called, if that was noted.
pub(super) fn of(file: RelFile) -> Option<Name> {
    NAMES.with(|names| {
        let names = names.as_ref()?;
        let holds = names.of_command || names.transaction == compat::local_transaction();
        names.files.get(&file).filter(|_| holds).cloned()
    })
}

/// In a transaction.
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
