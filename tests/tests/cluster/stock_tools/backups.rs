//! `pg_basebackup`.

use anyhow::{Result, ensure};
use pagevault_tests::{Cluster, Settings};

use super::TABLE;
use crate::assert_sealed;

#[test]
fn pg_basebackup_verifies_and_its_restore_opens() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("connection to client lost"); // the load is ended the hard way
    cluster.sql(TABLE)?;
    // Under load, so that data files and keystore change meanwhile.
    let mut churn = {
        let script = cluster.directory().join("churn.sql");
        std::fs::write(
            &script,
            "\\set n random(1, 1000000000)
             CREATE TABLE churn_:n (id int);
             INSERT INTO churn_:n SELECT generate_series(1, 10);
             INSERT INTO churned VALUES ('churn_:n');",
        )?;
        cluster.sql("CREATE TABLE churned (name text)")?;
        let script = script.to_string_lossy().into_owned();
        cluster.sql("ALTER SYSTEM SET pagevault.default_encryption = on")?;
        cluster.sql("SELECT pg_reload_conf()")?;
        cluster.pgbench_in_background(&["-n", "-c", "1", "-T", "600", "-f", &script])?
    };
    let mut load = {
        cluster.pgbench(&["-i", "-q", "-s", "1"])?;
        cluster.pgbench_in_background(&["-c", "2", "-T", "600"])?
    };
    let restored = Cluster::from_files(|target| cluster.base_backup(target))?;
    for program in [&mut load, &mut churn] {
        let _ = program.kill();
        program.wait()?;
    }
    restored.start_server()?;
    ensure!(restored.text("SELECT count(name) FROM t")? == "20000", "rows are missing");
    let sums = "SELECT (SELECT sum(abalance) FROM pgbench_accounts)
                     = (SELECT coalesce(sum(delta), 0) FROM pgbench_history)";
    ensure!(restored.text(sums)? == "t", "balances differ in the restored cluster");
    // Every table whose transaction is in the backup is readable: no key is missing.
    let tables = pagevault_tests::cluster::column(
        &mut restored.client()?,
        "SELECT name FROM churned WHERE to_regclass(name) IS NOT NULL",
    )?;
    ensure!(!tables.is_empty(), "no table was made during the backup");
    for table in tables {
        ensure!(restored.text(&format!("SELECT count(*) FROM {table}"))? == "10", "{table}");
    }
    restored.sql("SET pagevault.default_encryption = on; CREATE TABLE later AS SELECT 1 AS id")?;
    restored.sql("CHECKPOINT")?;
    assert_sealed(&restored.family_files("t")?)?;
    // Neither the backup nor the data directory contains the key file.
    ensure!(keys.path().starts_with(cluster.directory()), "the key file is elsewhere");
    ensure!(!keys.path().starts_with(cluster.data_directory()), "the key file is in PGDATA");
    restored.finish()?;
    cluster.finish()
}
