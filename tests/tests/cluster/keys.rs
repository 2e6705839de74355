//! Many keys: after a restart and a crash, a server opens each of thousands of encrypted relations.
//! `make bench` measures the cost.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::{Cluster, Settings};

const TABLES: u32 = 3000;

#[test]
fn thousands_of_encrypted_tables_survive_restart_and_crash() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let mut client = cluster.client()?;
    run_sql(
        &mut client,
        &format!(
            "DO $$ BEGIN
                SET pagevault.default_encryption = on;
                FOR i IN 1..{TABLES} LOOP
                    EXECUTE format('CREATE TABLE many_%s AS SELECT %s AS id', i, i);
                    IF i % 100 = 0 THEN COMMIT; END IF;
                END LOOP; END $$"
        ),
    )?;
    drop(client);
    cluster.restart()?;
    let check = |when: &str| -> Result<()> {
        for table in [1, TABLES / 2, TABLES] {
            let id = cluster.text(&format!("SELECT id FROM many_{table}"))?;
            ensure!(id == table.to_string(), "{when}, many_{table} holds {id}");
        }
        Ok(())
    };
    check("after a restart")?;
    cluster.sql("UPDATE many_7 SET id = 8")?;
    cluster.crash()?;
    check("after a crash")?;
    ensure!(cluster.text("SELECT id FROM many_7")? == "8", "the last change after a crash");
    cluster.finish()
}
