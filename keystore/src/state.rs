//! The state that results from a sequence of records.
//!
//! Applying a log's records gives its meaning. Compaction writes [`State::records`] and loses
//! nothing, because applying those gives the same state again. The state also guarantees what each
//! page depends on: a version of a file, once it has a key, keeps that key. Only the wrapping may
//! change.

use std::collections::{BTreeMap, BTreeSet};

use pagevault_cipher::{DataKeyVersion, KeyVersion, Lsn};

use crate::check_value::CheckValue;
use crate::former::FormerFiles;
use crate::job::{JobId, Jobs};
use crate::record::{KeyTimes, Record};
use crate::rel_file::{Phase, RelFile};
use crate::scope::Scope;
use crate::sorted::SortedMap;
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
    /// `file`, `vault`, `aws_kms`, `command`.
    pub kind: String,
    /// JSON object.
    pub options: String,
    /// The role that set the provider may run programs on the server, so the provider may, too.
    pub programs: bool,
}

/// The present wrapping of a database key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatabaseKey {
    /// Provider of the master key.
    pub provider: String,
    /// Name of the master key at the provider.
    pub master_key: String,
    /// Version of the master key that wrapped it.
    pub master_version: u64,
    /// Opaque.
    pub wrapped: Vec<u8>,
    /// Key check value of the wrapped key.
    pub check: CheckValue,
    /// When what began.
    pub times: KeyTimes,
}

/// The present wrapping of a data key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataKey {
    /// Number of the cipher; may be unknown to this version of pagevault.
    pub cipher: u8,
    /// Scope of the database key that wraps.
    pub scope: Scope,
    /// Version of the database key that wraps.
    pub key_version: KeyVersion,
    /// Nonce, ciphertext, tag.
    pub wrapped: Vec<u8>,
    /// Seconds since 1970.
    pub created: i64,
}

/// A relation file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct File {
    /// Its state.
    pub phase: Phase,
    /// Keys by version.
    pub keys: SortedMap<DataKeyVersion, DataKey>,
    /// The destroyed keys, if any.
    pub destroyed: Option<Destroyed>,
    /// The last state change that began when the file had pages, and whether all of them have been
    /// rewritten.
    pub rewriting: Option<(Phase, bool)>,
    /// Since when it contains sealed pages only, or after which version it does not any more; see
    /// [`File::floor`].
    pub sealed_only: Phase,
}

/// Tombstone of destroyed keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Destroyed {
    /// The highest destroyed version; all lower ones are destroyed, too.
    pub through: DataKeyVersion,
    /// All WAL records about pages under these keys end at this LSN or before.
    pub lsn: Lsn,
    /// Cipher of the file's pages; 0 if the file was plaintext by then.
    pub cipher: u8,
    /// The keys of all files of the database were destroyed.
    pub whole: bool,
    /// Time, in seconds since 1970.
    pub at: i64,
}

impl File {
    /// Whether pages on disk may be in another state than new ones. A `Rewriting` record precedes
    /// the record of the state that it announces.
    pub fn is_mixed(&self) -> bool {
        self.rewriting.is_some_and(|(phase, done)| phase >= self.phase && !done)
    }

    /// Whether all pages of the file are sealed or zero, so that a page in plaintext was not
    /// written by a server.
    pub fn is_sealed_only(&self) -> bool {
        self.floor().is_some()
    }

    /// The first version under which pages may be, if the file contains sealed pages only. No
    /// server wrote what is under an earlier one, or has it still.
    pub fn floor(&self) -> Option<DataKeyVersion> {
        self.sealed_only.current().filter(|since| Some(*since) <= self.phase.current())
    }

    /// Whether the key of a version was destroyed, or would be when it is recorded.
    pub fn is_destroyed(&self, version: DataKeyVersion) -> bool {
        self.destroyed.is_some_and(|destroyed| version <= destroyed.through)
    }

    /// Removes destroyed keys.
    fn destroy(&mut self, destroyed: Destroyed) {
        self.destroyed = self.destroyed.max(Some(destroyed));
        self.keys.retain(|version, _| *version > destroyed.through);
    }

    /// Enters a state, if it is a later one.
    fn enter(&mut self, phase: Phase) {
        self.phase = self.phase.max(phase);
        if phase.plaintext {
            self.sealed_only = self.sealed_only.max(phase);
        }
    }

    /// The version for a new key: numbering continues even if a file number is used again. `None`
    /// after the last version.
    pub fn next_version(&self) -> Option<DataKeyVersion> {
        DataKeyVersion::after(self.last_version())
    }

    /// The highest version that has a key, or had one that was destroyed.
    pub fn last_version(&self) -> Option<DataKeyVersion> {
        let last = self.keys.last_key_value().map(|(version, _)| *version);
        last.max(self.destroyed.map(|destroyed| destroyed.through))
    }
}

