//! Servers as started by pg_upgrade: they refuse to run if encrypted files would lose their keys,
//! and never create a key for a file that will be replaced. The program itself is tested in
//! `upgrade`.

use anyhow::{Result, ensure};
use pagevault_tests::{Cluster, Settings, StopMode};

use crate::labels::{expect, label};

const BINARY_UPGRADE: [&str; 1] = ["-b"];

#[test]
fn a_cluster_with_encrypted_relations_is_not_upgraded() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("pg_upgrade alone would leave");
    cluster.allow_log("database system is shut down");
    cluster.sql("CREATE TABLE secret AS SELECT 7 AS id; SELECT pagevault.encrypt('secret')")?;
    cluster.stop(StopMode::Fast)?;
    let Err(refused) = cluster.start_server_with(&BINARY_UPGRADE) else {
        anyhow::bail!("it starts for pg_upgrade");
    };
    let output = format!("{refused:#}");
    ensure!(
        output.contains("pg_upgrade alone would leave the keys of encrypted relations behind"),
        "{output}"
    );
    ensure!(output.contains("pagevault-keyring exec -- pg_upgrade"), "{output}");
    cluster.start_server()?;
    ensure!(cluster.text("SELECT id FROM secret")? == "7", "the table");

    // Once nothing is encrypted, it runs.
    cluster.set(&[("pagevault.data_catalog_encryption", "off")])?;
    for catalog in ["pg_statistic", "pg_statistic_ext_data", "pg_largeobject"] {
        cluster.sql(&format!("SELECT pagevault.decrypt('{catalog}')"))?;
    }
    cluster.sql(&label("TABLE secret", "'plaintext'"))?;
    cluster.sql("SELECT pagevault.wait_for_rekey(job) FROM pagevault.rekey_jobs")?;
    cluster.stop(StopMode::Fast)?;
    cluster.start_server_with(&BINARY_UPGRADE)?;
    ensure!(cluster.text("SELECT id FROM secret")? == "7", "the table, in plaintext");
    cluster.finish()
}

#[test]
fn no_key_is_made_for_a_file_that_pg_upgrade_replaces() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE TABLE t (id int)")?;
    cluster.set(&[("pagevault.default_encryption", "on")])?;
    cluster.stop(StopMode::Fast)?;
    cluster.start_server_with(&BINARY_UPGRADE)?;
    cluster.sql("SELECT binary_upgrade_set_next_heap_relfilenode('50004'::oid); TRUNCATE t")?;
    ensure!(cluster.text("SELECT pg_relation_filenode('t')")? == "50004", "the file's number");
    ensure!(cluster.text("SELECT data_keys FROM pagevault.status")? == "0", "a key was made");
    cluster.sql(&label("TABLE t", "'encrypted'"))?;
    cluster.sql(&label("SCHEMA public", "'encrypted'"))?;
    ensure!(cluster.text("SELECT data_keys FROM pagevault.status")? == "0", "a key was made");
    // The new cluster has its own catalogs.
    cluster.sql(&label("DATABASE postgres", "'encrypted'"))?;
    expect(&cluster, "pg_proc", "aes-256-xts-auth")?;
    let plain = "SELECT pagevault.is_encrypted('pg_largeobject')";
    ensure!(cluster.text(plain)? == "f", "pg_largeobject is encrypted");
    expect(&cluster, "t", "plain")?;
    // Afterwards there is drift, and no other difference.
    cluster.restart()?;
    expect(&cluster, "t", "plain")?;
    let heal = "SELECT fix FROM pagevault.drift WHERE relation = 't'::regclass";
    let heal = cluster.text(heal)?;
    ensure!(heal == "SELECT pagevault.reconcile('public.t')", "{heal}");
    cluster.sql(&heal)?;
    expect(&cluster, "t", "aes-256-xts-auth")?;
    cluster.finish()
}
