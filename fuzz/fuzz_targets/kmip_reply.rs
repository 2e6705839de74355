//! See `pagevault_fuzz::kmip_reply`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagevault_fuzz::kmip_reply(bytes));
