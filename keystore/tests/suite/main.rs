//! Tests of the keystore from outside, in one program.

mod arbitrary;
mod batch;
mod directory;
mod faults;
mod faulty;
mod golden;
mod log;
mod protocol;
mod state;
