//! The build with the feature `fips`: AWS-LC's validated module.
//!
//! The module tests itself when the library is loaded, and ends the process if it fails. If one of
//! its functions fails later, so does this file: there is no page that could be written then, and
//! nobody may take what is in the buffer for ciphertext.
//!
//! Expanded keys of XTS are in the module's own memory, on the heap. A process that cannot allocate
//! when it meets a new key, or whose keys must be kept out of core dumps, makes contexts in advance
//! ([`reserve`]): they are given a key when they are needed, and wiped and put back afterwards.

use std::io::Write;
use std::sync::Mutex;

use zeroize::ZeroizeOnDrop;

use super::Module;
use super::ffi::{self, XtsContext};
use crate::layout::Page;
use crate::residue::without_trace;
use crate::secret::RandomError;
use crate::xts::{Block, Direction, Tweak};

/// Of AWS-LC's branch 3 as a static library: docs/fips.md says what to check.
const CERTIFICATE: u32 = 5314;

/// The validated module of this build.
#[must_use]
pub fn module() -> Option<Module> {
    Some(Module {
        name: ffi::version(),
        certificate: CERTIFICATE,
        is_in_fips_mode: ffi::is_in_fips_mode(),
    })
}

/// Ends the process: the module has refused what it never refuses.
#[cold]
fn fail(what: &str) -> ! {
    let _ = writeln!(std::io::stderr(), "pagevault: the validated module failed: {what}");
    std::process::abort()
}

fn require(done: bool, what: &str) {
    if !done {
        fail(what);
    }
}

/// Both directions of one key.
struct Pair {
    seal: XtsContext,
    open: XtsContext,
}

impl Pair {
    fn new() -> Self {
        match (XtsContext::new(true), XtsContext::new(false)) {
            (Some(seal), Some(open)) => Self { seal, open },
            // As for any other memory in Rust.
            _ => std::alloc::handle_alloc_error(std::alloc::Layout::new::<[u8; 1024]>()),
        }
    }

    fn set_key(&mut self, key: &[u8; 64]) {
        let done = self.seal.set_key(key) && self.open.set_key(key);
        require(done, "AES-256-XTS did not accept a key");
    }
}

/// Contexts without a key. Nothing is ever allocated for the list but in [`reserve`], and it never
/// waits: if another thread uses it, contexts are allocated and freed.
static SPARE: Mutex<Vec<Pair>> = Mutex::new(Vec::new());

/// Not a secret: contexts without a key have it, so that no other is left in them.
const NO_KEY: [u8; 64] = {
    let mut key = [0; 64];
    key[63] = 1;
    key
};

/// Makes contexts for `keys` expanded keys in advance. `each` gets the memory that will contain
/// them. For a process that has one thread: those that it forks have the contexts, too.
pub fn reserve(keys: usize, mut each: impl FnMut(*const u8, usize)) {
    let Ok(mut spare) = SPARE.lock() else { return };
    spare.reserve_exact(keys);
    for _ in 0..keys {
        let pair = Pair::new();
        for (memory, length) in pair.seal.memory().into_iter().chain(pair.open.memory()) {
            each(memory, length);
        }
        spare.push(pair);
    }
}

/// An expanded key for AES-256-XTS; wiped when dropped.
pub(crate) struct Xts(Option<Pair>);

impl Xts {
    /// Always a value. Both halves of the key differ.
    pub(crate) fn new(key: &[u8; 64]) -> Option<Self> {
        let spare = SPARE.try_lock().ok().and_then(|mut spare| spare.pop());
        let mut pair = spare.unwrap_or_else(Pair::new);
        pair.set_key(key);
        Some(Self(Some(pair)))
    }

