//! pg_upgrade moves files of one cluster into another, and their keys do not follow yet: it is refused while
//! there is something encrypted, and never makes a key for a file that it will replace.

use anyhow::{Context, Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Settings, StopMode};

use crate::labels::{expect, label};

const BINARY_UPGRADE: [&str; 2] = ["-o", "-b"];

#[test]
fn a_cluster_with_encrypted_relations_is_not_upgraded() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("pg_upgrade does not work");
    cluster.allow_log("database system is shut down");
    cluster.sql("CREATE TABLE secret AS SELECT 7 AS id; SELECT pagevault.encrypt('secret')")?;
    cluster.stop(StopMode::Fast)?;
    let Err(refused) = cluster.start_server_with(&BINARY_UPGRADE) else {
        anyhow::bail!("it starts for pg_upgrade");
    };
    let said = format!("{refused:#}");
    ensure!(said.contains("pg_upgrade does not work with encrypted relations yet"), "{said}");
    ensure!(said.contains("pg_dump"), "{said}");
    cluster.start_server()?;
    ensure!(cluster.text("SELECT id FROM secret")? == "7", "the table");

    // The way that the message names.
    cluster.set(&[("pagevault.protect_statistics", "off")])?;
    for catalog in ["pg_statistic", "pg_statistic_ext_data", "pg_largeobject"] {
        cluster.sql(&format!("SELECT pagevault.decrypt('{catalog}')"))?;
    }
    cluster.sql(&label("TABLE secret", "'plain'"))?;
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
    ensure!(cluster.text("SELECT keys FROM pagevault.status")? == "0", "a key was made");
    let refused = cluster.error(&label("TABLE t", "'encrypted'"))?;
    ensure!(refused.text().contains("t cannot be encrypted while pg_upgrade runs"), "{refused}");
    cluster.sql(&label("SCHEMA public", "'encrypted'"))?;
    cluster.sql(&label("DATABASE postgres", "'encrypted'"))?;
    ensure!(cluster.text("SELECT keys FROM pagevault.status")? == "0", "a key was made");
    // Afterwards there is drift, and nothing else.
    cluster.restart()?;
    expect(&cluster, "t", "plain")?;
    let heal = "SELECT heal FROM pagevault.drift WHERE relation = 't'::regclass";
    let heal = cluster.text(heal)?;
    ensure!(heal == "SELECT pagevault.reconcile('public.t')", "{heal}");
    cluster.sql(&heal)?;
    expect(&cluster, "t", "aes-256-xts")?;
    cluster.finish()
}

/// The real program, from and to the same version.
#[test]
fn pg_upgrade_of_a_plain_cluster_with_labels_works() -> Result<()> {
    let (old, _keys) = Cluster::with_keys(&Settings::default())?;
    old.sql(
        "CREATE SCHEMA app; CREATE TABLE app.t AS SELECT i AS id FROM generate_series(1, 1000) i",
    )?;
    old.sql(&label("SCHEMA app", "'plain'"))?;
    let settings = Settings::default().conf("pagevault.default_encryption = on");
    let (new, _keys) = Cluster::with_keys(&settings)?;
    new.sql("DROP EXTENSION pagevault; DROP ROLE pagevault_admin")?;
    old.stop(StopMode::Fast)?;
    new.stop(StopMode::Fast)?;
    upgrade(&old, &new)?;
    new.start_server()?;
    ensure!(new.text("SELECT sum(id) FROM app.t")? == "500500", "rows");
    expect(&new, "app.t", "plain")?;
    ensure!(new.text("SELECT keys FROM pagevault.status")? == "0", "keys were made");

    // And with something encrypted it stops before anything is done.
    new.stop(StopMode::Fast)?;
    old.start_server()?;
    old.sql("SELECT pagevault.encrypt('app.t')")?;
    old.stop(StopMode::Fast)?;
    let Err(refused) = upgrade(&old, &new) else { anyhow::bail!("pg_upgrade does not stop") };
    let said = format!("{refused:#}");
    let log = said.split('"').find(|word| word.ends_with("pg_upgrade_server.log"));
    let log = std::fs::read_to_string(log.with_context(|| said.clone())?)?;
    ensure!(log.contains("does not work with encrypted relations yet"), "{said}\n{log}");
    old.start_server()?;
    ensure!(old.text("SELECT sum(id) FROM app.t")? == "500500", "rows of the old cluster");
    drop((old, new));
    Ok(())
}

fn upgrade(old: &Cluster, new: &Cluster) -> Result<String> {
    let installation = old.installation();
    let programs = installation.program("");
    run(installation
        .command("pg_upgrade")
        .arg("-b")
        .arg(&programs)
        .arg("-B")
        .arg(&programs)
        .arg("-d")
        .arg(old.data_directory())
        .arg("-D")
        .arg(new.data_directory())
        .arg("-s")
        .arg(new.directory())
        .args(["-U", "postgres"])
        .current_dir(new.directory()))
}
