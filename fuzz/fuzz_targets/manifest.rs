//! See `pagevault_fuzz::manifest`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagevault_fuzz::manifest(bytes));
