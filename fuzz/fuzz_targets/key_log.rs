//! See `pagevault_fuzz::key_log`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagevault_fuzz::key_log(bytes));
