//! See `pagevault_fuzz::elf`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagevault_fuzz::elf(bytes));
