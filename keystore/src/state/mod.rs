//! The state that results from a sequence of records.
//!
//! Applying a log's records gives its meaning. Compaction writes [`State::records`] and loses
//! nothing, because applying those gives the same state again. The state also guarantees what each
//! page depends on: a version of a file, once it has a key, keeps that key. Only the wrapping may
//! change.

mod file;
mod forgetting;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use pagevault_cipher::{DataKeyVersion, KeyVersion, Lsn};

pub use self::file::{DataKey, Destroyed, File};
pub use self::forgetting::FormerVersions;
use crate::former::FormerFiles;
use crate::job::{JobId, Jobs};
use crate::record::{DatabaseKey, Record};
use crate::rel_file::RelFile;
use crate::scope::{KeyGroup, Scope};
use crate::wal::{self, Switch};

/// A record that contradicts an earlier one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// A second key for a version that has one. Detected by its cipher or, if this pagevault does
    /// not know the cipher, by its length. (Wrapped keys of the same cipher cannot be
    /// distinguished.)
    #[error("relation file {file} has another data key of version {version}")]
    KeyReplaced {
        /// Which file.
        file: RelFile,
        /// Which version.
        version: DataKeyVersion,
    },
    /// Another key with the number of a known database key, detected by its key check value.
    #[error(
        "version {version} of the database key of scope {scope} differs from the key that is already known"
    )]
    DatabaseKeyReplaced {
        /// Scope of the key.
        scope: Scope,
        /// Its version.
        version: KeyVersion,
    },
    /// A record names a version that has no key.
    #[error("relation file {file} has no data key of version {version}")]
    NoKey {
        /// Which file.
        file: RelFile,
        /// Which version.
        version: DataKeyVersion,
    },
}

/// Configuration of a provider.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Provider {
    /// `file`, `vault`, `aws_kms`, `gcp_kms`, `azure_key_vault`, `pkcs11`, `kmip`, `command`.
    pub kind: String,
    /// JSON object.
    pub options: String,
    /// The role that set the provider may run programs on the server, so the provider may, too.
    pub programs: bool,
}

/// A key group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Its name in SQL and in labels.
    pub name: String,
    /// When it was created, in seconds since 1970.
    pub at: i64,
}

/// The state described by one or several logs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct State {
    providers: BTreeMap<String, Provider>,
    database_keys: BTreeMap<(Scope, KeyVersion), DatabaseKey>,
    key_groups: BTreeMap<KeyGroup, Group>,
    /// Those that have ended, and when.
    ended_key_groups: BTreeMap<KeyGroup, i64>,
    files: BTreeMap<RelFile, File>,
    wal_switches: BTreeSet<Switch>,
    jobs: BTreeMap<u32, Jobs>,
    former: FormerFiles,
    /// By database: see [`Record::KeysForgotten`].
    forgotten: BTreeMap<u32, Lsn>,
}

impl State {
    /// Applies records, in order, to an empty state.
    pub fn from_records(records: impl IntoIterator<Item = Record>) -> Result<Self, StateError> {
        let mut state = Self::default();
        records.into_iter().try_for_each(|record| state.apply(record))?;
        Ok(state)
    }

