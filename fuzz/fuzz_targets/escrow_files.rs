//! See `pagevault_fuzz::escrow_files`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagevault_fuzz::escrow_files(bytes));
