//! See `pagevault_fuzz::audit_line`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagevault_fuzz::audit_line(bytes));
