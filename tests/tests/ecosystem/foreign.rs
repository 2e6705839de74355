//! postgres_fdw: a foreign table that refers to an encrypted one.

use anyhow::{Result, ensure};
use pagevault_tests::Settings;
use pagevault_tests::datafile::assert_sealed;

use crate::Test;
use crate::inspection::twins;

pub(crate) const TESTS: &[Test] =
    &[Test { name: "postgres_fdw", needs: &["postgres_fdw"], run: postgres_fdw }];

fn postgres_fdw() -> Result<()> {
    let (cluster, _keys) = twins(&Settings::default(), &["postgres_fdw"])?;
    let host = cluster.directory().display();
    cluster.sql(&format!(
        "CREATE SERVER here FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host '{host}', dbname 'postgres');
         CREATE USER MAPPING FOR postgres SERVER here OPTIONS (user 'postgres');
         CREATE SCHEMA far; SECURITY LABEL FOR pagevault ON SCHEMA far IS 'encrypted';
         IMPORT FOREIGN SCHEMA public LIMIT TO (sealed) FROM SERVER here INTO far"
    ))?;
    cluster.sql(
        "INSERT INTO far.sealed SELECT i, 'far', repeat('wide', 1000) FROM generate_series(10001, 10020) i;
         UPDATE far.sealed SET name = 'farther' WHERE id = 10001; DELETE FROM far.sealed WHERE id = 10002;
         ANALYZE far.sealed",
    )?;
    let both = "SELECT (SELECT md5(string_agg(s::text, '' ORDER BY id)) FROM sealed s)
                     = (SELECT md5(string_agg(s::text, '' ORDER BY id)) FROM far.sealed s)";
    ensure!(cluster.text(both)? == "t", "rows");
    // It has no storage, so it can neither be labelled nor drift.
    let error =
        cluster.error("SECURITY LABEL FOR pagevault ON FOREIGN TABLE far.sealed IS 'encrypted'")?;
    ensure!(error.sqlstate == "0A000", "{error}");
    ensure!(cluster.text("SELECT count(*) FROM pagevault.drift(true)")? == "0", "drift");
    cluster.sql("TRUNCATE far.sealed; INSERT INTO far.sealed VALUES (1, 'x')")?;
    cluster.restart()?;
    assert_sealed(&cluster.family_files("sealed")?)?;
    cluster.finish()
}
