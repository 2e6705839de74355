//! The format of keys that this provider has wrapped.
//!
//! ```text
//! byte   0        1                        9        10          11
//!        +--------+------------------------+--------+-----------+------------+
//!        | format | key version, 8 bytes,  | method | length n  | unique     |
//!        | = 1    | most significant first |        | of the id | identifier |
//!        +--------+------------------------+--------+-----------+------------+
//!        +----------+----------------+-----------+------------------+--------------------+
//!        | length m | initialization | length k, | wrapped one-time | nonce, ciphertext, |
//!        | 1 byte   | vector         | 2 bytes   | key, k bytes     | tag                |
//!        +----------+----------------+-----------+------------------+--------------------+
//!
//! method 1, AES-GCM                   ciphertext, 32 bytes | tag, 16 bytes
//! method 2, AES-CBC without padding   ciphertext, 32 bytes
//! ```
//!
//! The server wraps a random key that is used once. From it another key is derived, which wraps the
//! secret (`pagevault_cipher::wrap`). docs/design/0048-kmip.md tells why.
//!
//! The associated data of the secret consist of everything before its nonce, the name of the master
//! key and the context. Those of AES-GCM in the server, of everything before the initialization
//! vector, the name and the context.

use pagevault_cipher::kdf;
use pagevault_cipher::wrap::{OVERHEAD, WrapKey};
use zeroize::Zeroizing;

/// Version of the format.
const FORMAT: u8 = 1;

/// Bytes before the unique identifier.
const HEADER: usize = 11;

/// Length of a one-time key, and of what the server makes of it with both methods, less the tag.
pub(super) const ONCE: usize = 32;

/// What the one-time key is used for.
const PURPOSE: &str = "pagevault kmip provider 1";

/// How the server wraps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Method {
    /// AES-GCM with associated data (NIST SP 800-38D).
    Gcm = 1,
    /// AES-CBC of two blocks (NIST SP 800-38A).
    Cbc = 2,
}

impl Method {
    fn of(number: u8) -> Option<Method> {
        [Method::Gcm, Method::Cbc].into_iter().find(|method| *method as u8 == number)
    }

    /// Length of the wrapped one-time key.
    pub(super) fn length(self) -> usize {
        match self {
            Method::Gcm => ONCE + super::operations::TAG,
            Method::Cbc => ONCE,
        }
    }

    /// Length of the initialization vector that pagevault chooses.
    pub(super) fn iv_length(self) -> usize {
        match self {
            Method::Gcm => 12,
            Method::Cbc => 16,
        }
    }
}

/// A parsed wrapped key.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Parts<'a> {
    pub(super) key_version: u64,
    pub(super) method: Method,
    /// Unique identifier of the key that wrapped it.
    pub(super) id: &'a str,
    /// Everything before the initialization vector.
    pub(super) start: &'a [u8],
    pub(super) iv: &'a [u8],
    /// The wrapped one-time key.
    pub(super) once: &'a [u8],
    /// Everything before the nonce.
    pub(super) head: &'a [u8],
    /// Nonce, ciphertext and tag.
    pub(super) body: &'a [u8],
}

impl Parts<'_> {
    /// `None` if it is not of this format.
    pub(super) fn of(wrapped: &[u8]) -> Option<Parts<'_>> {
        let ([FORMAT, version @ .., method, n], rest) = wrapped.split_first_chunk::<HEADER>()?
        else {
            return None;
        };
        let (key_version, method) = (u64::from_be_bytes(*version), Method::of(*method)?);
        let (id, rest) = rest.split_at_checked(usize::from(*n))?;
        let id = str::from_utf8(id).ok()?;
        super::attributes::identifier(id)?;
        let (start, _) = wrapped.split_at(HEADER + id.len());
        let (m, rest) = rest.split_first()?;
        let (iv, rest) = rest.split_at_checked(usize::from(*m))?;
        let (length, rest) = rest.split_first_chunk::<2>()?;
        let (once, body) = rest.split_at_checked(usize::from(u16::from_be_bytes(*length)))?;
        if iv.is_empty() || once.len() != method.length() || body.len() < OVERHEAD {
            return None;
        }
        let head = &wrapped[..wrapped.len() - body.len()];
        Some(Parts { key_version, method, id, start, iv, once, head, body })
    }
}

