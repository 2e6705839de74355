//! The envelope of providers whose keys can wrap, but cannot bind: a one-time key, which the master
//! key wraps, wraps the secret here, with associated data. For `pkcs11` and `azure_key_vault`.
//!
//! The format of a wrapped key, version 1:
//!
//! ```text
//! byte   0        1                        9        10         11
//!        +--------+------------------------+--------+----------+---------+--------------------+
//!        | format | key version, 8 bytes,  | method | length n | id,     | wrapped by method  |
//!        | = 1    | most significant first |        | of id    | n bytes |                    |
//!        +--------+------------------------+--------+----------+---------+--------------------+
//!
//! method 1, AES-GCM of a token                 nonce, 12 bytes | ciphertext | tag, 16 bytes
//! method 2, AES-KW   (CKM_AES_KEY_WRAP)        \
//! method 3, AES-KWP  (CKM_AES_KEY_WRAP_PAD)     > length of k, 2 bytes | k: the wrapped one-time
//! method 4, RSA-OAEP (SHA-256, MGF1-SHA-256)   /  key | nonce, ciphertext, tag
//!                                                       (pagevault_cipher::wrap)
//! ```
//!
//! The id is that of the version of the master key: `CKA_ID` in a token, the version's name in
//! Azure. The associated data consist of the provider's name, everything before the (last) nonce,
//! the name of the master key and the context.

use pagevault_cipher::Secret32;
use pagevault_cipher::wrap::{self, OVERHEAD, WrapError, WrapKey};
use zeroize::Zeroizing;

/// Version of the format.
const FORMAT: u8 = 1;

/// Bytes before the id.
const HEADER: usize = 11;

/// Length of a nonce of AES-GCM (NIST SP 800-38D section 8.2.2).
pub const NONCE: usize = 12;

/// Length of a tag of AES-GCM.
pub const TAG: usize = 16;

/// How the token wraps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Method {
    /// AES-GCM with associated data (NIST SP 800-38D).
    Gcm = 1,
    /// AES-KW (NIST SP 800-38F section 6.2, RFC 3394) of a one-time key.
    Kw = 2,
    /// AES-KWP (NIST SP 800-38F section 6.3, RFC 5649) of a one-time key.
    Kwp = 3,
    /// RSAES-OAEP with SHA-256 (RFC 8017 section 7.1) of a one-time key.
    Oaep = 4,
}

impl Method {
    fn of(number: u8) -> Option<Method> {
        [Method::Gcm, Method::Kw, Method::Kwp, Method::Oaep]
            .into_iter()
            .find(|method| *method as u8 == number)
    }
}

/// A parsed wrapped key.
#[derive(Debug, PartialEq, Eq)]
pub struct Parts<'a> {
    /// The number of that version.
    pub key_version: u64,
    /// How the master key wrapped.
    pub method: Method,
    /// The version of the master key that wrapped it.
    pub id: &'a [u8],
    /// Everything that the associated data contain.
    pub head: &'a [u8],
    /// The wrapped one-time key; empty with [`Method::Gcm`].
    pub once: &'a [u8],
    /// Nonce, ciphertext and tag.
    pub body: &'a [u8],
}

impl Parts<'_> {
    /// `None` if it is not of this format.
    pub fn of(wrapped: &[u8]) -> Option<Parts<'_>> {
        let ([FORMAT, version @ .., method, n], rest) = wrapped.split_first_chunk::<HEADER>()?
        else {
            return None;
        };
        let (key_version, method) = (u64::from_be_bytes(*version), Method::of(*method)?);
        let id = rest.get(..usize::from(*n))?;
        let mut start = HEADER + id.len();
        let mut once = &wrapped[..0];
        if method != Method::Gcm {
            let (length, rest) = wrapped[start..].split_first_chunk::<2>()?;
            once = rest.get(..usize::from(u16::from_be_bytes(*length)))?;
            start += 2 + once.len();
        }
        let (head, body) = wrapped.split_at(start);
        (body.len() >= NONCE + TAG).then_some(Parts { key_version, method, id, head, once, body })
    }
}

/// Everything before the nonce. `None` if a part is too long for the format.
pub fn head(key_version: u64, method: Method, id: &[u8], once: &[u8]) -> Option<Vec<u8>> {
    let mut head = vec![FORMAT];
    head.extend_from_slice(&key_version.to_be_bytes());
    head.push(method as u8);
    head.push(u8::try_from(id.len()).ok()?);
    head.extend_from_slice(id);
    if method != Method::Gcm {
        head.extend_from_slice(&u16::try_from(once.len()).ok()?.to_be_bytes());
        head.extend_from_slice(once);
    }
    Some(head)
}

