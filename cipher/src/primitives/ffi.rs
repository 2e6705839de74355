//! The functions of AWS-LC that this crate calls (aws-lc-fips-sys), as safe functions.
//!
//! Each returns whether the module did it. None of them retains a pointer that it was given, except
//! where a context owns the memory that it points to.

#![allow(unsafe_code, reason = "functions of a C library")]

use core::ffi::{CStr, c_int};
use core::mem::MaybeUninit;
use core::ptr::{self, NonNull};

use aws_lc_fips_sys as lc;

/// AES-256-XTS with one key, in one direction: an `EVP_CIPHER_CTX`.
///
/// Owns its memory, of which a pointer is all that moves: the context contains pointers into
/// itself.
pub(super) struct XtsContext(NonNull<lc::EVP_CIPHER_CTX>);

// SAFETY: a context belongs to no thread. It is not `Sync`, because `run` changes it.
unsafe impl Send for XtsContext {}

/// At least the size of what an `EVP_CIPHER_CTX` of XTS points to: two `AES_KEY` of 244 bytes, and
/// four pointers (`EVP_AES_XTS_CTX`, crypto/fipsmodule/cipher/e_aes.c).
const KEYS: usize = 2 * 244 + 8 * 8;

impl XtsContext {
    /// A context without a key. All of its memory is allocated here; `None` if there is none.
    pub(super) fn new(encrypts: bool) -> Option<Self> {
        // SAFETY: allocates, and returns null or a context that `Drop` frees.
        let context = Self(NonNull::new(unsafe { lc::EVP_CIPHER_CTX_new() })?);
        // SAFETY: the context is valid; the engine, the key and the number of the data unit may be
        // null, and are set by other calls.
        let done = unsafe {
            lc::EVP_CipherInit_ex(
                context.0.as_ptr(),
                lc::EVP_aes_256_xts(),
                ptr::null_mut(),
                ptr::null(),
                ptr::null(),
                encrypts.into(),
            )
        };
        (done == 1).then_some(context)
    }

    /// Expands a key in place of the one before. Allocates nothing. False if both halves of the key
    /// are the same.
    pub(super) fn set_key(&mut self, key: &[u8; 64]) -> bool {
        // SAFETY: the context is valid and has its cipher, whose key has 64 bytes; -1 keeps the
        // direction.
        1 == unsafe {
            lc::EVP_CipherInit_ex(
                self.0.as_ptr(),
                ptr::null(),
                ptr::null_mut(),
                key.as_ptr(),
                ptr::null(),
                -1,
            )
        }
    }

    /// Encrypts or decrypts a data unit in place. Allocates nothing, and takes no lock.
    ///
    /// The last call is what makes the module count this as an approved service.
    #[inline]
    pub(super) fn run(&self, tweak: &[u8; 16], unit: &mut [u8]) -> bool {
        let Ok(length) = c_int::try_from(unit.len()) else { return false };
        let (context, data) = (self.0.as_ptr(), unit.as_mut_ptr());
        let (mut done, mut rest) = (0, 0);
        let mut last = [0; 16];
        // SAFETY: the context is valid, and nobody else uses it now, because it is not `Sync` and
        // no function that it is given to calls back. The tweak has the 16 bytes of the cipher's
        // IV. The module may write where it reads, `length` bytes; XTS has no rest for the final
        // call to write, and `last` would have room for it.
        unsafe {
            lc::EVP_CipherInit_ex(
                context,
                ptr::null(),
                ptr::null_mut(),
                ptr::null(),
                tweak.as_ptr(),
                -1,
            ) == 1
                && lc::EVP_CipherUpdate(context, data, &raw mut done, data, length) == 1
                && lc::EVP_CipherFinal_ex(context, last.as_mut_ptr(), &raw mut rest) == 1
                && (done, rest) == (length, 0)
        }
    }

    /// The memory that contains the key, or more.
    pub(super) fn memory(&self) -> [(*const u8, usize); 2] {
        let context = self.0.as_ptr();
        // SAFETY: a field of a valid context.
        let keys = unsafe { (*context).cipher_data };
        [(context.cast_const().cast(), size_of::<lc::EVP_CIPHER_CTX>()), (keys.cast(), KEYS)]
    }
}

impl Drop for XtsContext {
    fn drop(&mut self) {
        // SAFETY: the context is valid, and not used after this. The module wipes what it frees.
        unsafe { lc::EVP_CIPHER_CTX_free(self.0.as_ptr()) };
    }
}

/// Bytes of a GCM tag followed by the nonce, as the module has them.
const TAG_AND_NONCE: usize = 28;

/// Calls `f` with a context of AES-256-GCM whose nonces the module draws itself: only these are
/// approved (FIPS 140-3 IG C.H). The context is on the stack, and is wiped.
fn with_gcm(key: &[u8; 32], f: impl FnOnce(&lc::EVP_AEAD_CTX) -> bool) -> bool {
    let mut memory = MaybeUninit::<lc::EVP_AEAD_CTX>::zeroed();
    let context = memory.as_mut_ptr();
    // SAFETY: the memory has the size of a context, and zeros are an empty one
    // (`EVP_AEAD_CTX_zero`). The key has the length that is given. A context of GCM has all of its
    // state in itself, so that after `f`, which cannot keep the reference, wiping it frees it.
    unsafe {
        let done = lc::EVP_AEAD_CTX_init(
            context,
            lc::EVP_aead_aes_256_gcm_randnonce(),
            key.as_ptr(),
            key.len(),
            TAG_AND_NONCE,
            ptr::null_mut(),
        ) == 1
            && f(&*context);
        lc::EVP_AEAD_CTX_cleanup(context);
        lc::OPENSSL_cleanse(context.cast(), size_of::<lc::EVP_AEAD_CTX>());
        done
    }
}

