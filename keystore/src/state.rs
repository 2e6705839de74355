//! Records folded into what is so now.
//!
//! The fold is the meaning of a log: compaction writes [`State::records`] and loses nothing,
//! because folding those gives the same state again. It also keeps the one promise on which every
//! page depends: a file's version, once it has a key, keeps that key. What may change is the
//! wrapping.

use std::collections::{BTreeMap, BTreeSet};

use pagevault_cipher::{DataKeyVersion, KeyVersion, Lsn};

use crate::check_value::CheckValue;
use crate::job::{JobId, Jobs};
use crate::record::Record;
use crate::rel_file::{Phase, RelFile};
use crate::scope::Scope;
use crate::wal::{self, Switch};

/// A record that contradicts an earlier one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// A second key for a version that has one, recognised by its cipher or, for a cipher that this
    /// version does not know, by its length. (Two keys of one cipher cannot be told apart while
    /// they are wrapped.)
    #[error("relation file {file} has another data key of version {version}")]
    KeyReplaced {
        /// Which file.
        file: RelFile,
        /// Which version.
        version: DataKeyVersion,
    },
    /// Another key under the number of a database key that is known, recognised by its check value.
    #[error(
        "version {version} of the database key of scope {scope} differs from the key that is already known"
    )]
    DatabaseKeyReplaced {
        /// Whose key.
        scope: Scope,
        /// Its version.
        version: KeyVersion,
    },
    /// A version is spoken of that has no key.
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
    /// Who set it may have the server run programs, and so may the provider.
    pub programs: bool,
}

/// A database key's present wrapping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatabaseKey {
    /// Provider of the master key.
    pub provider: String,
    /// Master key's name at the provider.
    pub master_key: String,
    /// Master key's version that wrapped.
    pub master_version: u64,
    /// Opaque.
    pub wrapped: Vec<u8>,
    /// Of the key that is wrapped.
    pub check: CheckValue,
    /// Seconds since 1970.
    pub created: i64,
}

/// A data key's present wrapping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataKey {
    /// Cipher number; perhaps one that this version does not know.
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
    /// How it is written.
    pub phase: Phase,
    /// Keys by version.
    pub keys: BTreeMap<DataKeyVersion, DataKey>,
    /// Keys that were destroyed on purpose.
    pub destroyed: Option<Destroyed>,
    /// The last phase that began when the file had pages, and whether all of these are written so
    /// by now.
    pub rewriting: Option<(Phase, bool)>,
}

/// What is left of destroyed keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Destroyed {
    /// The highest version whose key is destroyed, with all before it.
    pub through: DataKeyVersion,
    /// All WAL records about pages under these keys end at this LSN or before.
    pub lsn: Lsn,
    /// Cipher of the file's pages, 0 if it was not written sealed any more.
    pub cipher: u8,
    /// The keys of all files of the database were destroyed.
    pub whole: bool,
    /// When, in seconds since 1970.
    pub at: i64,
}

impl File {
    /// Whether pages on disk may be written otherwise than new ones. A rewriting is announced
    /// before the phase that it leads to.
    pub fn is_mixed(&self) -> bool {
        self.rewriting.is_some_and(|(phase, done)| phase >= self.phase && !done)
    }

    /// Whether the key of a version was destroyed, or would be if it came.
    pub fn is_destroyed(&self, version: DataKeyVersion) -> bool {
        self.destroyed.is_some_and(|destroyed| version <= destroyed.through)
    }

    /// Forgets keys for good.
    fn destroy(&mut self, destroyed: Destroyed) {
        self.destroyed = self.destroyed.max(Some(destroyed));
        self.keys.retain(|version, _| *version > destroyed.through);
    }

    /// Takes a step, if it is one forward.
    fn enter(&mut self, phase: Phase) {
        self.phase = self.phase.max(phase);
    }

    /// The version that a new key gets: numbers go on even where a file number is used again.
    /// `None` after the last one.
    pub fn next_version(&self) -> Option<DataKeyVersion> {
        DataKeyVersion::after(self.last_version())
    }

    /// The highest version that has a key, or had one that was destroyed.
    pub fn last_version(&self) -> Option<DataKeyVersion> {
        let last = self.keys.last_key_value().map(|(version, _)| *version);
        last.max(self.destroyed.map(|destroyed| destroyed.through))
    }
}

/// Everything that one or several logs say.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct State {
    providers: BTreeMap<String, Provider>,
    database_keys: BTreeMap<(Scope, KeyVersion), DatabaseKey>,
    files: BTreeMap<RelFile, File>,
    wal_switches: BTreeSet<Switch>,
    jobs: BTreeMap<u32, Jobs>,
}

impl State {
    /// Folds records, in order, into nothing.
    pub fn from_records(records: impl IntoIterator<Item = Record>) -> Result<Self, StateError> {
        let mut state = Self::default();
        records.into_iter().try_for_each(|record| state.apply(record))?;
        Ok(state)
    }

    /// Folds one more record. On error the state is as it was.
    ///
    /// Redo may repeat what a log has kept, in order, from any record on: in the end nothing has
    /// changed. A key that was destroyed does not come back. Of a file's records only those of its
    /// keys need their order, see [`Phase`].
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
                created,
            } => {
                let known = self.database_keys.get(&(scope, version));
                if known.is_some_and(|known| known.check != check) {
                    return Err(StateError::DatabaseKeyReplaced { scope, version });
                }
                let key =
                    DatabaseKey { provider, master_key, master_version, wrapped, check, created };
                self.database_keys.insert((scope, version), key);
            }
            Record::DataKey { file, version, cipher, scope, key_version, wrapped, created } => {
                let entry = self.files.get(&file);
                if entry.is_some_and(|entry| entry.is_destroyed(version)) {
                    return Ok(());
                }
                let known = entry.and_then(|entry| entry.keys.get(&version));
                let is_another =
                    |key: &DataKey| (key.cipher, key.wrapped.len()) != (cipher, wrapped.len());
                if known.is_some_and(is_another) {
                    return Err(StateError::KeyReplaced { file, version });
                }
                let key = DataKey { cipher, scope, key_version, wrapped, created };
                self.files.entry(file).or_default().keys.insert(version, key);
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

    /// The records that say all this, for the log of `home` (see [`Record::home`]).
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
        records
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
            created: key.created,
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

    /// Whether a database key is wrapped by a master key of this provider, so that it must stay.
    pub fn uses_provider(&self, name: &str) -> bool {
        self.database_keys.values().any(|key| key.provider == name)
    }

    /// All database keys as scope, version, key.
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

    /// All changes of how WAL is written.
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
    destroyed.into_iter().chain(keys).chain(phase).chain(rewriting)
}

/// What is forgotten comes last: before it stands all that is not.
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
