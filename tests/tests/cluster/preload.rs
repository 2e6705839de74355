//! What a start requires: the library in `shared_preload_libraries`, without which every function
//! and label reports the missing library; and valid settings.

use std::fs;

use anyhow::{Result, ensure};
use pagevault_tests::{Cluster, Settings, StopMode};

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

/// A setting that PostgreSQL would drop with a warning may be the one that protects the data.
#[test]
fn a_setting_that_does_not_exist_stops_the_start() -> Result<()> {
    let mut cluster = Cluster::start(&Settings::default())?;
    cluster.allow_log("FATAL");
    cluster.allow_log(" WARNING:  ");
    cluster.stop(StopMode::Fast)?;
    for (line, expected) in [
        ("Pagevault.enforce = on", "unrecognized configuration parameter \"Pagevault.enforce\""),
        (
            "pagevault.default_encryption = mostly",
            "invalid value for parameter \"pagevault.default_encryption\": \"mostly\"",
        ),
        ("pagevault.cipher = rot13", "invalid value for parameter \"pagevault.cipher\": \"rot13\""),
        ("pagevault.rekey_rate = '1 page'", "invalid value for parameter \"pagevault.rekey_rate\""),
        (
            "pagevault.audit_destination = nowhere",
            "invalid value for parameter \"pagevault.audit_destination\": \"nowhere\"",
        ),
    ] {
        let conf = cluster.data_directory().join("postgresql.conf");
        let before = fs::read(&conf)?;
        cluster.append_conf(line)?;
        ensure!(cluster.start_server().is_err(), "the server started with {line}");
        let log = cluster.log();
        ensure!(log.contains(&format!("FATAL:  {expected}")), "{line}: {log}");
        ensure!(log.contains("postgresql.conf\" line "), "{line}: the log does not say where");
        fs::write(&conf, before)?;
    }
    // The last of several lines for one setting counts, as for PostgreSQL.
    cluster.append_conf("pagevault.cipher = rot13\npagevault.cipher = 'aes-128-xts'")?;
    cluster.start_server()?;
    ensure!(cluster.text("SHOW pagevault.cipher")? == "aes-128-xts", "the valid line");
    // A running server keeps its value.
    cluster.append_conf("pagevault.enforce = on")?;
    cluster.sql("SELECT pg_reload_conf()")?;
    ensure!(cluster.text("SHOW pagevault.cipher")? == "aes-128-xts", "after the reload");
    let error = cluster.error("SHOW pagevault.enforce")?;
    ensure!(error.sqlstate == "42704", "{error}");
    cluster.finish()
}
