//! What pagevault remembers about keys, and how it speaks to the program that holds the master keys.

#![forbid(unsafe_code)]

pub mod protocol;
