//! Keys for relation files that the server copies unchanged, below the storage manager: CREATE
//! DATABASE with the strategy file_copy, and ALTER DATABASE ... SET TABLESPACE.
//!
//! Copies have the original's relfilenumbers, and their pages the original's key versions. So each
//! copy gets every key of its original, before the transaction that makes it visible commits. The
//! caller ensures that no keys are made for the originals meanwhile.

use std::collections::{BTreeSet, HashSet};

use pagevault_cipher::page::{Page, is_zero, version_of};
use pagevault_cipher::{CipherId, DataKeyVersion};
use pagevault_core::policy::Sealing;
use pagevault_keystore::log::{LogError, MAX_LOG};
use pagevault_keystore::rel_file::Phase;
use pagevault_keystore::state::{self, Destroyed, File};
use pagevault_keystore::{FormatError, KeyGroup, Problem, Record, RelFile, Scope, batch};
use pgrx::PgSqlErrorCode;

use super::data_keys::{
    make_key, require_group_key, require_master_key, unused_version, unwrap_record, with_wrap_key,
    wrap_data_key, wrapping_scope,
};
use super::{dropped, interim, refused};
use crate::keys::store::failures;
use crate::keys::store::persist::{self, append};
use crate::pg::locks::KeystoreLock;
use crate::pg::relation_files;
use crate::pg::report::{Report, Result};
use crate::shmem;

/// Records in one batch.
const RECORDS_AT_ONCE: usize = 10_000;

/// Files that the server copies, and where.
pub(crate) struct Copying<C, P> {
    /// The databases.
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// The copy of a file; `None` if it is not copied.
    pub(crate) copy_of: C,
    /// Whether a file is at a place to which files are copied.
    pub(crate) is_place: P,
}

impl<C: Fn(RelFile) -> Option<RelFile>, P: Fn(RelFile) -> bool> Copying<C, P> {
    /// Copies the keys of the files, wrapped by the key for the other database.
    pub(crate) fn copy_keys(&self) -> Result<()> {
        self.with_records(|lock, records| {
            for batch in records.chunks(RECORDS_AT_ONCE) {
                append(lock, Scope::database(self.to), batch)?;
            }
            Ok(())
        })
    }

    /// Before the server copies anything, which it would also do on standbys.
    ///
    /// # Errors
    /// What would keep [`Self::copy_keys`] from it, also that there is no room for the keys.
    pub(crate) fn require_possible(&self) -> Result<()> {
        self.with_records(|_, records| require_room(Scope::database(self.to), records))
    }

    fn with_records(&self, f: impl FnOnce(&KeystoreLock, &[Record]) -> Result<()>) -> Result<()> {
        let [from, to] = [self.from, self.to].map(Scope::database);
        dropped::require_own_keys(from, &self.copy_of)?;
        self.require_usable_keys()?;
        self.require_no_interim_pages()?;
        let at_former_places = at_former_places(from, to, &self.copy_of, &self.is_place)?;
        let lock = KeystoreLock::acquire();
        let originals = persist::log_state(&lock, from)?;
        let present = persist::log_state(&lock, to)?;
        let mut records = Vec::new();
        let exist = originals.files().filter(|(file, _)| relation_files::may_exist(*file));
        for (file, entry) in exist {
            if let Some(copy) = (self.copy_of)(file) {
                add_records(&lock, file, entry, copy, present.file(copy), &mut records)?;
            }
        }
        for (file, pages) in at_former_places {
            if let Some(entry) = present.file(file) {
                of_former_place(&lock, file, entry, &pages, &mut records)?;
            }
        }
        f(&lock, &records)
    }

    /// A copy would reveal what is under a refused key. Not under the keystore lock, because an
    /// error reads the keystore.
    fn require_usable_keys(&self) -> Result<()> {
        let mut scopes = BTreeSet::new();
        {
            let lock = KeystoreLock::acquire();
            let originals = persist::log_state(&lock, Scope::database(self.from))?;
            let copied = originals.files().filter(|(file, _)| {
                (self.copy_of)(*file).is_some() && relation_files::may_exist(*file)
            });
            scopes.extend(copied.flat_map(|(_, entry)| entry.keys.values().map(|key| key.scope)));
        }
        if !scopes.is_empty() {
            scopes.insert(wrapping_scope(self.to)?);
        }
        scopes.into_iter().try_for_each(refused::require_usable)
    }

