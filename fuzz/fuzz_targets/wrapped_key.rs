//! See `pagevault_fuzz::wrapped_key`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagevault_fuzz::wrapped_key(bytes));
