//! See `pagevault_fuzz::options`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagevault_fuzz::options(bytes));
