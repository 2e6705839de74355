//! The loop over a page, in assembler.
//!
//! Zen 4 and 5 execute products (`vpclmulqdq`) on the ports of `vaesenc`, one of either in a cycle
//! if they are of 512 bits. So a page takes the least time if each of these cycles is used. For
//! this, both must be next to each other everywhere in the program, and there must be little else
//! that takes these ports now and then, as XOR does. Compilers move all rounds together.
//!
//! A turn encrypts or decrypts a span of 1024 bytes, which are registers R0 to R15 of four blocks,
//! in two halves. Each lane of the registers has a hash of its own, S:
//!
//! ```text
//! S' = R0 H^60 + R1 H^56 + ... + R14 H^4 + R15 + S H^64
//! ```
//!
//! * Products are Karatsuba's: three for a register, the third of both halves' sum. The sums of two
//!   registers are in one ("pair"), which saves an XOR.
//! * S is the last factor, so its reduction has the time of the first half.
//! * Registers 8 to 15 are not the tweaks T, but F = T + K, with the last round key K. The last
//!   round adds F as it is. The first one adds F and K + (first round key). F x^32 + K (x^32 + 1)
//!   is the next F.
//! * In decryption the hash is half a span behind. The half that is before the page is zeros and
//!   the context.
//!
//! Registers: 0-7 blocks; 8-15 F; 16-18 sums of low, middle, and high products; 19 round key; 20-25
//! and 31 temporary; 26 first + last round key; 27 polynomial; 28 K (x^32 + 1); 29, 30 S or its
//! high and low half. Memory: rdi span, rsi round keys, rdx powers, r8 their halves' sums, r9
//! F of this half, r10 second half that is hashed, rax constants, rcx turns.

use core::arch::asm;
use core::arch::x86_64::__m512i;
use core::mem::MaybeUninit;

use super::super::super::Block;
use super::WidePowers;
use super::{HALF, Half, SPANS, polynomial};
use crate::layout::Page;

/// What passes from turn to turn.
pub(super) struct State {
    /// Those of the first half of the page.
    pub(super) tweaks: [__m512i; 8],
    /// Sums of low, middle and high products that are not in `hash` yet.
    pub(super) products: [__m512i; 3],
    /// The hash of each lane: its low half, which is still to be reduced, and the high half.
    pub(super) hash: [__m512i; 2],
}

/// For x^32: shifts a lane by 4 bytes; takes the 4 bytes that it loses; what each of their bits
/// adds, x^128 = x^7 + x^2 + x + 1.
#[repr(C, align(64))]
struct Constants {
    shift: [Block; 4],
    carry: [Block; 4],
    multiple: [u64; 8],
}

static CONSTANTS: Constants = Constants {
    shift: [[0xff, 0xff, 0xff, 0xff, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]; 4],
    carry: [[
        12, 13, 14, 15, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
    ]; 4],
    multiple: [0x87; 8],
};

/// The F of this half: registers 8 to 15 have the next ones already.
#[repr(align(64))]
struct Former {
    _registers: Half,
}

/// A line of assembler.
macro_rules! line {
    ($($part:expr),*) => { concat!($($part,)* "\n") };
}

/// One round of eight registers, with a line after each. With `none` only these lines.
macro_rules! round {
    ($op:literal, none; $($line:expr),* $(,)?) => { concat!($($line),*) };
    (
        $op:literal, $key:literal;
        $a:expr, $b:expr, $c:expr, $d:expr, $e:expr, $f:expr, $g:expr, $h:expr $(,)?
    ) => {
        concat!(
            line!("vbroadcasti32x4 zmm19, [rsi + 16*", $key, "]"),
            line!($op, " zmm0, zmm0, zmm19"), $a,
            line!($op, " zmm1, zmm1, zmm19"), $b,
            line!($op, " zmm2, zmm2, zmm19"), $c,
            line!($op, " zmm3, zmm3, zmm19"), $d,
            line!($op, " zmm4, zmm4, zmm19"), $e,
            line!($op, " zmm5, zmm5, zmm19"), $f,
            line!($op, " zmm6, zmm6, zmm19"), $g,
            line!($op, " zmm7, zmm7, zmm19"), $h,
        )
    };
}

