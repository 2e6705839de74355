//! Layout of the directory's words.

use pagevault_cipher::DataKeyVersion;

use super::{DirectoryError, Result};
use crate::record::MAX_WRAPPED_DATA_KEY;
use crate::rel_file::{Phase, RelFile};
use crate::sync::{AtomicU32, Ordering};

/// A cache line, of which nine words are used.
pub(super) const HEADER_WORDS: usize = 16;
pub(super) const FILE_WORDS: usize = 15;
pub(super) const KEY_WORDS: usize = 4;
pub(super) const BODY_WORDS: usize = 2 + WRAPPED_WORDS;
pub(super) const WRAPPED_WORDS: usize = MAX_WRAPPED_DATA_KEY / 4;
const _: () = assert!(MAX_WRAPPED_DATA_KEY.is_multiple_of(4) && MAX_WRAPPED_DATA_KEY < 256);

/// Words of the header.
pub(super) mod head {
    pub(crate) const FILES: usize = 0;
    pub(crate) const KEYS: usize = 1;
    pub(crate) const SPARE: usize = 2;
    pub(crate) const FLOORS: usize = 3;
    pub(crate) const REUSES: usize = 4;
    pub(crate) const FREE_FILE: usize = 5;
    pub(crate) const FREE_FILES: usize = 6;
    pub(crate) const FREE_KEY: usize = 7;
    pub(crate) const FREE_KEYS: usize = 8;
}

/// Words of a file entry.
pub(super) mod file {
    pub(crate) const TABLESPACE: usize = 0;
    pub(crate) const DATABASE: usize = 1;
    pub(crate) const RELATION: usize = 2;
    pub(crate) const PHASE: usize = 3;
    pub(crate) const NEXT: usize = 4;
    pub(crate) const KEYS: usize = 5;
    pub(crate) const DESTROYED: usize = 6;
    pub(crate) const DESTROYED_LSN: [[usize; 2]; 2] = [[7, 8], [10, 11]];
    pub(crate) const REWRITING: usize = 9;
    pub(crate) const SEALED_ONLY: usize = 12;
    pub(crate) const GENERATION: usize = 13;
    pub(crate) const EARLIEST: usize = 14;
}

/// Words of a key entry.
pub(super) mod key {
    pub(crate) const META: usize = 0;
    pub(crate) const NEXT: usize = 1;
    pub(crate) const SEQUENCE: usize = 2;
    pub(crate) const BODY: usize = 3;
}

/// A power of two, at least 1.
pub(super) const fn buckets(capacity: u32) -> u32 {
    if capacity == 0 { 1 } else { capacity.next_power_of_two() }
}

/// The index in a reference. A chain has no more entries than there may be (`left`): this prevents
/// endless loops.
pub(super) fn step(reference: u32, left: &mut u32) -> Result<Option<u32>> {
    let Some(index) = reference.checked_sub(1) else { return Ok(None) };
    *left = left.checked_sub(1).ok_or(DirectoryError::Damaged)?;
    Ok(Some(index))
}

/// Whether the entry of a file with this generation is free.
pub(super) const fn is_free(generation: u32) -> bool {
    generation & 1 != 0
}

pub(super) fn identity(entry: &[AtomicU32; FILE_WORDS]) -> RelFile {
    RelFile {
        tablespace: entry[file::TABLESPACE].load(Ordering::Acquire),
        database: entry[file::DATABASE].load(Ordering::Acquire),
        relation: entry[file::RELATION].load(Ordering::Acquire),
    }
}

/// File numbers are consecutive, so one multiplication per word distributes them well enough. The
/// shifts move the high bits, which depend on all input bits, to where the bucket number is taken
/// from.
pub(super) fn hash(file: RelFile) -> u32 {
    const ODD: u64 = 0x9E37_79B9_7F4A_7C15; // 2^64 / golden ratio
    let mix = |state: u64, word: u32| {
        let state = (state ^ u64::from(word)).wrapping_mul(ODD);
        state ^ state >> 32
    };
    (mix(mix(mix(0, file.tablespace), file.database), file.relation) >> 16) as u32
}

pub(super) fn pack_meta(version: DataKeyVersion, cipher: u8, length: usize) -> u32 {
    // At most 92, see `insert`.
    let length = length as u32 & 0xFF;
    u32::from(version.get()) | u32::from(cipher) << 16 | length << 24
}

/// Returns version, cipher and length.
pub(super) fn unpack_meta(meta: u32) -> (Option<DataKeyVersion>, u8, usize) {
    let [low, high, cipher, length] = meta.to_le_bytes();
    let version = DataKeyVersion::new(u16::from_le_bytes([low, high]));
    (version, cipher, usize::from(length).min(MAX_WRAPPED_DATA_KEY))
}

