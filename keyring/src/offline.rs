//! The keystore of a data directory, read without its server, and its database keys, unwrapped by
//! their providers.
//!
//! Read-only: the server may be running, and unfinished records at the end of files are ignored.

mod beside;
mod databases;
mod in_use;
mod locked;
mod unfinished;
mod writing;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Instant;

use nix::fcntl::Flock;
use pagevault_cipher::residue::without_trace;
use pagevault_cipher::wrap::{self, WrapKey};
use pagevault_cipher::{CipherId, DataKeyVersion, KeyVersion, Secret32};
use pagevault_keystore::given_up::GivenUp;
use pagevault_keystore::log;
use pagevault_keystore::protocol::{Action, Base64, ErrorClass, Operation, Outcome, Request};
use pagevault_keystore::state::{DataKey, State};
use pagevault_keystore::wal;
use pagevault_keystore::wrappings::OfCluster;
use pagevault_keystore::{
    CheckValue, DatabaseKey, Record, RelFile, Scope, Wrapping, data_key_aad, master_context,
};
use zeroize::Zeroizing;

pub(crate) use self::locked::Locked;
pub(crate) use self::writing::{put, require_no_server, require_not_started, require_stopped};
use crate::access::{Access, read_trusted, trusted_directories};
use crate::failure::{Failure, of_command, unreadable};
use crate::serve;
use crate::trust::FileKind;

/// Scope and version of a database key.
type Place = (Scope, KeyVersion);

/// The directory of the keystore in a data directory.
pub const DIRECTORY: &str = "pagevault";

/// The content of a data directory's key files.
pub struct Keystore {
    data_directory: PathBuf,
    id: [u8; 16],
    scopes: Vec<Scope>,
    state: State,
    of_cluster: OfCluster,
    restored: Vec<Record>,
    given_up: GivenUp,
    access: Access,
    /// How its files are judged.
    kind: FileKind,
    /// What [`databases::find`] has found, when it was asked first.
    databases: OnceLock<Option<HashSet<u32>>>,
    /// Held by a command that writes.
    _lock: Option<Flock<File>>,
}

/// Whether `path` is a data directory with a keystore, or a copy of the keystore only. Directories
/// above are not searched: otherwise anybody who can write there could choose the keystore.
#[must_use]
pub fn has_keystore(path: &Path) -> bool {
    path.join(DIRECTORY).join(log::file_name(Scope::CLUSTER)).is_file()
}

impl Keystore {
    /// Reads the key files of a data directory, or of a copy that contains only those. `access`
    /// says how providers may be reached.
    ///
    /// # Errors
    /// If files are missing, damaged or of different keystores, or if anybody but root and the
    /// current user could have written them.
    pub fn read(data_directory: &Path, access: Access) -> Result<Self, Failure> {
        let (data_directory, directory, kind) =
            trusted_directories(data_directory, DIRECTORY, &access)?;
        // The cluster's log comes first: records in others refer to it.
        let scopes = scopes_in(&directory, log::scope_of)?;
        if scopes.first() != Some(&Scope::CLUSTER) {
            return Err(Failure::new(
                ErrorClass::KeyMissing,
                format!("there is no keystore in \"{}\"", data_directory.display()),
            )
            .with_detail(format!(
                "File {DIRECTORY}/{} does not exist there.",
                log::file_name(Scope::CLUSTER)
            ))
            .with_hint(
                "Specify the data directory of a server that runs with pagevault, or a copy of it.",
            ));
        }
        let (mut id, mut state) = (None, State::default());
        let mut of_cluster: Option<OfCluster> = None;
        let mut given_up = GivenUp::default();
        for &scope in &scopes {
            let path = directory.join(log::file_name(scope));
            let damaged = |what: &dyn std::fmt::Display| {
                Failure::new(
                    ErrorClass::Internal,
                    format!("key file \"{}\" is not readable: {what}", path.display()),
                )
            };
            let bytes = read_trusted(kind, &path)?;
            let mut contents = log::replay(&bytes, scope).map_err(|error| damaged(&error))?;
            if *id.get_or_insert(contents.position.keystore_id) != contents.position.keystore_id {
                return Err(damaged(&"it belongs to another keystore than the other key files"));
            }
            // As the server does when it starts: the files of a backup are of different times.
            let of_cluster = match &mut of_cluster {
                Some(of_cluster) => of_cluster,
                None => {
                    given_up = beside::given_up(&directory, kind, contents.position.keystore_id)?;
                    let logged = contents.position.logged;
                    of_cluster.insert(OfCluster::new(&contents.records, logged, &given_up))
                }
            };
            of_cluster.bring_into_line(&mut contents.records);
            for record in contents.records {
                state.apply(record).map_err(|error| damaged(&error))?;
            }
        }
        let (id, of_cluster) = (id.unwrap_or_default(), of_cluster.unwrap_or_default());
        let restored = beside::restored(&directory, kind, id)?;
        for record in restored.iter().cloned().chain(given_up.records()) {
            state.apply(record).map_err(|error| {
                Failure::new(ErrorClass::Internal, format!("the keystore is damaged: {error}"))
            })?;
        }
        let databases = OnceLock::new();
        Ok(Self {
            data_directory,
            id,
            scopes,
            state,
            of_cluster,
            restored,
            given_up,
            access,
            kind,
            databases,
            _lock: None,
        })
    }

