//! The seal of a base backup's manifest: one line of JSON in the file [`FILE`] beside it.
//!
//! ```text
//! {"version":1,"keystore":"<32 hex>","time":"<UTC>","sha256":"<64 hex>","others":"<64 hex>",
//!  "mac_key":<version>,"mac":"<64 hex>"}
//! ```
//!
//! without spaces. `sha256` is the hash of the whole file `backup_manifest`. `others` is the
//! SHA-256 hash of one item for each of [`OTHERS`], in this order: a byte 0 if the file is missing;
//! else a byte 1 and the SHA-256 hash of its content. `mac_key` is the version of the cluster's
//! database key from which the MAC's key is derived:
//!
//! ```text
//! key = HKDF-SHA256 (RFC 5869), no salt, 32 bytes: key = the database key,
//!       label = "pagevault backup manifest v1", context = keystore id (16 bytes) | version u32,
//!       little-endian (label, context: pagevault_cipher::kdf)
//! mac = HMAC-SHA-256 of the line up to `,"mac":` (without it)
//! ```
//!
//! As in the audit trail, the text itself is verified, and never generated again.

use pagevault_cipher::{KeyVersion, Secret32, mac};
use serde::Deserialize;

use crate::audit::utc;
use crate::line::{BEFORE_MAC, hex, mac_key, unhex};

/// Its name in a backup.
pub const FILE: &str = "backup_manifest.pagevault";
/// Files that programs add to a backup, or change in it, although its manifest says otherwise. They
/// decide what a restored server does.
pub const OTHERS: [&str; 6] = [
    "postgresql.auto.conf",
    "recovery.signal",
    "standby.signal",
    "pagevault/restored",
    "pagevault/audit.tools",
    "pagevault/anchor.accepted",
];
/// Longest seal in bytes.
pub const MAX_SEAL: u64 = 1024;

const VERSION: u32 = 1;
const LABEL: &str = "pagevault backup manifest v1";

/// What is sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sealed {
    manifest: [u8; 32],
    others: [u8; 32],
}

impl Sealed {
    /// A manifest, and the contents of [`OTHERS`].
    #[must_use]
    pub fn new(manifest: &[u8], others: &[Option<Vec<u8>>; OTHERS.len()]) -> Self {
        let mut items = Vec::new();
        for content in others {
            items.push(u8::from(content.is_some()));
            items.extend(content.iter().flat_map(|content| mac::hash(content)));
        }
        Self { manifest: mac::hash(manifest), others: mac::hash(&items) }
    }
}

/// Seals a manifest with this version of the cluster's database key. `time_us` is in microseconds
/// since 1970.
#[must_use]
pub fn seal(
    sealed: &Sealed,
    keystore: &[u8; 16],
    (version, database_key): (KeyVersion, &Secret32),
    time_us: u64,
) -> String {
    let mut text = format!(
        "{{\"version\":{VERSION},\"keystore\":\"{}\",\"time\":\"{}\",\"sha256\":\"{}\",\"others\":\"{}\",\"mac_key\":{version}",
        hex(keystore),
        utc(time_us),
        hex(&sealed.manifest),
        hex(&sealed.others),
    );
    let key = key(database_key, keystore, version);
    let mac = mac::authenticate(&key, text.as_bytes());
    text.extend([BEFORE_MAC, &hex(&mac), "\"}\n"]);
    text
}

fn key(database_key: &Secret32, keystore: &[u8; 16], version: KeyVersion) -> Secret32 {
    mac_key(database_key.expose(), LABEL, keystore, version)
}

/// A parsed seal. Parsing does not authenticate it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seal<'a> {
    /// The keystore of the cluster, as stated.
    pub keystore: [u8; 16],
    /// When the manifest was sealed, as stated.
    pub time: &'a str,
    /// Version of the cluster's database key, as stated.
    pub version: KeyVersion,
    sealed: Sealed,
    body: &'a str,
    mac: [u8; 32],
}

/// Why a seal cannot be read. Repeats nothing of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// Not the JSON above.
    #[error("it is not a seal of pagevault")]
    Malformed,
    /// Of a later release.
    #[error("it has format version {0}, which this release does not know")]
    Version(u32),
}

impl<'a> Seal<'a> {
    /// Parses a seal.
    ///
    /// # Errors
    /// If it is not one, or of a later version.
    pub fn parse(text: &'a [u8]) -> Result<Self, SealError> {
        // Skips other fields: those of a later version must not prevent reading the version.
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let Versioned { version } =
            serde_json::from_slice(text).map_err(|_| SealError::Malformed)?;
        if version != VERSION {
            return Err(SealError::Version(version));
        }
        Self::of(text).ok_or(SealError::Malformed)
    }

