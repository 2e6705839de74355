//! See `pagevault_fuzz::key_file`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagevault_fuzz::key_file(bytes));
