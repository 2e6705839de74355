//! See `pagevault_fuzz::page`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagevault_fuzz::page(bytes));
