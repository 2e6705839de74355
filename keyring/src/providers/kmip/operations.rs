//! The operations: what is asked, and what the answers must contain. An answer with anything
//! missing, or about another key, is not an answer.

use zeroize::Zeroizing;

use super::attributes::{Attributes, Given, identifier};
use super::message::Version;
use super::names::{self, Operation, tag};
use super::ttlv::{Items, Malformed, Value, Writer};

/// Maximum number of keys with one name that are looked at.
pub(super) const LOCATE_LIMIT: usize = 64;

/// Maximum number of operations that a server may name.
const OPERATION_LIMIT: usize = 1024;

/// How the server encrypts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cipher<'a> {
    /// AES-GCM, with this as additional data; otherwise AES-CBC without padding.
    pub(super) gcm: Option<&'a [u8]>,
    /// Initialization vector or nonce; if there is none, the server chooses it.
    pub(super) iv: Option<&'a [u8]>,
}

/// Length of a tag of AES-GCM.
pub(super) const TAG: usize = 16;

/// A request for an operation.
pub(super) enum Call<'a> {
    DiscoverVersions,
    Query,
    /// Keys with this name.
    Locate(&'a str),
    GetAttributes(&'a str),
    Encrypt {
        id: &'a str,
        cipher: Cipher<'a>,
        data: &'a [u8],
    },
    Decrypt {
        id: &'a str,
        cipher: Cipher<'a>,
        data: &'a [u8],
        tag: &'a [u8],
    },
    ReKey(&'a str),
    Create(&'a [Given<'a>]),
    Activate(&'a str),
    AddAttribute {
        id: &'a str,
        given: Given<'a>,
    },
}

impl Call<'_> {
    pub(super) fn operation(&self) -> Operation {
        match self {
            Call::DiscoverVersions => Operation::DiscoverVersions,
            Call::Query => Operation::Query,
            Call::Locate(_) => Operation::Locate,
            Call::GetAttributes(_) => Operation::GetAttributes,
            Call::Encrypt { .. } => Operation::Encrypt,
            Call::Decrypt { .. } => Operation::Decrypt,
            Call::ReKey(_) => Operation::ReKey,
            Call::Create(_) => Operation::Create,
            Call::Activate(_) => Operation::Activate,
            Call::AddAttribute { .. } => Operation::AddAttribute,
        }
    }

    /// Writes the payload.
    pub(super) fn write(&self, version: Version, payload: &mut Writer) {
        let id = |payload: &mut Writer, id: &str| {
            payload.put(tag::UNIQUE_IDENTIFIER, Value::Text(id));
        };
        match *self {
            Call::DiscoverVersions => Version::ALL.iter().for_each(|one| one.write(payload)),
            Call::Query => {
                for function in [names::QUERY_OPERATIONS, names::QUERY_SERVER] {
                    payload.put(tag::QUERY_FUNCTION, Value::Enumeration(function));
                }
            }
            Call::Locate(name) => {
                payload.put(tag::MAXIMUM_ITEMS, Value::Integer(LOCATE_LIMIT as i32 + 1));
                let given = [Given::SymmetricKey, Given::Name(name)];
                grouped(payload, version, tag::ATTRIBUTES, None, &given);
            }
            Call::GetAttributes(of) | Call::ReKey(of) | Call::Activate(of) => id(payload, of),
            Call::Encrypt { id: of, cipher, data } => {
                id(payload, of);
                cipher.write(payload, data, true);
            }
            Call::Decrypt { id: of, cipher, data, tag } => {
                id(payload, of);
                cipher.write(payload, data, false);
                if cipher.gcm.is_some() {
                    payload.put(tag::AUTHENTICATION_TAG, Value::Bytes(tag));
                }
            }
            Call::Create(given) => {
                payload.put(tag::OBJECT_TYPE, Value::Enumeration(names::SYMMETRIC_KEY));
                grouped(payload, version, tag::ATTRIBUTES, Some(tag::TEMPLATE_ATTRIBUTE), given);
            }
            Call::AddAttribute { id: of, given } => {
                id(payload, of);
                grouped(payload, version, tag::NEW_ATTRIBUTE, None, &[given]);
            }
        }
    }
}

/// Writes attributes into the structure `newer` from KMIP 2 on, and before it into `older`.
fn grouped(
    payload: &mut Writer,
    version: Version,
    newer: super::ttlv::Tag,
    older: Option<super::ttlv::Tag>,
    given: &[Given<'_>],
) {
    let all = |writer: &mut Writer| given.iter().for_each(|one| one.write(version, writer));
    match if version.has_fields() { Some(newer) } else { older } {
        Some(parent) => payload.structure(parent, all),
        None => all(payload),
    }
}

impl Cipher<'_> {
    fn write(&self, payload: &mut Writer, data: &[u8], encrypts: bool) {
        payload.structure(tag::CRYPTOGRAPHIC_PARAMETERS, |parameters| {
            let mode = if self.gcm.is_some() { names::GCM } else { names::CBC };
            parameters.put(tag::BLOCK_CIPHER_MODE, Value::Enumeration(mode));
            if self.gcm.is_none() {
                parameters.put(tag::PADDING_METHOD, Value::Enumeration(names::UNPADDED));
            }
            parameters.put(tag::CRYPTOGRAPHIC_ALGORITHM, Value::Enumeration(names::AES));
            if encrypts && self.iv.is_none() {
                parameters.put(tag::RANDOM_IV, Value::Boolean(true));
            }
            if self.gcm.is_some() {
                parameters.put(tag::TAG_LENGTH, Value::Integer(TAG as i32));
            }
        });
        payload.put(tag::DATA, Value::Bytes(data));
        if let Some(iv) = self.iv {
            payload.put(tag::IV, Value::Bytes(iv));
        }
        if let Some(bound) = self.gcm {
            payload.put(tag::ADDITIONAL_DATA, Value::Bytes(bound));
        }
    }
}

/// What the server can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Abilities {
    operations: Vec<u32>,
    /// The vendor's name for it, possibly empty.
    pub(super) vendor: String,
}

