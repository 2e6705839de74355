//! What a server says of its module.

use anyhow::{Context, Result, ensure};
use pagevault_tests::{Cluster, Settings};

use crate::{REQUIRED, ordinary, validated};

const MODULE: &str = "SELECT concat_ws('|', coalesce(cryptographic_module, '-'), coalesce(fips_certificate::text, '-'), coalesce(fips_mode::text, '-')) FROM pagevault.status";

#[test]
fn status_names_module_version_and_certificate() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default().on(validated()?))?;
    let module = cluster.text(MODULE)?;
    let parts: Vec<_> = module.split('|').collect();
    ensure!(parts[0].starts_with("AWS-LC FIPS 3."), "{module}");
    ensure!(parts[1..] == ["5314", "true"], "{module}");
    cluster.finish()
}

#[test]
fn an_ordinary_server_has_none() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default().on(ordinary()?))?;
    ensure!(cluster.text(MODULE)? == "-|-|-");
    cluster.finish()
}

#[test]
fn a_server_that_requires_the_module_starts_with_it_only() -> Result<()> {
    let settings = Settings::default().conf(REQUIRED);
    let (cluster, _keys) = Cluster::with_keys(&settings.clone().on(validated()?))?;
    ensure!(cluster.text("SHOW pagevault.require_fips")? == "on");
    cluster.finish()?;

    let mut cluster = Cluster::create(&settings.on(ordinary()?))?;
    let said = format!("{:#}", cluster.start_server().err().context("it has started")?);
    for part in [
        "FATAL:  pagevault.require_fips is on, but there is no validated cryptographic module",
        "DETAIL:  This build of pagevault encrypts by implementations without a certificate.",
        "HINT:  Install the package of pagevault for FIPS (postgresql-NN-pagevault-fips) in place",
    ] {
        ensure!(said.contains(part), "it does not say {part:?} but {said}");
    }
    cluster.allow_log("FATAL");
    cluster.keep_quiet();
    Ok(())
}
