//! AES-XTS (IEEE 1619-2018, NIST SP 800-38E) over data units of whole blocks.
//!
//! Ciphertext stealing is in [`crate::stream`]; all other data units are whole blocks.
//!
//! In a build with a validated module (feature `fips`) that does AES-256-XTS, and what follows is
//! only for AES-128-XTS and for comparison in tests.
//!
//! Five kernels do the same: on x86-64 VAES on 512-bit and on 256-bit registers, and AES
//! instructions on 128-bit registers; on aarch64 its AES instructions; and the `aes` crate for all
//! other CPUs, also those of x86-64 and aarch64 without AES instructions.
//! The choice is made once, when a key is expanded.

mod expand;
pub(crate) mod hashed;
mod portable;

#[cfg(target_arch = "x86_64")]
mod aesni;
#[cfg(target_arch = "aarch64")]
mod arm;
#[cfg(target_arch = "aarch64")]
mod armaes;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod other;
#[cfg(target_arch = "x86_64")]
mod vaes256;
#[cfg(target_arch = "x86_64")]
mod vaes512;
#[cfg(test)]
mod vectors;
#[cfg(target_arch = "x86_64")]
mod x86;

use core::fmt;

use aes::cipher::Array;
use aes::cipher::consts::{U16, U32, U64};

#[cfg(target_arch = "aarch64")]
use self::arm::Kernel;
use self::expand::RoundKeys;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
use self::other::Kernel;
#[cfg(target_arch = "x86_64")]
use self::x86::Kernel;
use crate::primitives::{self, module};
use crate::residue::wipe_registers;

/// One AES block.
pub type Block = [u8; 16];

/// The number of a data unit, before its own encryption: 16 bytes, little-endian.
pub(crate) type Tweak = u128;

/// Length of the two AES keys of an XTS key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeySize {
    Aes128,
    Aes256,
}

impl KeySize {
    /// Bytes of the XTS key, which consists of both AES keys, the one for data first.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::Aes128 => 32,
            Self::Aes256 => 64,
        }
    }
}

/// The implementation of AES-XTS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Backend {
    /// The validated module, for AES-256-XTS alone.
    AwsLc,
    /// VAES on 512-bit registers (x86-64: Ice Lake, Zen 4 and later).
    Vaes512,
    /// VAES on 256-bit registers (x86-64 without AVX-512: Zen 3, Alder Lake and later).
    Vaes256,
    /// AES instructions on 128-bit registers (x86-64 with AES-NI, PCLMULQDQ and AVX).
    AesNi,
    /// AES instructions of aarch64, with PMULL.
    ArmAes,
    /// The `aes` crate, which detects CPU features itself: AES instructions, or constant-time code.
    Portable,
}

impl Backend {
    /// Every backend: the validated module, then the others, fastest first.
    pub const ALL: [Self; 6] =
        [Self::AwsLc, Self::Vaes512, Self::Vaes256, Self::AesNi, Self::ArmAes, Self::Portable];

    /// The validated module of this build, or else the fastest backend of this CPU.
    #[must_use]
    pub fn detect() -> Self {
        Self::ALL.into_iter().find(|backend| backend.is_available()).unwrap_or(Self::Portable)
    }

    /// Whether this build has it, and this CPU can run it.
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            Self::AwsLc => module().is_some(),
            Self::Portable => true,
            _ => Kernel::new(self).is_some(),
        }
    }

    /// The name used in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AwsLc => "aws-lc-fips",
            Self::Vaes512 => "vaes512",
            Self::Vaes256 => "vaes256",
            Self::AesNi => "aes-ni",
            Self::ArmAes => "arm-aes",
            Self::Portable => "portable",
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[derive(Clone, Copy)]
pub(crate) enum Direction {
    Encrypt,
    Decrypt,
}

/// The next block's tweak: multiplication by x in GF(2^128), IEEE 1619-2018 section 5.2.
/// Constant time: the carry selects by mask, not by branch.
const fn multiply_by_x(tweak: u128) -> u128 {
    let carry = (tweak.cast_signed() >> 127).cast_unsigned();
    (tweak << 1) ^ (carry & 0x87)
}

/// The expanded keys, in the form that the chosen kernel uses.
#[allow(clippy::large_enum_variant, reason = "lives in place, in a fixed-size cache")]
pub(crate) enum Schedule {
    Module(primitives::Xts),
    Kernel256(Kernel, RoundKeys<15>),
    Kernel128(Kernel, RoundKeys<11>),
    Portable256(portable::Keys256),
    Portable128(portable::Keys128),
}