    /// Applies one record. On error the state is unchanged.
    ///
    /// Redo may repeat, in order and from any record on, what a log already contains: in the end
    /// nothing has changed. A destroyed key does not come back. Among the records of a file, only
    /// the order of those of keys matters, see [`Phase`](crate::rel_file::Phase).
    pub fn apply(&mut self, record: Record) -> Result<(), StateError> {
        match record {
            Record::Provider { name, kind, options, programs } => {
                self.providers.insert(name, Provider { kind, options, programs });
            }
            Record::DropProvider { name } => {
                self.providers.remove(&name);
            }
            Record::KeyGroup { group, name, at } => {
                if !self.ended_key_groups.contains_key(&group) {
                    self.key_groups.insert(group, Group { name, at });
                }
            }
            Record::EndedKeyGroup { group, at } => self.end_key_group(group, at),
            Record::DatabaseKey { scope, version, key } => {
                if self.has_ended(scope) {
                    return Ok(());
                }
                let known = self.database_keys.get(&(scope, version));
                if known.is_some_and(|known| known.check != key.check) {
                    return Err(StateError::DatabaseKeyReplaced { scope, version });
                }
                let made = known.map_or(key.made, |known| known.made.min(key.made));
                self.database_keys.insert((scope, version), DatabaseKey { made, ..key });
            }
            Record::WalSwitch(switch) => {
                if let Some(version) = switch.phase.version {
                    let (file, version) = wal::key_place(version);
                    let place = self.files.get(&file);
                    if !place.is_some_and(|place| place.has_version(version)) {
                        return Err(StateError::NoKey { file, version });
                    }
                    self.wal_switches.insert(switch);
                }
            }
            Record::Job { job, request } => {
                self.jobs.entry(job.database).or_default().ask(job.number, request);
            }
            Record::JobStep { job, step } => {
                if let Some(jobs) = self.jobs.get_mut(&job.database) {
                    jobs.step(job.number, step);
                }
            }
            Record::JobBegun { job, relation } => {
                if let Some(jobs) = self.jobs.get_mut(&job.database) {
                    jobs.begin(job.number, relation);
                }
            }
            Record::JobsForgotten { database, through, all } => {
                self.jobs.entry(database).or_default().forget(through, all);
            }
            Record::FormerFiles(range) => self.former.add(range),
            Record::KeysForgotten { database, by } => {
                let last = self.forgotten.entry(database).or_default();
                *last = (*last).max(by);
            }
            Record::DataKey { file, .. }
            | Record::Current { file, .. }
            | Record::Plaintext { file, .. }
            | Record::Rewriting { file, .. }
            | Record::Switched { file, .. }
            | Record::SealedOnly { file, .. }
            | Record::Destroyed { file, .. } => return self.apply_to_file(file, record),
        }
        Ok(())
    }

    fn apply_to_file(&mut self, file: RelFile, record: Record) -> Result<(), StateError> {
        // Records of a file follow each other, and most files are newer than those before.
        if let Some(mut last) = self.files.last_entry()
            && *last.key() == file
        {
            return last.get_mut().apply(record);
        }
        match self.files.entry(file) {
            Entry::Occupied(known) => known.into_mut().apply(record),
            Entry::Vacant(unknown) => {
                let mut new = File::default();
                new.apply(record)?;
                if new.last_version().is_some() {
                    unknown.insert(new);
                }
                Ok(())
            }
        }
    }

    /// The records that describe this state, for the log of `home` (see [`Record::home`]).
    pub fn records(&self, home: Scope) -> Vec<Record> {
        let mut records = Vec::new();
        self.each_record(home, |record| records.push(record));
        records
    }

    /// The number of these records.
    pub fn count(&self, home: Scope) -> usize {
        let mut count = 0;
        self.each_record(home, |_| count += 1);
        count
    }

    fn each_record(&self, home: Scope, mut take: impl FnMut(Record)) {
        let database = home.number();
        if home.is_cluster() {
            self.provider_records().for_each(&mut take);
            self.key_group_records().for_each(&mut take);
            self.database_key_records().for_each(&mut take);
        }
        let files = self.files.iter().filter(|(file, _)| file.scope() == home);
        files.for_each(|(file, entry)| entry.records(*file).for_each(&mut take));
        if home.is_cluster() {
            self.wal_switches().map(Record::WalSwitch).for_each(&mut take);
        }
        if let Some(jobs) = self.jobs(database) {
            job_records(database, jobs).for_each(&mut take);
        }
        self.former.ranges_of(database).map(Record::FormerFiles).for_each(&mut take);
        if let Some(&by) = self.forgotten.get(&database) {
            take(Record::KeysForgotten { database, by });
        }
    }

    fn key_group_records(&self) -> impl Iterator<Item = Record> {
        let groups = self.key_groups.iter().map(|(&group, known)| Record::KeyGroup {
            group,
            name: known.name.clone(),
            at: known.at,
        });
        let ended = self.ended_key_groups.iter();
        groups.chain(ended.map(|(&group, &at)| Record::EndedKeyGroup { group, at }))
    }

    fn provider_records(&self) -> impl Iterator<Item = Record> {
        self.providers.iter().map(|(name, provider)| Record::Provider {
            name: name.clone(),
            kind: provider.kind.clone(),
            options: provider.options.clone(),
            programs: provider.programs,
        })
    }

    fn database_key_records(&self) -> impl Iterator<Item = Record> {
        self.database_keys.iter().map(|(&(scope, version), key)| Record::DatabaseKey {
            scope,
            version,
            key: key.clone(),
        })
    }

