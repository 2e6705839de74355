//! The protocol between the server and the helper `pagevault-keyring`, version 1: one JSON request
//! on standard input, one JSON reply on standard output.
//!
//! ```json
//! {"version":1,"deadline_ms":5000,"data_directory":"/var/lib/postgresql/17/main","operations":[
//!   {"provider":{"name":"disk","kind":"file","options":{"path":"/etc/pagevault/keys"}},
//!    "key":"main","context":"pagevault/1/...","action":{"wrap":{"plaintext":"<base64>"}}}]}
//!
//! {"version":1,"results":[{"wrapped":{"wrapped":"<base64>","key_version":3}}],"elapsed_us":[812]}
//! ```
//!
//! Both sides read with [`Request::from_json`] and [`Reply::from_json`]. These check size and
//! version first, refuse unknown fields, and never put content into an error, because an unreadable
//! message may hold a key. Secret bytes are [`SecretBytes`]; the text that carries them is in a
//! buffer that is wiped, also when it grows. (The caller must wipe the buffer that it passes to a
//! reader. Base64 is decoded directly from it, unless it contains JSON escapes, which neither side
//! writes.)

use std::fmt;
use std::io;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::de::{DeserializeOwned, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use zeroize::{Zeroize, Zeroizing};

use crate::anchor;
pub use crate::failure::{ErrorClass, Failure};

/// The protocol version of this crate.
pub const VERSION: u32 = 1;

/// Largest request or reply in bytes (1 MiB).
pub const SIZE_LIMIT: usize = 1 << 20;

/// Why a message was not accepted, or could not be written.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolError {
    /// More than [`SIZE_LIMIT`] bytes.
    #[error("message is larger than {SIZE_LIMIT} bytes")]
    TooLarge,
    /// The other side uses another version.
    #[error("unsupported protocol version {found}, expected version {VERSION}")]
    Version {
        /// The version in the message.
        found: u32,
    },
    /// Not JSON, or not of the expected form. Gives the position only, never the content.
    #[error("message cannot be read at line {line}, column {column}")]
    Malformed {
        /// Line, from 1.
        line: usize,
        /// Column, from 1; 0 where unknown.
        column: usize,
    },
    /// The reply does not have one outcome for each operation.
    #[error("reply has {found} results for {expected} operations")]
    Count {
        /// Number of operations.
        expected: usize,
        /// Number of outcomes received.
        found: usize,
    },
    /// The helper could not read the request.
    #[error("the key provider helper refused the request: {0}")]
    Refused(Failure),
}

/// A request of the server: operations on master keys, done in order within one deadline.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// [`VERSION`].
    pub version: u32,
    /// Milliseconds from reading the request to writing the reply.
    pub deadline_ms: u64,
    /// The server's data directory. No provider may keep its keys inside it.
    pub data_directory: String,
    /// The operations.
    pub operations: Vec<Operation>,
    /// A helper without a validated cryptographic module must refuse (`pagevault.require_fips`).
    #[serde(default, skip_serializing_if = "is_false")]
    pub require_fips: bool,
}

/// One operation on one master key.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Operation {
    /// The provider that holds the master key.
    pub provider: ProviderSpec,
    /// Name of the master key at the provider.
    pub key: String,
    /// Bound as associated data by every provider; see `master_context` in this crate.
    pub context: String,
    /// What to do with the key.
    pub action: Action,
    /// Try once, because others can do the same: no further attempts, and none at all if another
    /// such operation has found the provider out of order.
    #[serde(default, skip_serializing_if = "is_false")]
    pub once: bool,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
const fn is_false(flag: &bool) -> bool {
    !*flag
}

/// A provider as recorded in the keystore.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProviderSpec {
    /// Name in SQL; for messages.
    pub name: String,
    /// `file`, `vault`, `aws_kms`, `gcp_kms`, `azure_key_vault`, `pkcs11`, `kmip` or `command`.
    pub kind: String,
    /// Options of this kind. The helper refuses unknown names.
    pub options: serde_json::Map<String, serde_json::Value>,
    /// Whether it may run programs, including those named in a file to which an option points.
    #[serde(default)]
    pub programs: bool,
}

// Options are not shown: an operator may have put a credential there by mistake.
impl fmt::Debug for ProviderSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProviderSpec")
            .field("name", &self.name)
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

