//! The program `pagevault-keyring` with the module.

use anyhow::{Context, Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Settings};

use crate::{REQUIRED, ordinary, validated};

#[test]
fn its_version_names_the_module() -> Result<()> {
    let said = run(validated()?.command("pagevault-keyring").arg("--version"))?;
    ensure!(
        said.contains("AWS-LC FIPS 3.") && said.contains("in FIPS mode, certificate 5314"),
        "{said}"
    );
    let said = run(ordinary()?.command("pagevault-keyring").arg("--version"))?;
    ensure!(!said.contains("certificate"), "{said}");
    Ok(())
}

#[test]
fn it_neither_writes_nor_reads_escrow_bundles() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default().on(validated()?))?;
    let bundle = cluster.directory().join("bundle");
    let mut export = cluster.program("pagevault-keyring");
    export.args(["escrow", "export"]).arg(cluster.data_directory()).arg("--output").arg(&bundle);
    export.args(["--recipient", "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kudnyd4sqhs4kyk"]);
    let mut check = cluster.program("pagevault-keyring");
    check.args(["escrow", "check"]).arg(&bundle).arg("--identity").arg(&bundle);
    check.arg("--data-directory").arg(cluster.data_directory());
    for command in [&mut export, &mut check] {
        let said = format!("{:#}", run(command).err().context("it has not refused")?);
        for part in [
            "this pagevault-keyring neither writes nor reads escrow bundles",
            "has neither X25519 nor ChaCha20-Poly1305",
            "Have the database keys wrapped by master keys of two providers instead",
        ] {
            ensure!(said.contains(part), "it does not say {part:?} but {said}");
        }
    }
    ensure!(!bundle.exists());
    cluster.finish()
}

/// A server that requires the module does not give its keys to a helper without.
#[test]
fn a_server_that_requires_the_module_refuses_an_ordinary_helper() -> Result<()> {
    let settings = Settings::default().on(validated()?).conf(REQUIRED);
    let cluster = Cluster::start(&settings)?;
    let keys = cluster.key_file("keys", "main")?;
    cluster.sql("CREATE EXTENSION pagevault")?;
    let other = ordinary()?.program("pagevault-keyring");
    cluster.set(&[("pagevault.keyring_command", &other.display().to_string())])?;
    let error = cluster.error(&keys.add_provider("local"))?;
    ensure!(
        error.text().contains("this pagevault-keyring has no validated cryptographic module"),
        "{error}"
    );
    cluster.set(&[("pagevault.keyring_command", "")])?;
    cluster.sql(&keys.add_provider("local"))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('local', 'main')")?;
    cluster.finish()
}
