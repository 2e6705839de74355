//! The kernels leave no key on the stack. Cargo.toml turns this crate's debug assertions off: with
//! them the compiler checks the pointers of what is loaded, and copies it to the stack for that.

use std::collections::HashSet;
use std::fs::File;
use std::hint::black_box;
use std::iter;
use std::os::unix::fs::FileExt;

use aes::Aes256Enc;
use aes::cipher::{BlockCipherEncrypt, KeyInit};

use super::*;
use crate::residue::{DEPTH, without_trace};

/// The halves of all round keys and powers, and their sums, by which some kernels multiply.
fn secrets(schedule: &Schedule, powers: &Powers) -> HashSet<u64> {
    let Schedule::Kernel256(_, keys) = schedule else { panic!("no kernel for AES-256") };
    let blocks = keys.seal.iter().chain(&keys.open).chain(&keys.tweak).chain(&powers.each);
    let halves = blocks.map(|block| {
        let number = u128::from_ne_bytes(*block);
        (number as u64, (number >> 64) as u64)
    });
    halves.flat_map(|(low, high)| [low, high, low ^ high]).collect()
}

/// The halves of the sums of outer round keys and tweaks that kernels add to the blocks of a page.
fn sums(schedule: &Schedule, tweak: Tweak) -> HashSet<u64> {
    let Schedule::Kernel256(_, keys) = schedule else { panic!("no kernel for AES-256") };
    let [first, last] = [keys.seal[0], keys.seal[14]].map(u128::from_le_bytes);
    let tweaks = iter::successors(Some(tweak), |tweak| Some(multiply_by_x(*tweak)));
    let of_blocks = tweaks.take(PAGE_SIZE / 16).flat_map(|tweak| [tweak ^ first, tweak ^ last]);
    let sums = of_blocks.chain([first ^ last]);
    sums.flat_map(|sum| [sum as u64, (sum >> 64) as u64]).collect()
}

/// Runs `f` so deep in the stack that [`below`] does not overwrite what it leaves there.
#[inline(never)]
fn deeper(f: impl FnOnce()) {
    let mut room = [0_u8; DEPTH / 2];
    black_box(&mut room);
    f();
    black_box(&mut room);
}

/// The stack below, as far as it was wiped.
#[inline(never)]
fn below() -> Vec<u8> {
    let here = 0_u64;
    let mut stack = vec![0; DEPTH];
    let start = (&raw const here).addr() - stack.len();
    let memory = File::open("/proc/self/mem").unwrap();
    memory.read_exact_at(&mut stack, start as u64).unwrap();
    stack
}

/// How many words of `secrets` `f` leaves on the stack.
fn left(secrets: &HashSet<u64>, f: &mut dyn FnMut()) -> usize {
    without_trace(|| ()); // what was there before
    deeper(f);
    let stack = below();
    let words = stack.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word));
    words.filter(|word| secrets.contains(word)).count()
}

#[cfg_attr(miri, ignore = "its memory is not the process's")]
#[test]
fn no_key_is_left_on_the_stack() {
    let bytes: [u8; 64] = core::array::from_fn(|at| (at as u8).wrapping_mul(151) ^ 0x5a);
    let powers = without_trace(|| Powers::new(&core::array::from_fn(|at| at as u8)));
    let job = Job { tweak: 1, powers: &powers, context: &[2; 16] };
    let mut page: Page = [3; PAGE_SIZE];
    let mut tweak = Array(job.tweak.to_le_bytes());
    Aes256Enc::new_from_slice(&bytes[32..]).unwrap().encrypt_block(&mut tweak);
    let tweak = divide_by_x(Tweak::from_le_bytes(tweak.0));
    for backend in kernels() {
        let schedule = without_trace(|| Schedule::new(KeySize::Aes256, &bytes, backend));
        let Some(schedule) = schedule else { continue };
        let secrets = secrets(&schedule, &powers);
        let unit = page[16..].as_chunks_mut().0;
        let encrypted = left(&secrets, &mut || schedule.run(Direction::Encrypt, 1, unit));
        let decrypted = left(&secrets, &mut || schedule.run(Direction::Decrypt, 1, unit));
        let secrets = &secrets | &sums(&schedule, tweak);
        let sealed = left(&secrets, &mut || {
            assert!(seal(&schedule, &job, &mut page, 3..5, |_, _| ()).is_ok())
        });
        let opened =
            left(&secrets, &mut || _ = open(&schedule, &job, &mut page, |group, _| group + 3));
        assert_eq!([encrypted, decrypted, sealed, opened], [0; 4], "{backend}");
        // Proof that the search finds a key.
        assert_ne!(left(&secrets, &mut || _ = black_box(powers.each)), 0);
    }
}

/// The round keys are those of the kernels, because the cipher is.
#[cfg_attr(miri, ignore = "its memory is not the process's")]
#[test]
fn the_validated_module_leaves_no_key_on_the_stack() {
    let bytes: [u8; 64] = core::array::from_fn(|at| (at as u8).wrapping_mul(151) ^ 0x5a);
    let powers = Powers::new(&core::array::from_fn(|at| at as u8));
    let of = |backend| without_trace(|| Schedule::new(KeySize::Aes256, &bytes, backend));
    let (Some(module), Some(kernel)) = (of(Backend::AwsLc), kernels().find_map(of)) else { return };
    let secrets = secrets(&kernel, &powers);
    let mut page: Page = [3; PAGE_SIZE];
    let unit = page[16..].as_chunks_mut().0;
    for direction in [Direction::Encrypt, Direction::Decrypt] {
        assert_eq!(left(&secrets, &mut || module.run(direction, 1, unit)), 0);
    }
}
