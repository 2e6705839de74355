//! Selects the kernel for this x86-64 CPU.

use std::arch::is_x86_feature_detected;

use super::expand::RoundKeys;
use super::hashed::{self, Groups, Job};
use super::{Backend, Block, Direction, Tweak, aesni, vaes256, vaes512};
use crate::layout::Page;
use crate::residue::wipe_registers;

/// A kernel that this CPU can run. Only detection creates a value.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kernel(Width);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Width {
    Xmm,
    Ymm,
    Zmm,
}

impl Kernel {
    /// That of `backend`; `None` if this CPU cannot run it.
    pub(crate) fn new(backend: Backend) -> Option<Self> {
        match backend {
            Backend::Vaes512 => Self::vaes512(),
            Backend::Vaes256 => Self::vaes256(),
            Backend::AesNi => Self::aesni(),
            Backend::AwsLc | Backend::ArmAes | Backend::Portable => None,
        }
    }

    /// VAES on 512-bit registers.
    fn vaes512() -> Option<Self> {
        (Self::aesni().is_some()
            && is_x86_feature_detected!("vaes")
            && is_x86_feature_detected!("vpclmulqdq")
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vbmi"))
        .then_some(Self(Width::Zmm))
    }

    /// VAES on 256-bit registers.
    fn vaes256() -> Option<Self> {
        (Self::aesni().is_some()
            && is_x86_feature_detected!("vaes")
            && is_x86_feature_detected!("vpclmulqdq")
            && is_x86_feature_detected!("avx2"))
        .then_some(Self(Width::Ymm))
    }

    /// AES instructions on 128-bit registers, with AVX's three-operand forms.
    fn aesni() -> Option<Self> {
        (is_x86_feature_detected!("aes")
            && is_x86_feature_detected!("pclmulqdq")
            && is_x86_feature_detected!("avx"))
        .then_some(Self(Width::Xmm))
    }

    pub(crate) fn backend(self) -> Backend {
        match self.0 {
            Width::Xmm => Backend::AesNi,
            Width::Ymm => Backend::Vaes256,
            Width::Zmm => Backend::Vaes512,
        }
    }

    /// Encrypts or decrypts a data unit; `tweak` is the unit's number before its own encryption.
    ///
    /// The kernels are safe functions, but calling one on a CPU without its features is undefined
    /// behaviour. Therefore the calls are `unsafe`.
    #[allow(unsafe_code, reason = "calls of target_feature functions, behind proof of detection")]
    pub(crate) fn run<const N: usize>(
        self,
        direction: Direction,
        keys: &RoundKeys<N>,
        tweak: Tweak,
        unit: &mut [Block],
    ) {
        // SAFETY: each width is created only by the functions above, after they have detected every
        // feature that the kernels of this width enable.
        unsafe {
            match (self.0, direction) {
                (Width::Xmm, Direction::Encrypt) => aesni::encrypt(keys, tweak, unit),
                (Width::Xmm, Direction::Decrypt) => aesni::decrypt(keys, tweak, unit),
                (Width::Ymm, Direction::Encrypt) => vaes256::encrypt(keys, tweak, unit),
                (Width::Ymm, Direction::Decrypt) => vaes256::decrypt(keys, tweak, unit),
                (Width::Zmm, Direction::Encrypt) => vaes512::encrypt(keys, tweak, unit),
                (Width::Zmm, Direction::Decrypt) => vaes512::decrypt(keys, tweak, unit),
            }
        }
    }

    /// [`hashed::seal`] on this CPU.
    #[allow(unsafe_code, reason = "calls of target_feature functions, behind proof of detection")]
    pub(crate) fn seal_hashed<const N: usize>(
        self,
        keys: &RoundKeys<N>,
        job: &Job<'_>,
        page: &mut Page,
        late: Groups,
        finish: &mut impl FnMut(Block, &mut Page),
    ) {
        // SAFETY: as in `run`; the features are the same.
        unsafe {
            match self.0 {
                Width::Xmm => hashed::aesni::seal(keys, job, page, late, finish),
                Width::Ymm => hashed::vaes256::seal(keys, job, page, late, finish),
                Width::Zmm => hashed::vaes512::seal(keys, job, page, late, finish),
            }
        }
        // They contain round keys.
        wipe_registers();
    }

    /// [`hashed::open`] on this CPU.
    #[allow(unsafe_code, reason = "calls of target_feature functions, behind proof of detection")]
    pub(crate) fn open_hashed<const N: usize>(
        self,
        keys: &RoundKeys<N>,
        job: &Job<'_>,
        page: &mut Page,
        visit: &mut impl FnMut(usize, &mut Page) -> usize,
    ) -> Block {
        // SAFETY: as in `run`; the features are the same.
        let hash = unsafe {
            match self.0 {
                Width::Xmm => hashed::aesni::open(keys, job, page, visit),
                Width::Ymm => hashed::vaes256::open(keys, job, page, visit),
                Width::Zmm => hashed::vaes512::open(keys, job, page, visit),
            }
        };
        wipe_registers();
        hash
    }
}
