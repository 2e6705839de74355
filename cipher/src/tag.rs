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
use sha2::block_api::compress256;
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

use crate::kdf::derive_from;
use crate::key::{CipherId, DataKey, Fork};
use crate::layout::{PAGE_SIZE, Page};
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

/// HMAC with both of its key blocks (ipad, opad) hashed already.
#[derive(ZeroizeOnDrop)]
struct HmacMac {
    inner: [u32; 8],
    outer: [u32; 8],
}

/// The initial hash value of SHA-256, FIPS 180-4 section 5.3.3.
const INITIAL: [u32; 8] = [
    0x6a09_e667,
    0xbb67_ae85,
    0x3c6e_f372,
    0xa54f_f53a,
    0x510e_527f,
    0x9b05_688c,
    0x1f83_d9ab,
    0x5be0_cd19,
];
const HASH_BLOCK: usize = 64;

impl HmacMac {
    fn new(data_key: &DataKey) -> Self {
        let mut key = Zeroizing::new([0; 32]);
        let label = "pagevault page tag HMAC-SHA-256 v1";
        derive_from(data_key.expose(), label, &[], &mut key);
        let keyed = |pad: u8| {
            let mut block = Zeroizing::new([pad; HASH_BLOCK]);
            block.iter_mut().zip(key.iter()).for_each(|(byte, key)| *byte ^= key);
            let mut state = INITIAL;
            compress256(&mut state, core::slice::from_ref(&*block));
            state
        };
        Self { inner: keyed(0x36), outer: keyed(0x5c) }
    }

    fn tag(&self, context: &Block, page: &Page) -> Tag {
        let mut first = [0; HASH_BLOCK];
        first[..context.len()].copy_from_slice(context);
        let mut state = Zeroizing::new(self.inner);
        compress256(&mut state, &[first]);
        compress256(&mut state, page.as_chunks().0);
        compress256(&mut state, &[padded(&[], HASH_BLOCK + HASH_BLOCK + PAGE_SIZE)]);
        let mut digest = bytes(&state);
        *state = self.outer;
        compress256(&mut state, &[padded(&digest, HASH_BLOCK + digest.len())]);
        digest.zeroize();
        let [a, b, c, d, ..] = *state;
        [a, b, c, d].iter().fold(0, |tag, word| tag << 32 | Tag::from(*word)).swap_bytes()
    }
}

/// The last block of a message of `length` bytes that ends with `rest`: FIPS 180-4 section 5.1.1.
fn padded(rest: &[u8], length: usize) -> [u8; HASH_BLOCK] {
    let mut block = [0; HASH_BLOCK];
    block[..rest.len()].copy_from_slice(rest);
    block[rest.len()] = 0x80;
    block[HASH_BLOCK - 8..].copy_from_slice(&(length as u64 * 8).to_be_bytes());
    block
}

fn bytes(state: &[u32; 8]) -> [u8; 32] {
    let mut bytes = [0; 32];
    for (to, word) in bytes.as_chunks_mut().0.iter_mut().zip(state) {
        *to = word.to_be_bytes();
    }
    bytes
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
