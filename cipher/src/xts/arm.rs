//! Selects the kernel for this aarch64 CPU.

use std::arch::is_aarch64_feature_detected;

use super::expand::RoundKeys;
use super::hashed::{self, Groups, Job};
use super::{Backend, Block, Direction, Tweak, armaes};
use crate::layout::Page;
use crate::residue::wipe_registers;

/// The kernel, if this CPU can run it. Only detection creates a value.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kernel(());

impl Kernel {
    /// That of `backend`; `None` if this CPU cannot run it.
    pub(crate) fn new(backend: Backend) -> Option<Self> {
        // Rust's feature `aes` is AES and PMULL.
        (backend == Backend::ArmAes && is_aarch64_feature_detected!("aes")).then_some(Self(()))
    }

    pub(crate) fn backend(self) -> Backend {
        Backend::ArmAes
    }

    /// Encrypts or decrypts a data unit; `tweak` is the unit's number before its own encryption.
    ///
    /// The kernel's functions are safe, but calling one on a CPU without its features is undefined
    /// behaviour. Therefore the calls are `unsafe`.
    #[allow(unsafe_code, reason = "calls of target_feature functions, behind proof of detection")]
    pub(crate) fn run<const N: usize>(
        self,
        direction: Direction,
        keys: &RoundKeys<N>,
        tweak: Tweak,
        unit: &mut [Block],
    ) {
        // SAFETY: a `Kernel` is created only by `new`, after it has detected `aes`. That includes
        // `neon`, the only other feature that the kernel enables.
        unsafe {
            match direction {
                Direction::Encrypt => armaes::encrypt(keys, tweak, unit),
                Direction::Decrypt => armaes::decrypt(keys, tweak, unit),
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
        unsafe { hashed::armaes::seal(keys, job, page, late, finish) };
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
        let hash = unsafe { hashed::armaes::open(keys, job, page, visit) };
        wipe_registers();
        hash
    }
}
