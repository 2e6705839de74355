//! The ordinary build: RustCrypto.

use aes_gcm::aead::inout::InOutBuf;
use aes_gcm::{AeadInOut, Aes256Gcm, KeyInit, Nonce, Tag};
use hkdf::Hkdf;
use hkdf::hmac::{Hmac, Mac};
use sha2::block_api::compress256;
use sha2::{Digest, Sha256};
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

use super::Module;
use crate::layout::{PAGE_SIZE, Page};
use crate::secret::RandomError;
use crate::xts::{Block, Direction, Tweak};

/// The validated module of this build: none.
#[must_use]
pub fn module() -> Option<Module> {
    None
}

/// Does nothing: keys of this build are where their owners are.
pub fn reserve(_keys: usize, _each: impl FnMut(*const u8, usize)) {}

/// AES-256-XTS of the module. Has no value: the kernels of [`crate::xts`] do it.
pub(crate) enum Xts {}

impl Xts {
    pub(crate) fn new(_key: &[u8; 64]) -> Option<Self> {
        None
    }

    pub(crate) fn run(&self, _direction: Direction, _tweak: Tweak, _unit: &mut [Block]) {
        match *self {}
    }
}

/// Fills `out` from `getrandom(2)`.
pub(crate) fn fill_random(out: &mut [u8]) -> Result<(), RandomError> {
    Ok(getrandom::fill(out)?)
}

/// An expanded key for AES-256-GCM; wiped when dropped.
pub(crate) struct Gcm(Aes256Gcm);

impl Gcm {
    pub(crate) fn new(key: &[u8; 32]) -> Self {
        Self(Aes256Gcm::new(key.into()))
    }

    /// Encrypts `body` in place under a new random nonce. `Ok(false)` if it is too long.
    pub(crate) fn seal(
        &self,
        aad: &[u8],
        nonce_out: &mut [u8; 12],
        body: &mut [u8],
        tag_out: &mut [u8; 16],
    ) -> Result<bool, RandomError> {
        fill_random(nonce_out)?;
        let nonce = Nonce::from(*nonce_out);
        match self.0.encrypt_inout_detached(&nonce, aad, InOutBuf::from(body)) {
            Ok(tag) => {
                tag_out.copy_from_slice(&tag);
                Ok(true)
            }
            Err(_) => Ok(false),
        }
    }

    /// Decrypts `body` in place; false if it is not authentic.
    pub(crate) fn open(
        &self,
        aad: &[u8],
        nonce: &[u8; 12],
        body: &mut [u8],
        tag: &[u8; 16],
    ) -> bool {
        let (nonce, tag) = (Nonce::from(*nonce), Tag::from(*tag));
        self.0.decrypt_inout_detached(&nonce, aad, InOutBuf::from(body), &tag).is_ok()
    }
}

pub(crate) fn sha256(message: &[u8]) -> [u8; 32] {
    Sha256::digest(message).into()
}

pub(crate) fn hmac(key: &[u8; 32], message: &[u8]) -> [u8; 32] {
    // A key as long as a block is used as it is; a shorter one is padded with zeros (RFC 2104,
    // section 2).
    let mut block = Zeroizing::new([0; 64]);
    block[..32].copy_from_slice(key);
    let mut mac = Hmac::<Sha256>::new(&(*block).into());
    mac.update(message);
    mac.finalize().into_bytes().into()
}

/// HKDF-SHA256 without salt. `out` is at most 255 hashes long.
pub(crate) fn hkdf(key: &[u8], info: &[&[u8]], out: &mut [u8]) {
    let expanded = Hkdf::<Sha256>::new(None, key).expand_multi_info(info, out);
    debug_assert!(expanded.is_ok(), "the output is too long");
}

const HASH_BLOCK: usize = 64;

/// HMAC-SHA-256 of messages of one block and a page, with both blocks of the key (ipad, opad)
/// hashed already.
#[derive(ZeroizeOnDrop)]
pub(crate) struct PageHmac {
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

impl PageHmac {
    pub(crate) fn new(key: &[u8; 32]) -> Self {
        let keyed = |pad: u8| {
            let mut block = Zeroizing::new([pad; HASH_BLOCK]);
            block.iter_mut().zip(key).for_each(|(byte, key)| *byte ^= key);
            let mut state = INITIAL;
            compress256(&mut state, core::slice::from_ref(&*block));
            state
        };
        Self { inner: keyed(0x36), outer: keyed(0x5c) }
    }

    /// The first 16 bytes of the MAC.
    pub(crate) fn of(&self, first: &[u8; HASH_BLOCK], page: &Page) -> [u8; 16] {
        let mut state = Zeroizing::new(self.inner);
        compress256(&mut state, core::slice::from_ref(first));
        compress256(&mut state, page.as_chunks().0);
        compress256(&mut state, &[padded(&[], HASH_BLOCK + HASH_BLOCK + PAGE_SIZE)]);
        let mut digest = bytes(&state);
        *state = self.outer;
        compress256(&mut state, &[padded(&digest, HASH_BLOCK + digest.len())]);
        digest.zeroize();
        let [a, b, c, d, ..] = *state;
        [a, b, c, d].iter().fold(0, |tag, word| tag << 32 | u128::from(*word)).to_be_bytes()
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
