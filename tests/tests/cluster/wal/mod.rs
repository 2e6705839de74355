//! WAL encryption: every reader and writer of WAL, verified on disk.

mod archives;
mod backups;
mod barrier;
mod crashes;
mod leftovers;
mod locked;
mod readers;
mod received;
mod replication;
mod switching;
mod timelines;
mod tools;
mod unrecorded;

use anyhow::{Result, ensure};
use pagevault_tests::datafile::holds_numbered;
use pagevault_tests::wal::{PAGE, Segment, WalPage};
use pagevault_tests::{Cluster, Installation, KeyFile, Settings};

const STATE: &str = "SELECT wal_encrypted FROM pagevault.status";

/// A cluster that seals its WAL, with a plaintext table `t`, so that leaks come from WAL.
pub(crate) fn sealing(settings: &Settings) -> Result<(Cluster, KeyFile)> {
    let (cluster, keys) = Cluster::with_keys(settings)?;
    cluster.sql("CREATE TABLE t (id serial PRIMARY KEY, name text)")?;
    switch(&cluster, true)?;
    Ok((cluster, keys))
}

/// Turns WAL encryption on or off and waits until it takes effect.
pub(crate) fn switch(cluster: &Cluster, on: bool) -> Result<()> {
    cluster.set(&[("pagevault.wal_encryption", if on { "on" } else { "off" })])?;
    cluster.eventually(STATE, if on { "t" } else { "f" })
}

/// Inserts rows with `canary`.
pub(crate) fn insert(cluster: &Cluster, canary: &str, rows: u32) -> Result<()> {
    cluster.sql(&format!(
        "INSERT INTO t (name) SELECT '{canary}-' || i FROM generate_series(1, {rows}) i"
    ))
}

pub(crate) fn count(cluster: &Cluster, canary: &str) -> Result<String> {
    cluster.text(&format!("SELECT count(*) FROM t WHERE name LIKE '{canary}-%'"))
}

/// The segments of `pg_wal`.
pub(crate) fn segments(cluster: &Cluster) -> Result<Vec<Segment>> {
    Segment::all(&cluster.data_directory().join("pg_wal"))
}

/// Whether any segment contains rows of `canary` from [`insert`].
pub(crate) fn leaks(segments: &[Segment], canary: &str) -> bool {
    segments.iter().any(|segment| holds_numbered(&segment.bytes, canary))
}

/// The distinct marks of sealed pages, in order.
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

/// Address and state of the last written page.
fn last_page(segments: &[Segment]) -> Result<(u64, WalPage)> {
    let mut last = (0, WalPage::Unused);
    for segment in segments {
        for (at, page) in (segment.address()?..).step_by(PAGE).zip(segment.pages()?) {
            if page != WalPage::Unused && at > last.0 {
                last = (at, page);
            }
        }
    }
    Ok(last)
}

/// The state of the page at an address.
fn state_at(segments: &[Segment], address: u64) -> Result<WalPage> {
    for segment in segments {
        let base = segment.address()?;
        if (base..base + segment.bytes.len() as u64).contains(&address) {
            return Ok(segment.pages()?[(address - base) as usize / PAGE]);
        }
    }
    anyhow::bail!("no segment holds {address:X}")
}

pub(crate) fn assert_hidden(cluster: &Cluster, canary: &str) -> Result<()> {
    ensure!(!leaks(&segments(cluster)?, canary), "pg_wal holds {canary}");
    Ok(())
}

/// Whether the installation lacks a library that not every package contains; prints a message if
/// so.
fn lacks(library: &str) -> Result<bool> {
    let directory = Installation::get()?.library_directory();
    let lacks = !directory.join(format!("{library}.so")).exists();
    if lacks {
        eprintln!("skipped: {library} is not installed");
    }
    Ok(lacks)
}
