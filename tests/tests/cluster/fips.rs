//! `pagevault.require_fips`, in servers without a validated module; those with one are in
//! `tests/fips`.

use anyhow::{Context, Result, ensure};
use pagevault_tests::{Cluster, Settings};

#[test]
fn a_server_without_a_validated_module_does_not_start_if_it_is_required() -> Result<()> {
    let mut cluster = Cluster::start(&Settings::default())?;
    cluster.sql("CREATE EXTENSION pagevault")?;
    let has_one = "SELECT fips_mode FROM pagevault.status";
    if !cluster.text(has_one)?.is_empty() {
        eprintln!("skipped: this server has a validated module");
        return cluster.finish();
    }
    cluster.append_conf("pagevault.require_fips = on")?;
    cluster.stop(pagevault_tests::StopMode::Fast)?;
    let said = format!("{:#}", cluster.start_server().err().context("it has started")?);
    for part in [
        "FATAL:  pagevault.require_fips is on, but there is no validated cryptographic module",
        "DETAIL:  This build of pagevault encrypts by implementations without a certificate.",
        "HINT:  Install the package of pagevault for FIPS (postgresql-NN-pagevault-fips) in place of this one, or turn pagevault.require_fips off.",
    ] {
        ensure!(said.contains(part), "it does not say {part:?} but {said}");
    }
    cluster.allow_log("FATAL");
    cluster.keep_quiet();
    Ok(())
}