/// Set in the phase word of a file that is written as plaintext.
const PLAINTEXT: u32 = 1 << 24;
/// Set in the phase word of a file whose pages on disk may be in another state. It is in this word,
/// so that no reader sees a new phase without it.
const MIXED: u32 = 1 << 25;
/// Set in the phase word of a file that contains sealed pages only. It is in this word, so that no
/// reader sees it together with a phase in which pages are written as plaintext.
const SEALED_ONLY: u32 = 1 << 26;

/// `cipher`: of the version's key, 0 for plaintext; `rewriting`: as from [`pack_rewriting`];
/// `sealed_only`: as from [`pack_sealed_only`].
pub(super) fn pack_phase(phase: Phase, cipher: u8, rewriting: u32, sealed_only: u32) -> u32 {
    let plaintext = if phase.plaintext { PLAINTEXT } else { 0 };
    // A rewriting that was announced for the next phase counts already.
    let begun = rewriting != 0 && rewriting & DONE == 0;
    let mixed = if begun && rewriting >= pack_rewriting(phase, false) { MIXED } else { 0 };
    let since = unpack_sealed_only(sealed_only).current();
    let sealed_only = if since.is_some() && since <= phase.current() { SEALED_ONLY } else { 0 };
    let version = u32::from(DataKeyVersion::get_or_zero(phase.version));
    version | u32::from(cipher) << 16 | plaintext | mixed | sealed_only
}

/// Whether the file contains sealed pages only.
pub(super) fn unpack_is_sealed_only(word: u32) -> bool {
    word & SEALED_ONLY != 0
}

/// Since when a file contains sealed pages only, or after which version it does not any more. Later
/// ones are larger. 0 means none.
pub(super) fn pack_sealed_only(phase: Phase) -> u32 {
    u32::from(DataKeyVersion::get_or_zero(phase.version)) << 1 | u32::from(phase.plaintext)
}

pub(super) fn unpack_sealed_only(word: u32) -> Phase {
    // A word has no more bits than a version and one.
    Phase { version: DataKeyVersion::new((word >> 1) as u16), plaintext: word & 1 != 0 }
}

/// Whether pages on disk may be in another state than the phase.
pub(super) fn unpack_mixed(word: u32) -> bool {
    word & MIXED != 0
}

/// Returns phase and cipher.
pub(super) fn unpack_phase(word: u32) -> (Phase, u8) {
    let [low, high, cipher, _] = word.to_le_bytes();
    let version = DataKeyVersion::new(u16::from_le_bytes([low, high]));
    (Phase { version, plaintext: word & PLAINTEXT != 0 }, cipher)
}

const DONE: u32 = 1;

/// A phase that began when the file had pages, and whether these have been rewritten. Later ones
/// are larger. 0 means none.
pub(super) fn pack_rewriting(phase: Phase, done: bool) -> u32 {
    let done = if done { DONE } else { 0 };
    let version = u32::from(DataKeyVersion::get_or_zero(phase.version));
    version << 2 | u32::from(phase.plaintext) << 1 | done
}

/// Whether the key of an entry was destroyed; only its version is left.
pub(super) fn is_wiped(meta: u32) -> bool {
    unpack_meta(meta).2 == 0
}

/// What is known of a file's destroyed keys, except the LSN.
#[derive(Clone, Copy)]
pub(super) struct Destroyed {
    /// The last destroyed version.
    pub(super) through: Option<DataKeyVersion>,
    /// Of the file's pages then.
    pub(super) cipher: u8,
    /// How often keys of the file were destroyed (wraps). The LSN is in the first of two places or
    /// in the second, by turns.
    pub(super) count: u8,
}

impl Destroyed {
    pub(super) fn pack(self) -> u32 {
        let through = self.through.map_or(0, |version| u32::from(version.get()));
        through | u32::from(self.cipher) << 16 | u32::from(self.count) << 24
    }

    pub(super) fn unpack(word: u32) -> Self {
        let [low, high, cipher, count] = word.to_le_bytes();
        let through = DataKeyVersion::new(u16::from_le_bytes([low, high]));
        Self { through, cipher, count }
    }

    /// The words of the LSN.
    pub(super) fn lsn(self) -> [usize; 2] {
        let [first, second] = file::DESTROYED_LSN;
        if self.count & 1 == 0 { first } else { second }
    }
}

/// Returns version and cipher, `None` for plaintext.
pub(super) fn unpack_current(word: u32) -> Option<(DataKeyVersion, u8)> {
    let (phase, cipher) = unpack_phase(word);
    phase.current().map(|version| (version, cipher))
}
