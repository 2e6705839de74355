//! The files that `pagevault-keyring escrow` writes beside the key files: which database keys are
//! in escrow, and wrappings made by a restore while the server was down.
//!
//! The mark, a text file named `escrow`:
//!
//! ```text
//! pagevault escrow 2
//! keystore <32 hexadecimal digits>
//! made <seconds since 1970>
//! key <scope> <version> <check value>     one line for each database key in the bundle
//! end <CRC-32C of all lines before, 8 hexadecimal digits>
//! ```
//!
//! A check value has 32 hexadecimal digits.
//!
//! A restore, a file named `restored`:
//!
//! ```text
//!  0  magic     "pvrest1\n"
//!  8  keystore  16 bytes
//! 24  a batch of records (see `batch`): providers, and the database keys as they have wrapped them
//! ```
//!
//! Readers of the keystore apply these records after the cluster's log. The server writes them to
//! its log and, as soon as it may write WAL, to WAL; then it removes the file.

use std::collections::BTreeMap;
use std::fmt::Write;

use pagevault_cipher::KeyVersion;

use crate::error::{FormatError, Problem};
use crate::line::{hex, unhex};
use crate::scope::Scope;
use crate::{CheckValue, Record, batch};

/// Name of the mark's file.
pub const MARK: &str = "escrow";
/// Name of the file of a restore that the server has not logged yet.
pub const RESTORED: &str = "restored";
/// Largest size of either file, in bytes.
pub const LIMIT: u64 = 16 << 20;

const FIRST_LINE: &str = "pagevault escrow 2";
const MAGIC: [u8; 8] = *b"pvrest1\n";
const HEADER: usize = 24;

/// Contents of the newest bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// The keystore of the keys.
    pub keystore: [u8; 16],
    /// Seconds since 1970.
    pub made: i64,
    /// Scope and version of each database key, and its check value: a crash may take a key back,
    /// and its version be given to another one.
    pub keys: BTreeMap<(Scope, KeyVersion), CheckValue>,
}

impl Mark {
    /// The contents of the file.
    pub fn encode(&self) -> String {
        let id = u128::from_be_bytes(self.keystore);
        let mut text = format!("{FIRST_LINE}\nkeystore {id:032x}\nmade {}\n", self.made);
        for ((scope, version), check) in &self.keys {
            // Writing to a string does not fail.
            let _ = writeln!(text, "key {scope} {version} {}", hex(check.as_bytes()));
        }
        let checksum = crc32c::crc32c(text.as_bytes());
        let _ = writeln!(text, "end {checksum:08x}");
        text
    }

    /// Whether this key is in the bundle.
    #[must_use]
    pub fn contains(&self, scope: Scope, version: KeyVersion, check: CheckValue) -> bool {
        self.keys.get(&(scope, version)) == Some(&check)
    }

    /// Reads the file. `None` if it is damaged or of another version; then no key counts as
    /// escrowed.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        let (before, checksum) = text.strip_suffix('\n')?.rsplit_once("\nend ")?;
        let body = bytes.get(..=before.len())?;
        if u32::from_str_radix(checksum, 16).ok()? != crc32c::crc32c(body) {
            return None;
        }
        let mut lines = before.lines();
        (lines.next()? == FIRST_LINE).then_some(())?;
        let keystore = lines.next()?.strip_prefix("keystore ")?;
        let keystore = u128::from_str_radix(keystore, 16).ok()?.to_be_bytes();
        let made = lines.next()?.strip_prefix("made ")?.parse().ok()?;
        let key = |line: &str| {
            let (scope, rest) = line.strip_prefix("key ")?.split_once(' ')?;
            let (version, check) = rest.split_once(' ')?;
            let place =
                (Scope::from_number(scope.parse().ok()?), KeyVersion::new(version.parse().ok()?)?);
            Some((place, CheckValue::from_bytes(unhex(check)?)))
        };
        let keys = lines.map(key).collect::<Option<_>>()?;
        Some(Self { keystore, made, keys })
    }
}

/// Wrappings made while the server was down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restored {
    /// The keystore of the keys.
    pub keystore: [u8; 16],
    /// Providers and database keys.
    pub records: Vec<Record>,
}

impl Restored {
    /// The contents of the file.
    ///
    /// # Errors
    /// If a record exceeds its limits.
    pub fn encode(&self) -> Result<Vec<u8>, FormatError> {
        let batch = batch::encode(&self.records)?;
        Ok([MAGIC.as_slice(), &self.keystore, &batch].concat())
    }

    /// Reads the file.
    ///
    /// # Errors
    /// If it is damaged, or holds records of another kind.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let not_one = FormatError { offset: 0, problem: Problem::Magic };
        let Some((head, batch)) = bytes.split_at_checked(HEADER) else { return Err(not_one) };
        let Some(id) = head.strip_prefix(&MAGIC) else { return Err(not_one) };
        let keystore = id.try_into().map_err(|_| not_one.clone())?;
        let records = batch::decode(batch)?;
        let fits = |r: &Record| matches!(r, Record::Provider { .. } | Record::DatabaseKey { .. });
        if records.iter().all(fits) { Ok(Self { keystore, records }) } else { Err(not_one) }
    }
}
