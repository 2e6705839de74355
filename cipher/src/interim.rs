//! Interim keys of relation files: pages that recovery must write while the key of their key group
//! is not at hand are sealed under these.
//!
//! An interim key stands for one data key of a file. It is derived from a key of the cluster for
//! the key group by HKDF-SHA-256 (RFC 5869). The context is the database and the file number of
//! the relation, the version of the data key and its cipher. So a page under it is refused in the
//! file with the same number in another database, whose data key is another one. A raw copy in
//! another database must be sealed again.
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

/// The interim key of files of a database (OID) with this number (`RelFileNumber`), for a data key.
///
/// # Errors
/// [`KeyError`] if the derived key is one that XTS must not use; that never happens.
pub fn key(
    root: &DataKey,
    database: u32,
    relation: u32,
    data_key: DataKeyVersion,
    cipher: CipherId,
) -> Result<DataKey, KeyError> {
    let [d0, d1, d2, d3] = database.to_le_bytes();
    let [r0, r1, r2, r3] = relation.to_le_bytes();
    let [v0, v1] = data_key.get().to_le_bytes();
    let context = [d0, d1, d2, d3, r0, r1, r2, r3, v0, v1, cipher as u8];
    let mut bytes = Zeroizing::new([0; 64]);
    kdf::derive_from(root.expose(), LABEL, &context, &mut bytes);
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

    #[test]
    fn namesakes_in_other_databases_have_other_keys() {
        let root: [u8; 64] = core::array::from_fn(|at| at as u8);
        let root = DataKey::from_bytes(CipherId::Aes256Xts, &root).unwrap();
        let key = |database, relation| {
            key(&root, database, relation, version(1), CipherId::Aes256Xts).unwrap()
        };
        let here = key(5, 16384);
        assert!(here.is_same(&key(5, 16384)));
        assert!(!here.is_same(&key(6, 16384)) && !here.is_same(&key(5, 16385)));
    }

    /// Results of another implementation, cipher/vectors/kdf.py.
    #[test]
    fn keys_are_fixed() {
        let root: [u8; 64] = core::array::from_fn(|at| at as u8);
        let root = DataKey::from_bytes(CipherId::Aes256Xts, &root).unwrap();
        assert_eq!(
            key(&root, 5, 16384, version(1), CipherId::Aes256Xts).unwrap().expose(),
            hex!(
                "56a869cb9774ea01fea88e9a14cdfff068ff689a2322016a794c5a2754af0e5e"
                "9ed32346811170f64f7292fd6942bced4ed8409c962550b28ae082143de0e06d"
            )
        );
        assert_eq!(
            key(&root, 5, u32::MAX, version(7167), CipherId::Aes128Xts).unwrap().expose(),
            hex!("495a571e63f1b23468d08acc75c8c1390717b451dfa29c909d834bac922f22c0")
        );
    }
}
