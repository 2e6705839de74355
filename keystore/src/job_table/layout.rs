//! Layout of the job table's words.
//!
//! ```text
//! header   4 words: used (slots that were ever used), free (those of them that are free), begun
//! heads    capacity * 8 words: database (0: free), relation, number (2),
//!          kind | cipher << 8 | state << 16, step, process, given up
//! rest     capacity * 120 words: requested by, requested at (2), transaction (2), started (2),
//!          ended (2), pages done (2), pages in all (2), bytes per second (2), 0, length of the
//!          error, error
//! begun    BEGUN * 4 words: database, number (2), relation
//! ```
//!
//! A head of kind 0 holds the number up to which unknown jobs of its database are forgotten.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::job::MAX_ERROR;

pub(super) const HEADER: usize = 4;
pub(super) const HEAD: usize = 8;
pub(super) const REST: usize = 120;
/// Number of entries for relations that unfinished jobs have switched to another key. A relation
/// without an entry is switched once more when its job is resumed, which is harmless.
pub(super) const BEGUN: usize = 1 << 16;
pub(super) const BEGUN_STRIDE: usize = 4;

pub(super) const USED: usize = 0;
pub(super) const FREE: usize = 1;
pub(super) const BEGUN_USED: usize = 2;

pub(super) const DATABASE: usize = 0;
pub(super) const RELATION: usize = 1;
pub(super) const NUMBER: usize = 2;
pub(super) const PACKED: usize = 4;
pub(super) const STEP: usize = 5;
pub(super) const PROCESS: usize = 6;
pub(super) const GIVEN_UP: usize = 7;

pub(super) const REQUESTED_BY: usize = 0;
pub(super) const REQUESTED_AT: usize = 1;
pub(super) const TRANSACTION: usize = 3;
pub(super) const STARTED: usize = 5;
pub(super) const ENDED: usize = 7;
pub(super) const PAGES_DONE: usize = 9;
pub(super) const PAGES_TOTAL: usize = 11;
pub(super) const RATE: usize = 13;
pub(super) const ERROR: usize = 16;

pub(super) fn load(words: &[AtomicU32]) -> u64 {
    u64::from(words[0].load(Relaxed)) | u64::from(words[1].load(Relaxed)) << 32
}

pub(super) fn store(words: &[AtomicU32], value: u64) {
    words[0].store(value as u32, Relaxed);
    words[1].store((value >> 32) as u32, Relaxed);
}

pub(super) fn load_text(words: &[AtomicU32]) -> String {
    let (length, words) = (words[0].load(Relaxed) as usize, &words[1..]);
    let bytes = words.iter().flat_map(|word| word.load(Relaxed).to_le_bytes());
    String::from_utf8_lossy(&bytes.take(length.min(MAX_ERROR)).collect::<Vec<u8>>()).into_owned()
}

pub(super) fn store_text(words: &[AtomicU32], text: &str) {
    let text = &text[..text.floor_char_boundary(MAX_ERROR)];
    for (chunk, word) in text.as_bytes().chunks(4).zip(&words[1..]) {
        let mut padded = [0; 4];
        padded[..chunk.len()].copy_from_slice(chunk);
        word.store(u32::from_le_bytes(padded), Relaxed);
    }
    words[0].store(text.len() as u32, Relaxed);
}
