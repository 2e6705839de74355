//! The text of a key file, format version 1.
//!
//! ```json
//! {
//!   "pagevault_key_file": 1,
//!   "keys": {
//!     "main": {
//!       "versions": [
//!         { "version": 1, "created": 1767225600, "key": "<base64 of 32 bytes>" }
//!       ]
//!     }
//!   },
//!   "crc32c": "8a2be1f0"
//! }
//! ```
//!
//! `created` is in seconds since 1970. Versions count up from 1 and are never removed. `crc32c` is
//! the CRC-32C (RFC 3720, appendix B.4) of the value of `keys` as compact JSON. It distinguishes a
//! damaged file from a wrong one, and does not protect against an attacker, who can compute it too.

use std::collections::BTreeMap;
use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pagevault_cipher::Secret32;
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use zeroize::Zeroizing;

/// The format version that this program writes, and the only one that it reads.
pub const FORMAT_VERSION: u32 = 1;

/// Largest key file in bytes (1 MiB, some ten thousand versions).
pub const SIZE_LIMIT: usize = 1 << 20;

/// Longest key name in bytes.
pub const NAME_LIMIT: usize = 255;

/// Why a text is not a key file. Contains positions only, never content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FormatError {
    /// Empty: creating the file was interrupted.
    Empty,
    /// Not JSON, or not of the expected form.
    Malformed {
        /// Line, from 1.
        line: usize,
        /// Column, from 1; 0 if unknown.
        column: usize,
    },
    /// Written by a newer program.
    Version(u32),
    /// The checksum does not match.
    Checksum,
    /// Version numbers that do not increase from at least 1, a key without versions, or an invalid
    /// name.
    Inconsistent,
    /// More than [`SIZE_LIMIT`] bytes.
    TooLarge,
}

/// Master keys by name.
#[derive(Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct KeyFile {
    keys: BTreeMap<String, Key>,
}

/// One master key: its versions, oldest first, never empty.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    versions: Vec<KeyVersion>,
}

/// One version of a master key.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyVersion {
    /// Number, from 1.
    pub version: u64,
    /// Seconds since 1970.
    pub created: i64,
    /// The key.
    #[serde(rename = "key", serialize_with = "encode_key", deserialize_with = "decode_key")]
    pub secret: Secret32,
}

impl Key {
    /// All versions, oldest first.
    pub fn versions(&self) -> &[KeyVersion] {
        &self.versions
    }

    /// The version that is used for wrapping.
    pub fn newest(&self) -> Option<&KeyVersion> {
        self.versions.last()
    }

    /// The version with this number.
    pub fn version(&self, number: u64) -> Option<&KeyVersion> {
        self.versions.iter().find(|version| version.version == number)
    }
}

impl KeyFile {
    /// The key with this name.
    pub fn key(&self, name: &str) -> Option<&Key> {
        self.keys.get(name)
    }

    /// All keys, sorted by name.
    pub fn keys(&self) -> impl Iterator<Item = (&str, &Key)> {
        self.keys.iter().map(|(name, key)| (name.as_str(), key))
    }

    /// Adds a version with a new random key to the key `name`, which is created if it does not
    /// exist, and returns the number of the version. `None` if there is no higher number.
    ///
    /// # Errors
    /// If the operating system provides no random bytes.
    pub fn add_version(
        &mut self,
        name: &str,
    ) -> Result<Option<u64>, pagevault_cipher::secret::RandomError> {
        let secret = Secret32::random()?;
        let last = self.key(name).and_then(Key::newest).map_or(0, |newest| newest.version);
        let Some(version) = last.checked_add(1) else { return Ok(None) };
        let key = self.keys.entry(name.to_owned()).or_default();
        key.versions.push(KeyVersion { version, created: now(), secret });
        Ok(Some(version))
    }

