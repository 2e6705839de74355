//! See `pagevault_fuzz::wal_page`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagevault_fuzz::wal_page(bytes));
