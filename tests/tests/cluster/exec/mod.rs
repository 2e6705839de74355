//! `pagevault-keyring exec`: PostgreSQL's own programs on sealed WAL.

mod backups;
mod large;
mod old_copies;
mod refusals;
mod rewind;
mod unasked;
mod waldump;

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use pagevault_tests::Cluster;
use pagevault_tests::datafile::holds_numbered;

use crate::wal::{count, insert, sealing, switch};

/// A program run by `pagevault-keyring exec` with these options.
fn exec(cluster: &Cluster, options: &[&str], program: &str) -> Command {
    let mut command = cluster.program("pagevault-keyring");
    command.arg("exec").args(options).arg("--").arg(program);
    command
}

/// Like [`exec`], with the keystore of the cluster.
fn exec_with_keystore(cluster: &Cluster, program: &str) -> Command {
    let directory = cluster.data_directory();
    exec(cluster, &["--keystore", &directory.to_string_lossy()], program)
}

/// The output of a program that must fail.
fn failure(command: &mut Command) -> Result<String> {
    let output = command.output()?;
    ensure!(!output.status.success(), "{command:?} succeeds");
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// An empty directory of the server user next to the data directory.
fn directory(cluster: &Cluster, name: &str) -> Result<std::path::PathBuf> {
    let path = cluster.directory().join(name);
    std::fs::create_dir(&path)?;
    cluster.installation().give(&path)?;
    Ok(path)
}

/// Fails if a file below a directory contains rows of `canary`.
fn assert_nowhere(directory: &Path, canary: &str) -> Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let kind = std::fs::symlink_metadata(&path)?.file_type();
        if kind.is_dir() {
            assert_nowhere(&path, canary)?;
        } else if kind.is_file() {
            let found = holds_numbered(&std::fs::read(&path)?, canary);
            ensure!(!found, "{} holds {canary}", path.display());
        }
    }
    Ok(())
}
