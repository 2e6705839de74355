//! The tag of a page: a MAC of the prepared page and of where it belongs.
//!
//! The message is 16 bytes of context and the 8192 bytes of the page as it is on disk, before
//! encryption, with `pd_checksum` and all bits of the tag zero. Its length is constant.
//!
//! ```text
//! byte   0          4          8      9        10           16
//!        +----------+----------+------+--------+------------+
//!        | block    | 0        | fork | format | 0          |
//!        +----------+----------+------+--------+------------+
//! ```
//!
//! * POLYVAL: AES-256(K2, POLYVAL(K1, context, page)), RFC 8452 section 3. K1 (16 bytes) and K2
//!   (32 bytes) are derived from the data key.
//! * HMAC-SHA-256 (FIPS 198-1) of the context, 48 zero bytes and the page: the first 16 bytes.

use aes::Aes256Enc;
use aes::cipher::{Array, BlockCipherEncrypt, KeyInit};
use polyval::Polyval;
use polyval::universal_hash::UniversalHash;
use zeroize::Zeroizing;

use crate::kdf::derive_from;
use crate::key::{CipherId, DataKey, Fork};
use crate::layout::Page;
use crate::primitives::PageHmac;
use crate::residue::wipe_registers;
use crate::xts::Block;
use crate::xts::hashed::Powers;

/// 16 bytes, little-endian.
pub(crate) type Tag = u128;

const FORMAT: u8 = 2;

/// The first block of the message.
pub(crate) fn context(position: Position) -> Block {
    let mut context = [0; 16];
    context[..4].copy_from_slice(&position.block.to_le_bytes());
    context[8] = position.fork.tweak_byte();
    context[9] = FORMAT;
    context
}

/// Where a page belongs. Relation, database and cluster are bound by the data key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Position {
    /// The block number in the fork.
    pub(crate) block: u32,
    /// The fork. Init and main count as one, because recovery copies the first over the second.
    pub(crate) fork: Fork,
}

/// The part of a data key that tags need, expanded.
///
/// Has a fixed size, uses no heap, and is wiped when dropped.
pub(crate) struct Tagging {
    mac: Mac,
    /// Whether XTS and hash may run in one pass, where this CPU has a kernel for it.
    fused: bool,
}

impl Tagging {
    /// `None`, if pages of the key's cipher have no tag.
    pub(crate) fn new(key: &DataKey, fused: bool) -> Option<Self> {
        Mac::new(key).map(|mac| Self { mac, fused })
    }

    /// The tag of a prepared page.
    pub(crate) fn tag(&self, context: &Block, page: &Page) -> Tag {
        self.mac.tag(context, page)
    }

    /// The hash that can run in one pass with XTS.
    pub(crate) fn fused(&self) -> Option<&PolyvalMac> {
        match &self.mac {
            Mac::Polyval(mac) if self.fused => Some(mac),
            _ => None,
        }
    }
}

/// The expanded keys for tags of a cipher.
#[allow(clippy::large_enum_variant, reason = "lives in place, in a fixed-size cache")]
enum Mac {
    Polyval(PolyvalMac),
    Hmac(HmacMac),
}

impl Mac {
    fn new(data_key: &DataKey) -> Option<Self> {
        match data_key.cipher() {
            CipherId::Aes256Xts | CipherId::Aes128Xts => None,
            CipherId::Aes256XtsAuth => Some(Self::Polyval(PolyvalMac::new(data_key))),
            CipherId::Aes256XtsHmac => Some(Self::Hmac(HmacMac::new(data_key))),
        }
    }

    /// The tag of a prepared page.
    pub(crate) fn tag(&self, context: &Block, page: &Page) -> Tag {
        let tag = match self {
            Self::Polyval(mac) => mac.tag(context, page),
            Self::Hmac(mac) => mac.tag(context, page),
        };
        // They contain parts of keys.
        wipe_registers();
        tag
    }
}

/// AES over POLYVAL.
pub(crate) struct PolyvalMac {
    /// K1, for the kernels that hash while they encrypt.
    pub(crate) powers: Powers,
    /// K1, for other CPUs.
    hash: Polyval,
    /// K2.
    cipher: Aes256Enc,
}

impl PolyvalMac {
    fn new(data_key: &DataKey) -> Self {
        let mut keys = Zeroizing::new([0; 48]);
        let label = "pagevault page tag AES-256 POLYVAL v1";
        derive_from(data_key.expose(), label, &[], &mut keys);
        let (hash_key, cipher_key) = keys.split_at(16);
        let mut hash = Zeroizing::new([0; 16]);
        hash.copy_from_slice(hash_key);
        let mut cipher = Zeroizing::new([0; 32]);
        cipher.copy_from_slice(cipher_key);
        Self {
            powers: Powers::new(&hash),
            hash: Polyval::new(&Array(*hash)),
            cipher: Aes256Enc::new(&Array(*cipher)),
        }
    }

    fn tag(&self, context: &Block, page: &Page) -> Tag {
        // The copy is wiped when it is dropped.
        let mut hash = self.hash.clone();
        hash.update(&[Array(*context)]);
        hash.update(Array::cast_slice_from_core(page.as_chunks().0));
        self.finish(hash.finalize().0)
    }

    /// The tag of the message with this hash.
    pub(crate) fn finish(&self, hash: Block) -> Tag {
        let mut block = Array(hash);
        self.cipher.encrypt_block(&mut block);
        Tag::from_le_bytes(block.0)
    }
}

struct HmacMac(PageHmac);

impl HmacMac {
    fn new(data_key: &DataKey) -> Self {
        let mut key = Zeroizing::new([0; 32]);
        let label = "pagevault page tag HMAC-SHA-256 v1";
        derive_from(data_key.expose(), label, &[], &mut key);
        Self(PageHmac::new(&key))
    }

    fn tag(&self, context: &Block, page: &Page) -> Tag {
        let mut first = [0; 64];
        first[..context.len()].copy_from_slice(context);
        Tag::from_le_bytes(self.0.of(&first, page))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mac::authenticate;
    use crate::secret::Secret32;

    #[test]
    fn the_hmac_is_that_of_the_crate() {
        let data_key = DataKey::random(CipherId::Aes256XtsHmac).unwrap();
        let mut key = [0; 32];
        derive_from(data_key.expose(), "pagevault page tag HMAC-SHA-256 v1", &[], &mut key);
        let position = Position { block: 0x0102_0304, fork: Fork::VisibilityMap };
        let context = context(position);
        let page: Page = core::array::from_fn(|i| (i * 31 % 251) as u8);
        let message = [&context[..], &[0; 48], &page].concat();
        let mac = authenticate(&Secret32::from_bytes(&key), &message);
        let tag = HmacMac::new(&data_key).tag(&context, &page);
        assert_eq!(tag.to_le_bytes(), mac[..16]);
        assert_eq!(context[..12], [4, 3, 2, 1, 0, 0, 0, 0, 2, 2, 0, 0]);
    }
}