impl Abilities {
    pub(super) fn has(&self, operation: Operation) -> bool {
        self.operations.contains(&(operation as u32))
    }
}

/// The result of Encrypt.
pub(super) struct Encrypted {
    pub(super) data: Vec<u8>,
    /// The initialization vector that the server chose.
    pub(super) iv: Option<Vec<u8>>,
    pub(super) tag: Option<Vec<u8>>,
}

const INCOMPLETE: Malformed = Malformed("something is missing in it, or has another type");

/// Reads the answer to Discover Versions: versions that both sides know, the newest first.
pub(super) fn versions(payload: Items<'_>) -> Vec<Version> {
    let told = |version: Version| {
        let mut all = payload.all(tag::PROTOCOL_VERSION);
        all.any(|value| {
            matches!(value, Value::Structure(items) if Version::read(items) == Some(version))
        })
    };
    Version::ALL.into_iter().filter(|version| told(*version)).collect()
}

/// Reads the answer to Query.
pub(super) fn abilities(payload: Items<'_>) -> Result<Abilities, Malformed> {
    let mut operations = Vec::new();
    for value in payload.all(tag::OPERATION) {
        let Value::Enumeration(number) = value else { return Err(INCOMPLETE) };
        if operations.len() == OPERATION_LIMIT {
            return Err(Malformed("it names too many operations"));
        }
        operations.push(number);
    }
    let vendor = payload.text(tag::VENDOR_IDENTIFICATION).unwrap_or_default().to_owned();
    Ok(Abilities { operations, vendor })
}

/// Reads the answer to Locate: at most one more than [`LOCATE_LIMIT`].
pub(super) fn located(payload: Items<'_>) -> Result<Vec<String>, Malformed> {
    let mut found = Vec::new();
    for value in payload.all(tag::UNIQUE_IDENTIFIER).take(LOCATE_LIMIT + 1) {
        let Value::Text(id) = value else { return Err(INCOMPLETE) };
        found.push(identifier(id).ok_or(INCOMPLETE)?);
    }
    Ok(found)
}

/// The unique identifier of a new key.
pub(super) fn made(payload: Items<'_>) -> Result<String, Malformed> {
    payload.text(tag::UNIQUE_IDENTIFIER).and_then(identifier).ok_or(INCOMPLETE)
}

/// Fails unless the answer is about the key `id`.
pub(super) fn about(payload: Items<'_>, id: &str) -> Result<(), Malformed> {
    match payload.text(tag::UNIQUE_IDENTIFIER) {
        Some(other) if other != id => Err(Malformed("it is about another key")),
        Some(_) => Ok(()),
        None => Err(INCOMPLETE),
    }
}

/// Reads the answer to Get Attributes.
pub(super) fn attributes(
    payload: Items<'_>,
    version: Version,
    id: &str,
) -> Result<Attributes, Malformed> {
    about(payload, id)?;
    Attributes::read(payload, version).ok_or(INCOMPLETE)
}

/// Reads the answer to Encrypt.
pub(super) fn encrypted(payload: Items<'_>, id: &str) -> Result<Encrypted, Malformed> {
    about(payload, id)?;
    Ok(Encrypted {
        data: payload.bytes(tag::DATA).ok_or(INCOMPLETE)?.to_vec(),
        iv: payload.bytes(tag::IV).map(<[u8]>::to_vec),
        tag: payload.bytes(tag::AUTHENTICATION_TAG).map(<[u8]>::to_vec),
    })
}

/// Reads the answer to Decrypt.
pub(super) fn decrypted(payload: Items<'_>, id: &str) -> Result<Zeroizing<Vec<u8>>, Malformed> {
    about(payload, id)?;
    Ok(Zeroizing::new(payload.bytes(tag::DATA).ok_or(INCOMPLETE)?.to_vec()))
}

/// Reads arbitrary bytes as the reply to each operation in each version. For fuzzing.
pub fn read_anything(bytes: &[u8]) {
    use super::message::read_reply;
    for version in Version::ALL {
        let payload = |operation| {
            let reply = read_reply(bytes, version, operation).ok()?;
            reply.result.ok()
        };
        if let Some(payload) = payload(Operation::DiscoverVersions) {
            assert!(versions(payload).len() <= Version::ALL.len());
        }
        if let Some(Ok(told)) = payload(Operation::Query).map(abilities) {
            assert!(told.operations.len() <= OPERATION_LIMIT);
        }
        if let Some(Ok(found)) = payload(Operation::Locate).map(located) {
            assert!(found.len() <= LOCATE_LIMIT + 1);
            assert!(found.iter().all(|id| identifier(id).is_some()));
        }
        if let Some(payload) = payload(Operation::GetAttributes) {
            let read = attributes(payload, version, "1");
            assert!(read.is_err() || about(payload, "1").is_ok());
        }
        if let Some(payload) = payload(Operation::Encrypt) {
            let read = encrypted(payload, "1");
            assert!(read.is_err() || about(payload, "1").is_ok());
        }
        if let Some(payload) = payload(Operation::Decrypt) {
            let read = decrypted(payload, "1");
            assert!(read.is_err() || about(payload, "1").is_ok());
        }
        if let Some(Ok(id)) = payload(Operation::Create).map(made) {
            assert!(identifier(&id).is_some());
        }
    }
}