    fn of(text: &'a [u8]) -> Option<Self> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Members<'a> {
            #[serde(rename = "version")]
            _version: u32,
            keystore: &'a str,
            time: &'a str,
            sha256: &'a str,
            others: &'a str,
            mac_key: u32,
            mac: &'a str,
        }
        let text = std::str::from_utf8(text).ok()?;
        let members: Members<'_> = serde_json::from_str(text).ok()?;
        let body = text.strip_suffix(&format!("{BEFORE_MAC}{}\"}}\n", members.mac))?;
        let is_printable = !members.time.chars().any(char::is_control);
        (is_printable && text.len() as u64 <= MAX_SEAL).then_some(())?;
        Some(Self {
            keystore: unhex(members.keystore)?,
            time: members.time,
            version: KeyVersion::new(members.mac_key)?,
            sealed: Sealed { manifest: unhex(members.sha256)?, others: unhex(members.others)? },
            body,
            mac: unhex(members.mac)?,
        })
    }

    /// Whether the holder of this version of the cluster's database key has made it.
    #[must_use]
    pub fn is_authentic(&self, database_key: &Secret32) -> bool {
        let key = key(database_key, &self.keystore, self.version);
        mac::is_authentic(&key, self.body.as_bytes(), &self.mac)
    }

    /// Whether it is for this manifest.
    #[must_use]
    pub fn has_manifest_of(&self, found: &Sealed) -> bool {
        self.sealed.manifest == found.manifest
    }

    /// Whether the other files were these.
    #[must_use]
    pub fn has_others_of(&self, found: &Sealed) -> bool {
        self.sealed.others == found.others
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYSTORE: &[u8; 16] = b"0123456789abcdef";
    const MANIFEST: &[u8] = b"{\"Files\": []}\n";

    fn others() -> [Option<Vec<u8>>; OTHERS.len()] {
        [Some(b"port = 5433\n".to_vec()), Some(Vec::new()), None, None, None, None]
    }

    fn database_key(byte: u8) -> Secret32 {
        Secret32::from_bytes(&[byte; 32])
    }

    fn sealed() -> String {
        let version = KeyVersion::new(3).unwrap();
        seal(
            &Sealed::new(MANIFEST, &others()),
            KEYSTORE,
            (version, &database_key(7)),
            1_700_000_000_123_456,
        )
    }

    /// By another program, vectors/manifest_seal.py.
    #[test]
    fn the_format_is_fixed() {
        assert_eq!(sealed(), include_str!("../vectors/manifest.seal"));
    }

    #[test]
    fn only_the_sealed_manifest_is_authentic() {
        let text = sealed();
        let seal = Seal::parse(text.as_bytes()).unwrap();
        assert_eq!((&seal.keystore, seal.version.get()), (KEYSTORE, 3));
        assert_eq!(seal.time, "2023-11-14T22:13:20.123456Z");
        assert!(seal.is_authentic(&database_key(7)) && !seal.is_authentic(&database_key(8)));
        let same = Sealed::new(MANIFEST, &others());
        assert!(seal.has_manifest_of(&same) && seal.has_others_of(&same));
        let other = Sealed::new(b"{\"Files\": [0]}\n", &others());
        assert!(!seal.has_manifest_of(&other) && seal.has_others_of(&other));
    }

    #[test]
    fn other_files_are_told_apart() {
        let contents = [None, Some(Vec::new()), Some(b"a".to_vec())];
        let mut seen = std::collections::HashSet::new();
        let count = 3_usize.pow(OTHERS.len() as u32);
        for number in 0..count {
            let other = |place| contents[number / 3_usize.pow(place as u32) % 3].clone();
            seen.insert(Sealed::new(MANIFEST, &std::array::from_fn(other)).others);
        }
        assert_eq!(seen.len(), count);
    }

    #[test]
    fn every_changed_bit_is_noticed() {
        let text = sealed().into_bytes();
        for bit in 0..8 * text.len() {
            let mut changed = text.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            let accepted =
                Seal::parse(&changed).is_ok_and(|seal| seal.is_authentic(&database_key(7)));
            assert!(!accepted, "bit {bit}");
        }
        for length in 0..text.len() {
            assert!(Seal::parse(&text[..length]).is_err());
        }
    }

    #[test]
    fn seals_of_later_releases_are_named_so() {
        let later = sealed().replace("\"version\":1", "\"version\":2,\"more\":true");
        assert_eq!(Seal::parse(later.as_bytes()), Err(SealError::Version(2)));
        let more = sealed().replace("\"version\":1", "\"version\":1,\"more\":true");
        assert_eq!(Seal::parse(more.as_bytes()), Err(SealError::Malformed));
    }
}
