//! Wiping copies of keys: in stack frames of functions that have returned, and in vector registers.
//!
//! A key that is moved, expanded or unwrapped passes through local variables of this crate, of the
//! cipher crates, and of the compiler. `zeroize` wipes the value that is dropped, but not copies
//! that were made when it moved. These stay on the stack until it is used again. In a process that
//! mostly sleeps that may be never, and core dumps contain them. So all work with a key that is not
//! expanded yet runs in [`without_trace`].
//!
//! Sealing and opening pages uses expanded keys in place. Vector registers are wiped after each
//! data unit. Nothing wipes the stack then: the kernels leave no key there, see
//! `xts::hashed`. The `aes` crate, on CPUs without AES instructions, may (SECURITY.md).

mod registers;

use zeroize::zeroize_stack;

pub(crate) use registers::wipe_registers;

/// Bytes of stack that are wiped. Unwrapping and expanding a key uses far less, even without
/// optimization and with a signal handler in between. Tests of servers would find what is left
/// deeper.
pub const DEPTH: usize = 32 << 10;

/// Bytes of stack that the wiping functions may use themselves, above the memory that they wipe.
const LEAD: usize = 1024;

/// Runs `f`, then wipes the stack below the caller's frame and the vector registers, also if `f`
/// panics. If a panic prints a backtrace (`RUST_BACKTRACE`), the copies that this makes on the heap
/// are not wiped.
///
/// The result must not contain a key. `f` should call only pure code: after a `longjmp` by the
/// server nothing is wiped.
#[inline(never)]
pub fn without_trace<R>(f: impl FnOnce() -> R) -> R {
    let _wiping = Wiping;
    run_deeper(f)
}

struct Wiping;

impl Drop for Wiping {
    fn drop(&mut self) {
        wipe_stack();
        wipe_registers();
    }
}

/// Runs `f` so deep in the stack that [`wipe_stack`] reaches all of its frames.
#[inline(never)]
fn run_deeper<R>(f: impl FnOnce() -> R) -> R {
    let mut room = [0_u8; LEAD];
    core::hint::black_box(&mut room);
    let result = run_in_own_frame(f);
    core::hint::black_box(&mut room);
    result
}

/// Not inlined: otherwise `f` could keep its variables above `room`.
#[inline(never)]
fn run_in_own_frame<R>(f: impl FnOnce() -> R) -> R {
    f()
}

/// Wipes the stack below the caller's frame.
#[inline(never)]
fn wipe_stack() {
    zeroize_stack::<{ DEPTH + LEAD }>();
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;
    use std::fs::{self, File};
    use std::hint::black_box;
    use std::os::unix::fs::FileExt;

    const LENGTH: usize = 4096;

    /// The test's secret, byte by byte: a pattern that occurs nowhere else in memory.
    fn byte(at: usize) -> u8 {
        (at as u32).wrapping_mul(0x9e37_79b1).to_be_bytes()[1] ^ 0x5a
    }

    /// Leaves a secret in a frame about `down` bytes below the caller's.
    #[inline(never)]
    fn work(down: usize) -> u8 {
        let mut room = [0_u8; 1024];
        match down.checked_sub(room.len()) {
            Some(rest) => work(rest) & black_box(&mut room)[0].wrapping_sub(1),
            None => spill(),
        }
    }

    #[inline(never)]
    fn spill() -> u8 {
        let mut secret = [0_u8; LENGTH];
        for (at, place) in secret.iter_mut().enumerate() {
            *place = byte(at);
        }
        black_box(&mut secret)[0]
    }

    /// Number of pieces of 32 bytes of the secret in this process's memory.
    fn left() -> usize {
        let memory = File::open("/proc/self/mem").unwrap();
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        // By their first eight bytes: nowhere are 32 bytes together.
        let mut pieces: HashMap<[u8; 8], Vec<usize>> = HashMap::new();
        for from in 0..LENGTH - 32 {
            pieces.entry(core::array::from_fn(|i| byte(from + i))).or_default().push(from);
        }
        let mut found = 0;
        for line in maps.lines().filter(|line| line.contains(" rw")) {
            let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
            let number = |text| u64::from_str_radix(text, 16).unwrap();
            let mut at = number(start);
            let mut page = [0; 4096];
            while at < number(end) && memory.read_exact_at(&mut page, at).is_ok() {
                // Each page of the stack contains some pieces, wherever the secret begins.
                for window in page.windows(32).step_by(8) {
                    let start = window.first_chunk().and_then(|start| pieces.get(start));
                    let is_piece = |from: &usize| (0..32).all(|i| window[i] == byte(from + i));
                    found += usize::from(start.into_iter().flatten().any(is_piece));
                }
                page.fill(0);
                at += 4096;
            }
        }
        found
    }

    #[cfg_attr(miri, ignore = "its memory is not the process's")]
    #[test]
    fn nothing_is_left_on_the_stack() {
        for down in [0, 8 << 10, DEPTH - (8 << 10)] {
            assert_eq!(without_trace(|| work(black_box(down))), byte(0));
            assert_eq!(left(), 0, "{down}");
        }
        // Without the panic hook: what it copies for a backtrace is not wiped.
        let panics = || std::panic::resume_unwind(Box::new(work(0)));
        assert!(std::panic::catch_unwind(|| without_trace(panics)).is_err());
        assert_eq!(left(), 0, "after a panic");
        // Proof that the search finds a secret that was not wiped.
        work(black_box(16 << 10));
        assert_ne!(left(), 0);
    }

    #[test]
    fn the_result_is_returned() {
        let text = String::from("text");
        assert_eq!(without_trace(|| text + " and more"), "text and more");
    }
}
