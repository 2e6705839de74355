//! See `pagevault_fuzz::batch`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagevault_fuzz::batch(bytes));
