//! The program as the server and the operator see it: real processes, real files, JSON by hand.

#![cfg(test)]

mod bench;
mod operator;
mod process;
mod protocol;
mod refusals;
mod rotation;
