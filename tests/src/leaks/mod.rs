//! Searches for values where they should not be: canaries, and a scanner that recognizes them in
//! many encodings.
//!
//! A [`Canary`] is a value that occurs nowhere else. The [`Scanner`] searches every byte of files
//! for any piece of any spelling of it:
//!
//! | spelling | reason |
//! |---|---|
//! | as stored, and reversed | tables, WAL; numbers in the order in which keys compare |
//! | decimal, each byte separately | constants in the parse trees of catalogs |
//! | UTF-16 (both byte orders), hexadecimal, base64 (three alignments) | output of programs |
//! | 8 bytes in a row, or 12 with gaps | compressed data |
//!
//! Compression interrupts literals: lz4 and zstd rarely, pglz with a control byte after at most
//! eight bytes. A gap is a single foreign byte.
//!
//! So canaries must not resemble other data: [`Canary::text`] derives them from a hash.

mod scanner;
mod spellings;

pub use scanner::{Hit, Scanner, report};

/// A distinctive value, given by its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Canary {
    /// What the value represents, for example its path to disk.
    pub name: String,
    /// Its bytes, as they are stored.
    pub bytes: Vec<u8>,
}

impl Canary {
    /// 32 letters and digits, unique for `name`.
    #[must_use]
    pub fn text(name: &str) -> Canary {
        const ALPHABET: &[u8; 32] = b"abcdefghijkmnopqrstuvwxyz2345679";
        let letter = |word: u64, at: usize| ALPHABET[(word >> (5 * at)) as usize % 32];
        let words = hashes(name).take(4);
        let bytes = words.flat_map(|word| (0..8).map(move |at| letter(word, at))).collect();
        Canary { name: name.to_owned(), bytes }
    }

    /// `count` bytes, unique for `name`; fewer than eight are not found.
    #[must_use]
    pub fn binary(name: &str, count: usize) -> Canary {
        let bytes = hashes(name).flat_map(u64::to_le_bytes).take(count).collect();
        Canary { name: name.to_owned(), bytes }
    }

    /// A 64-bit number, unique for `name`, as stored by PostgreSQL.
    #[must_use]
    pub fn number(name: &str) -> (Canary, i64) {
        let canary = Canary::binary(name, 8);
        let number = canary.bytes.first_chunk().map_or(0, |bytes| i64::from_le_bytes(*bytes));
        (canary, number)
    }

    /// A value whose stored bytes are known.
    #[must_use]
    pub fn stored(name: &str, bytes: Vec<u8>) -> Canary {
        Canary { name: name.to_owned(), bytes }
    }

    /// The text of a [`Canary::text`].
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes).unwrap_or_default()
    }

    /// Its bytes in hexadecimal digits.
    #[must_use]
    pub fn hex(&self) -> String {
        self.bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Endless pseudorandom words that depend only on `name`: FNV-1a, then splitmix64.
fn hashes(name: &str) -> impl Iterator<Item = u64> + use<> {
    let mut state = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    std::iter::repeat_with(move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    })
}

#[cfg(test)]
mod tests {
    use super::Canary;

    #[test]
    fn canaries_depend_on_their_name_alone() {
        let canary = Canary::text("heap");
        assert_eq!(canary, Canary::text("heap"));
        assert_ne!(canary.bytes, Canary::text("index").bytes);
        assert_eq!(canary.as_str().len(), 32);
        assert!(canary.as_str().chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit()));
        let (stored, number) = Canary::number("id");
        assert_eq!(stored.bytes, number.to_le_bytes());
        assert_eq!(Canary::binary("b", 20).hex().len(), 40);
    }
}
