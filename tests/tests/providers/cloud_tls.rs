//! TLS to services that are reached by REST.

use anyhow::{Result, ensure};
use pagevault_tests::key_servers::azure::KeyVault;
use pagevault_tests::key_servers::certificates::Authority;
use pagevault_tests::key_servers::gcp::Gcp;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::write_file;
use serde_json::json;

use crate::Test;
use crate::contract::{CONTEXT, KEY, SECRET, says, wrap};

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, run| Test { name, needs: &[], run };
    vec![
        test("gcp_kms::only_trusted_servers_are_spoken_to", gcp),
        test("azure_key_vault::only_trusted_servers_are_spoken_to", azure),
    ]
}

/// A server with a certificate for each of these hosts: the first is right, the second is not.
const HOSTS: [&str; 2] = ["127.0.0.1", "kms.example.com"];

fn gcp() -> Result<()> {
    let authority = Authority::new()?;
    for host in HOSTS {
        let (certificate, key) = authority.sign("gcp", &[host])?;
        let gcp = Gcp::start_with_tls(&certificate, &key)?;
        judge(&gcp.provider(gcp.options()), &authority, host)?;
        ensure!(gcp.server.seen().is_empty() == (host != HOSTS[0]), "{host}");
    }
    Ok(())
}

fn azure() -> Result<()> {
    let authority = Authority::new()?;
    for host in HOSTS {
        let (certificate, key) = authority.sign("azure", &[host])?;
        let vault = KeyVault::start_with_tls("oct-HSM", &certificate, &key)?;
        judge(&vault.provider(vault.options()), &authority, host)?;
        ensure!(vault.server.seen().is_empty() == (host != HOSTS[0]), "{host}");
    }
    Ok(())
}

fn judge(provider: &Provider, authority: &Authority, host: &str) -> Result<()> {
    let mut provider = provider.clone();
    let failure = provider.refused(KEY, CONTEXT, wrap(), "tls")?;
    says(&failure, "UnknownIssuer")?;
    ensure!(failure["retry"] == false, "{failure}");
    let directory = tempfile::tempdir()?;
    pagevault_tests::Installation::get()?.give(directory.path())?;
    let ca_file = |name: &str, authority: &Authority| {
        write_file(&directory.path().join(name), authority.pem(), 0o644)
    };
    provider.options["ca_file"] = json!(ca_file("stranger.pem", &Authority::new()?)?);
    provider.refused(KEY, CONTEXT, wrap(), "tls")?;
    provider.options["ca_file"] = json!(ca_file("ca.pem", authority)?);
    if host == HOSTS[0] {
        let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
        ensure!(provider.unwrap(KEY, CONTEXT, &wrapped)? == SECRET);
        return Ok(());
    }
    let failure = provider.refused(KEY, CONTEXT, wrap(), "tls")?;
    says(&failure, host)
}
