//! The conversation between the server and the helper `pagevault-keyring`: one JSON request on its
//! standard input, one JSON reply on its standard output, protocol version 1.
//!
//! ```json
//! {"version":1,"deadline_ms":5000,"data_directory":"/var/lib/postgresql/17/main","operations":[
//!   {"provider":{"name":"disk","kind":"file","options":{"path":"/etc/pagevault/keys"}},
//!    "key":"main","context":"pagevault/1/...","action":{"wrap":{"plaintext":"<base64>"}}}]}
//!
//! {"version":1,"results":[{"wrapped":{"wrapped":"<base64>","key_version":3}}],"elapsed_us":[812]}
//! ```
//!
//! Both sides read with [`Request::from_json`] and [`Reply::from_json`], which check size and
//! version before anything else, refuse unknown fields, and never put content into an error: a
//! message that cannot be read may hold a key. Secret bytes travel as [`SecretBytes`], and the text
//! that carries them lives in a buffer that is wiped, also when it has to grow. (A reader must hand
//! in a buffer that it wipes itself. Base64 is decoded straight from there, unless it contains JSON
//! escapes, which neither side writes.)

use std::fmt;
use std::io;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::de::{DeserializeOwned, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use zeroize::{Zeroize, Zeroizing};

pub use crate::failure::{ErrorClass, Failure};

/// The protocol version this crate speaks.
pub const VERSION: u32 = 1;

/// Largest request or reply in bytes (1 MiB).
pub const SIZE_LIMIT: usize = 1 << 20;

/// Why a message was not accepted or could not be written.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolError {
    /// More than [`SIZE_LIMIT`] bytes.
    #[error("message is larger than {SIZE_LIMIT} bytes")]
    TooLarge,
    /// The other side speaks another version.
    #[error("unsupported protocol version {found}, expected version {VERSION}")]
    Version {
        /// The version in the message.
        found: u32,
    },
    /// Not JSON, or not of the expected form. Position only; content is never repeated.
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
        /// Operations asked.
        expected: usize,
        /// Outcomes received.
        found: usize,
    },
    /// The helper could not read the request at all.
    #[error("the key provider helper refused the request: {0}")]
    Refused(Failure),
}

/// What the server asks: operations on master keys, done in order within one deadline.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// [`VERSION`].
    pub version: u32,
    /// Milliseconds from the reading of the request until the reply must have been written.
    pub deadline_ms: u64,
    /// The server's data directory. No provider may keep its keys inside it.
    pub data_directory: String,
    /// What to do.
    pub operations: Vec<Operation>,
}

/// One thing to do with one master key.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Operation {
    /// Who holds the master key.
    pub provider: ProviderSpec,
    /// The master key's name there.
    pub key: String,
    /// Bound as associated data by every provider; see `master_context` in this crate.
    pub context: String,
    /// What to do with it.
    pub action: Action,
}

/// A provider as the keystore records it.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProviderSpec {
    /// Name given in SQL; for messages.
    pub name: String,
    /// `file`, `vault`, `aws_kms` or `command`.
    pub kind: String,
    /// Options of that kind. The helper refuses names it does not know.
    pub options: serde_json::Map<String, serde_json::Value>,
    /// Whether it may run programs, also those that a file names which the options name.
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
    /// Unwrap what `Wrap` gave, whichever version wrapped it.
    Unwrap {
        /// From [`Outcome::Wrapped`].
        wrapped: Base64,
    },
    /// Wrap again under the newest version of this operation's key what `from_key` of the same
    /// provider wrapped; answered by [`Outcome::Wrapped`]. Where the provider can, the plaintext
    /// stays with it.
    Rewrap {
        /// The master key that wrapped it: the same key, or the one that is being left.
        from_key: String,
        /// From [`Outcome::Wrapped`].
        wrapped: Base64,
    },
    /// Make sure that the key has a version newer than the one that wrapped `wrapped`. If it has
    /// one already (rotated elsewhere, or a rotation that was cut short), that one will do.
    Rotate {
        /// What the key wraps now.
        wrapped: Base64,
    },
    /// Look at everything from the options to the provider's answers and, if the operation names a
    /// key, have it wrap and unwrap a secret made for the purpose.
    Check,
    /// Check the provider's options only. No key is looked up, the network is not used.
    CheckOptions,
}

