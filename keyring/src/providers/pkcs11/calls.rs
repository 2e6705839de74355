//! What the provider asks of the process that has loaded the module, and the answers: one JSON
//! object each, in turn. Variants without fields have braces, so that they are objects too.

use std::io;

use pagevault_keystore::protocol::{Base64, Failure, Finding, SecretBytes};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use super::settings::Settings;
use crate::provider::KeyInfo;

/// Maximum size of a message in bytes.
pub(super) const LIMIT: usize = 16 * 1024 * 1024;

/// A call.
#[derive(Serialize, Deserialize)]
pub(super) enum Call {
    /// The first: what the others concern.
    Open {
        settings: Settings,
        data_directory: Option<String>,
        time_ms: u64,
    },
    /// Examine everything but the key.
    Examine {},
    Wrap {
        key: String,
        context: String,
        plaintext: SecretBytes,
    },
    Unwrap {
        key: String,
        context: String,
        wrapped: Base64,
    },
    Rotate {
        key: String,
        wrapped: Base64,
    },
    Describe {
        key: String,
    },
}

/// Its answer.
#[derive(Serialize, Deserialize)]
pub(super) enum Answer {
    Opened {},
    Examined { findings: Vec<Finding> },
    Wrapped { wrapped: Base64, key_version: u64 },
    Unwrapped { plaintext: SecretBytes, key_version: u64 },
    Rotated { key_version: u64 },
    Described { key_version: u64, oldest_version: u64, summary: String },
    Failed { failure: Failure },
}

impl From<KeyInfo> for Answer {
    fn from(KeyInfo { key_version, oldest_version, summary }: KeyInfo) -> Answer {
        Answer::Described { key_version, oldest_version, summary }
    }
}

/// A message as JSON, in memory that is wiped.
pub(super) fn to_json(message: &impl Serialize) -> io::Result<Zeroizing<Vec<u8>>> {
    let mut text = Wiped(Zeroizing::new(Vec::with_capacity(4096)));
    serde_json::to_writer(&mut text, message)?;
    Ok(text.0)
}

/// Reads a message.
///
/// # Errors
/// Without the text, which may contain a key.
pub(super) fn from_json<T: DeserializeOwned>(text: &[u8]) -> io::Result<T> {
    serde_json::from_slice(text).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Grows by copying into a new vector and wiping the old one, which `Vec` does not do.
struct Wiped(Zeroizing<Vec<u8>>);

impl io::Write for Wiped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let needed = self.0.len() + bytes.len();
        if needed > LIMIT {
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
