//! Numbers and texts in words of shared memory. Readers and writers hold the keystore lock.

use std::sync::atomic::{AtomicU32, Ordering::*};

/// A number from two words.
pub(crate) fn load_u64(words: &[AtomicU32]) -> u64 {
    u64::from(words[0].load(Relaxed)) | u64::from(words[1].load(Relaxed)) << 32
}

/// A number into two words.
pub(crate) fn store_u64(words: &[AtomicU32], value: u64) {
    words[0].store(value as u32, Relaxed);
    words[1].store((value >> 32) as u32, Relaxed);
}

/// A text: its length in the first word, its bytes in the others.
pub(crate) fn load_text(words: &[AtomicU32]) -> String {
    let (length, words) = (words[0].load(Relaxed) as usize, &words[1..]);
    let bytes = words.iter().flat_map(|word| word.load(Relaxed).to_le_bytes());
    let bytes: Vec<u8> = bytes.take(length).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Stores a text, cut to what fits.
pub(crate) fn store_text(words: &[AtomicU32], text: &str) {
    let text = cut(text, (words.len() - 1) * 4);
    for (chunk, word) in text.as_bytes().chunks(4).zip(&words[1..]) {
        let mut padded = [0; 4];
        padded[..chunk.len()].copy_from_slice(chunk);
        word.store(u32::from_le_bytes(padded), Relaxed);
    }
    words[0].store(text.len() as u32, Relaxed);
}

/// The longest beginning of `text` that has at most `limit` bytes.
fn cut(text: &str, limit: usize) -> &str {
    &text[..text.floor_char_boundary(limit)]
}