    /// The data directory, without symbolic links.
    #[must_use]
    pub fn data_directory(&self) -> &Path {
        &self.data_directory
    }

    /// How files of the keystore are judged.
    pub(crate) fn file_kind(&self) -> FileKind {
        self.kind
    }

    /// The identity of the keystore; copies and standbys have the same.
    #[must_use]
    pub fn id(&self) -> [u8; 16] {
        self.id
    }

    /// The scopes that have a key file, ascending: 0 for there cluster, or the OID of a database.
    #[must_use]
    pub fn scopes(&self) -> &[Scope] {
        &self.scopes
    }

    /// Whether the database of this scope was dropped: no tablespace has a directory for it. No,
    /// where that cannot be seen.
    #[must_use]
    pub fn is_gone(&self, scope: Scope) -> bool {
        scope.is_database()
            && self.databases().is_some_and(|found| !found.contains(&scope.number()))
    }

    /// The databases with a directory; `None` where not all of these can be seen.
    pub(crate) fn databases(&self) -> Option<&HashSet<u32>> {
        self.databases.get_or_init(|| databases::find(&self.data_directory)).as_ref()
    }

    /// The state that the key files describe.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Records of restored escrows that the server has not applied yet.
    pub(crate) fn restored(&self) -> &[Record] {
        &self.restored
    }

    /// Key groups that were destroyed while the server was down, and that it has not logged yet.
    pub(crate) fn given_up(&self) -> &GivenUp {
        &self.given_up
    }

    /// [`Scope::name`], with the name of a key group that exists.
    fn name(&self, scope: Scope) -> String {
        match scope.key_group().and_then(|group| self.state.key_group(group)) {
            Some(group) => format!("key group \"{}\"", group.name),
            None => scope.name(),
        }
    }

    /// The records of all WAL keys, by version.
    pub fn wal_keys(&self) -> impl Iterator<Item = (KeyVersion, &DataKey)> {
        let places = self.state.files().filter(|(file, _)| wal::is_key_place(*file));
        places.flat_map(|(file, entry)| {
            let place = move |version| wal::version_at(file, version);
            entry.keys.iter().filter_map(move |(version, key)| Some((place(*version)?, key)))
        })
    }

    /// Has the providers unwrap these database keys, given by scope and version.
    ///
    /// # Errors
    /// The first failure.
    pub fn unlock(&self, wanted: &BTreeSet<(Scope, KeyVersion)>) -> Result<DatabaseKeys, Failure> {
        let records = self.records_of(wanted)?;
        self.unlock_all(records)
    }

    /// The records of these database keys.
    fn records_of(&self, wanted: &BTreeSet<Place>) -> Result<Vec<(Place, &DatabaseKey)>, Failure> {
        let record = |&(scope, version): &Place| {
            let key = self.state.database_key(scope, version).ok_or_else(|| {
                let whose = self.name(scope);
                damaged(format!(
                    "the keystore has no version {version} of the database key of {whose}"
                ))
            })?;
            Ok(((scope, version), key))
        };
        wanted.iter().map(record).collect()
    }

