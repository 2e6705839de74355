//! Master keys in a token, and their versions.
//!
//! The master key `db-kek` is all AES keys and RSA private keys with the label (`CKA_LABEL`)
//! `db-kek`. PKCS#11 has no versions, so the id (`CKA_ID`) of each key gives its version:
//!
//! | id | version |
//! |---|---|
//! | 16 bytes: a number in 8 bytes, then 8 random bytes | the number |
//! | a number in at most 8 bytes | the number |
//! | anything else, also none | 1 |
//!
//! Numbers are from 1 to 4294967295, and their most significant byte is the first.
//!
//! Rotation makes ids of the first form. Their random part keeps keys apart that two servers make
//! at the same time: both keys have the same version, and a wrapped key names the whole id. The
//! second form is that of `pkcs11-tool --id 02`.

use std::cmp::Reverse;

use cryptoki::object::{Attribute, AttributeType, KeyType, ObjectClass, ObjectHandle};
use cryptoki::session::Session;
use pagevault_cipher::secret::fill_random;
use pagevault_keystore::protocol::ErrorClass;

use super::failure::{self, Doing};
use crate::failure::Failure;
use crate::options::printable;
use crate::trust::insecure;

/// Shortest modulus of an RSA key in bits (NIST SP 800-131A).
const RSA_BITS: usize = 2048;

/// Largest number that an id can contain.
const LAST_VERSION: u64 = u32::MAX as u64;

/// Length of the ids that rotation makes.
const OUR_ID: usize = 16;

/// The kind of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Aes,
    Rsa,
}

/// One version of a master key.
#[derive(Debug, Clone)]
pub(super) struct Key {
    /// The secret key or private key.
    pub(super) handle: ObjectHandle,
    /// Its `CKA_ID`.
    pub(super) id: Vec<u8>,
    pub(super) version: u64,
    pub(super) kind: Kind,
    /// Length of the key in bits, if the token tells.
    pub(super) bits: Option<usize>,
    /// Of an RSA key.
    modulus: Option<Vec<u8>>,
    /// Attributes that the token has told.
    flags: Vec<(AttributeType, bool)>,
}

impl Key {
    /// Whether an attribute is known to be true.
    pub(super) fn is(&self, attribute: AttributeType) -> bool {
        self.flags.contains(&(attribute, true))
    }

    /// Whether an attribute is known to be false.
    pub(super) fn is_not(&self, attribute: AttributeType) -> bool {
        self.flags.contains(&(attribute, false))
    }

    /// Whether a use is not known to be forbidden. A token that does not tell may still refuse.
    pub(super) fn may(&self, attribute: AttributeType) -> bool {
        !self.is_not(attribute)
    }

    /// Refuses a key that could leave the token.
    ///
    /// # Errors
    /// `insecure`.
    pub(super) fn stays_in_token(&self, name: &str) -> Result<(), Failure> {
        let stays = self.is_not(AttributeType::Extractable);
        if self.is(AttributeType::Sensitive) && stays {
            return Ok(());
        }
        let reason = if stays { "CKA_SENSITIVE is false" } else { "CKA_EXTRACTABLE is true" };
        Err(insecure(format!("key \"{}\" can leave the token", printable(name)))
            .with_detail(format!("Its {reason}. Keys that it has wrapped can still be unwrapped."))
            .with_hint("Make a new key that is sensitive and not extractable (docs/pkcs11.md), and move to it with set_cluster_master_key() or set_database_master_key()."))
    }

    /// Kind, length, and what protects it.
    pub(super) fn describe(&self) -> String {
        let bits = self.bits.map_or(String::new(), |bits| format!("-{bits}"));
        let kind = match self.kind {
            Kind::Aes => "AES",
            Kind::Rsa => "RSA",
        };
        // PKCS#11 3.0 section 4.9: both are false for ever once a key has been outside.
        let history = if self.is(AttributeType::AlwaysSensitive)
            && self.is(AttributeType::NeverExtractable)
        {
            "never outside a token"
        } else {
            "imported, or extractable in the past"
        };
        format!("{kind}{bits}, sensitive, not extractable, {history}")
    }
}

/// All versions of a master key, newest first.
///
/// # Errors
/// `key_missing` if there is none.
pub(super) fn find(session: &Session, name: &str) -> Result<Vec<Key>, Failure> {
    if name.is_empty() {
        return Err(Failure::new(ErrorClass::BadRequest, "the name of the key is empty")
            .with_detail("Keys without a label cannot be used.")
            .with_hint("Specify the key's label (CKA_LABEL)."));
    }
    let mut keys = Vec::new();
    for class in [ObjectClass::SECRET_KEY, ObjectClass::PRIVATE_KEY] {
        let template = [
            Attribute::Token(true),
            Attribute::Class(class),
            Attribute::Label(name.as_bytes().to_vec()),
        ];
        let found = session.find_objects(&template);
        for handle in found.map_err(|error| failure::of(&error, Doing::FindKey))? {
            keys.extend(examine(session, handle)?);
        }
    }
    keys.sort_by_key(|key| (Reverse(key.version), Reverse(key.id.clone())));
    if keys.is_empty() {
        let shown = printable(name);
        return Err(Failure::new(ErrorClass::KeyMissing, format!("token has no key \"{shown}\""))
            .with_detail("It has no AES key and no RSA private key with this label that its user can see.")
            .with_hint("Check the key's name, which is its label (CKA_LABEL). To make a key, see docs/pkcs11.md."));
    }
    Ok(keys)
}

