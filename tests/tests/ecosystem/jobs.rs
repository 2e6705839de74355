//! pg_partman and pg_cron, which run DDL by themselves.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::column;
use pagevault_tests::datafile::assert_sealed;
use pagevault_tests::{Cluster, Settings};

use crate::Test;

pub(crate) const TESTS: &[Test] = &[
    Test { name: "pg_partman", needs: &["pg_partman"], run: partman },
    Test { name: "pg_cron", needs: &["pg_cron"], run: cron },
];

/// Partitions created in advance, and those to which it moves rows of the default partition.
fn partman() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE SCHEMA partman; CREATE EXTENSION pg_partman SCHEMA partman")?;
    let version = "SELECT extversion FROM pg_extension WHERE extname = 'pg_partman'";
    // 4 has partitions by inheritance, too.
    let kind = if cluster.text(version)?.starts_with("4.") { "'native'," } else { "" };
    cluster.sql(&format!(
        "CREATE TABLE parts (id bigint NOT NULL, name text) PARTITION BY RANGE (id);
         CREATE INDEX ON parts (name);
         SECURITY LABEL FOR pagevault ON TABLE parts IS 'encrypted';
         SELECT partman.create_parent('public.parts', 'id', {kind} '100', p_premake => 3);
         INSERT INTO parts SELECT i, 'name ' || i FROM generate_series(0, 1500) i"
    ))?;
    cluster.sql("CALL partman.partition_data_proc('public.parts', p_wait => 0)")?;
    cluster.sql("SELECT partman.run_maintenance('public.parts')")?;
    ensure!(cluster.text("SELECT count(*) FROM ONLY parts_default")? == "0", "rows in the default");
    ensure!(cluster.text("SELECT count(*) FROM parts")? == "1501", "rows");
    ensure!(cluster.text("SELECT count(*) FROM pagevault.drift")? == "0", "drift");
    cluster.restart()?;
    let leaves = "SELECT relid::regclass FROM pg_partition_tree('parts') WHERE isleaf";
    let leaves = column(&mut cluster.client()?, leaves)?;
    ensure!(leaves.len() > 16, "{leaves:?}");
    for leaf in leaves {
        // A partition created in advance has no row, but its index has a page.
        assert_sealed(&cluster.family_files(&leaf)?)?;
    }
    cluster.finish()
}

/// A job in a separate session follows labels and the setting of the database.
fn cron() -> Result<()> {
    let settings = Settings::default()
        .conf("shared_preload_libraries = 'pagevault, pg_cron'")
        .conf("cron.use_background_workers = on")
        .conf("cron.database_name = 'postgres'");
    let (mut cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.allow_log("cron");
    cluster.sql("ALTER DATABASE postgres SET pagevault.default_encryption = on")?;
    cluster.sql("CREATE EXTENSION pg_cron")?;
    cluster.sql(
        "SELECT cron.schedule('once', '@reboot',
             $$CREATE TABLE made AS SELECT 'by cron' AS name$$)",
    )?;
    cluster.restart()?;
    cluster.eventually("SELECT status FROM cron.job_run_details", "succeeded")?;
    ensure!(cluster.text("SELECT name FROM made")? == "by cron", "the row");
    cluster.sql("SELECT cron.unschedule('once')")?;
    ensure!(cluster.text("SELECT count(*) FROM pagevault.drift")? == "0", "drift");
    cluster.restart()?;
    for table in ["made", "cron.job_run_details"] {
        assert_sealed(&cluster.family_files(table)?)?;
    }
    cluster.finish()
}