    /// Reads a key file's text.
    pub fn decode(text: &[u8]) -> Result<KeyFile, FormatError> {
        // Accepts unknown fields: a later version may have more, and must still be reported as
        // such.
        #[derive(Deserialize)]
        struct Versioned {
            pagevault_key_file: u32,
        }
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct File {
            #[serde(rename = "pagevault_key_file")]
            _version: u32,
            keys: KeyFile,
            crc32c: String,
        }
        if text.is_empty() {
            return Err(FormatError::Empty);
        }
        if text.len() > SIZE_LIMIT {
            return Err(FormatError::TooLarge);
        }
        let versioned: Versioned = serde_json::from_slice(text).map_err(malformed)?;
        if versioned.pagevault_key_file != FORMAT_VERSION {
            return Err(FormatError::Version(versioned.pagevault_key_file));
        }
        let file: File = serde_json::from_slice(text).map_err(malformed)?;
        if file.keys.checksum()? != file.crc32c {
            return Err(FormatError::Checksum);
        }
        if !file.keys.consistent() {
            return Err(FormatError::Inconsistent);
        }
        Ok(file.keys)
    }

    /// The file's text, in memory that is wiped.
    pub fn encode(&self) -> Result<Zeroizing<Vec<u8>>, FormatError> {
        #[derive(Serialize)]
        struct File<'a> {
            pagevault_key_file: u32,
            keys: &'a KeyFile,
            crc32c: String,
        }
        let file =
            File { pagevault_key_file: FORMAT_VERSION, keys: self, crc32c: self.checksum()? };
        // The length is computed first: a vector that grows leaves copies of keys behind.
        let mut length = Length(1);
        serde_json::to_writer_pretty(&mut length, &file).map_err(malformed)?;
        if length.0 > SIZE_LIMIT {
            return Err(FormatError::TooLarge);
        }
        let mut text = Zeroizing::new(Vec::with_capacity(length.0));
        serde_json::to_writer_pretty(&mut *text, &file).map_err(malformed)?;
        text.push(b'\n');
        Ok(text)
    }

    fn checksum(&self) -> Result<String, FormatError> {
        let mut crc = Crc(0);
        serde_json::to_writer(&mut crc, self).map_err(malformed)?;
        Ok(format!("{:08x}", crc.0))
    }

    fn consistent(&self) -> bool {
        self.keys.iter().all(|(name, key)| {
            valid_name(name)
                && key.versions.first().is_some_and(|first| first.version >= 1)
                && key.versions.is_sorted_by(|a, b| a.version < b.version)
        })
    }
}

/// Whether `name` may name a key: 1 to [`NAME_LIMIT`] bytes, no control character.
pub fn valid_name(name: &str) -> bool {
    (1..=NAME_LIMIT).contains(&name.len()) && !name.chars().any(char::is_control)
}

/// Keeps the position and drops the text: serde_json quotes the value, which may be a key.
fn malformed(error: serde_json::Error) -> FormatError {
    FormatError::Malformed { line: error.line(), column: error.column() }
}

/// Seconds since 1970; 0 if the clock is before that.
fn now() -> i64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH);
    elapsed.ok().and_then(|elapsed| elapsed.as_secs().try_into().ok()).unwrap_or(0)
}

/// Length of the base64 of 32 bytes.
const KEY_TEXT: usize = 44;

fn encode_key<S: Serializer>(key: &Secret32, serializer: S) -> Result<S::Ok, S::Error> {
    let mut text = Zeroizing::new(String::with_capacity(KEY_TEXT));
    STANDARD.encode_string(key.expose(), &mut text);
    serializer.serialize_str(&text)
}

fn decode_key<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Secret32, D::Error> {
    struct KeyText;

    impl Visitor<'_> for KeyText {
        type Value = Secret32;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("base64 of 32 bytes")
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<Secret32, E> {
            // One byte more than a key, so that a longer key is detected.
            let mut bytes = Zeroizing::new([0; 33]);
            let wrong = || E::custom("not a key");
            let length = STANDARD.decode_slice(text, bytes.as_mut()).map_err(|_| wrong())?;
            match bytes.first_chunk() {
                Some(key) if length == 32 => Ok(Secret32::from_bytes(key)),
                _ => Err(wrong()),
            }
        }
    }

    deserializer.deserialize_str(KeyText)
}

/// Counts bytes.
struct Length(usize);

