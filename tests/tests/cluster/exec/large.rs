//! `pg_rewind` of a relation with several files, whose blocks are numbered across the files.

use std::fs::File;

use anyhow::{Context, Result, ensure};
use pagevault_tests::datafile::{PAGE_SIZE, assert_sealed};
use pagevault_tests::installation::run;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, DataFile, KeyFile, Settings, StopMode};

use super::rewind::{allow, files, follow, rewind, server};
use crate::segments::SEGMENT_BLOCKS;
use crate::wal::{assert_hidden, sealing};

/// Each row fills a page. Rows with these numbers are at the end of the first file and in the
/// second one.
const ROWS: u32 = 2000;

const CONTENT: &str =
    "SELECT count(*) || ' ' || sum(id) || ' ' || sum(hashtext(name)::bigint) FROM large";

fn insert(cluster: &Cluster, canary: &str, from: u32, to: u32) -> Result<()> {
    cluster.sql(&format!(
        "INSERT INTO large SELECT i, '{canary}-' || i || repeat('x', 7000) FROM generate_series({from}, {to}) i"
    ))
}

fn change(cluster: &Cluster, canary: &str, every: u32) -> Result<()> {
    cluster.sql(&format!(
        "UPDATE large SET name = '{canary}-' || id WHERE id % {every} = 0;
         DELETE FROM large WHERE id % {every} = 1"
    ))
}

/// A primary with a sparse table of more than a gigabyte, and its standby.
fn pair() -> Result<(Cluster, Cluster, KeyFile)> {
    let settings = Settings::default().conf("wal_keep_size = 1GB").conf("shared_buffers = 32MB");
    let (mut primary, keys) = sealing(&settings)?;
    allow(&mut primary);
    primary.sql(
        "CREATE TABLE large (id int, name text); ALTER TABLE large ALTER name SET STORAGE PLAIN;
         SELECT pagevault.encrypt('large'); INSERT INTO large VALUES (0, 'first')",
    )?;
    let first = primary.files("large")?.first().context("a file")?.clone();
    primary.stop(StopMode::Fast)?;
    let hole = (SEGMENT_BLOCKS - u64::from(ROWS) / 2) * PAGE_SIZE as u64;
    File::options().write(true).open(&first.path)?.set_len(hole)?;
    primary.start_server()?;
    insert(&primary, "amsel", 1, ROWS)?;
    let mut standby = standby_of(&primary, &[])?;
    allow(&mut standby);
    wait_for(&standby, &primary)?;
    Ok((primary, standby, keys))
}

/// Checks that both files are sealed; returns the length of the second one in bytes.
fn second_file(cluster: &Cluster) -> Result<u64> {
    let files = cluster.files("large")?;
    let mains: Vec<DataFile> =
        files.into_iter().filter(|file| !file.path.to_string_lossy().contains('_')).collect();
    ensure!(mains.len() == 2, "{mains:?}");
    assert_sealed(&mains)?;
    Ok(std::fs::metadata(&mains[1].path)?.len())
}

fn promote(cluster: &Cluster) -> Result<()> {
    cluster.sql("SELECT pg_promote()")?;
    cluster.eventually("SELECT pg_is_in_recovery()", "f")?;
    cluster.sql("CHECKPOINT")
}

/// The target's second file is first longer than the source's, then shorter.
#[test]
fn both_directions_with_a_relation_over_one_gigabyte() -> Result<()> {
    let (a, b, _keys) = pair()?;
    promote(&b)?;
    a.sql("SELECT pagevault.rotate_wal_key()")?;
    insert(&a, "drossel", ROWS + 1, ROWS + 500)?;
    change(&a, "drossel", 7)?;
    change(&b, "fink", 5)?;
    b.sql("DELETE FROM large WHERE id > 1500")?;
    b.sql("VACUUM large")?;
    a.stop(StopMode::Fast)?;
    run(&mut rewind(&a, &server(&b)))?;
    follow(&a, &b)?;
    ensure!(a.text(CONTENT)? == b.text(CONTENT)?, "the tables differ");
    b.sql("CHECKPOINT")?;
    a.sql("CHECKPOINT")?;
    let shorter = second_file(&a)?;
    ensure!(shorter == second_file(&b)?, "the second files differ in length");

    promote(&a)?;
    a.sql("SELECT pagevault.rotate_wal_key(); SELECT pagevault.rotate_database_key()")?;
    insert(&a, "meise", 3000, 4000)?;
    change(&b, "zeisig", 3)?;
    a.stop(StopMode::Fast)?;
    b.stop(StopMode::Fast)?;
    run(&mut rewind(&b, &files(&a)))?;
    a.start_server()?;
    follow(&b, &a)?;
    let content = a.text(CONTENT)?;
    ensure!(b.text(CONTENT)? == content, "the tables differ");
    ensure!(second_file(&b)? > shorter, "the second file did not grow");
    b.crash()?;
    wait_for(&b, &a)?;
    ensure!(b.text(CONTENT)? == content, "the tables differ after a crash");
    for cluster in [&a, &b] {
        for canary in ["drossel", "fink", "meise", "zeisig"] {
            assert_hidden(cluster, canary)?;
        }
    }
    b.stop(StopMode::Fast)?;
    b.pg_checksums()?;
    b.start_server()?;
    b.finish()?;
    a.finish()
}