    /// Has a provider unwrap a database key whose record is not in the key files; its provider is.
    ///
    /// # Errors
    /// Those of [`Keystore::unlock`].
    pub(crate) fn unlock_recorded(
        &self,
        place: Place,
        key: &DatabaseKey,
    ) -> Result<DatabaseKeys, Failure> {
        self.unlock_all(vec![(place, key)])
    }

    fn unlock_all(&self, wanted: Vec<(Place, &DatabaseKey)>) -> Result<DatabaseKeys, Failure> {
        let asking = |(place, key): (Place, _)| Ok((place, key, self.operations(place.0, key)?));
        let asked = wanted.into_iter().map(asking).collect::<Result<_, Failure>>()?;
        let keys = self.answers(asked).into_iter().map(|(place, key)| Ok((place, key?)));
        Ok(DatabaseKeys { keys: keys.collect::<Result<_, Failure>>()? })
    }

    /// What asks each of a database key's master keys.
    fn operations(&self, scope: Scope, key: &DatabaseKey) -> Result<Vec<Operation>, Failure> {
        let once = !key.others.is_empty();
        key.wrappings().map(|wrapping| self.unwrap_operation(scope, wrapping, once)).collect()
    }

    /// Asks all master keys of these database keys at the same time.
    fn answers(
        &self,
        mut asked: Vec<(Place, &DatabaseKey, Vec<Operation>)>,
    ) -> Vec<(Place, Result<Secret32, Failure>)> {
        let operations = asked.iter_mut().flat_map(|(.., operations)| std::mem::take(operations));
        let mut outcomes = self.ask(operations.collect()).into_iter();
        let mut unwrap = |place, key: &DatabaseKey| {
            let mut found = None;
            for wrapping in key.wrappings() {
                let outcome = outcomes.next().ok_or_else(|| damaged("no reply from a provider"))?;
                let plain = unwrapped(outcome).and_then(|plain| {
                    self.require_recorded(place, key, wrapping, &plain).map(|()| plain)
                });
                // The failure of the first one, if all fail.
                if found
                    .as_ref()
                    .is_none_or(|before: &Result<_, _>| before.is_err() && plain.is_ok())
                {
                    found = Some(plain);
                }
            }
            found.unwrap_or_else(|| Err(damaged("no reply from a provider")))
        };
        asked.iter().map(|&(place, key, _)| (place, unwrap(place, key))).collect()
    }

    /// The database keys that wrap data keys, except those of dropped databases.
    pub(crate) fn needed(&self) -> BTreeSet<(Scope, KeyVersion)> {
        let keys = self.state.files().flat_map(|(_, entry)| entry.keys.values());
        let mut needed: BTreeSet<_> = keys.map(|key| (key.scope, key.key_version)).collect();
        needed.retain(|(scope, _)| !self.is_gone(*scope));
        needed
    }

    /// The key check value for a database key of this keystore.
    pub(crate) fn check_value(
        &self,
        (scope, version): (Scope, KeyVersion),
        key: &Secret32,
    ) -> CheckValue {
        CheckValue::of(key, &self.id, scope, version)
    }

    /// Refuses a key whose check value differs from the recorded one, before it is used. A key
    /// without a record passes.
    pub(crate) fn require_matching(
        &self,
        (scope, version): (Scope, KeyVersion),
        key: &Secret32,
    ) -> Result<(), Failure> {
        match self.state.database_key(scope, version) {
            Some(record) => self.require_recorded((scope, version), record, &record.first, key),
            None => Ok(()),
        }
    }

    pub(crate) fn require_recorded(
        &self,
        (scope, version): (Scope, KeyVersion),
        record: &DatabaseKey,
        wrapping: &Wrapping,
        key: &Secret32,
    ) -> Result<(), Failure> {
        if record.check.fits(key, &self.id, scope, version) {
            return Ok(());
        }
        Err(Failure::new(
            ErrorClass::WrongKey,
            format!("wrong key for version {version} of the database key of {}", self.name(scope)),
        )
        .with_detail(format!(
            "The key does not match the recorded key check value. According to the keystore, it is wrapped by master key \"{}\" of provider \"{}\". Nothing was changed.",
            wrapping.master_key, wrapping.provider
        ))
        .with_hint("Check that the provider or the bundle is the right one. If the key files are damaged, restore the directory pagevault/ of the data directory from a backup."))
    }

