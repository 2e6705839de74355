//! The cost of encryption, measured against stock PostgreSQL on this machine.
//!
//! ```text
//!    cli      command line
//!    plan     amount of work: profiles, sweeps, limits of the machine
//!    suites/  cells: what is loaded, and the work of one round
//!    runner   all cells, round by round, with the servers in turn
//!    servers  one server for each variant (variants, others)
//!    meter    the cost of a round: processor time (accounts), pages, WAL, counters of pagevault
//!    results  the JSON file; statistics: ratios with intervals
//!    report/  terminal, Markdown, HTML
//!    diff, gate      compare results with one another, or with bands
//!    claims   what is in plaintext on disk, after statements that encryption can miss
//!    callgrind, statements  instructions of the page path and of statements, for the gate
//! ```

mod accounts;
mod callgrind;
mod claims;
mod cli;
mod diff;
mod gate;
mod interrupt;
mod machine;
mod meter;
mod others;
mod page_cache;
mod plan;
mod processes;
mod report;
mod results;
mod runner;
mod servers;
mod statements;
mod statistics;
mod suites;
mod variants;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match cli::Arguments::parse().command.execute() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("pagevault-bench: {error:#}");
            ExitCode::from(2)
        }
    }
}
