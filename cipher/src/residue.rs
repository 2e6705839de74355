//! What working with keys leaves behind, and wiping it: frames of functions that have returned, and
//! vector registers.
//!
//! A key that is moved, expanded or unwrapped passes through local variables of ours, of the
//! ciphers' crates and of the compiler's; `zeroize` wipes the value that is dropped, and not the
//! copies that moving it has made. They stay on the stack until something else is written there,
//! which in a process that mostly sleeps may be never, and get into core dumps. So who works with a
//! key that is not expanded yet does all of it within [`without_trace`].
//!
//! Sealing and opening pages borrows expanded keys where they are and copies nothing of them to the
//! stack; of these the registers are wiped after each data unit.

mod registers;

use zeroize::zeroize_stack;

pub(crate) use registers::wipe_registers;

/// Bytes of stack that are wiped. Unwrapping and expanding a key takes far less, also without
/// optimization and with a signal that the process gets meanwhile; what went deeper would be found
/// by the tests of servers.
pub const DEPTH: usize = 32 << 10;

/// What the frames that wipe may take themselves before they come to the memory that they wipe.
const LEAD: usize = 1024;

/// Runs `f`, and wipes what it leaves on the stack below the caller's frame, and in vector
/// registers, also if it panics. Where a panic is told with a backtrace (`RUST_BACKTRACE`), what
/// making that copies to the heap is not wiped.
///
/// What it returns must be no key and hold none. It should call nothing but pure code: what a
/// `longjmp` of the server's leaves out is not wiped.
#[inline(never)]
pub fn without_trace<R>(f: impl FnOnce() -> R) -> R {
    let _wiping = Wiping;
    ahead(f)
}

struct Wiping;

impl Drop for Wiping {
    fn drop(&mut self) {
        wipe_stack();
        wipe_registers();
    }
}

/// Has `f` begin so far down that all of its frames are where [`wipe_stack`] comes to.
#[inline(never)]
fn ahead<R>(f: impl FnOnce() -> R) -> R {
    let mut room = [0_u8; LEAD];
    core::hint::black_box(&mut room);
    let result = apart(f);
    core::hint::black_box(&mut room);
    result
}

/// A frame of its own: inlined, `f` could keep its variables above the room.
#[inline(never)]
fn apart<R>(f: impl FnOnce() -> R) -> R {
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
    use std::fs::{self, File};
    use std::hint::black_box;
    use std::os::unix::fs::FileExt;

    const LENGTH: usize = 4096;

    /// What is looked for, byte by byte, so that nothing else in memory is the same.
    fn byte(at: usize) -> u8 {
        (at as u32).wrapping_mul(0x9e37_79b1).to_be_bytes()[1] ^ 0x5a
    }

    /// Works with a secret some `down` bytes below its caller, and leaves it there.
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

    /// How many pieces of 32 bytes of the secret are in this process's memory.
    fn left() -> usize {
        let memory = File::open("/proc/self/mem").unwrap();
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let mut found = 0;
        for line in maps.lines().filter(|line| line.contains(" rw")) {
            let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
            let number = |text| u64::from_str_radix(text, 16).unwrap();
            let mut at = number(start);
            let mut page = [0; 4096];
            while at < number(end) && memory.read_exact_at(&mut page, at).is_ok() {
                // Each page of the stack has some of the secret's pieces, wherever it begins.
                for window in page.windows(32).step_by(8) {
                    let is_piece = |from: &usize| (0..32).all(|i| window[i] == byte(from + i));
                    found += usize::from((0..LENGTH - 32).any(|from| is_piece(&from)));
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
        // Without the panic's hook: what that copies for a backtrace is not ours to wipe.
        let panics = || std::panic::resume_unwind(Box::new(work(0)));
        assert!(std::panic::catch_unwind(|| without_trace(panics)).is_err());
        assert_eq!(left(), 0, "after a panic");
        // What is found nowhere may also not have been looked for.
        work(black_box(16 << 10));
        assert_ne!(left(), 0);
    }

    #[test]
    fn what_is_computed_comes_back() {
        let text = String::from("text");
        assert_eq!(without_trace(|| text + " and more"), "text and more");
    }
}