impl Schedule {
    /// Expands the XTS key in the first [`KeySize::bytes`] of `bytes`; `None` if `backend` is not
    /// available, or has no keys of this size.
    pub(crate) fn new(size: KeySize, bytes: &[u8; 64], backend: Backend) -> Option<Self> {
        match backend {
            Backend::AwsLc if size == KeySize::Aes256 => {
                primitives::Xts::new(bytes).map(Self::Module)
            }
            Backend::AwsLc => None,
            Backend::Portable => Some(Self::portable(size, bytes)),
            _ => Kernel::new(backend).map(|kernel| Self::with_kernel(size, bytes, kernel)),
        }
    }

    /// Expands for the first backend of [`Backend::ALL`] that is available and has such keys.
    pub(crate) fn detect(size: KeySize, bytes: &[u8; 64]) -> Self {
        let first = Backend::ALL.into_iter().find_map(|backend| Self::new(size, bytes, backend));
        first.unwrap_or_else(|| Self::portable(size, bytes))
    }

    fn with_kernel(size: KeySize, bytes: &[u8; 64], kernel: Kernel) -> Self {
        let (data, tweak) = bytes[..size.bytes()].split_at(size.bytes() / 2);
        match size {
            KeySize::Aes256 => Self::Kernel256(kernel, RoundKeys::new(data, tweak)),
            KeySize::Aes128 => Self::Kernel128(kernel, RoundKeys::new(data, tweak)),
        }
    }

    fn portable(size: KeySize, bytes: &[u8; 64]) -> Self {
        let bytes: &Array<u8, U64> = bytes.into();
        match size {
            KeySize::Aes256 => {
                let (data, tweak) = bytes.split_ref::<U32>();
                Self::Portable256(portable::Keys256::new(data, tweak))
            }
            KeySize::Aes128 => {
                let (data, rest) = bytes.split_ref::<U16>();
                let (tweak, _) = rest.split_ref::<U16>();
                Self::Portable128(portable::Keys128::new(data, tweak))
            }
        }
    }

    pub(crate) fn backend(&self) -> Backend {
        match self {
            Self::Module(_) => Backend::AwsLc,
            Self::Kernel256(kernel, _) | Self::Kernel128(kernel, _) => kernel.backend(),
            Self::Portable256(_) | Self::Portable128(_) => Backend::Portable,
        }
    }

    /// Encrypts or decrypts a data unit in place; `tweak` is the unit's number before its own
    /// encryption.
    pub(crate) fn run(&self, direction: Direction, tweak: Tweak, unit: &mut [Block]) {
        match self {
            Self::Module(xts) => xts.run(direction, tweak, unit),
            Self::Kernel256(kernel, keys) => kernel.run(direction, keys, tweak, unit),
            Self::Kernel128(kernel, keys) => kernel.run(direction, keys, tweak, unit),
            Self::Portable256(keys) => keys.run(direction, tweak, unit),
            Self::Portable128(keys) => keys.run(direction, tweak, unit),
        }
        // They contain round keys.
        wipe_registers();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn multiplication_reduces_the_carry() {
        assert_eq!(multiply_by_x(1), 2);
        assert_eq!(multiply_by_x(1 << 127), 0x87);
        assert_eq!(multiply_by_x(u128::MAX), (u128::MAX << 1) ^ 0x87);
    }

    #[test]
    fn the_detected_backend_is_the_fastest_available() {
        let detected = Backend::detect();
        assert!(detected.is_available());
        for backend in Backend::ALL.into_iter().take_while(|backend| *backend != detected) {
            assert!(!backend.is_available());
        }
        let key = core::array::from_fn(|at| at as u8);
        for backend in Backend::ALL {
            let schedule = Schedule::new(KeySize::Aes256, &key, backend);
            assert_eq!(schedule.is_some(), backend.is_available());
            assert!(schedule.is_none_or(|schedule| schedule.backend() == backend));
        }
    }

    proptest! {
        /// Units of every length up to that of a page and beyond, so that all groups and remainders
        /// of each kernel are tested.
        #[test]
        fn the_backends_agree(
            size in prop::sample::select(&[KeySize::Aes128, KeySize::Aes256][..]),
            key in prop::array::uniform32(any::<u8>()), tweak: Tweak,
            unit in prop::collection::vec(any::<Block>(), 0..520),
        ) {
            let mut bytes = [0; 64];
            bytes[..32].copy_from_slice(&key);
            bytes[32..].copy_from_slice(&key.map(|byte| !byte));
            let portable = Schedule::new(size, &bytes, Backend::Portable).unwrap();
            let mut expected = unit.clone();
            portable.run(Direction::Encrypt, tweak, &mut expected);
            for backend in Backend::ALL {
                if let Some(schedule) = Schedule::new(size, &bytes, backend) {
                    let mut actual = unit.clone();
                    schedule.run(Direction::Encrypt, tweak, &mut actual);
                    prop_assert!(actual == expected, "{} encrypts differently", backend);
                    schedule.run(Direction::Decrypt, tweak, &mut actual);
                    prop_assert!(actual == unit, "{} does not open what it sealed", backend);
                }
            }
        }
    }
}
