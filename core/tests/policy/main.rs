//! What is to be encrypted: every combination of labels, settings and files, against rules that are
//! stated here once more, in other words.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test's helpers fail as its test does"
)]

mod decisions;
mod drift;
mod enforcement;
mod rule;
mod storage;
mod world;
