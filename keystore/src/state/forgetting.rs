//! Forgetting keys that nothing needs any more.

use std::collections::HashSet;

use pagevault_cipher::{DataKeyVersion, KeyVersion, Lsn};

use super::State;
use crate::former::FormerFiles;
use crate::rel_file::{Phase, RelFile};
use crate::scope::Scope;
use crate::wal;

/// Keys that have been replaced, and that nothing needs where WAL is replayed from the address
/// `gone` on, or from a later one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FormerVersions {
    /// Database keys that wrap nothing.
    pub database_keys: HashSet<(Scope, KeyVersion)>,
    /// WAL keys up to this version: there is no WAL under them ([`wal::before_all`]).
    pub wal_keys: Option<KeyVersion>,
    /// Data keys of files in use: there is no page under them. What is left after
    /// [`State::forget_versions`] contains WAL keys as well, by their places.
    pub data_keys: HashSet<(RelFile, DataKeyVersion)>,
    /// See above.
    pub gone: Lsn,
}

impl FormerVersions {
    /// Whether none is named.
    pub fn is_empty(&self) -> bool {
        self.database_keys.is_empty() && self.wal_keys.is_none() && self.data_keys.is_empty()
    }
}

impl State {
    /// Forgets the keys of former files of a database, if `is_gone` confirms it: nothing needs them
    /// where WAL is replayed from the address `by` on, or from a later one. Returns these files.
    pub fn forget_keys(
        &mut self,
        database: u32,
        by: Lsn,
        is_gone: impl Fn(RelFile) -> bool,
    ) -> Vec<RelFile> {
        let former = &self.former;
        let mut files = Vec::new();
        self.files.retain(|&file, entry| {
            let gone = file.database == database
                && former.was_gone(file, entry.last_version(), Lsn::MAX)
                && is_gone(file);
            if gone {
                files.push(file);
            }
            !gone
        });
        if !files.is_empty() {
            let known = self.forgotten.entry(database).or_default();
            *known = (*known).max(by);
        }
        files
    }

    /// Takes back what [`State::forgotten`] says.
    pub fn clear_forgotten(&mut self) {
        self.forgotten.clear();
    }

    /// Files that are gone.
    pub fn former_files(&self) -> &FormerFiles {
        &self.former
    }

    /// The address from which on, or from a later one, WAL must be replayed with these keys: keys
    /// of files that were gone there are forgotten.
    pub fn forgotten(&self) -> Lsn {
        self.forgotten.values().copied().max().unwrap_or_default()
    }

    /// Forgets these keys, in the log of `home`, but for those that its other records contradict.
    /// Leaves in `former` those that this state does not have afterwards. Returns the number of
    /// keys that it had. Whether data keys in other logs are wrapped by a database key, the caller
    /// must know.
    pub fn forget_versions(&mut self, home: Scope, former: &mut FormerVersions) -> usize {
        let mut count = self.forget_data_keys(home, &mut former.data_keys);
        if home.is_cluster() {
            count += self.forget_wal_keys(former);
            count += self.forget_database_keys(&mut former.database_keys);
        }
        if count > 0 {
            let known = self.forgotten.entry(home.number()).or_default();
            *known = (*known).max(former.gone);
        }
        count
    }

    fn forget_data_keys(
        &mut self,
        home: Scope,
        keys: &mut HashSet<(RelFile, DataKeyVersion)>,
    ) -> usize {
        let mut count = 0;
        keys.retain(|(file, version)| {
            if file.scope() != home {
                return false;
            }
            let Some(entry) = self.files.get_mut(file) else { return true };
            let is_named = entry.phase.version == Some(*version)
                || entry.rewriting.is_some_and(|(phase, _)| phase.version == Some(*version));
            if is_named || entry.floor().is_none_or(|floor| *version >= floor) {
                return false;
            }
            let before = entry.keys.len();
            entry.keys.retain(|known, _| known != version);
            count += before - entry.keys.len();
            // No record can name it any more. The floor is later.
            if entry.earliest.version.is_some_and(|version| !entry.has_version(version)) {
                entry.earliest = Phase::default();
            }
            true
        });
        count
    }

    fn forget_database_keys(&mut self, keys: &mut HashSet<(Scope, KeyVersion)>) -> usize {
        let data_keys = self.files.values().flat_map(|file| file.keys.values());
        let wrapping: HashSet<_> = data_keys.map(|key| (key.scope, key.key_version)).collect();
        keys.retain(|&(scope, version)| {
            let newest = self.current_database_key(scope).map(|(newest, _)| newest);
            !wrapping.contains(&(scope, version)) && newest > Some(version)
        });
        keys.iter().filter(|key| self.database_keys.remove(key).is_some()).count()
    }

    fn forget_wal_keys(&mut self, former: &mut FormerVersions) -> usize {
        let newest = self.wal_switches.last().and_then(|newest| newest.phase.version);
        former.wal_keys = former.wal_keys.filter(|through| newest > Some(*through));
        let Some(through) = former.wal_keys else { return 0 };
        self.wal_switches.retain(|switch| switch.phase.version > Some(through));
        let mut count = 0;
        self.files.retain(|&file, entry| {
            if !wal::is_key_place(file) {
                return true;
            }
            let versions = entry.keys.keys().copied();
            let is_gone = |at: &DataKeyVersion| {
                wal::version_at(file, *at).is_some_and(|version| version <= through)
            };
            let gone: Vec<_> = versions.filter(is_gone).collect();
            entry.keys.retain(|version, _| !gone.contains(version));
            count += gone.len();
            former.data_keys.extend(gone.into_iter().map(|version| (file, version)));
            entry.last_version().is_some()
        });
        count
    }
}
