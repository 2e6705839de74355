//! WAL encryption: every reader and writer of WAL, each looked at on disk.

mod crashes;
mod switching;

use anyhow::{Result, ensure};
use pagevault_tests::datafile::holds;
use pagevault_tests::wal::{Segment, WalPage};
use pagevault_tests::{Cluster, KeyFile, Settings};

const STATE: &str = "SELECT wal FROM pagevault.status";

/// A cluster that seals its WAL, with a plain table `t`: what leaks must come from WAL.
fn sealing(settings: &Settings) -> Result<(Cluster, KeyFile)> {
    let (cluster, keys) = Cluster::with_keys(settings)?;
    cluster.sql("CREATE TABLE t (id serial PRIMARY KEY, name text)")?;
    switch(&cluster, true)?;
    Ok((cluster, keys))
}

/// Turns WAL encryption on or off and waits until it is so.
fn switch(cluster: &Cluster, on: bool) -> Result<()> {
    cluster.set(&[("pagevault.wal_encryption", if on { "on" } else { "off" })])?;
    cluster.eventually(STATE, if on { "encrypted" } else { "plaintext" })
}

/// Adds rows that hold `canary`.
fn insert(cluster: &Cluster, canary: &str, rows: u32) -> Result<()> {
    cluster.sql(&format!(
        "INSERT INTO t (name) SELECT '{canary}-' || i FROM generate_series(1, {rows}) i"
    ))
}

fn count(cluster: &Cluster, canary: &str) -> Result<String> {
    cluster.text(&format!("SELECT count(*) FROM t WHERE name LIKE '{canary}-%'"))
}

/// The segments of `pg_wal`.
fn segments(cluster: &Cluster) -> Result<Vec<Segment>> {
    Segment::all(&cluster.data_directory().join("pg_wal"))
}

/// Whether any segment holds `canary`.
fn leaks(segments: &[Segment], canary: &str) -> bool {
    segments.iter().any(|segment| holds(&segment.bytes, canary.as_bytes()))
}

/// The marks of the pages that are sealed, in order, each once.
fn marks(segments: &[Segment]) -> Result<Vec<u16>> {
    let mut marks = Vec::new();
    for segment in segments {
        for page in segment.pages()? {
            if let WalPage::Sealed(mark) = page {
                marks.push(mark);
            }
        }
    }
    marks.dedup();
    Ok(marks)
}

fn assert_hidden(cluster: &Cluster, canary: &str) -> Result<()> {
    ensure!(!leaks(&segments(cluster)?, canary), "pg_wal holds {canary}");
    Ok(())
}
