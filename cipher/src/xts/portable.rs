//! XTS on the `aes` crate: AES instructions where the CPU has them (x86-64, aarch64), a
//! constant-time bit-sliced implementation where it has none. The crate detects at run time.

use aes::cipher::consts::U16;
use aes::cipher::{
    Array, BlockCipherDecBackend, BlockCipherDecClosure, BlockCipherDecrypt, BlockCipherEncBackend,
    BlockCipherEncClosure, BlockCipherEncrypt, BlockSizeUser, KeyInit, ParBlocks,
};
use aes::{Aes128Dec, Aes128Enc, Aes256Dec, Aes256Enc};

use super::{Block, Direction, Tweak, multiply_by_x};

type AesBlock = Array<u8, U16>;

/// The three key schedules of one XTS key. The `aes` crate wipes them when they are dropped.
pub(crate) struct Keys<E, D> {
    tweak: E,
    seal: E,
    open: D,
}

pub(crate) type Keys256 = Keys<Aes256Enc, Aes256Dec>;
pub(crate) type Keys128 = Keys<Aes128Enc, Aes128Dec>;

impl<E, D> Keys<E, D>
where
    E: KeyInit + BlockCipherEncrypt<BlockSize = U16>,
    D: KeyInit<KeySize = E::KeySize> + BlockCipherDecrypt<BlockSize = U16>,
{
    pub(crate) fn new(data: &Array<u8, E::KeySize>, tweak: &Array<u8, E::KeySize>) -> Self {
        Self { tweak: E::new(tweak), seal: E::new(data), open: D::new(data) }
    }

    pub(crate) fn run(&self, direction: Direction, tweak: Tweak, unit: &mut [Block]) {
        let mut first = Array(tweak.to_le_bytes());
        self.tweak.encrypt_block(&mut first);
        let tweak = u128::from_le_bytes(first.0);
        let unit = Unit { tweak, blocks: Array::cast_slice_from_core_mut(unit) };
        match direction {
            Direction::Encrypt => self.seal.encrypt_with_backend(unit),
            Direction::Decrypt => self.open.decrypt_with_backend(unit),
        }
    }
}

/// A data unit and the tweak of its first block.
struct Unit<'a> {
    tweak: u128,
    blocks: &'a mut [AesBlock],
}

impl BlockSizeUser for Unit<'_> {
    type BlockSize = U16;
}

fn xor(block: &mut AesBlock, tweak: &AesBlock) {
    let mixed = u128::from_ne_bytes(block.0) ^ u128::from_ne_bytes(tweak.0);
    block.0 = mixed.to_ne_bytes();
}

/// Common code of both directions: the encrypting and decrypting traits of the `aes` crate have no
/// common trait that a generic function could use.
macro_rules! run_unit {
    ($self:ident, $backend:ident, $par_blocks:ident, $one_block:ident) => {{
        let mut tweak = $self.tweak;
        let mut next_tweak = || {
            let current = Array(tweak.to_le_bytes());
            tweak = multiply_by_x(tweak);
            current
        };
        let (groups, rest) = ParBlocks::<B>::slice_as_chunks_mut($self.blocks);
        for group in groups {
            let mut tweaks: ParBlocks<B> = Array::default();
            tweaks.iter_mut().for_each(|tweak| *tweak = next_tweak());
            group.iter_mut().zip(&tweaks).for_each(|(block, tweak)| xor(block, tweak));
            $backend.$par_blocks(group);
            group.iter_mut().zip(&tweaks).for_each(|(block, tweak)| xor(block, tweak));
        }
        for block in rest {
            let tweak = next_tweak();
            xor(block, &tweak);
            $backend.$one_block(block);
            xor(block, &tweak);
        }
    }};
}

impl BlockCipherEncClosure for Unit<'_> {
    #[inline(always)]
    fn call<B: BlockCipherEncBackend<BlockSize = U16>>(self, backend: &B) {
        run_unit!(self, backend, encrypt_par_blocks_inplace, encrypt_block_inplace);
    }
}

impl BlockCipherDecClosure for Unit<'_> {
    #[inline(always)]
    fn call<B: BlockCipherDecBackend<BlockSize = U16>>(self, backend: &B) {
        run_unit!(self, backend, decrypt_par_blocks_inplace, decrypt_block_inplace);
    }
}
