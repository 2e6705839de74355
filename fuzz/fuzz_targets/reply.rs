//! See `pagevault_fuzz::reply`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagevault_fuzz::reply(bytes));
