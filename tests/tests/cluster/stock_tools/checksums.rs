//! `pg_checksums` on sealed files.

use anyhow::{Result, ensure};
use pagevault_tests::{Cluster, Settings, StopMode};

use super::TABLE;
use crate::assert_sealed;

#[test]
fn pg_checksums_is_clean() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(TABLE)?;
    cluster.sql("VACUUM t")?;
    cluster.stop(StopMode::Fast)?;
    let report = cluster.pg_checksums()?;
    ensure!(report.contains("Bad checksums:  0"), "{report}");
    cluster.start_server()?;
    assert_sealed(&cluster.family_files("t")?)?;
    cluster.finish()
}

#[test]
fn checksums_can_be_enabled_and_disabled_by_pg_checksums() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default().without_checksums())?;
    cluster.sql(TABLE)?;
    for flag in ["--enable", "--disable", "--enable"] {
        cluster.stop(StopMode::Fast)?;
        let mut program = cluster.program("pg_checksums");
        pagevault_tests::installation::run(
            program.arg(flag).arg("-D").arg(cluster.data_directory()),
        )?;
        cluster.start_server()?;
        ensure!(cluster.text("SELECT count(name) FROM t")? == "20000", "{flag}: rows are missing");
        cluster.sql("UPDATE t SET name = name WHERE id % 3 = 0; CHECKPOINT")?;
        ensure!(cluster.text("SELECT count(name) FROM t")? == "20000", "{flag}: rows are missing");
    }
    cluster.stop(StopMode::Fast)?;
    cluster.pg_checksums()?;
    cluster.finish()
}
