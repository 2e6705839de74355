//! See `pagevault_fuzz::command_reply`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagevault_fuzz::command_reply(bytes));
