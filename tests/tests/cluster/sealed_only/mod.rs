//! A file that was created encrypted contains encrypted pages only, and the keystore says so. Then
//! a page in plaintext is somebody else's, and is refused; and no page of a server's own ever is.

mod attacks;
mod backups;
mod former;
mod lifting;
mod proven;
mod rewound;
mod servers;
mod verified;

use anyhow::{Context, Result, ensure};
use pagevault_tests::datafile::{DataFile, PageState};
use pagevault_tests::errors::SqlError;
use pagevault_tests::{Cluster, KeyFile, Settings, StopMode};

/// `t` is encrypted, `forged` is not. They look alike, and differ in what they say.
const TABLES: &str = "
    CREATE TABLE forged AS SELECT i AS id, 'forged' AS name FROM generate_series(1, 1000) i;
    SET pagevault.default_encryption = on;
    CREATE TABLE t AS SELECT i AS id, 'honest' AS name FROM generate_series(1, 1000) i";

const HONEST: &str = "SELECT count(*) FROM t WHERE name = 'honest'";

fn cluster(settings: &Settings) -> Result<(Cluster, KeyFile)> {
    let (cluster, keys) = Cluster::with_keys(settings)?;
    cluster.sql(TABLES)?;
    Ok((cluster, keys))
}

/// The main fork of a relation.
fn file(cluster: &Cluster, relation: &str) -> Result<DataFile> {
    cluster.files(relation)?.into_iter().next().context("a file")
}

/// Whether the keystore says of a relation's file that it contains encrypted pages only.
fn is_sealed_only(cluster: &Cluster, relation: &str) -> Result<bool> {
    let query = format!(
        "SELECT sealed_only FROM pagevault.relations WHERE relation = '{relation}'::regclass"
    );
    Ok(cluster.text(&query)? == "t")
}

/// While the server is down, puts block 0 of one file in the place of block 0 of another. Returns
/// what was there.
fn plant(from: &DataFile, over: &DataFile) -> Result<Vec<u8>> {
    let (page, before) = (from.read_page(0)?, over.read_page(0)?);
    ensure!(PageState::of(&page) == PageState::Plaintext, "the forged page is not in plaintext");
    ensure!(matches!(PageState::of(&before), PageState::Sealed(_)), "no encrypted page is there");
    over.write_page(0, &page)?;
    Ok(before)
}

/// The error of a query that reads a forged page.
fn ensure_refused(error: &SqlError) -> Result<()> {
    ensure!(error.sqlstate == "XX001", "{error}");
    ensure!(error.message.starts_with("block 0 of relation file base/"), "{error}");
    ensure!(error.message.ends_with("is in plaintext, which is not accepted there"), "{error}");
    ensure!(error.text().contains("contains encrypted pages only"), "{error}");
    Ok(())
}

/// Restarts the server, so that every page is read from disk.
fn read_again(cluster: &Cluster) -> Result<()> {
    cluster.stop(StopMode::Fast)?;
    cluster.start_server()
}

fn wait(cluster: &Cluster, statement: &str) -> Result<()> {
    let job = cluster.text(statement)?;
    ensure!(cluster.text(&format!("SELECT pagevault.wait_for_rekey({job}, '1min')"))? == "t");
    Ok(())
}
