//! Providers with real key servers, alone and used by a real PostgreSQL.
//!
//! A test whose key server is not installed counts as ignored and is named on standard error; with
//! `PAGEVAULT_REQUIRE_KEY_SERVERS` set, as in CI, it fails.

mod anchor;
mod aws_kms;
mod azure_key_vault;
mod bench;
mod checks;
mod cloud_tls;
mod command;
mod contract;
mod gcp_kms;
mod kmip;
mod moving;
mod outages;
mod pkcs11;
mod proxies;
mod routes;
mod serving;
mod several;
mod vault;
mod vault_aws;
mod vault_cluster;
mod vault_logins;

use std::process::ExitCode;

use anyhow::Result;
use libtest_mimic::{Arguments, Failed, Trial};
use pagevault_tests::key_servers::{Server, is_optional, missing};

/// A test: its name, the servers it needs, and the function.
#[derive(Clone, Copy)]
struct Test {
    name: &'static str,
    needs: &'static [Server],
    run: fn() -> Result<()>,
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let tests: Vec<Test> = [
        anchor::tests(),
        checks::tests(),
        contract::tests(),
        aws_kms::tests(),
        gcp_kms::tests(),
        azure_key_vault::tests(),
        cloud_tls::tests(),
        vault::tests(),
        vault_cluster::tests(),
        vault_aws::tests(),
        vault_logins::tests(),
        serving::tests(),
        outages::tests(),
        proxies::tests(),
        routes::tests(),
        command::tests(),
        pkcs11::tests(),
        kmip::tests(),
        moving::tests(),
        several::tests(),
    ]
    .into_iter()
    .flatten()
    .collect();
    let trials = tests.into_iter().map(trial).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn trial(test: Test) -> Trial {
    let required = std::env::var_os("PAGEVAULT_REQUIRE_KEY_SERVERS").is_some();
    let lacking = missing(test.needs);
    let ignored = lacking.is_some() && (!required || is_optional(test.needs));
    if let Some(lacking) = &lacking {
        eprintln!("SKIPPED {}: {lacking} is not on this machine (tools/key-servers)", test.name);
    }
    let run = test.run;
    Trial::test(test.name, move || match lacking {
        Some(lacking) => Err(Failed::from(format!("{lacking} is not on this machine"))),
        None => run().map_err(|error| Failed::from(format!("{error:#}"))),
    })
    .with_ignored_flag(ignored)
}
