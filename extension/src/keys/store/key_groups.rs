//! Names of key groups.

use std::collections::HashMap;

use pagevault_keystore::{KeyGroup, Scope};
use pgrx::PgSqlErrorCode;

use super::persist;
use crate::pg::process::ProcessLocal;
use crate::pg::processes;
use crate::pg::report::{Report, Result};
use crate::shmem;

/// A further sentence for a HINT, where recovery needs the key of a group.
pub(crate) const LAST_RESORT: &str = " If the key is gone for ever, \"pagevault-keyring give-up-key-group\" destroys what is in the key group while the server is down, and everything else is recovered.";

/// The groups that exist, as this process knows them since a number of changes.
static KNOWN: ProcessLocal<Option<(u32, HashMap<String, KeyGroup>)>> = ProcessLocal::new(None);

/// Calls `f` with all groups. The key file is read again only after a change.
fn with_all<R>(f: impl FnOnce(&HashMap<String, KeyGroup>) -> R) -> Result<R> {
    let changes = shmem::label_changes();
    let is_known = KNOWN.with(|known| known.as_ref().is_some_and(|(at, _)| *at == changes));
    if !is_known {
        let state = persist::state_at_hand(Scope::CLUSTER)?;
        let groups = state.key_groups().map(|(group, known)| (known.name.clone(), group));
        KNOWN.set(Some((changes, groups.collect())));
    }
    Ok(KNOWN.with(|known| f(&known.get_or_insert_default().1)))
}

/// The group of this name.
pub(crate) fn named(name: &str) -> Result<Option<KeyGroup>> {
    with_all(|groups| groups.get(name).copied())
}

/// The error for the name of a group that does not exist.
pub(crate) fn missing(name: &str) -> Report {
    let message = format!("key group \"{name}\" does not exist");
    Report::new(PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT, message)
}

/// The name of a group.
pub(crate) fn name_of(group: KeyGroup) -> Option<String> {
    let find = |groups: &HashMap<String, KeyGroup>| {
        let found = groups.iter().find(|(_, known)| **known == group);
        found.map(|(name, _)| name.clone())
    };
    with_all(find).ok().flatten()
}

/// [`Scope::name`], with the name of a key group. Reads no catalogs.
pub(crate) fn describe(scope: Scope) -> String {
    match scope.key_group().and_then(name_of) {
        Some(name) => format!("key group \"{name}\""),
        None => scope.name(),
    }
}

/// The key group that is being shredded, and the PID of the process that does it. Under the
/// keystore lock.
pub(crate) fn being_shredded() -> Option<(KeyGroup, u32)> {
    let (group, process, pid) = shmem::get()?.control.shredded_group()?;
    processes::is_there(process, pid).then_some((group, pid))
}