    /// Providers by name.
    pub fn providers(&self) -> impl Iterator<Item = (&str, &Provider)> {
        self.providers.iter().map(|(name, provider)| (name.as_str(), provider))
    }

    /// A provider.
    pub fn provider(&self, name: &str) -> Option<&Provider> {
        self.providers.get(name)
    }

    /// Whether a database key is wrapped by a master key of this provider, which must therefore
    /// stay.
    pub fn uses_provider(&self, name: &str) -> bool {
        let mut wrappings = self.database_keys.values().flat_map(DatabaseKey::wrappings);
        wrappings.any(|wrapping| wrapping.provider == name)
    }

    /// All database keys with scope and version.
    pub fn database_keys(&self) -> impl Iterator<Item = (Scope, KeyVersion, &DatabaseKey)> {
        self.database_keys.iter().map(|(&(scope, version), key)| (scope, version, key))
    }

    /// A database key.
    pub fn database_key(&self, scope: Scope, version: KeyVersion) -> Option<&DatabaseKey> {
        self.database_keys.get(&(scope, version))
    }

    /// The newest database key of a scope, which wraps new data keys, with its version.
    pub fn current_database_key(&self, scope: Scope) -> Option<(KeyVersion, &DatabaseKey)> {
        let all = (scope, KeyVersion::FIRST)..=(scope, KeyVersion::LAST);
        let mut versions = self.database_keys.range(all);
        versions.next_back().map(|(&(_, version), key)| (version, key))
    }

    /// All key groups.
    pub fn key_groups(&self) -> impl Iterator<Item = (KeyGroup, &Group)> {
        self.key_groups.iter().map(|(group, known)| (*group, known))
    }

    /// A key group.
    pub fn key_group(&self, group: KeyGroup) -> Option<&Group> {
        self.key_groups.get(&group)
    }

    /// The key group of this name.
    pub fn key_group_named(&self, name: &str) -> Option<KeyGroup> {
        self.key_groups().find(|(_, known)| known.name == name).map(|(group, _)| group)
    }

    /// The scopes of the key groups that have ended, and when.
    pub fn ended_key_groups(&self) -> impl Iterator<Item = (Scope, i64)> {
        self.ended_key_groups.iter().map(|(group, at)| (group.scope(), *at))
    }

    /// Whether it is a key group that has ended.
    pub fn has_ended(&self, scope: Scope) -> bool {
        scope.key_group().is_some_and(|group| self.ended_key_groups.contains_key(&group))
    }

    /// The number for another key group; `None` if there is none left.
    pub fn next_key_group(&self) -> Option<KeyGroup> {
        let last = self.key_groups.keys().chain(self.ended_key_groups.keys()).max();
        KeyGroup::after(last.copied())
    }

    fn end_key_group(&mut self, group: KeyGroup, at: i64) {
        self.ended_key_groups.entry(group).or_insert(at);
        self.key_groups.remove(&group);
        self.database_keys.retain(|(scope, _), _| *scope != group.scope());
    }

    /// All WAL switches.
    pub fn wal_switches(&self) -> impl Iterator<Item = Switch> + Clone {
        self.wal_switches.iter().copied()
    }

    /// All relation files.
    pub fn files(&self) -> impl Iterator<Item = (RelFile, &File)> {
        self.files.iter().map(|(file, entry)| (*file, entry))
    }

    /// Rekey jobs of a database.
    pub fn jobs(&self, database: u32) -> Option<&Jobs> {
        self.jobs.get(&database)
    }

    /// A relation file.
    pub fn file(&self, file: RelFile) -> Option<&File> {
        self.files.get(&file)
    }
}

/// The record of forgotten jobs comes last, after the jobs that are not forgotten.
fn job_records(database: u32, jobs: &Jobs) -> impl Iterator<Item = Record> {
    let known = jobs.iter().flat_map(move |(number, known)| {
        let job = JobId { database, number };
        let request = Record::Job { job, request: known.request };
        let begun = known.begun.iter().map(move |&relation| Record::JobBegun { job, relation });
        let step = known.step.clone().map(|step| Record::JobStep { job, step });
        [request].into_iter().chain(begun).chain(step)
    });
    let forgotten = Some(jobs.forgotten()).filter(|through| *through != 0);
    let all = false;
    known.chain(forgotten.map(|through| Record::JobsForgotten { database, through, all }))
}
