//! `age` itself opens escrow bundles, and a bundle that it re-encrypts to another key can be
//! restored.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Settings, StopMode};

use crate::Test;
use crate::programs::program;

pub(crate) const TESTS: &[Test] = &[Test {
    name: "age::hands_an_escrow_on_to_another_key",
    needs: &["age-keygen"],
    run: hands_an_escrow_on_to_another_key,
}];

fn age(name: &str) -> Result<Command> {
    let path = program("age-keygen").context("age-keygen")?.with_file_name(name);
    Ok(Command::new(path))
}

/// A key pair, created like an operator does: the file, and the public key.
fn key_pair(cluster: &Cluster, name: &str) -> Result<(PathBuf, String)> {
    let path = cluster.directory().join(name);
    run(age("age-keygen")?.arg("--output").arg(&path))?;
    let public = run(age("age-keygen")?.arg("-y").arg(&path))?;
    cluster.installation().give(&path)?;
    Ok((path, public.trim().to_owned()))
}

fn escrow(cluster: &Cluster, verb: &str, bundle: &Path) -> Command {
    let mut command = cluster.program("pagevault-keyring");
    command.args(["escrow", verb]).arg(bundle);
    command
}

fn hands_an_escrow_on_to_another_key() -> Result<()> {
    let (cluster, lost) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE TABLE t AS SELECT 7 AS id; SELECT pagevault.encrypt('t')")?;
    cluster.sql("SELECT pagevault.set_database_master_key('local', 'main')")?;
    let (identity, recipient) = key_pair(&cluster, "officer")?;
    let bundle = cluster.directory().join("bundle");
    let mut export = cluster.program("pagevault-keyring");
    export.args(["escrow", "export"]).arg(cluster.data_directory());
    run(export.arg("--output").arg(&bundle).args(["--recipient", &recipient]))?;
    cluster.stop(StopMode::Fast)?;
    fs::remove_file(lost.path())?;

    // The officer re-encrypts it to a successor's key, using only age.
    let (successor, recipient) = key_pair(&cluster, "successor")?;
    let (clear, handed_on) =
        (cluster.directory().join("clear"), cluster.directory().join("handed"));
    run(age("age")?.arg("--decrypt").arg("-i").arg(&identity).arg("-o").arg(&clear).arg(&bundle))?;
    run(age("age")?.args(["--recipient", &recipient]).arg("-o").arg(&handed_on).arg(&clear))?;
    fs::remove_file(&clear)?;
    let wrong = age("age")?.arg("--decrypt").arg("-i").arg(&successor).arg(&bundle).output()?;
    ensure!(!wrong.status.success(), "any key opens it");
    cluster.installation().give(&handed_on)?;

    let found = cluster.key_file("found", "new")?;
    let mut restore = escrow(&cluster, "restore", &handed_on);
    restore.arg("--identity").arg(&successor);
    restore.arg("--data-directory").arg(cluster.data_directory());
    restore.args(["--provider-kind", "file", "--key", "new"]);
    restore.args(["--options", &format!("{{\"path\": \"{}\"}}", found.path().display())]);
    run(&mut restore)?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT id FROM t")? == "7", "the row is lost");
    cluster.finish()
}
