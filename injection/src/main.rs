//! `pagevault-injection`: injected errors. See docs/testing.md.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Parser;
use pagevault_injection::campaign::{Campaign, Outcome};
use pagevault_injection::catalogue::{self, Scenario};
use pagevault_injection::injector::{Fault, Injection};
use pagevault_tests::Installation;
use pagevault_tests::choice::{self, Choice};

/// Has calls of servers fail, one after the other, and judges what becomes of it. The PostgreSQL
/// under test is that of PAGEVAULT_PG_CONFIG.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(flatten)]
    choice: Choice,
    /// Of many calls of one place, how many fail; the first, the last, and some between
    #[arg(long, default_value_t = 3)]
    each: u32,
    /// Only calls whose name contains this
    #[arg(long)]
    only: Option<String>,
    /// One call: its name
    #[arg(long, requires = "fault")]
    call: Option<String>,
    /// Which of that name
    #[arg(long, default_value_t = 1)]
    number: u32,
    /// What happens to it: EIO, ENOSPC..., EIO+ for all from there on, short, 3600s for a clock
    #[arg(long)]
    fault: Option<Fault>,
    /// Lists the calls of the scenarios
    #[arg(long)]
    count: bool,
    /// Tells what became of each injection, and what has stopped processes
    #[arg(long)]
    verbose: bool,
}

fn main() -> ExitCode {
    choice::end("pagevault-injection", "injections", run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<usize> {
    let wanted = arguments.choice.of(catalogue::ALL)?;
    eprintln!("{}", Installation::get()?.version);
    let mut failures = 0;
    for scenario in wanted {
        failures += one(arguments, scenario).with_context(|| scenario.name)?;
    }
    Ok(failures)
}

fn one(arguments: &Arguments, scenario: &'static Scenario) -> Result<usize> {
    let mut campaign = Campaign::new(scenario)?;
    let injections = match (&arguments.call, arguments.fault) {
        (Some(call), Some(fault)) => {
            vec![Injection { call: call.clone(), number: arguments.number, fault }]
        }
        (Some(_), None) => bail!("--fault is missing"),
        (None, _) => {
            let mut places = campaign.places()?;
            places.retain(|place| {
                arguments.only.as_ref().is_none_or(|only| place.call.contains(only.as_str()))
            });
            if arguments.count {
                places.iter().for_each(|place| eprintln!("{place}"));
                return Ok(0);
            }
            let calls: usize = places.iter().map(|place| place.numbers.len()).sum();
            eprintln!("{}: {calls} calls in {} places", scenario.name, places.len());
            places.iter().flat_map(|place| place.injections(arguments.each)).collect()
        }
    };
    let (mut failures, mut outcomes) = (0, Vec::new());
    for injection in &injections {
        match campaign.inject(injection) {
            Ok(Outcome::Complaints(complaints)) => {
                failures += 1;
                let complaints = complaints.join("\n");
                eprintln!("--- pagevault-injection {} {injection}\n{complaints}", scenario.name);
                eprintln!("{}\n", campaign.log());
            }
            Ok(outcome) => {
                if arguments.verbose {
                    eprintln!("{outcome:?}: {injection}");
                    campaign.stops().iter().take(3).for_each(|line| eprintln!("    {line}"));
                }
                outcomes.push(outcome);
            }
            Err(error) => {
                failures += 1;
                eprintln!("--- pagevault-injection {} {injection}\n{error:#}", scenario.name);
                eprintln!("{}\n", campaign.log());
                campaign = Campaign::new(scenario)?;
            }
        }
    }
    let count = |wanted| outcomes.iter().filter(|outcome| **outcome == wanted).count();
    eprintln!(
        "{}: {} injections: {} without effect, {} refused, {} stopped a process, {} lost rows as PostgreSQL itself, {} not reached, {failures} failed",
        scenario.name,
        injections.len(),
        count(Outcome::Succeeded),
        count(Outcome::Refused),
        count(Outcome::Stopped),
        count(Outcome::Known),
        count(Outcome::NotReached),
    );
    Ok(failures)
}
