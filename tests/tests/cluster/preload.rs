//! Without `shared_preload_libraries` every entry point says so.

use anyhow::{Result, ensure};
use pagevault_tests::{Cluster, Settings};

#[test]
fn every_entry_point_says_that_the_library_is_not_preloaded() -> Result<()> {
    let cluster = Cluster::start(&Settings::default().without_preload())?;
    let said = cluster.error("LOAD 'pagevault'")?;
    ensure!(said.sqlstate == "55000", "{said}");
    ensure!(said.text().contains("shared_preload_libraries"), "{said}");
    let created = cluster.sql("CREATE EXTENSION pagevault");
    if created.is_err() {
        let said = cluster.error("CREATE EXTENSION pagevault")?;
        ensure!(said.sqlstate == "55000", "{said}");
        ensure!(said.text().contains("shared_preload_libraries"), "{said}");
        return cluster.finish();
    }
    let calls = pagevault_tests::cluster::column(
        &mut cluster.client()?,
        "SELECT format('SELECT pagevault.%I(%s)', proname,
                       (SELECT string_agg(format('NULL::%s', t), ', ')
                        FROM unnest(proargtypes::oid[]::regtype[]) t))
         FROM pg_proc WHERE pronamespace = 'pagevault'::regnamespace
           AND prolang = (SELECT oid FROM pg_language WHERE lanname = 'c') AND prokind = 'f'",
    )?;
    ensure!(!calls.is_empty(), "no function to call");
    for call in calls {
        let said = cluster.error(&call)?;
        ensure!(said.sqlstate == "55000", "{call}: {said}");
        ensure!(said.text().contains("shared_preload_libraries"), "{call}: {said}");
    }
    cluster.sql("CREATE TABLE t (id int)")?;
    let said = cluster.error("SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted'")?;
    ensure!(said.sqlstate == "22023", "{said}");
    cluster.finish()
}
