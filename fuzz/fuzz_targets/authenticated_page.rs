//! See `pagevault_fuzz::authenticated_page`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagevault_fuzz::authenticated_page(bytes));
