//! Ages of keys, as the keystore knows them.

use pagevault_keystore::state::State;
use pagevault_keystore::wal::{is_key_place, key_place};
use pagevault_keystore::{RelFile, Scope};

use super::number;
use crate::keys::provider::gone::is_gone;
use crate::keys::store::persist;
use crate::pg::guc::{self, KeyKind};
use crate::pg::report::Result;
use crate::shmem;

/// A key in use.
pub(crate) struct Age {
    pub(crate) kind: KeyKind,
    /// Of a database key or master key.
    pub(crate) scope: Scope,
    /// Of a data key.
    pub(crate) file: Option<RelFile>,
    pub(crate) version: i64,
    /// Since when it is in use; seconds since 1970.
    pub(crate) since: i64,
}

impl Age {
    /// When it is to be rotated, if the setting for its kind says so; seconds since 1970.
    pub(crate) fn due_at(&self) -> Option<i64> {
        let limit = guc::rotate_after(self.kind)?.as_secs();
        Some(self.since.saturating_add(i64::try_from(limit).unwrap_or(i64::MAX)))
    }
}

/// Master keys, database keys and the WAL key that are in use.
pub(crate) fn of_cluster() -> Result<Vec<Age>> {
    let state = persist::state_at_hand(Scope::CLUSTER)?;
    let mut scopes: Vec<Scope> = state.database_keys().map(|(scope, _, _)| scope).collect();
    scopes.dedup();
    scopes.retain(|scope| !is_gone(*scope));
    let mut ages = Vec::new();
    for scope in scopes {
        let Some((version, key)) = state.current_database_key(scope) else { continue };
        let age = |kind, version, since| Age { kind, scope, file: None, version, since };
        ages.extend(key.wrappings().map(|by| {
            let version = i64::try_from(by.master_version).unwrap_or(i64::MAX);
            age(KeyKind::Master, version, by.since)
        }));
        ages.push(age(KeyKind::Database, number(version), key.made));
    }
    ages.extend(wal_key(&state)?);
    Ok(ages)
}

/// The key of WAL, if that is encrypted.
fn wal_key(state: &State) -> Result<Option<Age>> {
    let Some(version) = shmem::required()?.wal.latest_phase().sealed() else { return Ok(None) };
    let (file, place) = key_place(version);
    let key = state.file(file).and_then(|entry| entry.keys.get(&place));
    let (kind, scope, file, version) = (KeyKind::Wal, Scope::CLUSTER, None, number(version));
    Ok(key.map(|key| Age { kind, scope, file, version, since: key.created }))
}

/// The data keys under which files of a database, or shared files, are written.
pub(crate) fn of_files(home: Scope) -> Result<Vec<Age>> {
    let state = persist::state_at_hand(home)?;
    let files = state.files().filter(|(file, _)| file.scope() == home && !is_key_place(*file));
    let ages = files.filter_map(|(file, entry)| {
        let version = entry.phase.current()?;
        let key = entry.keys.get(&version)?;
        let (kind, scope, version) = (KeyKind::Data, key.scope, version.get().into());
        Some(Age { kind, scope, file: Some(file), version, since: key.created })
    });
    Ok(ages.collect())
}
