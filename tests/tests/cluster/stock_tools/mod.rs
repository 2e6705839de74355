//! Stock tools and a stock server without pagevault, on sealed files.

mod backups;
mod checksums;
mod dumps;
mod maintenance;
mod resetwal;
mod single_user;
mod without;

use std::process::Command;

use anyhow::{Result, ensure};

const TABLE: &str = "SET pagevault.default_encryption = on;
    CREATE TABLE t (id int PRIMARY KEY, name text);
    INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 20000) i;
    SET pagevault.default_encryption = off;
    CREATE TABLE plain_beside (id int)";

/// The errors of a program that fails or reports that it continued after errors.
fn complaints(command: &mut Command) -> Result<String> {
    let output = command.output()?;
    ensure!(!output.status.success(), "{command:?} succeeds");
    Ok(String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}