/// Associated data of a provider, whose name and format are in `of`: each part is preceded by its
/// length, so that different triples give different data.
pub fn associated_data(of: &str, head: &[u8], key: &str, context: &str) -> Vec<u8> {
    let mut bound = of.as_bytes().to_vec();
    for part in [head, key.as_bytes(), context.as_bytes()] {
        bound.extend_from_slice(&(part.len() as u64).to_be_bytes());
        bound.extend_from_slice(part);
    }
    bound
}

/// Appends nonce, ciphertext and tag of `plaintext` under a one-time key.
///
/// # Errors
/// Without random bytes.
pub fn seal(
    once: &Secret32,
    bound: &[u8],
    plaintext: &[u8],
    wrapped: &mut Vec<u8>,
) -> Result<(), WrapError> {
    let start = wrapped.len();
    wrapped.resize(start + plaintext.len() + OVERHEAD, 0);
    wrap::wrap(&WrapKey::new(once.expose()), bound, plaintext, &mut wrapped[start..]).map(drop)
}

/// What a one-time key has sealed; `None` if it is another key, or anything was changed.
pub fn open(once: &[u8], bound: &[u8], body: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let once = <&[u8; 32]>::try_from(once).ok()?;
    let mut plaintext = Zeroizing::new(vec![0; body.len().checked_sub(OVERHEAD)?]);
    wrap::unwrap(&WrapKey::new(once), bound, body, &mut plaintext).ok()?;
    Some(plaintext)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(method: Method, id: &[u8], once: &[u8], body: &[u8]) -> Vec<u8> {
        let mut wrapped = head(7, method, id, once).unwrap();
        wrapped.extend_from_slice(body);
        wrapped
    }

    #[test]
    fn what_is_written_is_read() {
        let body = [9; 60];
        for method in [Method::Gcm, Method::Kw, Method::Kwp, Method::Oaep] {
            for id in [&[][..], &[1], &[5; 255]] {
                let once: &[u8] = if method == Method::Gcm { &[] } else { &[3; 40] };
                let wrapped = whole(method, id, once, &body);
                let head = &wrapped[..wrapped.len() - body.len()];
                let expected = Parts { key_version: 7, method, id, head, once, body: &body };
                assert_eq!(Parts::of(&wrapped), Some(expected));
            }
        }
        assert!(head(1, Method::Gcm, &[0; 256], &[]).is_none());
        assert!(head(1, Method::Kw, &[], &[0; 65536]).is_none());
    }

    #[test]
    fn truncated_and_foreign_bytes_are_not_of_this_format() {
        let wrapped = whole(Method::Kw, b"id", &[3; 40], &[9; NONCE + TAG]);
        for length in 0..wrapped.len() {
            assert_eq!(Parts::of(&wrapped[..length]), None, "{length}");
        }
        for (at, value) in [(0, 0), (0, 2), (9, 0), (9, 5), (10, 255), (13, 255)] {
            let mut other = wrapped.clone();
            other[at] = value;
            assert_eq!(Parts::of(&other), None, "byte {at}");
        }
    }

    #[test]
    fn different_triples_give_different_associated_data() {
        let data = [("a", "b", "c"), ("ab", "", "c"), ("a", "bc", ""), ("", "ab", "c")]
            .map(|(head, key, context)| associated_data("x", head.as_bytes(), key, context));
        for (at, one) in data.iter().enumerate() {
            assert!(data[at + 1..].iter().all(|other| other != one));
        }
    }

    #[test]
    fn what_is_sealed_opens_with_the_same_key_and_data() {
        let (once, other) = (Secret32::from_bytes(&[1; 32]), [2; 32]);
        for length in [0, 1, 32, 1000] {
            let (plaintext, mut wrapped) = (vec![7; length], b"head".to_vec());
            seal(&once, b"bound", &plaintext, &mut wrapped).unwrap();
            let body = &wrapped[4..];
            assert_eq!(body.len(), length + NONCE + TAG);
            assert_eq!(*open(once.expose(), b"bound", body).unwrap(), plaintext);
            assert!(open(once.expose(), b"other", body).is_none());
            assert!(open(&other, b"bound", body).is_none());
            assert!(open(&other[1..], b"bound", body).is_none());
            assert!(open(once.expose(), b"bound", &body[1..]).is_none());
            assert!(open(once.expose(), b"bound", &[]).is_none());
        }
    }
}