/// Everything before the initialization vector.
pub(super) fn start(key_version: u64, method: Method, id: &str) -> Option<Vec<u8>> {
    let mut start = vec![FORMAT];
    start.extend_from_slice(&key_version.to_be_bytes());
    start.push(method as u8);
    start.push(u8::try_from(id.len()).ok()?);
    start.extend_from_slice(id.as_bytes());
    Some(start)
}

/// Everything before the nonce.
pub(super) fn head(mut start: Vec<u8>, iv: &[u8], once: &[u8]) -> Option<Vec<u8>> {
    start.push(u8::try_from(iv.len()).ok()?);
    start.extend_from_slice(iv);
    start.extend_from_slice(&u16::try_from(once.len()).ok()?.to_be_bytes());
    start.extend_from_slice(once);
    Some(start)
}

/// Associated data: each part is preceded by its length, so that different triples give different
/// data.
pub(super) fn associated_data(head: &[u8], key: &str, context: &str) -> Vec<u8> {
    let mut bound = PURPOSE.as_bytes().to_vec();
    for part in [head, key.as_bytes(), context.as_bytes()] {
        bound.extend_from_slice(&(part.len() as u64).to_be_bytes());
        bound.extend_from_slice(part);
    }
    bound
}

/// The key that wraps the secret.
pub(super) fn derived(once: &[u8; ONCE]) -> WrapKey {
    let mut key = Zeroizing::new([0; 32]);
    kdf::derive(once, PURPOSE, &[], &mut key);
    WrapKey::new(&key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(method: Method, id: &str, iv: &[u8], body: &[u8]) -> Vec<u8> {
        let start = start(20_261_127_070_809, method, id).unwrap();
        let mut wrapped = head(start, iv, &vec![3; method.length()]).unwrap();
        wrapped.extend_from_slice(body);
        wrapped
    }

    #[test]
    fn what_is_written_is_read() {
        let body = [9; 60];
        for method in [Method::Gcm, Method::Cbc] {
            for id in ["1", "9b8b7f5e-0000-4000-8000-000000000000", &"x".repeat(255)] {
                for iv in [&[1; 1][..], &[5; 255]] {
                    let wrapped = whole(method, id, iv, &body);
                    let once = vec![3; method.length()];
                    let head = &wrapped[..wrapped.len() - body.len()];
                    let start = &wrapped[..11 + id.len()];
                    let (key_version, body) = (20_261_127_070_809, &body[..]);
                    let once = once.as_slice();
                    let expected = Parts { key_version, method, id, start, iv, once, head, body };
                    assert_eq!(Parts::of(&wrapped), Some(expected));
                }
            }
        }
        assert!(start(1, Method::Gcm, &"x".repeat(256)).is_none());
        assert!(head(Vec::new(), &[0; 256], &[]).is_none());
        assert!(head(Vec::new(), &[], &[0; 65_536]).is_none());
    }

    #[test]
    fn truncated_and_foreign_bytes_are_not_of_this_format() {
        let wrapped = whole(Method::Cbc, "id", &[7; 16], &[9; OVERHEAD]);
        for length in 0..wrapped.len() {
            assert_eq!(Parts::of(&wrapped[..length]), None, "{length}");
        }
        // Format, method, length and bytes of the id, lengths of the vector and the one-time key.
        for (at, value) in [
            (0, 0),
            (0, 2),
            (9, 0),
            (9, 1),
            (9, 3),
            (10, 0),
            (10, 255),
            (11, 0xff),
            (11, 10),
            (13, 0),
            (13, 255),
            (31, 33),
        ] {
            let mut other = wrapped.clone();
            other[at] = value;
            assert_eq!(Parts::of(&other), None, "byte {at}: {value}");
        }
    }

    #[test]
    fn different_triples_give_different_associated_data() {
        let data = [("a", "b", "c"), ("ab", "", "c"), ("a", "bc", ""), ("", "ab", "c")]
            .map(|(head, key, context)| associated_data(head.as_bytes(), key, context));
        for (at, one) in data.iter().enumerate() {
            assert!(data[at + 1..].iter().all(|other| other != one));
        }
    }
}
