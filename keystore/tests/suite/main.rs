//! Tests of the keystore's public interface, in one program.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test's helpers fail as its test does"
)]

mod anchor;
mod arbitrary;
mod batch;
mod compaction;
mod directory;
mod escrow;
mod faults;
mod faulty;
mod former;
mod given_up;
mod golden;
mod jobs;
mod log;
mod marks;
mod protocol;
mod redo;
mod replaced;
mod reuse;
mod sealed_only;
mod settle;
mod state;
mod unsettled;
mod wal;
mod wal_segments;
mod years;
