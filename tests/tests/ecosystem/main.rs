//! Other people's extensions on encrypted tables, and their programs on encrypted clusters: they
//! work, and what they write is sealed.
//!
//! A test whose extension is not installed counts as ignored and is named on standard error.
//! Extensions in `PAGEVAULT_EXTENSIONS` (printed by tools/extensions) are required, as are programs
//! in `PAGEVAULT_PROGRAMS`. docs/ecosystem.md lists the results.

mod access_methods;
mod age;
mod backups;
mod barman;
mod citus;
mod cloudnativepg;
mod foreign;
mod graph;
mod inspection;
mod jobs;
mod languages;
mod patroni;
mod pgbackrest;
mod programs;
mod repack;
mod repair;
mod squeeze;
mod timescaledb;

use std::process::ExitCode;

use anyhow::Result;
use libtest_mimic::{Arguments, Failed, Trial};
use pagevault_tests::Installation;

/// A test: its name, the extensions and programs it needs, and the function. A long one needs a
/// variable of the environment that asks for it.
#[derive(Clone, Copy)]
struct Test {
    name: &'static str,
    needs: &'static [&'static str],
    run: fn() -> Result<()>,
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let tests = [
        access_methods::TESTS,
        age::TESTS,
        barman::TESTS,
        citus::TESTS,
        cloudnativepg::TESTS,
        foreign::TESTS,
        graph::TESTS,
        inspection::TESTS,
        jobs::TESTS,
        languages::TESTS,
        patroni::TESTS,
        pgbackrest::TESTS,
        repack::TESTS,
        repair::TESTS,
        squeeze::TESTS,
        timescaledb::TESTS,
    ];
    let trials = tests.into_iter().flatten().map(|test| trial(*test)).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn trial(test: Test) -> Trial {
    let promised = std::env::var("PAGEVAULT_EXTENSIONS").unwrap_or_default();
    let is_there = |name| {
        Installation::get().is_ok_and(|found| found.has_extension(name))
            || programs::program(name).is_some()
            || cloudnativepg::is_there(name)
            || (is_variable(name) && std::env::var_os(name).is_some())
    };
    let lacking = test.needs.iter().find(|name| !is_there(name));
    let required = lacking.is_some_and(|name| {
        promised.split(' ').any(|known| known == *name) || programs::is_promised(name)
    });
    if let Some(lacking) = lacking
        && !required
    {
        let source = if is_variable(lacking) { "make patroni" } else { "tools/extensions" };
        eprintln!("SKIPPED {}: there is no {lacking} ({source})", test.name);
    }
    Trial::test(test.name, move || match lacking {
        Some(lacking) => Err(Failed::from(format!("there is no {lacking}"))),
        None => (test.run)().map_err(|error| Failed::from(format!("{error:#}"))),
    })
    .with_ignored_flag(lacking.is_some() && !required)
}

fn is_variable(name: &str) -> bool {
    name.starts_with("PAGEVAULT_")
}