/// Encrypts `body` in place under a random nonce. False if it is too long.
pub(super) fn gcm_seal(
    key: &[u8; 32],
    aad: &[u8],
    nonce: &mut [u8; 12],
    body: &mut [u8],
    tag: &mut [u8; 16],
) -> bool {
    let mut both = [0; TAG_AND_NONCE];
    let mut written = 0;
    let data = body.as_mut_ptr();
    // SAFETY: the module may write where it reads, the length of `body`. `both` has room for tag
    // and nonce. No nonce is given, and no further input.
    let sealed = with_gcm(key, |context| unsafe {
        1 == lc::EVP_AEAD_CTX_seal_scatter(
            context,
            data,
            both.as_mut_ptr(),
            &raw mut written,
            both.len(),
            ptr::null(),
            0,
            data,
            body.len(),
            ptr::null(),
            0,
            aad.as_ptr(),
            aad.len(),
        )
    });
    tag.copy_from_slice(&both[..16]);
    nonce.copy_from_slice(&both[16..]);
    sealed && written == TAG_AND_NONCE
}

/// Decrypts `body` in place; false if it is not authentic.
pub(super) fn gcm_open(
    key: &[u8; 32],
    aad: &[u8],
    nonce: &[u8; 12],
    body: &mut [u8],
    tag: &[u8; 16],
) -> bool {
    let mut both = [0; TAG_AND_NONCE];
    both[..16].copy_from_slice(tag);
    both[16..].copy_from_slice(nonce);
    let data = body.as_mut_ptr();
    // SAFETY: the module may write where it reads, the length of `body`. `both` has tag and nonce,
    // in the length that the context was made for. No nonce is given, and no further input.
    with_gcm(key, |context| unsafe {
        1 == lc::EVP_AEAD_CTX_open_gather(
            context,
            data,
            ptr::null(),
            0,
            data,
            body.len(),
            both.as_ptr(),
            both.len(),
            aad.as_ptr(),
            aad.len(),
        )
    })
}

pub(super) fn sha256(message: &[u8], out: &mut [u8; 32]) {
    // SAFETY: reads the message, and writes 32 bytes. It cannot fail.
    unsafe { lc::SHA256(message.as_ptr(), message.len(), out.as_mut_ptr()) };
}

/// HMAC-SHA-256 of a message in two parts. The context is on the stack, and the module wipes it.
pub(super) fn hmac(key: &[u8; 32], parts: [&[u8]; 2], out: &mut [u8; 32]) -> bool {
    let mut memory = MaybeUninit::<lc::HMAC_CTX>::zeroed();
    let context = memory.as_mut_ptr();
    let mut length = 0;
    // SAFETY: the memory has the size of a context, and `HMAC_CTX_init` makes it one. The parts are
    // read; `out` has room for a hash. Contexts of SHA-256 have all of their state in themselves.
    unsafe {
        lc::HMAC_CTX_init(context);
        let (md, engine) = (lc::EVP_sha256(), ptr::null_mut());
        let done = lc::HMAC_Init_ex(context, key.as_ptr().cast(), key.len(), md, engine) == 1
            && parts.iter().all(|part| lc::HMAC_Update(context, part.as_ptr(), part.len()) == 1)
            && lc::HMAC_Final(context, out.as_mut_ptr(), &raw mut length) == 1;
        lc::HMAC_CTX_cleanup(context);
        done && length as usize == out.len()
    }
}

/// HKDF-SHA256 without salt.
pub(super) fn hkdf(key: &[u8], info: &[u8], out: &mut [u8]) -> bool {
    // SAFETY: reads key and info, and writes the length of `out`. Without a salt the pointer may be
    // null; the module takes zeros then, as RFC 5869 has it.
    1 == unsafe {
        lc::HKDF(
            out.as_mut_ptr(),
            out.len(),
            lc::EVP_sha256(),
            key.as_ptr(),
            key.len(),
            ptr::null(),
            0,
            info.as_ptr(),
            info.len(),
        )
    }
}

/// Bytes of the module's own generator, which seeds itself again in a process that was forked.
pub(super) fn fill_random(out: &mut [u8]) -> bool {
    // SAFETY: writes the length of `out`.
    1 == unsafe { lc::RAND_bytes(out.as_mut_ptr(), out.len()) }
}

/// Whether the module says that it is in FIPS mode.
pub(super) fn is_in_fips_mode() -> bool {
    // SAFETY: reads a constant of the module.
    1 == unsafe { lc::FIPS_mode() }
}

/// The module's name and version.
pub(super) fn version() -> &'static str {
    // SAFETY: a constant string that ends with a zero byte.
    let text = unsafe { CStr::from_ptr(lc::awslc_version_string()) };
    text.to_str().unwrap_or("AWS-LC")
}

/// Whether the module counts what `f` does as approved services (FIPS 140-3 IG 2.4.C), at least
/// one.
#[cfg(test)]
pub(super) fn is_approved(f: impl FnOnce()) -> bool {
    // SAFETY: both read a counter of this thread.
    let count = || unsafe { lc::FIPS_service_indicator_after_call() };
    let before = count();
    f();
    count() > before
}