/// Three rounds, or two. Meanwhile the products of a pair, of which `$x` and `$y` load the
/// registers, and two of the next tweaks.
macro_rules! step {
    (
        $op:literal, [$first:tt $second:tt $third:tt], pair $pair:literal: $x:expr, $y:expr,
        by $p:literal, $q:literal, tweaks $t:literal = $f:literal, $u:literal = $g:literal
    ) => {
        concat!(
            round!($op, $first;
                line!("vmovdqu64 zmm20, ", $x),
                line!("vmovdqa64 [r9 + 64*", $t, "], ", $f),
                line!("vmovdqu64 zmm21, ", $y),
                line!("vpshufb zmm31, ", $f, ", [rax + 64]"),
                line!("vpunpcklqdq zmm22, zmm20, zmm21"),
                line!("vpshufb ", $f, ", ", $f, ", [rax]"),
                line!("vpunpckhqdq zmm23, zmm20, zmm21"),
                line!("vpclmulqdq zmm31, zmm31, [rax + 128], 0x00"),
            ),
            round!($op, $second;
                line!("vpclmulqdq zmm24, zmm20, [rdx + 64*", $p, "], 0x00"),
                line!("vpternlogq ", $f, ", zmm31, zmm28, 0x96"),
                line!("vpclmulqdq zmm25, zmm21, [rdx + 64*", $q, "], 0x00"),
                line!("vpxorq zmm22, zmm22, zmm23"),
                line!("vmovdqa64 [r9 + 64*", $u, "], ", $g),
                line!("vpternlogq zmm16, zmm24, zmm25, 0x96"),
                line!("vpclmulqdq zmm24, zmm20, [rdx + 64*", $p, "], 0x11"),
                line!("vpshufb zmm31, ", $g, ", [rax + 64]"),
            ),
            round!($op, $third;
                line!("vpclmulqdq zmm25, zmm21, [rdx + 64*", $q, "], 0x11"),
                line!("vpshufb ", $g, ", ", $g, ", [rax]"),
                line!("vpclmulqdq zmm23, zmm22, [r8 + 64*", $pair, "], 0x00"),
                line!("vpclmulqdq zmm31, zmm31, [rax + 128], 0x00"),
                line!("vpclmulqdq zmm22, zmm22, [r8 + 64*", $pair, "], 0x11"),
                line!("vpternlogq zmm18, zmm24, zmm25, 0x96"),
                line!("vpternlogq ", $g, ", zmm31, zmm28, 0x96"),
                line!("vpternlogq zmm17, zmm23, zmm22, 0x96"),
            ),
        )
    };
}

/// Loads eight registers and adds the first round key.
macro_rules! load {
    ($half:literal) => {
        concat!(
            load!($half, "0", "8"),
            load!($half, "1", "9"),
            load!($half, "2", "10"),
            load!($half, "3", "11"),
            load!($half, "4", "12"),
            load!($half, "5", "13"),
            load!($half, "6", "14"),
            load!($half, "7", "15"),
        )
    };
    ($half:literal, $at:literal, $tweak:literal) => {
        concat!(
            line!("vmovdqu64 zmm", $at, ", [rdi + ", $half, " + 64*", $at, "]"),
            line!("vpternlogq zmm", $at, ", zmm", $tweak, ", zmm26, 0x96"),
        )
    };
}

/// The last round, and stores eight registers.
macro_rules! store {
    ($op:literal, $half:literal) => {
        concat!(
            store!($op, $half, "0"),
            store!($op, $half, "1"),
            store!($op, $half, "2"),
            store!($op, $half, "3"),
            store!($op, $half, "4"),
            store!($op, $half, "5"),
            store!($op, $half, "6"),
            store!($op, $half, "7"),
        )
    };
    ($op:literal, $half:literal, $at:literal) => {
        concat!(
            line!($op, "last zmm", $at, ", zmm", $at, ", [r9 + 64*", $at, "]"),
            line!("vmovdqu64 [rdi + ", $half, " + 64*", $at, "], zmm", $at),
        )
    };
}

/// Half a span, at `$half` of it. Meanwhile the products of R0 to R7, and S is reduced.
macro_rules! first {
    (
        $op:literal, $half:literal,
        [$a:tt $b:tt $c:tt] [$d:tt $e:tt $f:tt] [$g:tt $h:tt $i:tt] [$j:tt $k:tt $l:tt]
        $last:literal
    ) => {
        concat!(
            load!($half),
            step!($op, [$a $b $c], pair 0: "[rdi]", "[rdi + 64*1]", by 0, 1,
                tweaks 0 = "zmm8", 1 = "zmm9"),
            step!($op, [$d $e $f], pair 1: "[rdi + 64*2]", "[rdi + 64*3]", by 2, 3,
                tweaks 2 = "zmm10", 3 = "zmm11"),
            step!($op, [$g $h $i], pair 2: "[rdi + 64*4]", "[rdi + 64*5]", by 4, 5,
                tweaks 4 = "zmm12", 5 = "zmm13"),
            step!($op, [$j $k $l], pair 3: "[rdi + 64*6]", "[rdi + 64*7]", by 6, 7,
                tweaks 6 = "zmm14", 7 = "zmm15"),
            round!($op, $last;
                line!("vpclmulqdq zmm20, zmm30, zmm27, 0x00"),
                line!("vpshufd zmm30, zmm30, 0x4e"),
                line!("vpxorq zmm30, zmm30, zmm20"),
                line!("vpclmulqdq zmm20, zmm30, zmm27, 0x00"),
                line!("vpshufd zmm30, zmm30, 0x4e"),
                line!("vpternlogq zmm29, zmm30, zmm20, 0x96"),
                "", "",
            ),
            store!($op, $half),
        )
    };
}

