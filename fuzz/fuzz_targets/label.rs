//! See `pagevault_fuzz::label`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagevault_fuzz::label(bytes));
