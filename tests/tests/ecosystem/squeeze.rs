//! pg_squeeze: copies a table in a worker, takes over changes by logical decoding, and finally
//! exchanges the files.

use std::thread;

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{column, run_sql};
use pagevault_tests::datafile::{assert_plain, assert_sealed};
use pagevault_tests::{Cluster, Settings};

use crate::Test;
use crate::inspection::twins;

pub(crate) const TESTS: &[Test] =
    &[Test { name: "pg_squeeze", needs: &["pg_squeeze"], run: squeeze }];

const DIGEST: &str =
    "SELECT count(*) || ' ' || md5(string_agg(s::text, '' ORDER BY id)) FROM sealed s";

fn check(cluster: &Cluster, what: &str) -> Result<()> {
    cluster.sql("CHECKPOINT")?;
    assert_sealed(&cluster.family_files("sealed")?).context(what.to_owned())?;
    assert_plain(&cluster.family_files("open")?).context(what.to_owned())?;
    let drift = column(&mut cluster.client()?, "SELECT r::text FROM pagevault.drift(true) r")?;
    ensure!(drift.is_empty(), "{what}: {drift:?}");
    Ok(())
}

/// Only the table has a label. Rows are changed meanwhile.
fn squeeze() -> Result<()> {
    let settings = Settings::default()
        .conf("shared_preload_libraries = 'pagevault, pg_squeeze'")
        .conf("wal_level = logical")
        .conf("output_plugin_libraries = 'pg_squeeze'")
        .conf("max_worker_processes = 32");
    let (mut cluster, _keys) = twins(&settings, &["pg_squeeze"])?;
    cluster.allow_log("squeeze");
    for arguments in [
        "'public', 'sealed'",
        "'public', 'open'",
        "'public', 'sealed', 'sealed_pkey'",
        "'public', 'open', 'open_pkey'",
    ] {
        let paths = "SELECT pg_relation_filepath('sealed'), pg_relation_filepath('open')";
        let paths = paths.replace(',', " || ' ' ||");
        let before = cluster.text(&paths)?;
        let mut writer = cluster.client()?;
        thread::scope(|scope| {
            let change = |n| {
                format!(
                    "UPDATE sealed SET name = 'changed' WHERE id % 60 = {n};
                     UPDATE open SET name = 'changed' WHERE id % 60 = {n}"
                )
            };
            let writing =
                scope.spawn(move || (0..60).try_for_each(|n| run_sql(&mut writer, &change(n))));
            cluster.sql(&format!("SELECT squeeze.squeeze_table({arguments})"))?;
            writing.join().map_err(|_| anyhow::anyhow!("the session panicked"))?
        })?;
        ensure!(cluster.text(&paths)? != before, "{arguments}: nothing was done");
        check(&cluster, arguments)?;
    }
    let rows = cluster.text(DIGEST)?;
    ensure!(cluster.text(&DIGEST.replace("sealed", "open"))? == rows, "the twins differ");
    cluster.crash()?;
    ensure!(cluster.text(DIGEST)? == rows, "rows after a crash");
    check(&cluster, "after a crash")?;
    cluster.finish()
}
