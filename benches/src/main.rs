//! What encryption costs, measured beside stock PostgreSQL on the machine at hand.
//!
//! ```text
//!   cli            what was asked for
//!   plan           how much of it: profiles, sweeps, and what the machine can hold
//!     suites/      cells: what is loaded, and what one round of work is
//!   runner         all cells, round by round, the servers in turn
//!     servers      one server for each variant
//!     meter        what a round cost: processor time, pages, WAL, counters of pagevault
//!   results        the JSON file; statistics: ratios with intervals
//!   report/        terminal, Markdown, HTML
//!   compare, gate  one result against another, or against bands
//! ```

mod callgrind;
mod cli;
mod compare;
mod gate;
mod interrupt;
mod machine;
mod meter;
mod page_cache;
mod plan;
mod processes;
mod report;
mod results;
mod runner;
mod servers;
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
