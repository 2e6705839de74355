//! Tables with more than one segment (1 GB): the tweak contains the block number in the fork, not
//! in the file.

use std::fs::File;

use anyhow::{Context, Result, ensure};
use pagevault_tests::datafile::{PAGE_SIZE, PageState};
use pagevault_tests::{Cluster, Settings, StopMode};

use crate::assert_sealed;

/// RELSEG_SIZE of all usual builds: blocks in a segment.
pub(crate) const SEGMENT_BLOCKS: u64 = 131_072;

#[test]
fn a_table_reads_and_recovers_across_the_segment_boundary() -> Result<()> {
    let settings = Settings::default().conf("shared_buffers = 8MB");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql(
        "SET pagevault.default_encryption = on;
         CREATE TABLE t (id int, name text);
         INSERT INTO t SELECT i, 'first' FROM generate_series(1, 10) i",
    )?;
    let files = cluster.files("t")?;
    let first = files.first().context("a file")?;
    cluster.stop(StopMode::Fast)?;
    // Zero pages up to just before the boundary, as after a crash during extension. The file is
    // sparse, so this costs neither time nor space.
    File::options()
        .write(true)
        .open(&first.path)?
        .set_len((SEGMENT_BLOCKS - 3) * PAGE_SIZE as u64)?;
    cluster.start_server()?;
    // Neither compressed nor moved to TOAST: one row fills one page.
    cluster.sql("ALTER TABLE t ALTER name SET STORAGE PLAIN")?;
    cluster.sql("INSERT INTO t SELECT i, repeat('x', 7000) FROM generate_series(11, 210) i")?;
    cluster.crash()?;
    let check = "SELECT count(*) || ' ' || sum(id) || ' ' || count(DISTINCT name) FROM t";
    ensure!(cluster.text(check)? == "210 22155 2", "{}", cluster.text(check)?);
    ensure!(
        cluster.text("SELECT max((ctid::text::point)[0]) > 131072 FROM t")? == "t",
        "no row lies beyond the boundary"
    );
    cluster.restart()?;
    ensure!(cluster.text(check)? == "210 22155 2", "{}", cluster.text(check)?);
    cluster.stop(StopMode::Fast)?;
    let mut second = first.clone();
    second.path.as_mut_os_string().push(".1");
    assert_sealed(std::slice::from_ref(&second))?;
    let last = u32::try_from(SEGMENT_BLOCKS - 1)?;
    ensure!(
        matches!(PageState::of(&first.read_page(last)?), PageState::Sealed(_)),
        "the last block of the first segment is not sealed"
    );
    cluster.pg_checksums()?;
    cluster.start_server()?;
    cluster.finish()
}
