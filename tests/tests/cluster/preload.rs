//! Without `shared_preload_libraries` every function and label reports the missing library.

use anyhow::{Result, ensure};
use pagevault_tests::{Cluster, Settings};

#[test]
fn every_entry_point_says_that_the_library_is_not_preloaded() -> Result<()> {
    let cluster = Cluster::start(&Settings::default().without_preload())?;
    // CREATE EXTENSION works, so that a dump can be restored before the configuration.
    cluster.sql("CREATE EXTENSION pagevault")?;
    let calls = pagevault_tests::cluster::column(
        &mut cluster.client()?,
        "SELECT format('SELECT pagevault.%I(%s)', proname,
                       (SELECT string_agg(CASE t WHEN 'jsonb'::regtype THEN '''{}''' WHEN 'boolean'::regtype THEN 'true' WHEN 'bigint'::regtype THEN '1::bigint' WHEN 'integer'::regtype THEN '1' WHEN 'regclass'::regtype THEN '''pg_class''::regclass' WHEN 'regnamespace'::regtype THEN '''pg_catalog''::regnamespace' WHEN 'interval'::regtype THEN 'NULL' ELSE '''pg_class''' END, ', ')
                        FROM unnest(proargtypes::oid[]::regtype[]) t))
         FROM pg_proc WHERE pronamespace = 'pagevault'::regnamespace
           AND prolang = (SELECT oid FROM pg_language WHERE lanname = 'c') AND prokind = 'f'",
    )?;
    ensure!(!calls.is_empty(), "no function to call");
    for call in calls.iter().filter(|call| !call.contains("status_rows")) {
        let output = cluster.error(call)?;
        ensure!(output.sqlstate == "55000", "{call}: {output}");
        ensure!(output.text().contains("shared_preload_libraries"), "{call}: {output}");
    }
    let state = "SELECT loaded || ' ' || state FROM pagevault.status";
    ensure!(cluster.text(state)? == "false not_loaded", "{}", cluster.text(state)?);
    cluster.sql("CREATE TABLE t (id int)")?;
    let output = cluster.error("SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted'")?;
    ensure!(output.sqlstate == "22023", "{output}");
    cluster.finish()
}