/// The key that wraps.
///
/// # Errors
/// `bad_options` if it cannot be told which of several is the newest.
pub(super) fn newest<'a>(keys: &'a [Key], name: &str) -> Result<&'a Key, Failure> {
    let shown = printable(name);
    let Some((first, others)) = keys.split_first() else {
        return Err(Failure::new(ErrorClass::Internal, "key has no version"));
    };
    let rivals: Vec<&Key> = others.iter().filter(|key| key.version == first.version).collect();
    // Keys that two servers made at the same time are equally good, and have different ids.
    let mut all = rivals.iter().copied().chain([first]);
    if rivals.is_empty() || all.all(|key| is_ours(&key.id)) && rivals[0].id != first.id {
        return Ok(first);
    }
    let ids: Vec<String> = rivals.iter().chain([&first]).map(|key| hexadecimal(&key.id)).collect();
    Err(Failure::new(
        ErrorClass::BadOptions,
        format!("several keys have the label \"{shown}\" and the version {}", first.version),
    )
    .with_detail(format!("Their ids (CKA_ID) are {}.", ids.join(", ")))
    .with_hint("Give the key that is to wrap a higher number as id, for example 02, or another label. Keep keys that have wrapped something: existing wrapped keys name the id."))
}

/// The keys with the id of a wrapped key. There may be several, which cannot be told apart.
///
/// # Errors
/// `key_missing` if there is none.
pub(super) fn with_id<'a>(
    keys: &'a [Key],
    id: &[u8],
    kind: Kind,
    name: &str,
) -> Result<Vec<&'a Key>, Failure> {
    let found: Vec<&Key> = keys.iter().filter(|key| key.id == id && key.kind == kind).collect();
    if !found.is_empty() {
        return Ok(found);
    }
    let name = printable(name);
    let message = format!("token no longer has the version of key \"{name}\" that wrapped it");
    Err(Failure::new(ErrorClass::KeyMissing, message)
        .with_detail(format!(
            "It was wrapped by the key with id {}; the token has keys of this name with other ids.",
            hexadecimal(id)
        ))
        .with_hint("Restore this version of the key from a backup of the token."))
}

/// The public key that belongs to an RSA key. It must have the same modulus: in many tokens a
/// public key can be made without a login, and what it wraps could be unwrapped elsewhere.
///
/// # Errors
/// `key_missing` if the token has none.
pub(super) fn public_key(
    session: &Session,
    key: &Key,
    name: &str,
) -> Result<ObjectHandle, Failure> {
    let missing = |detail: &str| {
        let message = format!("token has no public key for key \"{}\"", printable(name));
        Failure::new(ErrorClass::KeyMissing, message)
            .with_detail(detail)
            .with_hint("The public key must have the same label, id and modulus as the private key. Make the key pair as in docs/pkcs11.md.")
    };
    let modulus = key.modulus.as_ref();
    let modulus =
        modulus.ok_or_else(|| missing("The token does not show the private key's modulus."))?;
    let template = [
        Attribute::Token(true),
        Attribute::Class(ObjectClass::PUBLIC_KEY),
        Attribute::Id(key.id.clone()),
        Attribute::Modulus(modulus.clone()),
    ];
    let found = session.find_objects(&template);
    let found = found.map_err(|error| failure::of(&error, Doing::FindKey))?;
    for handle in found {
        // Not left to the token's search.
        let seen = session.get_attributes(handle, &[AttributeType::Modulus]);
        let seen = seen.map_err(|error| failure::of(&error, Doing::FindKey))?;
        if let Some(Attribute::Modulus(seen)) = seen.first()
            && seen == modulus
        {
            return Ok(handle);
        }
    }
    Err(missing("No public key has its id and modulus."))
}

/// The version that an id gives.
pub(super) fn version_of(id: &[u8]) -> u64 {
    numbered(id).unwrap_or(1)
}

/// The number in an id of one of the two forms.
fn numbered(id: &[u8]) -> Option<u64> {
    let digits = if id.len() == OUR_ID { id.get(..8)? } else { id };
    if digits.len() > 8 {
        return None;
    }
    let number = digits.iter().fold(0, |number: u64, digit| number << 8 | u64::from(*digit));
    (1..=LAST_VERSION).contains(&number).then_some(number)
}

/// Whether rotation made an id.
fn is_ours(id: &[u8]) -> bool {
    id.len() == OUR_ID && numbered(id).is_some()
}