    /// A page under an interim key is refused in another database. Redo seals copies of such pages
    /// again, not a session ([`crate::page::raw_copies`]).
    fn require_no_interim_pages(&self) -> Result<()> {
        if self.from == self.to || !interim::any() {
            return Ok(());
        }
        let mut files = Vec::new();
        {
            let lock = KeystoreLock::acquire();
            let originals = persist::log_state(&lock, Scope::database(self.from))?;
            let copied = originals.files().filter(|(file, _)| (self.copy_of)(*file).is_some());
            for (file, entry) in copied {
                for group in entry.keys.values().filter_map(|key| key.scope.key_group()) {
                    if !has_ended(group)? {
                        files.push(file);
                        break;
                    }
                }
            }
        }
        let Some(file) = files.into_iter().find(|file| interim::has_pages(*file)) else {
            return Ok(());
        };
        Err(Report::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            format!("relation file {file} has pages under an interim key"),
        )
        .detail("They are accepted in its database only.")
        .hint("Wait until the server log says that no page is under an interim key any more, or use STRATEGY wal_log. If the log says that the file belongs to no relation, remove the file."))
    }
}

/// Whether there is room for all these records: in memory, and in the key file.
fn require_room(scope: Scope, records: &[Record]) -> Result<()> {
    if records.is_empty() {
        return Ok(());
    }
    persist::require_room(scope, records)?;
    let shared = shmem::required()?;
    shared.directory.check(records)?;
    let offset = shared.control.position(scope).map_or(0, |position| position.end);
    let failed = |error| failures::keystore_failure(&LogError::Record(error));
    let mut end = offset;
    for records in records.chunks(RECORDS_AT_ONCE) {
        end += batch::encode(records).map_err(failed)?.len() as u64;
    }
    if end <= MAX_LOG {
        return Ok(());
    }
    Err(failed(FormatError { offset, problem: Problem::TooLarge(MAX_LOG) }))
}

/// What there is among the pages of a file.
struct Pages {
    sealed: bool,
    plaintext: bool,
}

/// Copies of files without keys, at places of files that were encrypted. Reads them.
fn at_former_places(
    from: Scope,
    to: Scope,
    copy_of: impl Fn(RelFile) -> Option<RelFile>,
    is_place: impl Fn(RelFile) -> bool,
) -> Result<Vec<(RelFile, Pages)>> {
    let (originals, present) = {
        let lock = KeystoreLock::acquire();
        (persist::log_state(&lock, from)?, persist::log_state(&lock, to)?)
    };
    let exist = originals.files().map(|(file, _)| file).filter(|at| relation_files::may_exist(*at));
    let with_keys: HashSet<_> = exist.filter_map(copy_of).collect();
    let places = present.files().filter(|(file, entry)| {
        entry.phase.current().is_some()
            && is_place(*file)
            && !with_keys.contains(file)
            && relation_files::may_exist(*file)
    });
    let is_sealed = |page: &Page| version_of(page.as_slice()).is_some();
    let pages = |file| Pages {
        sealed: relation_files::any_page(file, is_sealed),
        plaintext: relation_files::any_page(file, |page| !is_sealed(page) && !is_zero(page)),
    };
    Ok(places.map(|(file, _)| (file, pages(file))).collect())
}

/// What is recorded of such a copy. It may be that of a file which never had a key: as a new file
/// with such a number. Or the database was moved away while the library was not loaded, and comes
/// back. Then the pages are under the keys of this place, and what was added to them meanwhile is
/// in plaintext.
fn of_former_place(
    lock: &KeystoreLock,
    file: RelFile,
    entry: &File,
    pages: &Pages,
    records: &mut Vec<Record>,
) -> Result<()> {
    let (Some(current), Some(last)) = (entry.phase.current(), entry.last_version()) else {
        return Ok(());
    };
    if pages.sealed && pages.plaintext {
        return mixed(lock, file, last, entry.keys.values().next_back(), records);
    }
    let is_right = pages.sealed || !pages.plaintext && !entry.is_destroyed(current);
    if !is_right {
        records.push(Record::Plaintext { file, after: last });
    }
    Ok(())
}

/// The pages of a file are in states of which none is recorded to be the earlier one. With another
/// key, each page on disk decides how it may be written, and a job gives all of them this key.
fn mixed(
    lock: &KeystoreLock,
    file: RelFile,
    last: DataKeyVersion,
    like: Option<&state::DataKey>,
    records: &mut Vec<Record>,
) -> Result<()> {
    let Some(like) = like else { return Ok(()) };
    let version = unused_version(lock, file, Some(last))?;
    let Ok(cipher) = CipherId::try_from(like.cipher) else { return Ok(()) };
    let sealing = Sealing { cipher, group: like.scope.key_group() };
    let phase = Phase::under(version);
    records.push(Record::Plaintext { file, after: last });
    records.push(make_key(file, version, sealing)?);
    records.push(Record::Rewriting { file, phase, done: false });
    records.push(Record::Current { file, version });
    Ok(())
}

