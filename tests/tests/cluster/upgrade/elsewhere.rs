//! Clusters whose configuration is outside of the data directories, as Debian has it.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, StopMode};

use super::{arguments_with, failure, new_cluster, old_cluster, upgrading};

const FILES: [&str; 3] = ["postgresql.conf", "pg_hba.conf", "pg_ident.conf"];

/// Moves the configuration of a cluster into a directory of its own.
fn take_away(cluster: &Cluster) -> Result<PathBuf> {
    let place = cluster.directory().join("etc");
    fs::create_dir(&place)?;
    for name in FILES {
        fs::rename(cluster.data_directory().join(name), place.join(name))?;
    }
    let mut file = OpenOptions::new().append(true).open(place.join(FILES[0]))?;
    writeln!(file, "\ndata_directory = '{}'", cluster.data_directory().display())?;
    writeln!(file, "hba_file = '{}'", place.join(FILES[1]).display())?;
    writeln!(file, "ident_file = '{}'", place.join(FILES[2]).display())?;
    cluster.installation().give(&place)?;
    Ok(place)
}

fn bring_back(cluster: &Cluster, place: &Path) -> Result<()> {
    for name in FILES {
        fs::rename(place.join(name), cluster.data_directory().join(name))?;
    }
    let data = cluster.data_directory();
    cluster.append_conf(&format!("hba_file = '{}'", data.join(FILES[1]).display()))?;
    cluster.append_conf(&format!("ident_file = '{}'", data.join(FILES[2]).display()))
}

#[test]
fn configuration_outside_of_the_data_directories() -> Result<()> {
    let (old, _keys) = old_cluster("")?;
    old.sql("CREATE TABLE t AS SELECT 7 AS id; SELECT pagevault.encrypt('t')")?;
    old.stop(StopMode::Fast)?;
    let new = new_cluster()?;
    let (old_place, new_place) = (take_away(&old)?, take_away(&new)?);

    // The data directories alone have no settings.
    let error = failure(&mut upgrading(&old, &new), &new)?;
    ensure!(error.contains("-O \"-c config_file=NEW/postgresql.conf\""), "{error}");

    // They have, with the options of pg_upgrade.
    let option = |place: &Path| format!("-c config_file={}/postgresql.conf", place.display());
    let mut command = upgrading(&old, &new);
    command.args(["--check", "-o", &option(&old_place), "-O", &option(&new_place)]);
    run(&mut command)?;

    // The directories of the configuration name them.
    let mut command = new.installation().command("pagevault-keyring");
    command.args(["exec", "--", "pg_upgrade"]);
    arguments_with(&mut command, &old, &new, [&old_place, &new_place]);
    run(&mut command)?;
    bring_back(&old, &old_place)?;
    bring_back(&new, &new_place)?;
    new.start_server()?;
    ensure!(new.text("SELECT id FROM t WHERE pagevault.is_encrypted('t')")? == "7", "the row");
    old.finish()?;
    new.finish()
}
