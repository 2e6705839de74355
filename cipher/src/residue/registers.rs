//! Wiping vector registers.

/// Wipes the vector registers. A value stays in a register until it is used again; signal frames
/// and core dumps contain all registers.
#[inline]
pub(crate) fn wipe_registers() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    x86::wipe();
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    arm::wipe();
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[allow(unsafe_code, reason = "no safe function clears registers")]
mod x86 {
    use core::arch::asm;
    use std::arch::is_x86_feature_detected;

    /// Runs instructions that change only vector registers.
    macro_rules! each {
        ($($line:literal)*) => {
            // SAFETY: sets vector registers to zero and does nothing else. The CPU has the
            // instructions (callers have detected them), and the compiler is told that it finds
            // nothing in these registers afterwards: they are among those that any call may change.
            unsafe {
                asm!(
                    $($line,)*
                    clobber_abi("sysv64"), options(nomem, nostack, preserves_flags),
                )
            }
        };
    }

    #[inline]
    pub(super) fn wipe() {
        if !is_x86_feature_detected!("avx") {
            return sse();
        }
        // All bits of the low 16 registers.
        each!("vzeroall");
        if is_x86_feature_detected!("avx512f") {
            high();
        }
    }

    #[inline]
    fn high() {
        each!(
            "vpxord zmm16, zmm16, zmm16" "vpxord zmm17, zmm17, zmm17"
            "vpxord zmm18, zmm18, zmm18" "vpxord zmm19, zmm19, zmm19"
            "vpxord zmm20, zmm20, zmm20" "vpxord zmm21, zmm21, zmm21"
            "vpxord zmm22, zmm22, zmm22" "vpxord zmm23, zmm23, zmm23"
            "vpxord zmm24, zmm24, zmm24" "vpxord zmm25, zmm25, zmm25"
            "vpxord zmm26, zmm26, zmm26" "vpxord zmm27, zmm27, zmm27"
            "vpxord zmm28, zmm28, zmm28" "vpxord zmm29, zmm29, zmm29"
            "vpxord zmm30, zmm30, zmm30" "vpxord zmm31, zmm31, zmm31"
        );
    }

    #[cold]
    fn sse() {
        each!(
            "pxor xmm0, xmm0" "pxor xmm1, xmm1" "pxor xmm2, xmm2" "pxor xmm3, xmm3"
            "pxor xmm4, xmm4" "pxor xmm5, xmm5" "pxor xmm6, xmm6" "pxor xmm7, xmm7"
            "pxor xmm8, xmm8" "pxor xmm9, xmm9" "pxor xmm10, xmm10" "pxor xmm11, xmm11"
            "pxor xmm12, xmm12" "pxor xmm13, xmm13" "pxor xmm14, xmm14" "pxor xmm15, xmm15"
        );
    }
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
#[allow(unsafe_code, reason = "no safe function clears registers")]
mod arm {
    use core::arch::asm;

    #[inline]
    pub(super) fn wipe() {
        // SAFETY: sets vector registers to zero and does nothing else. Every AArch64 CPU that
        // Rust's target allows has them. `clobber_abi` tells the compiler that they change; it
        // saves the halves of v8 to v15 that callers rely on.
        unsafe {
            asm!(
                "movi v0.2d, #0",
                "movi v1.2d, #0",
                "movi v2.2d, #0",
                "movi v3.2d, #0",
                "movi v4.2d, #0",
                "movi v5.2d, #0",
                "movi v6.2d, #0",
                "movi v7.2d, #0",
                "movi v8.2d, #0",
                "movi v9.2d, #0",
                "movi v10.2d, #0",
                "movi v11.2d, #0",
                "movi v12.2d, #0",
                "movi v13.2d, #0",
                "movi v14.2d, #0",
                "movi v15.2d, #0",
                "movi v16.2d, #0",
                "movi v17.2d, #0",
                "movi v18.2d, #0",
                "movi v19.2d, #0",
                "movi v20.2d, #0",
                "movi v21.2d, #0",
                "movi v22.2d, #0",
                "movi v23.2d, #0",
                "movi v24.2d, #0",
                "movi v25.2d, #0",
                "movi v26.2d, #0",
                "movi v27.2d, #0",
                "movi v28.2d, #0",
                "movi v29.2d, #0",
                "movi v30.2d, #0",
                "movi v31.2d, #0",
                clobber_abi("C"),
                options(nomem, nostack, preserves_flags),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
    #[test]
    fn no_round_key_is_left_in_registers() {
        use std::hint::black_box;

        use crate::xts::{Backend, Direction};
        use crate::{CipherId, DataKey, PageKey};

        let bytes: [u8; 64] = std::array::from_fn(|at| at as u8);
        let key = DataKey::from_bytes(CipherId::Aes256Xts, &bytes).unwrap();
        for backend in Backend::ALL {
            let Some(key) = PageKey::with_backend(&key, backend) else { continue };
            let mut registers = [[0; 64]; 32];
            let mut unit = [[7; 16]; 511];
            key.schedule.run(Direction::Encrypt, 1, black_box(&mut unit));
            store_registers(&mut registers);
            assert!(registers == [[0; 64]; 32], "{backend}");
        }
    }

    /// Stores the vector registers.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[allow(unsafe_code, reason = "no safe function reads registers")]
    #[inline(always)]
    fn store_registers(to: &mut [[u8; 64]; 32]) {
        let to = to.as_mut_ptr();
        if std::arch::is_x86_feature_detected!("avx512f") {
            // SAFETY: the CPU has these registers, and the array has room for all of them.
            unsafe {
                core::arch::asm!(
                    ".irp i, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, \
                     16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31",
                    "vmovdqu64 [{to} + 64 * \\i], zmm\\i",
                    ".endr",
                    to = in(reg) to, options(nostack, preserves_flags),
                )
            }
        } else {
            // SAFETY: every x86-64 CPU has these registers, and the array has room for all of them.
            unsafe {
                core::arch::asm!(
                    ".irp i, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
                    "movdqu [{to} + 64 * \\i], xmm\\i",
                    ".endr",
                    to = in(reg) to, options(nostack, preserves_flags),
                )
            }
        }
    }

    /// Stores the vector registers, except the halves of v8 to v15 that functions must preserve:
    /// these are the test's own.
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    #[allow(unsafe_code, reason = "no safe function reads registers")]
    #[inline(always)]
    fn store_registers(registers: &mut [[u8; 64]; 32]) {
        let to = registers.as_mut_ptr();
        // SAFETY: every AArch64 CPU that Rust's target allows has these registers, and the array
        // has room for all of them.
        unsafe {
            core::arch::asm!(
                ".irp i, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, \
                 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31",
                "str q\\i, [{to}, #64 * \\i]",
                ".endr",
                to = in(reg) to, options(nostack, preserves_flags),
            )
        }
        for register in &mut registers[8..16] {
            register[..8].fill(0);
        }
    }
}