/// What the helper answers: one outcome for each operation, in the same order.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reply {
    /// [`VERSION`].
    pub version: u32,
    /// As many as there were operations. A request that could not be read at all is answered by one
    /// [`Outcome::Failed`] of class [`ErrorClass::BadRequest`].
    pub results: Vec<Outcome>,
    /// Microseconds that each operation took, repeated attempts included, in the same order.
    pub elapsed_us: Vec<u64>,
}

/// How one operation ended.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Outcome {
    /// Answers [`Action::Wrap`].
    Wrapped {
        /// Opaque to the server.
        wrapped: Base64,
        /// Version of the master key that wrapped.
        key_version: u64,
    },
    /// Answers [`Action::Unwrap`].
    Unwrapped {
        /// What was wrapped.
        plaintext: SecretBytes,
        /// Version of the master key that had wrapped it.
        key_version: u64,
    },
    /// Answers [`Action::Rotate`].
    Rotated {
        /// The new version.
        key_version: u64,
    },
    /// Answers [`Action::Check`]: what was looked at, in order, up to the first failure.
    Checked {
        /// One entry for each thing looked at.
        findings: Vec<Finding>,
    },
    /// Answers [`Action::CheckOptions`].
    OptionsOk,
    /// The operation was not done.
    Failed(Failure),
}

/// One thing that [`Action::Check`] looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Finding {
    /// What should be, such as "the key is there".
    pub what: String,
    /// What was seen, in plain words; empty after a failure.
    pub seen: String,
    /// Why it is not so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
}

impl Request {
    /// A request of this version.
    pub fn new(deadline_ms: u64, data_directory: String, operations: Vec<Operation>) -> Self {
        Self { version: VERSION, deadline_ms, data_directory, operations }
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
    /// A reply of this version. `elapsed_us` belongs to `results`, one for one.
    pub fn new(results: Vec<Outcome>, elapsed_us: Vec<u64>) -> Self {
        Self { version: VERSION, results, elapsed_us }
    }

    /// Reads the reply to a request of `operations` operations.
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

/// Reads a message after its size and version.
fn read<T: DeserializeOwned>(text: &[u8]) -> Result<T, ProtocolError> {
    // Other fields are skipped here: what a later version adds must not hide the version itself.
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

/// Keeps the place and drops the text: serde_json quotes the offending value, which may be a key.
fn malformed(error: serde_json::Error) -> ProtocolError {
    ProtocolError::Malformed { line: error.line(), column: error.column() }
}

fn write<T: Serialize>(message: &T) -> Result<Zeroizing<Vec<u8>>, ProtocolError> {
    let mut buffer = WipedBuffer(Zeroizing::new(Vec::with_capacity(4096)));
    // The only thing that can fail is the buffer's limit.
    serde_json::to_writer(&mut buffer, message).map_err(|_| ProtocolError::TooLarge)?;
    Ok(buffer.0)
}

/// Grows by copying into a new vector and wiping the old one, which `Vec` itself does not do.
struct WipedBuffer(Zeroizing<Vec<u8>>);

impl io::Write for WipedBuffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let needed = self.0.len() + bytes.len();
        if needed > SIZE_LIMIT {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        if needed > self.0.capacity() {
            let mut larger = Zeroizing::new(Vec::with_capacity(needed.next_power_of_two()));
            larger.extend_from_slice(&self.0);
            self.0 = larger;
        }
        self.0.extend_from_slice(bytes);
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

    /// The secret. Not to be compared: `Secret32::matches` does.
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

/// Bytes that need no secrecy: base64 in JSON.
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

/// Decodes base64 straight from the input, into one allocation of the right size.
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
