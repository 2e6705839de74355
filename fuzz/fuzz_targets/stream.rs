//! See `pagevault_fuzz::stream`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagevault_fuzz::stream(bytes));