    #[inline]
    pub(crate) fn run(&self, direction: Direction, tweak: Tweak, unit: &mut [Block]) {
        let Some(pair) = &self.0 else { fail("a key is used after it was dropped") };
        let context = match direction {
            Direction::Encrypt => &pair.seal,
            Direction::Decrypt => &pair.open,
        };
        let unit = unit.as_flattened_mut();
        require(
            unit.is_empty() || context.run(&tweak.to_le_bytes(), unit),
            "AES-256-XTS did not process a data unit",
        );
    }
}

impl Drop for Xts {
    fn drop(&mut self) {
        let Some(mut pair) = self.0.take() else { return };
        pair.set_key(&NO_KEY);
        if let Ok(mut spare) = SPARE.try_lock()
            && spare.len() < spare.capacity()
        {
            spare.push(pair);
        }
    }
}

pub(crate) fn fill_random(out: &mut [u8]) -> Result<(), RandomError> {
    require(ffi::fill_random(out), "there are no random bytes");
    Ok(())
}

/// A key for AES-256-GCM; wiped when dropped. It is expanded for each use, on the stack: so it is
/// nowhere but where its owner is, as in the ordinary build.
#[derive(ZeroizeOnDrop)]
pub(crate) struct Gcm([u8; 32]);

impl Gcm {
    pub(crate) fn new(key: &[u8; 32]) -> Self {
        Self(*key)
    }

    /// Encrypts `body` in place under a new random nonce. `Ok(false)` if it is too long.
    pub(crate) fn seal(
        &self,
        aad: &[u8],
        nonce: &mut [u8; 12],
        body: &mut [u8],
        tag: &mut [u8; 16],
    ) -> Result<bool, RandomError> {
        Ok(without_trace(|| ffi::gcm_seal(&self.0, aad, nonce, body, tag)))
    }

    /// Decrypts `body` in place; false if it is not authentic.
    pub(crate) fn open(
        &self,
        aad: &[u8],
        nonce: &[u8; 12],
        body: &mut [u8],
        tag: &[u8; 16],
    ) -> bool {
        without_trace(|| ffi::gcm_open(&self.0, aad, nonce, body, tag))
    }
}

pub(crate) fn sha256(message: &[u8]) -> [u8; 32] {
    let mut hash = [0; 32];
    ffi::sha256(message, &mut hash);
    hash
}

pub(crate) fn hmac(key: &[u8; 32], message: &[u8]) -> [u8; 32] {
    let mut mac = [0; 32];
    require(ffi::hmac(key, [message, &[]], &mut mac), "HMAC-SHA-256");
    mac
}

/// Longest `info` that is put together on the stack; a longer one needs the heap.
const INFO: usize = 2048;

/// HKDF-SHA256 without salt. `out` is at most 255 hashes long.
pub(crate) fn hkdf(key: &[u8], info: &[&[u8]], out: &mut [u8]) {
    let length = info.iter().map(|part| part.len()).sum();
    let mut room = [0; INFO];
    let done = match room.get_mut(..length) {
        Some(whole) => {
            let mut rest = &mut whole[..];
            for part in info {
                let (to, after) = rest.split_at_mut(part.len());
                to.copy_from_slice(part);
                rest = after;
            }
            ffi::hkdf(key, whole, out)
        }
        None => ffi::hkdf(key, &info.concat(), out),
    };
    require(done, "HKDF-SHA256");
}

/// HMAC-SHA-256 of messages of one block and a page; wiped when dropped. Hashing both blocks of the
/// key for each page is two of some 130 blocks, and leaves the key where its owner is.
#[derive(ZeroizeOnDrop)]
pub(crate) struct PageHmac([u8; 32]);

impl PageHmac {
    pub(crate) fn new(key: &[u8; 32]) -> Self {
        Self(*key)
    }

    /// The first 16 bytes of the MAC.
    pub(crate) fn of(&self, first: &[u8; 64], page: &Page) -> [u8; 16] {
        let mut mac = [0; 32];
        require(ffi::hmac(&self.0, [first, page], &mut mac), "HMAC-SHA-256");
        mac.as_chunks().0[0]
    }
}
