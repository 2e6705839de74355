//! Policy: all combinations of labels, settings and states of files, compared with a second,
//! independent statement of the rules.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test's helpers fail as its test does"
)]

mod decisions;
mod drift;
mod enforcement;
mod key_groups;
mod rule;
mod storage;
mod world;
