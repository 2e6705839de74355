//! Temporary data: whether it is encrypted, and the keys of temporary files, which are derived from
//! the random key of this server start and the file's path.
//!
//! These keys are not stored: any process that reads the file derives the same key. Nothing here
//! allocates, locks or raises errors.
//!
//! The setting `pagevault.temp_encryption` and the keys may change at any time, at different times
//! in different processes. So every page of a temporary table and every temporary file states
//! itself whether it is encrypted; this module only decides about new ones.

use pagevault_cipher::residue::without_trace;
use pagevault_cipher::{CipherId, DataKey, PageKey, kdf};
use zeroize::Zeroizing;

use crate::pg::guc::{self, TempEncryption};
use crate::pg::process::ProcessLocal;
use crate::shmem;

/// The cipher that temporary data is sealed with.
pub(crate) const TEMPORARY_CIPHER: CipherId = CipherId::Aes256Xts;

/// Whether new pages of temporary tables and new temporary files are encrypted.
#[inline]
pub(crate) fn is_wanted() -> bool {
    match guc::temp_encryption() {
        TempEncryption::Auto => shmem::any_database_key(),
        TempEncryption::On => true,
        TempEncryption::Off => false,
    }
}

/// Whether new segments of the NOTIFY queue are encrypted. The queue is emptied at every start, and
/// its first segment may exist until the next one, so it cannot wait for the first key.
#[inline]
pub(crate) fn is_wanted_for_queues() -> bool {
    guc::temp_encryption() != TempEncryption::Off
}

/// Identifies the key of a path: 127 pseudorandom bits, and one bit for other use.
pub(crate) type Name = [u64; 2];

/// The bit of the first word that is 0 in every name.
pub(crate) const FREE_BIT: u64 = 1 << 63;

/// Number of expanded keys in a process's cache; a hash join has two files for each of its batches.
const SETS: usize = 32;
const WAYS: usize = 4;

/// Maximum number of expanded keys in the cache.
pub(super) const KEYS: usize = SETS * WAYS;

struct Set {
    entries: [(Name, Option<PageKey>); WAYS],
    /// The next entry to replace.
    hand: usize,
}

static CACHE: ProcessLocal<[Set; SETS]> =
    ProcessLocal::new([const { Set { entries: [const { ([0; 2], None) }; WAYS], hand: 0 } }; SETS]);

/// Keeps the cache's memory out of core dumps, in this process and those forked from it.
pub(crate) fn protect() -> std::io::Result<()> {
    crate::pg::mapping::exclude_from_core_dumps(CACHE.as_ptr())
}

/// The name of the key for the file at `path`; `None` before the server has its random key.
pub(crate) fn name(path: &[u8]) -> Option<Name> {
    let mut bytes = [0; 16];
    derive("pagevault temporary file name v1", path, &mut bytes)?;
    let words = bytes.as_chunks().0;
    Some([u64::from_le_bytes(words[0]) & !FREE_BIT, u64::from_le_bytes(words[1])])
}

/// Calls `f` with the key of a file; `None` without a key.
#[inline]
pub(crate) fn with_key<R>(name: Name, f: impl FnOnce(&PageKey) -> R) -> Option<R> {
    CACHE.with(|cache| {
        let set = &mut cache[name[1] as usize % SETS];
        let known = |(n, key): &(Name, Option<PageKey>)| *n == name && key.is_some();
        let way = match set.entries.iter().position(known) {
            Some(way) => way,
            None => set.fill(name)?,
        };
        set.entries[way].1.as_ref().map(f)
    })
}

impl Set {
    #[cold]
    fn fill(&mut self, name: Name) -> Option<usize> {
        let mut context = [0; 16];
        context[..8].copy_from_slice(&name[0].to_le_bytes());
        context[8..].copy_from_slice(&name[1].to_le_bytes());
        without_trace(|| {
            let mut bytes = Zeroizing::new([0; 64]);
            derive("pagevault temporary file v1", &context, &mut bytes)?;
            let key = DataKey::from_bytes(TEMPORARY_CIPHER, bytes.as_slice()).ok()?;
            let way = self.hand;
            self.hand = (way + 1) % WAYS;
            let entry = &mut self.entries[way];
            entry.1 = None; // wipes the old one
            *entry = (name, Some(PageKey::new(&key)));
            Some(way)
        })
    }
}

fn derive<const N: usize>(label: &str, context: &[u8], out: &mut [u8; N]) -> Option<()> {
    shmem::secrets()?.with_temporary(|key| kdf::derive(key, label, context, out))
}
