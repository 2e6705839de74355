//! What the provider asks of the process that has loaded the module, and the answers: one JSON
//! object each, in turn. Variants without fields have braces, so that they are objects too.

use std::io;

use pagevault_keystore::protocol::{Base64, Failure, Finding, SecretBytes, to_wiped_json};
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
    Described { key_version: u64, oldest_version: Option<u64>, summary: String },
    Failed { failure: Failure },
}

impl From<KeyInfo> for Answer {
    fn from(KeyInfo { key_version, oldest_version, summary }: KeyInfo) -> Answer {
        Answer::Described { key_version, oldest_version, summary }
    }
}

/// A message as JSON, in memory that is wiped.
pub(super) fn to_json(message: &impl Serialize) -> io::Result<Zeroizing<Vec<u8>>> {
    to_wiped_json(message, LIMIT)
}

/// Reads a message.
///
/// # Errors
/// Without the text, which may contain a key.
pub(super) fn from_json<T: DeserializeOwned>(text: &[u8]) -> io::Result<T> {
    serde_json::from_slice(text).map_err(|_| io::ErrorKind::InvalidData.into())
}