/// The state described by one or several logs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct State {
    providers: BTreeMap<String, Provider>,
    database_keys: BTreeMap<(Scope, KeyVersion), DatabaseKey>,
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
    /// the order of those of keys matters, see [`Phase`].
    pub fn apply(&mut self, record: Record) -> Result<(), StateError> {
        match record {
            Record::Provider { name, kind, options, programs } => {
                self.providers.insert(name, Provider { kind, options, programs });
            }
            Record::DropProvider { name } => {
                self.providers.remove(&name);
            }
            Record::DatabaseKey {
                scope,
                version,
                provider,
                master_key,
                master_version,
                wrapped,
                check,
                times,
            } => {
                let known = self.database_keys.get(&(scope, version));
                if known.is_some_and(|known| known.check != check) {
                    return Err(StateError::DatabaseKeyReplaced { scope, version });
                }
                let made = known.map_or(times.made, |known| known.times.made.min(times.made));
                let times = KeyTimes { made, ..times };
                let key =
                    DatabaseKey { provider, master_key, master_version, wrapped, check, times };
                self.database_keys.insert((scope, version), key);
            }
            Record::DataKey { file, version, cipher, scope, key_version, wrapped, created } => {
                // If it is a new one, the key is added.
                let entry = self.files.entry(file).or_default();
                if entry.is_destroyed(version) {
                    return Ok(());
                }
                let is_another =
                    |key: &DataKey| (key.cipher, key.wrapped.len()) != (cipher, wrapped.len());
                if entry.keys.get(&version).is_some_and(is_another) {
                    return Err(StateError::KeyReplaced { file, version });
                }
                let key = DataKey { cipher, scope, key_version, wrapped, created };
                entry.keys.insert(version, key);
            }
            Record::Current { file, version } => {
                let entry = self.file_with_key(file, version)?;
                entry.enter(Phase::under(version));
            }
            Record::Plaintext { file, after } => {
                let entry = self.file_with_key(file, after)?;
                entry.enter(Phase::plaintext_after(after));
            }
            Record::Rewriting { file, phase, done } => {
                if let Some(version) = phase.version {
                    let entry = self.file_with_key(file, version)?;
                    entry.rewriting = entry.rewriting.max(Some((phase, done)));
                }
            }
            Record::SealedOnly { file, phase } => {
                if let Some(version) = phase.version {
                    let entry = self.file_with_key(file, version)?;
                    entry.sealed_only = entry.sealed_only.max(phase);
                }
            }
            Record::WalSwitch(switch) => {
                if let Some(version) = switch.phase.version {
                    let (file, data_key_version) = wal::key_place(version);
                    self.file_with_key(file, data_key_version)?;
                    self.wal_switches.insert(switch);
                }
            }
            Record::Destroyed { file, through, cipher, whole, lsn, at } => {
                let destroyed = Destroyed { through, lsn, cipher, whole, at };
                self.files.entry(file).or_default().destroy(destroyed);
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
        }
        Ok(())
    }

    fn file_with_key(
        &mut self,
        file: RelFile,
        version: DataKeyVersion,
    ) -> Result<&mut File, StateError> {
        let entry = self
            .files
            .get_mut(&file)
            .filter(|entry| entry.keys.contains_key(&version) || entry.is_destroyed(version));
        entry.ok_or(StateError::NoKey { file, version })
    }

    /// The records that describe this state, for the log of `home` (see [`Record::home`]).
    pub fn records(&self, home: Scope) -> Vec<Record> {
        let mut records = Vec::new();
        if home.is_cluster() {
            records.extend(self.provider_records());
            records.extend(self.database_key_records());
        }
        let files = self.files.iter().filter(|(file, _)| file.scope() == home);
        files.for_each(|(file, entry)| records.extend(file_records(*file, entry)));
        if home.is_cluster() {
            records.extend(self.wal_switches().map(Record::WalSwitch));
        }
        if let Some(jobs) = self.jobs(home.number()) {
            records.extend(job_records(home.number(), jobs));
        }
        records.extend(self.former.ranges_of(home.number()).map(Record::FormerFiles));
        let database = home.number();
        let forgotten = self.forgotten.get(&database);
        records.extend(forgotten.map(|&by| Record::KeysForgotten { database, by }));
        records
    }

    /// Forgets the keys of former files of a database that were gone at the address `by`, from
    /// which on or from a later one WAL is replayed from now on, if `is_gone` confirms it. Returns
    /// these files.
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
                && former.was_gone(file, entry.last_version(), by)
                && is_gone(file);
            if gone {
                files.push(file);
            }
            !gone
        });
        if !files.is_empty() {
            let gone = self.former.ranges_of(database).map(|range| range.gone);
            let last = gone.filter(|gone| *gone <= by).max().unwrap_or(by);
            let known = self.forgotten.entry(database).or_default();
            *known = (*known).max(last);
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
            provider: key.provider.clone(),
            master_key: key.master_key.clone(),
            master_version: key.master_version,
            wrapped: key.wrapped.clone(),
            check: key.check,
            times: key.times,
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
        self.database_keys.values().any(|key| key.provider == name)
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

fn file_records(file: RelFile, entry: &File) -> impl Iterator<Item = Record> {
    let destroyed = entry.destroyed.map(|Destroyed { through, lsn, cipher, whole, at }| {
        Record::Destroyed { file, through, cipher, whole, lsn, at }
    });
    let keys = entry.keys.iter().map(move |(&version, key)| Record::DataKey {
        file,
        version,
        cipher: key.cipher,
        scope: key.scope,
        key_version: key.key_version,
        wrapped: key.wrapped.clone(),
        created: key.created,
    });
    let Phase { version, plaintext } = entry.phase;
    let phase = version.map(|version| match plaintext {
        true => Record::Plaintext { file, after: version },
        false => Record::Current { file, version },
    });
    let rewriting = entry.rewriting.map(|(phase, done)| Record::Rewriting { file, phase, done });
    // Not if the record of the phase says the same.
    let is_said = entry.sealed_only.version.is_none()
        || entry.phase.plaintext && entry.sealed_only == entry.phase;
    let sealed_only = Some(entry.sealed_only).filter(|_| !is_said);
    let sealed_only = sealed_only.map(|phase| Record::SealedOnly { file, phase });
    destroyed.into_iter().chain(keys).chain(phase).chain(rewriting).chain(sealed_only)
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
