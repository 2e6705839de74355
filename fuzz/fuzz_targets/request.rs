//! See `pagevault_fuzz::request`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagevault_fuzz::request(bytes));