/// Half a span. Meanwhile the products of R8 to R15 and S, and all sums are added to S.
macro_rules! second {
    (
        $op:literal, $half:literal,
        [$a:tt $b:tt $c:tt] [$d:tt $e:tt $f:tt] [$g:tt $h:tt $i:tt] [$j:tt $k:tt $l:tt]
        $last:literal
    ) => {
        concat!(
            load!($half),
            step!($op, [$a $b $c], pair 4: "[r10]", "[r10 + 64*1]", by 8, 9,
                tweaks 0 = "zmm8", 1 = "zmm9"),
            step!($op, [$d $e $f], pair 5: "[r10 + 64*2]", "[r10 + 64*3]", by 10, 11,
                tweaks 2 = "zmm10", 3 = "zmm11"),
            step!($op, [$g $h $i], pair 6: "[r10 + 64*4]", "[r10 + 64*5]", by 12, 13,
                tweaks 4 = "zmm12", 5 = "zmm13"),
            step!($op, [$j $k $l], pair 7: "[r10 + 64*6]", "zmm29", by 14, 15,
                tweaks 6 = "zmm14", 7 = "zmm15"),
            round!($op, $last;
                line!("vpternlogq zmm17, zmm16, zmm18, 0x96"),
                line!("vmovdqu64 zmm29, [r10 + 64*7]"),
                line!("vpslldq zmm30, zmm17, 8"),
                line!("vpsrldq zmm17, zmm17, 8"),
                line!("vpxorq zmm30, zmm30, zmm16"),
                line!("vpternlogq zmm29, zmm18, zmm17, 0x96"),
                line!("vpxorq zmm16, zmm16, zmm16"),
                concat!(
                    line!("vpxorq zmm17, zmm17, zmm17"),
                    line!("vpxorq zmm18, zmm18, zmm18"),
                ),
            ),
            store!($op, $half),
        )
    };
}

/// 14 rounds, or ten.
macro_rules! half {
    ($which:ident, $op:literal, $half:literal, 15) => {
        $which!($op, $half, [1 2 3] [4 5 6] [7 8 9] [10 11 12] 13)
    };
    ($which:ident, $op:literal, $half:literal, 11) => {
        $which!($op, $half, [1 2 none] [3 4 none] [5 6 none] [7 8 none] 9)
    };
}

/// Of tweaks it makes F. Not outside, where the compiler might store what comes from keys.
macro_rules! begin {
    (15) => { begin!(at 14) };
    (11) => { begin!(at 10) };
    (at $last:literal) => {
        concat!(
            line!("vbroadcasti32x4 zmm28, [rsi + 16*", $last, "]"),
            line!("vbroadcasti32x4 zmm26, [rsi]"),
            line!("vpxorq zmm26, zmm26, zmm28"),
            line!("vpxorq zmm8, zmm8, zmm28"), line!("vpxorq zmm9, zmm9, zmm28"),
            line!("vpxorq zmm10, zmm10, zmm28"), line!("vpxorq zmm11, zmm11, zmm28"),
            line!("vpxorq zmm12, zmm12, zmm28"), line!("vpxorq zmm13, zmm13, zmm28"),
            line!("vpxorq zmm14, zmm14, zmm28"), line!("vpxorq zmm15, zmm15, zmm28"),
            line!("vpshufb zmm31, zmm28, [rax + 64]"),
            line!("vpshufb zmm20, zmm28, [rax]"),
            line!("vpclmulqdq zmm31, zmm31, [rax + 128], 0x00"),
            line!("vpternlogq zmm28, zmm20, zmm31, 0x96"),
            "2:\n",
        )
    };
}

