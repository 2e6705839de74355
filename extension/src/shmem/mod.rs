//! What all processes of the server share about keys: the directory of data keys, the database
//! keys, the health of providers, a page of control words, and counters. Mapped once in the
//! postmaster; see [`crate::keys::load`].

pub(crate) mod health;
pub(crate) mod secrets;
pub(crate) mod words;

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::*};

use pagevault_cipher::{CipherId, Epoch};
use pagevault_keystore::RelFile;
use pagevault_keystore::directory::{Directory, FileInfo, Writing};
use pagevault_keystore::job_table::JobTable;
use pagevault_keystore::log::Position;
use pagevault_keystore::record::MAX_WRAPPED_DATA_KEY;

use self::health::Health;
use self::secrets::Secrets;
use self::words::{load_text, load_u64, store_text, store_u64};
use crate::audit::Trail;
use crate::keys::usage::wal::Wal;
use crate::page::written_over::WrittenOver;
use crate::rekey::launcher;
use crate::stats::Stats;
use crate::writers::Writers;

/// Handles to the shared memory; the same in every process.
pub(crate) struct Shared {
    pub(crate) directory: Directory<'static>,
    /// The directory's memory, for a crash restart.
    pub(crate) words: &'static [AtomicU32],
    pub(crate) secrets: Secrets,
    pub(crate) control: Control,
    pub(crate) health: Health,
    pub(crate) wal: Wal,
    pub(crate) stats: Stats,
    pub(crate) writers: Writers,
    pub(crate) jobs: JobTable<'static>,
    pub(crate) written_over: WrittenOver,
    pub(crate) trail: Trail,
}

static SHARED: OnceLock<Shared> = OnceLock::new();

/// Publishes the handles; in the postmaster, before anything is forked.
pub(crate) fn publish(shared: Shared) -> &'static Shared {
    SHARED.get_or_init(|| shared)
}

/// The handles, once the postmaster has published them.
#[inline]
pub(crate) fn get() -> Option<&'static Shared> {
    SHARED.get()
}

/// The database keys.
pub(crate) fn secrets() -> Option<&'static Secrets> {
    get().map(|shared| &shared.secrets)
}

/// The one flag that a cluster without encryption pays for: does any data key exist?
#[inline]
pub(crate) fn anything_sealed() -> bool {
    get().is_some_and(|shared| shared.control.sealed())
}

/// Does any database key exist? Without one nothing can be encrypted.
pub(crate) fn any_database_key() -> bool {
    secrets().is_some_and(Secrets::any_known)
}

fn current(file: RelFile) -> Option<(u16, u8)> {
    let directory = &get()?.directory;
    directory.current(directory.find(file).ok()??).ok()?
}

/// The epoch that pages of this file are written under now; `None` for plaintext.
#[inline]
pub(crate) fn current_epoch(file: RelFile) -> Option<Epoch> {
    current(file).and_then(|(epoch, _)| Epoch::new(epoch))
}

/// The cipher that pages of this file are written with now; `None` for plaintext.
pub(crate) fn current_cipher(file: RelFile) -> Option<CipherId> {
    current(file).and_then(|(_, cipher)| CipherId::try_from(cipher).ok())
}

/// True if pages of this file are sealed when they are written.
pub(crate) fn is_sealed(file: RelFile) -> bool {
    current(file).is_some()
}

/// True if pages of any file of a database are sealed when they are written, be it one that was
/// dropped. Looks at all files of the cluster.
pub(crate) fn anything_sealed_in(database: u32) -> bool {
    let files = get().and_then(|shared| shared.directory.files().ok());
    files
        .into_iter()
        .flatten()
        .flatten()
        .any(|known| known.file.database == database && known.current.is_some())
}

/// How pages of this file are written at this moment; `None` if it never had a key.
#[inline]
pub(crate) fn writing(file: RelFile) -> Option<Writing> {
    let directory = &get()?.directory;
    directory.writing(directory.find(file).ok()??).ok()
}

/// True if the file ever had a data key.
pub(crate) fn is_known(file: RelFile) -> bool {
    get().is_some_and(|shared| matches!(shared.directory.find(file), Ok(Some(_))))
}

/// The cheap question before every read: were the keys of any file destroyed?
#[inline]
pub(crate) fn anything_destroyed() -> bool {
    destructions() != 0
}

/// How many times keys were destroyed: what a process has expanded before the last time is out of
/// date.
#[inline]
pub(crate) fn destructions() -> u32 {
    get().map_or(0, |shared| shared.control.destructions())
}

/// How many times labels were changed since the server was started.
pub(crate) fn label_changes() -> u32 {
    get().map_or(0, |shared| shared.control.words[LABELS].load(Acquire))
}

/// Labels were changed, and everybody sees them.
pub(crate) fn count_label_change() {
    if let Some(shared) = get() {
        shared.control.words[LABELS].fetch_add(1, Release);
    }
}

/// True if the file is written under a key that was destroyed: nothing in it can be read.
pub(crate) fn is_destroyed(file: RelFile) -> bool {
    anything_destroyed() && info(file).is_some_and(|info| info.is_destroyed())
}

