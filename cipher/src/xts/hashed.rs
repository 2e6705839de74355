//! XTS over a page and POLYVAL (RFC 8452) over its plaintext in one pass.
//!
//! The page is processed in groups of [`GROUP`] bytes. Its first block is hashed, but it is no part
//! of the data unit: block n of the page is block n - 1 of the unit.
//!
//! Nothing wipes the stack after a page. So in the kernels the functions that load keys or powers
//! call no others, and are not inlined: otherwise the compiler, or the function that is called,
//! would store some of the registers on the stack. The closures are references because Rust 1.96
//! forgets `inline(never)` of functions with target features where a panic in them would have to
//! drop something.

#![cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(dead_code, reason = "only kernels use it")
)]

#[cfg(target_arch = "x86_64")]
pub(super) mod aesni;
#[cfg(target_arch = "aarch64")]
pub(super) mod armaes;
#[cfg(target_arch = "x86_64")]
pub(super) mod vaes256;
#[cfg(target_arch = "x86_64")]
pub(super) mod vaes512;

#[cfg(test)]
mod tests;

use core::ops::Range;

use polyval::Polyval;
use polyval::universal_hash::UniversalHash;
use polyval::universal_hash::common::array::Array;
use zeroize::ZeroizeOnDrop;

use super::{Block, Schedule, Tweak};
use crate::layout::{PAGE_SIZE, Page};

/// Bytes that are processed together.
pub(crate) const GROUP: usize = 256;

/// Groups in a page.
pub(crate) const GROUPS: usize = PAGE_SIZE / GROUP;

/// Numbers of groups.
pub(crate) type Groups = Range<usize>;

const BLOCKS: usize = GROUP / size_of::<Block>();

/// The powers of a POLYVAL key.
#[derive(ZeroizeOnDrop)]
#[repr(align(64))]
pub(crate) struct Powers {
    /// Those for the blocks of a group, highest first. As many blocks are multiplied by the last.
    each: [Block; BLOCKS],
    #[cfg(target_arch = "x86_64")]
    wide: vaes512::WidePowers,
}

impl Powers {
    pub(crate) fn new(key: &Block) -> Self {
        let mut each = of::<BLOCKS>(key);
        each.reverse();
        Self {
            #[cfg(target_arch = "x86_64")]
            wide: vaes512::WidePowers::new(key, &each[0]),
            each,
        }
    }

    #[inline]
    fn last<const COUNT: usize>(&self) -> &[Block; COUNT] {
        const { assert!(COUNT <= BLOCKS) };
        // Never the other: the count is checked above.
        self.each.last_chunk().unwrap_or(&[[0; 16]; COUNT])
    }
}

/// The powers of a key, from the first on.
fn of<const COUNT: usize>(key: &Block) -> [Block; COUNT] {
    let hash = Polyval::new(&Array(*key));
    let mut powers = [*key; COUNT];
    for i in 1..COUNT {
        // The hash of one block is its product with the key.
        let mut product = hash.clone();
        product.update(&[Array(powers[i - 1])]);
        powers[i] = product.finalize().0;
    }
    powers
}

/// What a pass needs besides the keys of XTS.
pub(crate) struct Job<'a> {
    /// The number of the data unit, before its own encryption.
    pub(crate) tweak: Tweak,
    /// The key of the hash.
    pub(crate) powers: &'a Powers,
    /// A block that is hashed before the page.
    pub(crate) context: &'a Block,
}

/// Encrypts the page, and hashes it as it was before. `finish` gets the hash and may then change
/// the groups `late`, at most two, which are encrypted after that.
///
/// # Errors
/// `finish`, if this CPU has no kernel for it; the page is not changed.
pub(crate) fn seal<F: FnOnce(Block, &mut Page)>(
    schedule: &Schedule,
    job: &Job<'_>,
    page: &mut Page,
    late: Groups,
    finish: F,
) -> Result<(), F> {
    match schedule {
        Schedule::Kernel256(kernel, keys) => {
            kernel.seal_hashed(keys, job, page, late, &mut callable(finish));
            Ok(())
        }
        Schedule::Kernel128(kernel, keys) => {
            kernel.seal_hashed(keys, job, page, late, &mut callable(finish));
            Ok(())
        }
        Schedule::Module(_) | Schedule::Portable256(_) | Schedule::Portable128(_) => Err(finish),
    }
}

/// `finish`, callable by reference. Only the first call does something.
fn callable(finish: impl FnOnce(Block, &mut Page)) -> impl FnMut(Block, &mut Page) {
    let mut finish = Some(finish);
    move |hash, page| {
        if let Some(finish) = finish.take() {
            finish(hash, page);
        }
    }
}

/// Decrypts the page and returns the hash of the result; `None` if this CPU has no kernel for it,
/// and the page is not changed.
///
/// `visit` is called with group 0, after it was decrypted and before it is hashed. It may change
/// this group, and returns the next group for which it is to be called, or [`GROUPS`].
pub(crate) fn open(
    schedule: &Schedule,
    job: &Job<'_>,
    page: &mut Page,
    mut visit: impl FnMut(usize, &mut Page) -> usize,
) -> Option<Block> {
    match schedule {
        Schedule::Kernel256(kernel, keys) => Some(kernel.open_hashed(keys, job, page, &mut visit)),
        Schedule::Kernel128(kernel, keys) => Some(kernel.open_hashed(keys, job, page, &mut visit)),
        Schedule::Module(_) | Schedule::Portable256(_) | Schedule::Portable128(_) => None,
    }
}

/// The tweak of the block before: the inverse of [`super::multiply_by_x`], with
/// x^-1 = x^127 + x^6 + x + 1.
fn divide_by_x(tweak: Tweak) -> Tweak {
    let carry = (tweak & 1).wrapping_neg();
    (tweak >> 1) ^ (carry & (1 << 127 | 0x43))
}