macro_rules! turns {
    (seal $keys:tt) => {
        concat!(
            begin!($keys),
            half!(first, "vaesenc", 0, $keys),
            half!(second, "vaesenc", 512, $keys),
            "add rdi, 1024\n",
            "add r10, 1024\n",
            "dec rcx\n",
            "jnz 2b\n",
        )
    };
    (open $keys:tt) => {
        concat!(
            begin!($keys),
            half!(second, "vaesdec", 0, $keys),
            half!(first, "vaesdec", 512, $keys),
            "lea r10, [rdi + 512]\n",
            "add rdi, 1024\n",
            "dec rcx\n",
            "jnz 2b\n",
        )
    };
}

/// Wipes what was stored: F and a tweak together give a round key.
macro_rules! wipe {
    () => {
        concat!(
            "vpxorq zmm0, zmm0, zmm0\n",
            "vmovdqa64 [r9], zmm0\n",
            "vmovdqa64 [r9 + 64*1], zmm0\n",
            "vmovdqa64 [r9 + 64*2], zmm0\n",
            "vmovdqa64 [r9 + 64*3], zmm0\n",
            "vmovdqa64 [r9 + 64*4], zmm0\n",
            "vmovdqa64 [r9 + 64*5], zmm0\n",
            "vmovdqa64 [r9 + 64*6], zmm0\n",
            "vmovdqa64 [r9 + 64*7], zmm0\n",
        )
    };
}

/// Runs `$turns` over a page.
macro_rules! run {
    ($turns:expr, $state:ident, $keys:ident, $powers:ident, $page:ident, $behind:expr) => {{
        let mut former = MaybeUninit::<Former>::uninit();
        let State { tweaks, products: [low, middle, high], hash, .. } = $state;
        // SAFETY: the CPU has these instructions, because the function enables them. The program
        // reads and writes SPANS spans from rdi on, which are the page. From r10 on it reads half a
        // span in each turn: first `$behind`, then halves of the page. It reads the round keys, 16
        // powers and 8 sums of four blocks, and the constants, and writes 8 registers of `former`;
        // powers, sums, constants and `former` are aligned to 64 bytes. It does not use the stack.
        unsafe {
            asm!(
                $turns, wipe!(),
                inout("rcx") SPANS => _,
                inout("rdi") $page.as_mut_ptr() => _,
                inout("r10") $behind => _,
                in("rsi") $keys.as_ptr(),
                in("rdx") $powers.spans.as_ptr(),
                in("r8") $powers.sums.as_ptr(),
                in("r9") former.as_mut_ptr(),
                in("rax") &raw const CONSTANTS,
                out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _,
                out("zmm4") _, out("zmm5") _, out("zmm6") _, out("zmm7") _,
                inout("zmm8") tweaks[0] => _, inout("zmm9") tweaks[1] => _,
                inout("zmm10") tweaks[2] => _, inout("zmm11") tweaks[3] => _,
                inout("zmm12") tweaks[4] => _, inout("zmm13") tweaks[5] => _,
                inout("zmm14") tweaks[6] => _, inout("zmm15") tweaks[7] => _,
                inout("zmm16") *low, inout("zmm17") *middle, inout("zmm18") *high,
                out("zmm19") _, out("zmm20") _, out("zmm21") _, out("zmm22") _,
                out("zmm23") _, out("zmm24") _, out("zmm25") _,
                out("zmm26") _,
                in("zmm27") polynomial(),
                out("zmm28") _,
                inout("zmm29") hash[1], inout("zmm30") hash[0],
                out("zmm31") _,
                options(nostack),
            );
        }
    }};
}

/// Encrypts the page and hashes it as it was before. Nothing is left in `products`.
#[inline]
#[target_feature(enable = "aes,vaes,avx512f,avx512bw,vpclmulqdq")]
pub(super) fn seal<const N: usize>(
    state: &mut State,
    keys: &[Block; N],
    powers: &WidePowers,
    page: &mut Page,
) {
    let half = page[HALF..].as_ptr();
    if N == 15 {
        run!(turns!(seal 15), state, keys, powers, page, half);
    } else {
        const { assert!(N == 15 || N == 11) };
        run!(turns!(seal 11), state, keys, powers, page, half);
    }
}

/// Decrypts the page and hashes the result, but for its last half of a span, which is to be added
/// to `products`. `behind` is half a span before the page.
#[inline]
#[target_feature(enable = "aes,vaes,avx512f,avx512bw,vpclmulqdq")]
pub(super) fn open<const N: usize>(
    state: &mut State,
    keys: &[Block; N],
    powers: &WidePowers,
    page: &mut Page,
    behind: &Half,
) {
    if N == 15 {
        run!(turns!(open 15), state, keys, powers, page, behind.as_ptr());
    } else {
        const { assert!(N == 15 || N == 11) };
        run!(turns!(open 11), state, keys, powers, page, behind.as_ptr());
    }
}