fn has_ended(group: KeyGroup) -> Result<bool> {
    if shmem::required()?.secrets.newest(group.scope()).is_some() {
        return Ok(false);
    }
    Ok(persist::state_at_hand(Scope::CLUSTER)?.has_ended(group.scope()))
}

fn add_records(
    lock: &KeystoreLock,
    file: RelFile,
    entry: &File,
    copy: RelFile,
    known: Option<&File>,
    records: &mut Vec<Record>,
) -> Result<()> {
    let of_database = require_master_key(copy.database);
    if let Some(known) = known
        && let Some(version) = destroyed_in_one(entry, known)
    {
        return Err(taken(file, copy, version));
    }
    // First, because the following records may refer to its versions.
    records.extend(entry.destroyed.map(|Destroyed { through, lsn, cipher, whole, at }| {
        Record::Destroyed { file: copy, through, cipher, whole, lsn, at }
    }));
    let mut copied = HashSet::new();
    for (&version, key) in &entry.keys {
        let other = known.and_then(|known| known.keys.get(&version));
        // A copy stays in the key group of its original.
        let (scope, key_version) = match key.scope.key_group() {
            None => of_database.clone()?,
            // Nothing is left under this key, and nobody can unwrap it.
            Some(group) if has_ended(group)? => continue,
            // Also an error while the group is being shredded: what is in it must not grow.
            Some(group) => require_group_key(group)?,
        };
        let wrapped = with_wrap_key(scope, key_version, |wrap_key| {
            let data_key = unwrap_record(file, version, key)?;
            if let Some(other) = other
                && !unwrap_record(copy, version, other)?.is_same(&data_key)
            {
                return Err(taken(file, copy, version));
            }
            wrap_data_key(&data_key, wrap_key, copy, version)
        })?;
        copied.insert(version);
        records.push(Record::DataKey {
            file: copy,
            version,
            cipher: key.cipher,
            scope,
            key_version,
            wrapped,
            created: key.created,
        });
    }
    if let Some(version) = entry.phase.version {
        records.push(match entry.phase.plaintext {
            false => Record::Current { file: copy, version },
            true => Record::Plaintext { file: copy, after: version },
        });
    }
    // So that its first version is known, which a new file has from `SealedOnly`.
    let is_whole = entry.phase.current().is_some() && !entry.is_mixed();
    let rewriting = if is_whole { Some((entry.phase, true)) } else { entry.rewriting };
    records.extend(rewriting.map(|(phase, done)| Record::Rewriting { file: copy, phase, done }));
    // Also that it may have pages in plaintext, which the place perhaps had not.
    let earliest = entry
        .earliest
        .version
        .filter(|version| !is_whole && (copied.contains(version) || entry.is_destroyed(*version)));
    records.extend(earliest.map(|version| match entry.earliest.plaintext {
        true => Record::Plaintext { file: copy, after: version },
        false => Record::Rewriting { file: copy, phase: entry.earliest, done: true },
    }));
    // The place may have been that of a file which was sealed only. Of the copy that is not known
    // on a server that replays the copying when the original has changed since.
    records.extend(
        entry.phase.version.map(|version| Record::SealedOnly {
            file: copy,
            phase: Phase::plaintext_after(version),
        }),
    );
    // Its database was moved away from the place while the library was not loaded.
    if let Some(ahead) = known.filter(|known| known.phase > entry.phase)
        && let Some(last) = ahead.last_version().max(entry.last_version())
    {
        mixed(lock, copy, last, entry.keys.values().next_back(), records)?;
    }
    Ok(())
}

/// A version whose key was destroyed for one of the two files, while the other one has it.
///
/// Not if the original stays in use without that key ([`super::destruction`]), and the copy is at
/// the place of the file before its database was moved: the remaining keys there are destroyed too.
fn destroyed_in_one(original: &File, copy: &File) -> Option<DataKeyVersion> {
    let lost = |from: &File, by: &File| from.keys.keys().copied().find(|v| by.is_destroyed(*v));
    let continues =
        original.destroyed.is_some_and(|keys| Some(keys.through) < original.phase.version);
    lost(original, copy).or_else(|| lost(copy, original).filter(|_| !continues))
}

/// The report if the place of the copy has other keys: of a relation that had this number, or of
/// what was written there when the database was moved away without the library.
fn taken(file: RelFile, copy: RelFile, version: DataKeyVersion) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("relation file {copy} has another data key of version {version}"),
    )
    .detail(format!(
        "An encrypted relation had this place before, or the database was there while pagevault was not loaded. The copy of relation file {file} would be unreadable."
    ))
    .hint("Use a tablespace in which the database has not been; or rewrite the relation into a new file (VACUUM FULL, REINDEX), run CHECKPOINT, and try again.")
}
