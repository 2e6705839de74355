//! Interim keys of relation files: pages that recovery must write while the key of their key group
//! is not at hand are sealed under these.
//!
//! An interim key stands for one data key of a file. It is derived from a key of the cluster for
//! the key group by HKDF-SHA-256 (RFC 5869). The context is the relation's file number, the version
//! of the data key and its cipher, not the database: a raw copy of a database has the pages of its
//! original, and keeps file numbers.
//!
//! A page under such a key names one of the last versions ([`version_of`]), which no key of the
//! file itself has. These tell the cipher, and the version of the data key modulo [`RESIDUES`].

use zeroize::Zeroizing;

use crate::kdf;
use crate::key::{CipherId, DataKey, KeyError};
use crate::version::DataKeyVersion;

const LABEL: &str = "pagevault interim page v1";

/// The versions of a file's data keys under which there may be pages must be fewer: then each
/// interim version stands for one of them.
pub const RESIDUES: u16 = 256;

const _: () = assert!(
    DataKeyVersion::LAST_OF_FILE.get() + RESIDUES * CipherId::ALL.len() as u16
        == DataKeyVersion::LAST.get()
);

/// The version that pages under the interim key for this data key name.
#[must_use]
pub const fn version_of(cipher: CipherId, data_key: DataKeyVersion) -> DataKeyVersion {
    let place = (cipher as u16 - 1) * RESIDUES + data_key.get() % RESIDUES;
    match DataKeyVersion::new(DataKeyVersion::LAST_OF_FILE.get() + 1 + place) {
        Some(version) => version,
        None => DataKeyVersion::LAST,
    }
}

/// Whether pages of this version are under an interim key.
#[inline]
#[must_use]
pub const fn is_interim(version: DataKeyVersion) -> bool {
    version.get() > DataKeyVersion::LAST_OF_FILE.get()
}

/// The place among the interim versions.
fn place_of(version: DataKeyVersion) -> Option<u16> {
    version.get().checked_sub(DataKeyVersion::LAST_OF_FILE.get() + 1)
}

/// The cipher of pages of this version; `None` if they are under a key of the file itself.
#[must_use]
pub fn cipher_of(version: DataKeyVersion) -> Option<CipherId> {
    let number = place_of(version)? / RESIDUES + 1;
    CipherId::ALL.into_iter().find(|cipher| *cipher as u16 == number)
}

/// The data key for which the interim key of pages of this version stands, in a file whose last
/// data key has the version `last`; `None` if there is none.
#[must_use]
pub fn data_key_of(version: DataKeyVersion, last: DataKeyVersion) -> Option<DataKeyVersion> {
    let behind = (last.get() + RESIDUES - place_of(version)? % RESIDUES) % RESIDUES;
    DataKeyVersion::new(last.get().checked_sub(behind)?)
}

/// The interim key of files with this number (`RelFileNumber`) for a data key.
///
/// # Errors
/// [`KeyError`] if the derived key is one that XTS must not use; that never happens.
pub fn key(
    root: &DataKey,
    relation: u32,
    data_key: DataKeyVersion,
    cipher: CipherId,
) -> Result<DataKey, KeyError> {
    let [a, b, c, d] = relation.to_le_bytes();
    let [low, high] = data_key.get().to_le_bytes();
    let mut bytes = Zeroizing::new([0; 64]);
    kdf::derive_from(root.expose(), LABEL, &[a, b, c, d, low, high, cipher as u8], &mut bytes);
    DataKey::from_bytes(cipher, &bytes[..cipher.key_len()])
}

#[cfg(test)]
mod tests {
    use hex_literal::hex;

    use super::*;

    fn version(number: u16) -> DataKeyVersion {
        DataKeyVersion::new(number).unwrap()
    }

    #[test]
    fn a_version_tells_cipher_and_data_key() {
        let mut seen = Vec::new();
        for cipher in CipherId::ALL {
            for last in (1..520).step_by(7).chain([7167]) {
                for number in (last - RESIDUES.min(last) + 1).max(1)..=last {
                    let named = version_of(cipher, version(number));
                    assert!(is_interim(named) && cipher_of(named) == Some(cipher));
                    assert_eq!(data_key_of(named, version(last)), Some(version(number)));
                    seen.push(named.get());
                }
            }
        }
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, (7168..=8191).collect::<Vec<_>>());
    }

    #[test]
    fn a_data_key_that_the_file_does_not_have() {
        let named = version_of(CipherId::Aes256Xts, version(3));
        assert_eq!(data_key_of(named, version(2)), None);
        assert_eq!(data_key_of(named, version(258)), Some(version(3)));
        assert_eq!(data_key_of(named, version(259)), Some(version(259)));
        let last = DataKeyVersion::LAST_OF_FILE;
        assert!(!is_interim(last));
        assert_eq!((cipher_of(last), data_key_of(last, last)), (None, None));
    }

    /// Results of another implementation, cipher/vectors/kdf.py.
    #[test]
    fn keys_are_fixed() {
        let root: [u8; 64] = core::array::from_fn(|at| at as u8);
        let root = DataKey::from_bytes(CipherId::Aes256Xts, &root).unwrap();
        assert_eq!(
            key(&root, 16384, version(1), CipherId::Aes256Xts).unwrap().expose(),
            hex!(
                "b6d7a280873dee9e6fbd42b806afd2fe161016083239f1d720823eac4a2041d8"
                "e3dd762e98163a197f70e15c25be739036ae5bd63fa537948a350bf7797e97c7"
            )
        );
        assert_eq!(
            key(&root, u32::MAX, version(7167), CipherId::Aes128Xts).unwrap().expose(),
            hex!("374acec45581b0347e16a7758deb91aa1b7d3f1886d4279b111dcba9d3c2041e")
        );
    }
}
