//! `pagevault-injection`: injected errors. See docs/testing.md.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Parser;
use pagevault_injection::campaign::{Campaign, Outcome};
use pagevault_injection::catalogue::{self, Scenario};
use pagevault_injection::injector::{Fault, Injection};
use pagevault_tests::Installation;

/// Has calls of servers fail, one after the other, and judges what becomes of it. The PostgreSQL
/// under test is that of PAGEVAULT_PG_CONFIG.
#[derive(Debug, Parser)]
struct Arguments {
    /// Scenarios; all if none is named
    scenarios: Vec<String>,
    /// Of many calls of one name, how many fail besides the last
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
    /// Lists the scenarios
    #[arg(long)]
    list: bool,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(failures) => {
            eprintln!("{failures} injections failed");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("pagevault-injection: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<usize> {
    if arguments.list {
        catalogue::ALL.iter().for_each(|scenario| eprintln!("{}", scenario.name));
        return Ok(0);
    }
    eprintln!("{}", Installation::get()?.version);
    let wanted: Vec<&'static Scenario> = if arguments.scenarios.is_empty() {
        catalogue::ALL.iter().collect()
    } else {
        let find =
            |name: &String| catalogue::find(name).with_context(|| format!("no scenario {name}"));
        arguments.scenarios.iter().map(find).collect::<Result<_>>()?
    };
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
            let mut counted = campaign.count()?;
            counted.retain(|call, _| {
                arguments.only.as_ref().is_none_or(|only| call.contains(only.as_str()))
            });
            if arguments.count {
                counted.iter().for_each(|(call, count)| eprintln!("{count:6} {call}"));
                return Ok(0);
            }
            Campaign::injections(&counted, arguments.each)
        }
    };
    let (mut failures, mut outcomes) = (0, Vec::new());
    for injection in &injections {
        match campaign.inject(injection) {
            Ok(Outcome::Complaints(complaints)) => {
                failures += 1;
                let complaints = complaints.join("\n");
                eprintln!("--- pagevault-injection {} {injection}\n{complaints}\n", scenario.name);
            }
            Ok(outcome) => outcomes.push(outcome),
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
        "{}: {} injections: {} without effect, {} refused, {} stopped a process, {} not reached, {failures} failed",
        scenario.name,
        injections.len(),
        count(Outcome::Succeeded),
        count(Outcome::Refused),
        count(Outcome::Stopped),
        count(Outcome::NotReached),
    );
    Ok(failures)
}
