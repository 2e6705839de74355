//! Key derivation: HKDF-SHA256 (RFC 5869) without salt.
//!
//! The `info` input is the label and the context, each after its length (8 bytes, little-endian),
//! so that no two pairs of label and context give the same `info`.

use crate::primitives::hkdf;
use crate::residue::without_trace;

/// Longest output, RFC 5869 section 2.3: 255 hashes.
pub const MAX_OUTPUT: usize = 255 * 32;

/// Derives `N` bytes from `key` for the purpose `label` and the subject `context`. More than
/// [`MAX_OUTPUT`] bytes do not compile.
pub fn derive<const N: usize>(key: &[u8; 32], label: &str, context: &[u8], out: &mut [u8; N]) {
    derive_from(key, label, context, out);
}

/// Likewise from a key of another length.
pub(crate) fn derive_from<const N: usize>(
    key: &[u8],
    label: &str,
    context: &[u8],
    out: &mut [u8; N],
) {
    const { assert!(N <= MAX_OUTPUT) };
    let length = |part: &[u8]| (part.len() as u64).to_le_bytes();
    let label = label.as_bytes();
    let info = [&length(label)[..], label, &length(context)[..], context];
    without_trace(|| hkdf(key, &info, out));
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;

    /// Result of another implementation, cipher/vectors/kdf.py.
    #[test]
    fn derivation_is_fixed() {
        let mut out = [0; 64];
        derive(&[0x0b; 32], "temporary file", b"base/pgsql_tmp/pgsql_tmp1.0", &mut out);
        assert_eq!(
            out,
            hex!(
                "685a2ac14c76106f3b6c9faf32d3fdf7227df03f23b94489ad6419186653ddf9"
                "c820bbd9cd84564b15233bd594667c66eaf9f80fae56db14b6a94bcbb15c4bf8"
            )
        );
    }

    #[test]
    fn label_and_context_are_separated() {
        let derive = |label, context: &[u8]| {
            let mut out = [0; 32];
            super::derive(&[1; 32], label, context, &mut out);
            out
        };
        assert_ne!(derive("ab", b"c"), derive("a", b"bc"));
        assert_ne!(derive("ab", b""), derive("", b"ab"));
        assert_ne!(derive("a", b"b"), derive("a", b"c"));
    }

    #[test]
    fn a_longer_output_begins_with_the_shorter() {
        let (mut short, mut long) = ([0; 32], [0; MAX_OUTPUT]);
        derive(&[1; 32], "label", b"context", &mut short);
        derive(&[1; 32], "label", b"context", &mut long);
        assert_eq!(short, long[..32]);
    }
}
