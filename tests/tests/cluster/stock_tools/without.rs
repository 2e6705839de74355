//! A server without pagevault.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::{Cluster, Settings, StopMode};

use super::TABLE;

#[test]
fn a_server_without_pagevault_refuses_sealed_pages() -> Result<()> {
    // With sealed statistics such a server could not plan any query.
    let statistics = Settings::default().conf("pagevault.data_catalog_encryption = off");
    let (mut cluster, _keys) = Cluster::with_keys(&statistics)?;
    cluster.sql(TABLE)?;
    cluster.sql("INSERT INTO plain_beside VALUES (7)")?;
    cluster.stop(StopMode::Fast)?;
    cluster.append_conf("shared_preload_libraries = ''")?;
    cluster.start_server()?;
    let error = cluster.error("SELECT count(*) FROM t")?;
    ensure!(error.message.contains("invalid page in block 0 of relation"), "{error}");
    ensure!(error.sqlstate == "XX001", "{error}");
    ensure!(cluster.text("SELECT id FROM plain_beside")? == "7", "the plain table");
    cluster.stop(StopMode::Fast)?;
    cluster.append_conf("shared_preload_libraries = 'pagevault'")?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(name) FROM t")? == "20000", "rows are missing");

    // The planner reads statistics: if these are sealed, plaintext tables cannot be used either.
    cluster.sql("SELECT pagevault.encrypt('pg_statistic')")?;
    cluster.sql("CREATE DATABASE other TEMPLATE template0")?;
    cluster.stop(StopMode::Fast)?;
    cluster.append_conf("shared_preload_libraries = ''")?;
    cluster.start_server()?;
    let error = cluster.error("SELECT id FROM plain_beside")?;
    ensure!(error.sqlstate == "XX001", "{error}");
    let mut other = cluster.client_to("other")?;
    run_sql(&mut other, "CREATE TABLE plain AS SELECT 7 AS id; SELECT id FROM plain")?;
    drop(other);
    cluster.stop(StopMode::Fast)?;
    cluster.append_conf("shared_preload_libraries = 'pagevault'")?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT id FROM plain_beside")? == "7", "the plain table, again");
    cluster.allow_log("page verification failed");
    cluster.finish()
}
