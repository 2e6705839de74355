//! pg_upgrade of clusters with encrypted relations, by `pagevault-keyring exec`: from the
//! installation in `PAGEVAULT_OLD_PG_CONFIG` to the one under test; without that variable, within
//! one version.

mod elsewhere;
mod failing;
mod moving;
mod scene;
mod written;

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use pagevault_tests::{Cluster, Installation, KeyFile, Settings};

/// Settings of both clusters.
fn settings() -> Settings {
    Settings::default().conf("pagevault.wal_encryption = on").conf("pagevault.unlock_timeout = 2")
}

/// A cluster to upgrade into, as created by initdb, with its settings. Its server is not running.
fn new_cluster() -> Result<Cluster> {
    Cluster::create(&settings())
}

/// A cluster to upgrade, with a key, WAL encryption, one more setting, and no other contents.
fn old_cluster(conf: &str) -> Result<(Cluster, KeyFile)> {
    let settings = settings().on(Installation::to_upgrade_from()?).conf(conf);
    let (mut old, keys) = Cluster::with_keys(&settings)?;
    old.allow_log("cannot encrypt WAL: the cluster has no master key");
    old.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    Ok((old, keys))
}

/// Arguments of pg_upgrade from `old` to `new`.
fn arguments(command: &mut Command, old: &Cluster, new: &Cluster) {
    arguments_with(command, old, new, [&old.data_directory(), &new.data_directory()]);
}

/// The same with the given directories of `old` and `new`.
fn arguments_with(command: &mut Command, old: &Cluster, new: &Cluster, directories: [&Path; 2]) {
    command
        .arg("-b")
        .arg(old.installation().program(""))
        .arg("-B")
        .arg(new.installation().program(""))
        .arg("-d")
        .arg(directories[0])
        .arg("-D")
        .arg(directories[1])
        .arg("-s")
        .arg(new.directory())
        .args(["-U", "postgres"])
        .current_dir(new.directory());
}

/// pg_upgrade without the keys.
fn alone(old: &Cluster, new: &Cluster) -> Command {
    let mut command = new.installation().command("pg_upgrade");
    arguments(&mut command, old, new);
    command
}

/// pg_upgrade with the keys.
pub(crate) fn upgrading(old: &Cluster, new: &Cluster) -> Command {
    let mut command = new.installation().command("pagevault-keyring");
    command.args(["exec", "--", "pg_upgrade"]);
    arguments(&mut command, old, new);
    command
}

/// Both outputs of a failed program, and the logs of pg_upgrade.
fn failure(command: &mut Command, new: &Cluster) -> Result<String> {
    let output = command.output()?;
    ensure!(!output.status.success(), "{command:?} succeeds");
    let mut response = String::from_utf8_lossy(&output.stdout).into_owned();
    response.push_str(&String::from_utf8_lossy(&output.stderr));
    for log in scene::files_below(&new.data_directory().join("pg_upgrade_output.d"))? {
        if log.extension().is_some_and(|extension| extension == "log") {
            response.push_str(&std::fs::read_to_string(log)?);
        }
    }
    Ok(response)
}