/// What to do with a master key.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Action {
    /// Wrap `plaintext` under the key's newest version.
    Wrap {
        /// A database key.
        plaintext: SecretBytes,
    },
    /// Unwrap the result of `Wrap`, whichever version of the key wrapped it.
    Unwrap {
        /// From [`Outcome::Wrapped`].
        wrapped: Base64,
    },
    /// Wrap again, under the newest version of this operation's key, what `from_key` of the same
    /// provider wrapped. Answered by [`Outcome::Wrapped`]. The plaintext stays in the provider if
    /// the provider can do this.
    Rewrap {
        /// The master key that wrapped it: the same key, or the previous one.
        from_key: String,
        /// From [`Outcome::Wrapped`].
        wrapped: Base64,
    },
    /// Make sure that the key has a version newer than the one that wrapped `wrapped`. If such a
    /// version exists (rotated elsewhere, or by an interrupted rotation), nothing is done.
    Rotate {
        /// A database key wrapped by the version in use.
        wrapped: Base64,
    },
    /// Check everything from the options to the provider's answers. If the operation names a key,
    /// also wrap and unwrap a test secret with it.
    Check,
    /// Check the provider's options only, without looking up a key or using the network.
    CheckOptions,
    /// Read the newest note ([`crate::anchor`]). For operations on a store only; see
    /// [`ProviderSpec::store`].
    ReadNote,
    /// Write a note, if the store still has the one of this version.
    WriteNote {
        /// The note.
        note: String,
        /// The version from [`Outcome::Note`] or [`Outcome::Noted`]; `None` if there was no note.
        replaces: Option<u64>,
    },
}

/// A reply of the helper: one outcome for each operation, in the same order.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reply {
    /// [`VERSION`].
    pub version: u32,
    /// One for each operation. A request that could not be read is answered by one
    /// [`Outcome::Failed`] of class [`ErrorClass::BadRequest`].
    pub results: Vec<Outcome>,
    /// Microseconds that each operation took, including retries, in the same order.
    pub elapsed_us: Vec<u64>,
}

/// Outcome of one operation.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Outcome {
    /// Answers [`Action::Wrap`].
    Wrapped {
        /// Opaque to the server.
        wrapped: Base64,
        /// Version of the master key that wrapped it.
        key_version: u64,
    },
    /// Answers [`Action::Unwrap`].
    Unwrapped {
        /// The unwrapped key.
        plaintext: SecretBytes,
        /// Version of the master key that had wrapped it.
        key_version: u64,
    },
    /// Answers [`Action::Rotate`].
    Rotated {
        /// The new version.
        key_version: u64,
    },
    /// Answers [`Action::Check`]: the checks in order, up to the first failure.
    Checked {
        /// One entry for each check.
        findings: Vec<Finding>,
    },
    /// Answers [`Action::CheckOptions`].
    OptionsOk,
    /// Answers [`Action::ReadNote`].
    Note {
        /// The newest note, if there is one.
        stored: Option<StoredNote>,
    },
    /// Answers [`Action::WriteNote`]: the note was written.
    Noted {
        /// Its version in the store.
        version: u64,
    },
    /// Answers [`Action::WriteNote`]: nothing was written, because the store has another note than
    /// the one to be replaced.
    Overtaken,
    /// The operation was not done.
    Failed(Failure),
}

/// A note as a store has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredNote {
    /// The text, as it was written; not verified yet.
    pub note: String,
    /// Its version in the store, for the next [`Action::WriteNote`].
    pub version: u64,
}

impl ProviderSpec {
    /// The store of notes that a file describes. The file's path is a setting of the server, so it
    /// may name programs.
    pub fn store(file: &str) -> Self {
        let options = [(anchor::FILE.to_owned(), file.into())].into_iter().collect();
        let (name, kind) = (anchor::KIND.to_owned(), anchor::KIND.to_owned());
        Self { name, kind, options, programs: true }
    }
}

/// Result of one check of [`Action::Check`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Finding {
    /// What is expected, such as "the key is there".
    pub what: String,
    /// What was found, in plain words; empty after a failure.
    pub seen: String,
    /// Why the check failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
}

impl Request {
    /// A request of this version.
    pub fn new(deadline_ms: u64, data_directory: String, operations: Vec<Operation>) -> Self {
        Self { version: VERSION, deadline_ms, data_directory, operations, require_fips: false }
    }

    /// Reads a request. Size and version are checked first.
    pub fn from_json(text: &[u8]) -> Result<Self, ProtocolError> {
        read(text)
    }

    /// The request as text, in memory that is wiped.
    pub fn to_json(&self) -> Result<Zeroizing<Vec<u8>>, ProtocolError> {
        write(self)
    }
}

impl Reply {
    /// A reply of this version, with one element of `elapsed_us` for each of `results`.
    pub fn new(results: Vec<Outcome>, elapsed_us: Vec<u64>) -> Self {
        Self { version: VERSION, results, elapsed_us }
    }

