//! The program as the server and the operator use it: real processes, real files, JSON written by
//! hand.

#![cfg(test)]

mod audit;
mod bench;
mod command;
mod command_process;
mod descendants;
mod named_files;
mod operator;
mod parallel;
mod process;
mod programs;
mod protocol;
mod refusals;
mod rotation;
mod special_files;
mod trust;