/// A new id for a version.
///
/// # Errors
/// `denied` if there is no higher number, `internal` without random bytes.
pub(super) fn new_id(version: u64) -> Result<Vec<u8>, Failure> {
    if version > LAST_VERSION {
        return Err(Failure::new(ErrorClass::Denied, "key has no further version number"));
    }
    let mut id = vec![0; OUR_ID];
    id[..8].copy_from_slice(&version.to_be_bytes());
    fill_random(&mut id[8..])
        .map_err(|error| Failure::new(ErrorClass::Internal, format!("no random bytes: {error}")))?;
    Ok(id)
}

/// An id for messages and for command lines.
pub(super) fn hexadecimal(id: &[u8]) -> String {
    if id.is_empty() {
        return "(none)".to_owned();
    }
    id.iter().take(32).map(|byte| format!("{byte:02x}")).collect()
}

/// Attributes that are read of each key. Tokens need not have all of them.
const FLAGS: &[AttributeType] = &[
    AttributeType::Sensitive,
    AttributeType::Extractable,
    AttributeType::AlwaysSensitive,
    AttributeType::NeverExtractable,
    AttributeType::Encrypt,
    AttributeType::Decrypt,
    AttributeType::Wrap,
    AttributeType::Unwrap,
];

/// Reads the attributes of a key. `None` for a key of a kind that is not supported.
fn examine(session: &Session, handle: ObjectHandle) -> Result<Option<Key>, Failure> {
    let mut asked = vec![AttributeType::KeyType, AttributeType::Id];
    asked.extend([AttributeType::ValueLen, AttributeType::Modulus]);
    asked.extend(FLAGS);
    let read = session.get_attributes(handle, &asked);
    let read = read.map_err(|error| failure::of(&error, Doing::FindKey))?;
    let (mut id, mut kind, mut length, mut modulus) = (Vec::new(), None, None, None);
    let mut flags = Vec::new();
    for attribute in read {
        let name = attribute.attribute_type();
        match attribute {
            Attribute::Id(value) => id = value,
            Attribute::KeyType(KeyType::AES) => kind = Some(Kind::Aes),
            Attribute::KeyType(KeyType::RSA) => kind = Some(Kind::Rsa),
            Attribute::ValueLen(bytes) => length = usize::try_from(*bytes).ok(),
            Attribute::Modulus(bytes) if !bytes.is_empty() => modulus = Some(bytes),
            Attribute::Sensitive(value)
            | Attribute::Extractable(value)
            | Attribute::AlwaysSensitive(value)
            | Attribute::NeverExtractable(value)
            | Attribute::Encrypt(value)
            | Attribute::Decrypt(value)
            | Attribute::Wrap(value)
            | Attribute::Unwrap(value) => flags.push((name, value)),
            _ => {}
        }
    }
    let Some(kind) = kind else { return Ok(None) };
    let bits = match kind {
        Kind::Aes => length.map(|bytes| 8 * bytes),
        Kind::Rsa => modulus.as_deref().map(bit_length),
    };
    // A wrapped key has one byte for the length of the id.
    let usable = id.len() <= usize::from(u8::MAX)
        && (kind != Kind::Rsa || bits.is_none_or(|bits| bits >= RSA_BITS));
    let version = version_of(&id);
    Ok(usable.then_some(Key { handle, id, version, kind, bits, modulus, flags }))
}

/// Length of a number in bits.
fn bit_length(number: &[u8]) -> usize {
    let digits = &number[number.iter().take_while(|digit| **digit == 0).count()..];
    digits.first().map_or(0, |first| 8 * digits.len() - first.leading_zeros() as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_give_versions() {
        for (id, version) in [
            (&b""[..], 1),
            (b"\x01", 1),
            (b"\x02", 2),
            (b"\x00\x10", 16),
            (b"\0\0\0\0\0\0\0\x07", 7),
            (b"\0\0\0\0\xff\xff\xff\xff", LAST_VERSION),
            // Too large to be a number: a name, a random id.
            (b"\0\0\0\x01\0\0\0\0", 1),
            (b"db-kek", 1),
            (b"\0", 1),
            (&[0x5a; 8], 1),
            (&[0x5a; 16], 1),
            (&[0; 16], 1),
            (&[0; 9], 1),
            (b"\0\0\0\0\0\0\0\x03........", 3),
            (b"\0\0\0\0\0\0\0\x03.........", 1),
        ] {
            assert_eq!(version_of(id), version, "{id:?}");
        }
    }

    #[test]
    fn new_ids_differ_and_give_their_version() {
        for version in [1, 2, 300, LAST_VERSION] {
            let (one, other) = (new_id(version).unwrap(), new_id(version).unwrap());
            assert_eq!((version_of(&one), is_ours(&one)), (version, true));
            assert_ne!(one, other);
        }
        assert_eq!(new_id(LAST_VERSION + 1).unwrap_err().class, ErrorClass::Denied);
    }

    #[test]
    fn numbers_have_a_length_in_bits() {
        assert_eq!(bit_length(&[]), 0);
        assert_eq!(bit_length(&[0, 0]), 0);
        assert_eq!(bit_length(&[1]), 1);
        assert_eq!(bit_length(&[0, 0x80, 0]), 16);
        assert_eq!(bit_length(&[0x7f; 256]), 2047);
    }
}