    /// Reads the reply to a request with this number of operations.
    pub fn from_json(text: &[u8], operations: usize) -> Result<Self, ProtocolError> {
        let mut reply: Self = read(text)?;
        if reply.results.len() == operations && reply.elapsed_us.len() == operations {
            return Ok(reply);
        }
        match (reply.results.len(), reply.results.pop()) {
            (1, Some(Outcome::Failed(failure))) if failure.class == ErrorClass::BadRequest => {
                Err(ProtocolError::Refused(failure))
            }
            (found, _) => Err(ProtocolError::Count { expected: operations, found }),
        }
    }

    /// The reply as text, in memory that is wiped.
    pub fn to_json(&self) -> Result<Zeroizing<Vec<u8>>, ProtocolError> {
        write(self)
    }
}

/// Reads a message, after checking its size and version.
fn read<T: DeserializeOwned>(text: &[u8]) -> Result<T, ProtocolError> {
    // Skips other fields: fields of a later version must not prevent reading the version.
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    if text.len() > SIZE_LIMIT {
        return Err(ProtocolError::TooLarge);
    }
    let Versioned { version: found } = serde_json::from_slice(text).map_err(malformed)?;
    if found != VERSION {
        return Err(ProtocolError::Version { found });
    }
    serde_json::from_slice(text).map_err(malformed)
}

/// Keeps the position and drops the text: serde_json quotes the offending value, which may be a
/// key.
fn malformed(error: serde_json::Error) -> ProtocolError {
    ProtocolError::Malformed { line: error.line(), column: error.column() }
}

fn write<T: Serialize>(message: &T) -> Result<Zeroizing<Vec<u8>>, ProtocolError> {
    // Only the limit can cause an error.
    to_wiped_json(message, SIZE_LIMIT).map_err(|_| ProtocolError::TooLarge)
}

/// A message as JSON, in memory that is wiped.
///
/// # Errors
/// If it is longer than `limit` bytes.
pub fn to_wiped_json(message: &impl Serialize, limit: usize) -> io::Result<Zeroizing<Vec<u8>>> {
    let mut buffer = WipedBuffer { bytes: Zeroizing::new(Vec::with_capacity(4096)), limit };
    serde_json::to_writer(&mut buffer, message)?;
    Ok(buffer.bytes)
}

/// Grows by copying into a new vector and wiping the old one, which `Vec` does not do.
struct WipedBuffer {
    bytes: Zeroizing<Vec<u8>>,
    limit: usize,
}

impl io::Write for WipedBuffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let needed = self.bytes.len() + bytes.len();
        if needed > self.limit {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        if needed > self.bytes.capacity() {
            let mut larger = Zeroizing::new(Vec::with_capacity(needed.next_power_of_two()));
            larger.extend_from_slice(&self.bytes);
            self.bytes = larger;
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Secret bytes: base64 in JSON, wiped in memory, shown by length only.
pub struct SecretBytes(Zeroizing<Vec<u8>>);

impl SecretBytes {
    /// Copies `bytes` once.
    pub fn from_slice(bytes: &[u8]) -> Self {
        Self(Zeroizing::new(bytes.to_vec()))
    }

    /// Takes `bytes` over without a copy.
    pub fn from_vec(bytes: Zeroizing<Vec<u8>>) -> Self {
        Self(bytes)
    }

    /// The secret. Compare it with `Secret32::matches`, not with `==`.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for SecretBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretBytes({} bytes)", self.0.len())
    }
}

impl Serialize for SecretBytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut text = Zeroizing::new(String::with_capacity(self.0.len().div_ceil(3) * 4));
        STANDARD.encode_string(self.0.as_slice(), &mut text);
        serializer.serialize_str(&text)
    }
}

impl<'de> Deserialize<'de> for SecretBytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Base64Text).map(|bytes| Self(Zeroizing::new(bytes)))
    }
}

/// Bytes that are not secret: base64 in JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base64(pub Vec<u8>);

impl Serialize for Base64 {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Base64 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Base64Text).map(Self)
    }
}

/// Decodes base64 directly from the input, into one allocation of the right size.
struct Base64Text;

impl Visitor<'_> for Base64Text {
    type Value = Vec<u8>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("base64")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Vec<u8>, E> {
        let mut bytes = vec![0; base64::decoded_len_estimate(text.len())];
        match STANDARD.decode_slice(text, &mut bytes) {
            Ok(length) => {
                bytes.truncate(length);
                Ok(bytes)
            }
            Err(_) => {
                bytes.zeroize();
                Err(E::custom("not base64"))
            }
        }
    }
}