/// True if the file is written, under a later key or in plaintext, since it was written under the
/// key of this epoch.
pub(crate) fn has_outlived(file: RelFile, epoch: u16) -> bool {
    info(file).is_some_and(|info| info.phase.epoch > epoch)
}

fn info(file: RelFile) -> Option<FileInfo> {
    let directory = &get()?.directory;
    directory.info(directory.find(file).ok()??).ok()
}

/// If the key of this epoch was destroyed: the LSN at or before which all WAL records about pages
/// under it end.
pub(crate) fn destroyed_at(file: RelFile, epoch: u16) -> Option<u64> {
    if !anything_destroyed() {
        return None;
    }
    let directory = &get()?.directory;
    let (through, lsn) = directory.destroyed(directory.find(file).ok()??).ok()?;
    (epoch <= through).then_some(lsn)
}

/// True if the file has a data key of this epoch.
pub(crate) fn has_key(file: RelFile, epoch: u16) -> bool {
    data_key(file, epoch, &mut [0; MAX_WRAPPED_DATA_KEY]).is_some()
}

/// A wrapped data key, as copied out of the directory.
pub(crate) struct Found {
    pub(crate) cipher: u8,
    pub(crate) scope: u32,
    pub(crate) key_version: u32,
    pub(crate) len: usize,
}

/// Copies the wrapped data key of a file and epoch. No lock, no allocation.
pub(crate) fn data_key(
    file: RelFile,
    epoch: u16,
    wrapped: &mut [u8; MAX_WRAPPED_DATA_KEY],
) -> Option<Found> {
    let directory = &get()?.directory;
    let slot = directory.find(file).ok()??;
    let info = directory.key(slot, epoch, wrapped).ok()?;
    Some(Found {
        cipher: info.cipher,
        scope: info.scope,
        key_version: info.key_version,
        len: info.length.min(MAX_WRAPPED_DATA_KEY),
    })
}

/// The cheap question before every read: is access to any database key's data refused?
#[inline]
pub(crate) fn anything_refused() -> bool {
    get().is_some_and(|shared| shared.secrets.any_refused())
}

/// Is any database key locked or refused? Two loads.
#[inline]
pub(crate) fn anything_withheld() -> bool {
    get().is_some_and(|shared| shared.secrets.any_refused() || shared.secrets.any_locked())
}

/// The scope of the database key behind the data key that this file is sealed with now, if that
/// database key is refused; while the file is being rewritten also of one that some of its pages
/// may still be sealed with.
pub(crate) fn refused_scope(file: RelFile) -> Option<u32> {
    let shared = get()?;
    let is_refused = |scope: &u32| shared.secrets.is_refused(*scope);
    let slot = shared.directory.find(file).ok()??;
    let writing = shared.directory.writing(slot).ok()?;
    let scope_of = |epoch| Some(data_key(file, epoch, &mut [0; MAX_WRAPPED_DATA_KEY])?.scope);
    let current = writing.current.and_then(|(epoch, _)| scope_of(epoch)).filter(is_refused);
    if current.is_some() || !writing.mixed {
        return current;
    }
    let keys = shared.directory.keys(slot).ok()?;
    keys.filter_map(|key| Some(key.ok()?.scope)).find(is_refused)
}

/// The cipher of an encrypted file with the same number in another database: CREATE DATABASE copies
/// its template's files under their old numbers.
pub(crate) fn cipher_of_namesake(file: RelFile) -> Option<CipherId> {
    let files = get()?.directory.files().ok()?;
    files
        .flatten()
        .filter(|other| {
            other.file.relation == file.relation && other.file.database != file.database
        })
        .find_map(|other| other.current)
        .and_then(|(_, cipher)| CipherId::try_from(cipher).ok())
}

/// Control words: flags, the keystore's identity, where each log ends and WAL had it, the last
/// failed unlock.
///
/// All but the flags are read and written under the keystore lock.
#[derive(Clone, Copy)]
pub(crate) struct Control {
    words: &'static [AtomicU32],
}

const SEALED: usize = 0;
const HAS_ID: usize = 1;
const ID: usize = 2;
const ID_WORDS: usize = 4;
const DESTRUCTIONS: usize = 6;
const LABELS: usize = 7;
const LOGGED: Range<usize> = 8..10;
const FAILURE: Range<usize> = 10..256;
const REKEY: Range<usize> = FAILURE.end..FAILURE.end + launcher::WORDS;
const LOGS: usize = REKEY.end;
const LOG_STRIDE: usize = 8;
/// Logs for which there is always room.
const LOGS_LEAST: usize = 8192;
/// More than there are when the server starts.
const LOGS_GROWTH: usize = 1024;
/// Those of them that only recovery uses.
const LOGS_RESERVED: usize = 256;

/// Words of memory that [`Control`] needs where there are this many logs.
pub(crate) fn control_words(logs: usize) -> usize {
    LOGS + LOGS_LEAST.max(logs + LOGS_GROWTH) * LOG_STRIDE
}

