//! AWS KMS, by emulators. The table in [`pagevault_tests::key_servers::kms`] shows their
//! differences, and so which of them a test needs.

mod access;
mod faults;
mod keys;
mod rotation;
mod sources;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::Test;

pub(crate) fn tests() -> Vec<Test> {
    [keys::TESTS, rotation::TESTS, access::TESTS, faults::TESTS, sources::TESTS].concat()
}

/// The provider's stored form (`keyring/src/providers/aws_kms/wrapping.rs`), in base64.
pub(crate) fn wrapped_by(arn: &str, key_version: u64, ciphertext: &[u8]) -> String {
    let length = u16::try_from(arn.len()).unwrap_or(u16::MAX);
    let parts: [&[u8]; 5] =
        [&[1], &length.to_be_bytes(), arn.as_bytes(), &key_version.to_be_bytes(), ciphertext];
    STANDARD.encode(parts.concat())
}
