//! Control words: flags, the keystore's identity, where each log ends and WAL had it, the last
//! failed unlock.
//!
//! All but the flags are read and written under the keystore lock.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::*};

use pagevault_keystore::log::Position;

use super::words::{load_text, load_u64, store_text, store_u64};

/// The control words.
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
/// The number of the process that starts rekey workers, plus one.
const LAUNCHER: usize = FAILURE.end;
const LOGS: usize = LAUNCHER + 1;
const LOG_STRIDE: usize = 8;
/// Logs for which there is always room.
const LOGS_LEAST: usize = 8192;
/// More than there are when the server starts.
const LOGS_GROWTH: usize = 1024;
/// Those of them that only recovery uses.
const LOGS_RESERVED: usize = 256;

/// Words of memory that [`Control`] needs where there are this many logs.
pub(crate) fn words_needed(logs: usize) -> usize {
    LOGS + LOGS_LEAST.max(logs + LOGS_GROWTH) * LOG_STRIDE
}

/// More databases with keys than there is room for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooManyLogs;

impl Control {
    /// Control words in `words`, zero at first.
    pub(crate) fn new(words: &'static [AtomicU32]) -> Control {
        assert!(words.len() >= words_needed(0));
        Control { words }
    }

    /// Forgets everything, before the keystore is read again.
    pub(crate) fn reset(&self) {
        self.words.iter().for_each(|word| word.store(0, Relaxed));
    }

    #[inline]
    pub(super) fn sealed(&self) -> bool {
        self.words[SEALED].load(Relaxed) != 0
    }

    /// Raises the flag. It is never lowered while the server runs.
    pub(crate) fn set_sealed(&self) {
        self.words[SEALED].store(1, Release);
    }

    #[inline]
    pub(super) fn destructions(&self) -> u32 {
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

    /// The number of the process that starts rekey workers, if there is one.
    pub(crate) fn rekey_launcher(&self) -> Option<u32> {
        self.words[LAUNCHER].load(Acquire).checked_sub(1)
    }

    /// Remembers the process that starts rekey workers.
    pub(crate) fn set_rekey_launcher(&self, number: Option<u32>) {
        self.words[LAUNCHER].store(number.map_or(0, |number| number + 1), Release);
    }

    /// How many times labels were changed since the server was started.
    pub(super) fn label_changes(&self) -> u32 {
        self.words[LABELS].load(Acquire)
    }

    /// Labels were changed.
    pub(super) fn count_label_change(&self) {
        self.words[LABELS].fetch_add(1, Release);
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
