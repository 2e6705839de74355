//! Rekeying, interleaved with crashes, commands of users, other commands on the relation, and
//! writers that have looked up a key before it changed.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test's helpers fail as its test does"
)]

mod interleavings;
mod jobs;
mod pace;
mod random;
mod steps;
mod world;