    /// Has the providers perform operations; returns one outcome for each.
    pub(crate) fn ask(&self, operations: Vec<Operation>) -> Vec<Outcome> {
        let directory = self.data_directory.to_string_lossy().into_owned();
        let time = self.access.time();
        let milliseconds = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let request = Request::new(milliseconds, directory, operations);
        let outcomes = serve::answer(request, Instant::now(), time).results.into_iter();
        let said = |outcome| match outcome {
            Outcome::Failed(failure) => Outcome::Failed(of_command(failure)),
            done => done,
        };
        outcomes.map(said).collect()
    }

    pub(crate) fn unwrap_operation(
        &self,
        scope: Scope,
        wrapping: &Wrapping,
        once: bool,
    ) -> Result<Operation, Failure> {
        let name = &wrapping.provider;
        let provider = self
            .state
            .provider(name)
            .ok_or_else(|| damaged(format!("the keystore has no provider \"{name}\"")))?;
        Ok(Operation {
            provider: self.access.spec(name, provider, &self.data_directory)?,
            key: wrapping.master_key.clone(),
            context: master_context(&self.id, scope),
            action: Action::Unwrap { wrapped: Base64(wrapping.wrapped.clone()) },
            once,
        })
    }
}

fn damaged(what: impl Into<String>) -> Failure {
    Failure::new(ErrorClass::Internal, what)
}

/// The database key in the outcome of an unwrap operation.
pub(crate) fn unwrapped(outcome: Outcome) -> Result<Secret32, Failure> {
    match outcome {
        Outcome::Unwrapped { plaintext, .. } => {
            let bytes = plaintext.expose().try_into().map_err(|_| {
                Failure::new(ErrorClass::WrongCiphertext, "a database key does not have 32 bytes")
            })?;
            Ok(Secret32::from_bytes(bytes))
        }
        other => Err(failure_of(other)),
    }
}

/// The failure in an outcome that is not the expected one.
pub(crate) fn failure_of(outcome: Outcome) -> Failure {
    match outcome {
        Outcome::Failed(failure) => failure,
        _ => Failure::new(ErrorClass::Internal, "unexpected reply from a provider"),
    }
}

/// The scopes in the file names of a directory, ascending.
fn scopes_in(directory: &Path, of: impl Fn(&str) -> Option<Scope>) -> Result<Vec<Scope>, Failure> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(|error| unreadable(directory, &error))?,
    };
    let mut scopes = Vec::new();
    for entry in entries {
        let name = entry.map_err(|error| unreadable(directory, &error))?.file_name();
        scopes.extend(name.to_str().and_then(&of));
    }
    scopes.sort_unstable();
    Ok(scopes)
}

/// Unwrapped database keys.
pub struct DatabaseKeys {
    keys: BTreeMap<(Scope, KeyVersion), Secret32>,
}

impl DatabaseKeys {
    /// From keys that were not unwrapped by a provider.
    pub(crate) fn from_known(keys: BTreeMap<(Scope, KeyVersion), Secret32>) -> Self {
        Self { keys }
    }

    /// Adds keys.
    pub(crate) fn extend(&mut self, others: DatabaseKeys) {
        self.keys.extend(others.keys);
    }

    /// Unwraps a data key from its record; `None` if it does not authenticate, or its database key
    /// is not here.
    #[must_use]
    pub fn data_key(
        &self,
        file: RelFile,
        version: DataKeyVersion,
        record: &DataKey,
    ) -> Option<pagevault_cipher::DataKey> {
        let key = self.keys.get(&(record.scope, record.key_version))?;
        let cipher = CipherId::try_from(record.cipher).ok()?;
        let aad = data_key_aad(file, version, record.cipher);
        let mut plain = Zeroizing::new([0; 64]);
        let length = without_trace(|| {
            let wrap_key = WrapKey::new(key.expose());
            wrap::unwrap(&wrap_key, &aad, &record.wrapped, plain.as_mut_slice()).ok()
        })?;
        pagevault_cipher::DataKey::from_bytes(cipher, plain.get(..length)?).ok()
    }

    /// Scope, version and key.
    pub fn iter(&self) -> impl Iterator<Item = (Scope, KeyVersion, &Secret32)> {
        self.keys.iter().map(|(&(scope, version), key)| (scope, version, key))
    }
}