impl io::Write for Length {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Crc(u32);

impl io::Write for Crc {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 = crc32c::crc32c_append(self.0, bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file of the documentation above; the key consists of the bytes 0 to 31.
    const GOLDEN: &str = include_str!("../../vectors/key_file_1.json");

    fn decoded(text: &str) -> Result<(), FormatError> {
        KeyFile::decode(text.as_bytes()).map(drop)
    }

    /// `GOLDEN` with another value of `keys` and the matching checksum.
    fn with_keys(keys: &str) -> String {
        let crc = crc32c::crc32c(keys.as_bytes());
        format!("{{\"pagevault_key_file\":1,\"keys\":{keys},\"crc32c\":\"{crc:08x}\"}}")
    }

    fn key(version: u64) -> String {
        let text = STANDARD.encode([7; 32]);
        format!("{{\"version\":{version},\"created\":0,\"key\":\"{text}\"}}")
    }

    #[test]
    fn version_1_is_read_and_written_byte_for_byte() {
        let file = KeyFile::decode(GOLDEN.as_bytes()).unwrap();
        let main = file.key("main").unwrap();
        let numbers: Vec<_> = main.versions().iter().map(|v| (v.version, v.created)).collect();
        assert_eq!(numbers, [(1, 1_767_225_600), (2, 1_798_761_600)]);
        let first: [u8; 32] = std::array::from_fn(|i| i as u8);
        assert!(main.version(1).unwrap().secret.matches(&first));
        assert!(main.version(3).is_none());
        assert!(file.encode().unwrap().as_slice() == GOLDEN.as_bytes());
    }

    #[test]
    fn versions_count_up_and_are_never_empty() {
        let versions = |list: &[u64]| {
            let list: Vec<String> = list.iter().map(|&version| key(version)).collect();
            decoded(&with_keys(&format!("{{\"k\":{{\"versions\":[{}]}}}}", list.join(","))))
        };
        assert_eq!(versions(&[1, 2, 5]), Ok(()));
        for bad in [&[][..], &[0], &[2, 1], &[1, 1]] {
            assert_eq!(versions(bad), Err(FormatError::Inconsistent), "{bad:?}");
        }
    }

    #[test]
    fn names_are_checked() {
        let named = |name: &str| {
            let versions = format!("{{\"versions\":[{}]}}", key(1));
            let name = serde_json::to_string(name).unwrap();
            decoded(&with_keys(&format!("{{{name}:{versions}}}")))
        };
        assert_eq!(named("arn:aws:kms/\u{e9} \""), Ok(()));
        for bad in ["", "a\nb", &"n".repeat(256)] {
            assert_eq!(named(bad), Err(FormatError::Inconsistent));
        }
    }

    #[test]
    fn keys_have_32_bytes() {
        for length in [0, 31, 33, 34, 64, 4096] {
            let text = STANDARD.encode(vec![7; length]);
            let version = format!("{{\"version\":1,\"created\":0,\"key\":\"{text}\"}}");
            let keys = format!("{{\"k\":{{\"versions\":[{version}]}}}}");
            assert!(matches!(decoded(&with_keys(&keys)), Err(FormatError::Malformed { .. })));
        }
    }

    #[test]
    fn there_is_no_version_after_the_highest_number() {
        let keys = format!("{{\"k\":{{\"versions\":[{}]}}}}", key(u64::MAX));
        let mut file = KeyFile::decode(with_keys(&keys).as_bytes()).unwrap();
        assert_eq!(file.add_version("k").unwrap(), None);
    }

    #[test]
    fn a_file_grows_up_to_its_limit() {
        let mut file = KeyFile::default();
        let mut versions = 0;
        let text = loop {
            for _ in 0..500 {
                file.add_version("k").unwrap();
            }
            match file.encode() {
                Ok(text) => {
                    versions += 500;
                    assert!(KeyFile::decode(&text).is_ok());
                }
                Err(error) => break error,
            }
        };
        assert_eq!(text, FormatError::TooLarge);
        assert!(versions >= 5000, "only {versions} versions fit");
    }
}