/// More databases with keys than there is room for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooManyLogs;

impl Control {
    /// Control words in `words`, zero at first.
    pub(crate) fn new(words: &'static [AtomicU32]) -> Control {
        assert!(words.len() >= control_words(0));
        Control { words }
    }

    /// Forgets everything, before the keystore is read again.
    pub(crate) fn reset(&self) {
        self.words.iter().for_each(|word| word.store(0, Relaxed));
    }

    #[inline]
    fn sealed(&self) -> bool {
        self.words[SEALED].load(Relaxed) != 0
    }

    /// Raises the flag. It is never lowered while the server runs.
    pub(crate) fn set_sealed(&self) {
        self.words[SEALED].store(1, Release);
    }

    #[inline]
    fn destructions(&self) -> u32 {
        self.words[DESTRUCTIONS].load(Acquire)
    }

    /// Has every process forget its expanded keys before it uses one again.
    pub(crate) fn count_destruction(&self) {
        // Never back to 0, which means that there was none.
        let next = self.destructions().wrapping_add(1).max(1);
        self.words[DESTRUCTIONS].store(next, Release);
    }

    /// The keystore's identity, once it has one.
    pub(crate) fn keystore_id(&self) -> Option<[u8; 16]> {
        if self.words[HAS_ID].load(Acquire) == 0 {
            return None;
        }
        let mut id = [0; 16];
        for (bytes, word) in id.as_chunks_mut::<4>().0.iter_mut().zip(&self.words[ID..]) {
            *bytes = word.load(Relaxed).to_le_bytes();
        }
        Some(id)
    }

    /// Remembers the keystore's identity.
    pub(crate) fn set_keystore_id(&self, id: &[u8; 16]) {
        for (bytes, word) in id.as_chunks::<4>().0.iter().zip(&self.words[ID..ID + ID_WORDS]) {
            word.store(u32::from_le_bytes(*bytes), Relaxed);
        }
        self.words[HAS_ID].store(1, Release);
    }

    /// Where the end of a log is remembered, or may be.
    fn places(&self) -> impl Iterator<Item = &'static [AtomicU32]> + use<> {
        self.words[LOGS..].chunks_exact(LOG_STRIDE)
    }

    fn logs(&self) -> impl Iterator<Item = &'static [AtomicU32]> + use<> {
        // Scopes are stored plus one, so that zero means a free entry.
        self.places().take_while(|entry| entry[0].load(Acquire) != 0)
    }

    fn log(&self, scope: u32) -> Option<&'static [AtomicU32]> {
        self.logs().find(|entry| entry[0].load(Relaxed) == scope.wrapping_add(1))
    }

    /// Whether another log may be made.
    pub(crate) fn has_room(&self) -> bool {
        self.logs().count() + LOGS_RESERVED < self.places().count()
    }

    /// Whether another log may be made in recovery.
    pub(crate) fn has_any_room(&self) -> bool {
        self.logs().count() < self.places().count()
    }

    /// Up to where WAL must be durable before a log may say that it is settled: the end of the last
    /// record about keys.
    pub(crate) fn logged(&self) -> u64 {
        load_u64(&self.words[LOGGED])
    }

    /// Remembers the end of a record about keys.
    pub(crate) fn set_logged(&self, lsn: u64) {
        store_u64(&self.words[LOGGED], lsn);
    }

    /// Where the log of a scope ends; `None` if there is no such log.
    pub(crate) fn position(&self, scope: u32) -> Option<Position> {
        let entry = self.log(scope)?;
        Some(Position {
            keystore_id: self.keystore_id()?,
            scope,
            generation: entry[1].load(Relaxed),
            end: load_u64(&entry[2..4]),
            settled: load_u64(&entry[4..6]),
            logged: load_u64(&entry[6..8]),
        })
    }

    /// Remembers where a log ends.
    pub(crate) fn set_position(&self, position: &Position) -> Result<(), TooManyLogs> {
        let entry = match self.log(position.scope) {
            Some(entry) => entry,
            None => self.places().find(|entry| entry[0].load(Acquire) == 0).ok_or(TooManyLogs)?,
        };
        entry[1].store(position.generation, Relaxed);
        store_u64(&entry[2..4], position.end);
        store_u64(&entry[4..6], position.settled);
        store_u64(&entry[6..8], position.logged);
        entry[0].store(position.scope.wrapping_add(1), Release);
        Ok(())
    }

    /// What [`wishes`] keeps here.
    pub(crate) fn rekey_wishes(&self) -> &'static [AtomicU32] {
        &self.words[REKEY]
    }

    /// Why the last attempt to unlock failed; empty when it did not.
    pub(crate) fn unlock_failure(&self) -> String {
        load_text(&self.words[FAILURE])
    }

    /// Remembers why unlocking failed, cut to what fits.
    pub(crate) fn set_unlock_failure(&self, text: &str) {
        store_text(&self.words[FAILURE], text);
    }
}
