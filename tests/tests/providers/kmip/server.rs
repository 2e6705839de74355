//! A PostgreSQL server with its master keys in a key server.

use anyhow::{Result, ensure};
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::pykmip::PyKmip;
use pagevault_tests::{Cluster, Settings, StopMode};
use serde_json::json;

use crate::Test;
use crate::bench::{TABLES, add_provider, impatient, readable};

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, run| Test { name, needs: &[Server::PyKmip], run };
    vec![
        test("kmip::keys_live_in_a_key_server", keys_live_there),
        test("kmip::a_key_server_that_is_away_means_locked_until_it_returns", away),
        test("kmip::a_revoked_key_is_told_and_locks_if_so_set", revoked),
    ]
}

const STATE: &str = "SELECT state FROM pagevault.status";

fn on_kmip(server: &PyKmip, settings: &Settings) -> Result<Cluster> {
    let cluster = Cluster::start(settings)?;
    cluster.sql("CREATE EXTENSION pagevault")?;
    cluster.sql(&add_provider("kmip", "kmip", &server.options()))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('kmip', 'db-kek')")?;
    cluster.sql(TABLES)?;
    Ok(cluster)
}

fn keys_live_there() -> Result<()> {
    let server = PyKmip::start()?;
    server.make_key("db-own")?;
    let mut cluster = on_kmip(&server, &impatient())?;
    cluster.allow_log("pagevault");
    let version = "SELECT DISTINCT master_key_version FROM pagevault.database_keys";
    let before = cluster.text(version)?;
    let after = cluster.text("SELECT pagevault.rotate_cluster_master_key()")?;
    ensure!(after > before && cluster.text(version)? == after, "{before} {after}");
    cluster.sql("SELECT pagevault.set_database_master_key('kmip', 'db-own')")?;
    cluster.sql("SELECT pagevault.rotate_database_master_key()")?;
    cluster.crash()?;
    readable(&cluster)?;
    let checks = "SELECT bool_and(ok)::text || ' ' || count(DISTINCT master_key)::text
        FROM pagevault.check_provider('kmip')";
    ensure!(cluster.text(checks)? == "true 2", "{}", cluster.text(checks)?);
    let error = cluster.error("SELECT pagevault.set_cluster_master_key('kmip', 'typo')")?;
    ensure!(error.sqlstate == "42704" && error.text().contains("kmip"), "{error}");
    cluster.finish()
}

fn away() -> Result<()> {
    let mut server = PyKmip::start()?;
    let mut cluster = on_kmip(&server, &impatient())?;
    cluster.allow_log("pagevault");
    cluster.allow_log("encrypted relations locked");
    cluster.stop(StopMode::Fast)?;
    server.stop();
    cluster.start_server()?;
    ensure!(cluster.text("SELECT id FROM open")? == "1" && cluster.text(STATE)? == "locked");
    let why = cluster.text("SELECT unlock_error FROM pagevault.status")?;
    ensure!(why.contains(&server.address()), "{why}");
    server.restart()?;
    cluster.eventually(STATE, "unlocked")?;
    readable(&cluster)?;
    cluster.finish()
}

fn revoked() -> Result<()> {
    let mut server = PyKmip::start()?;
    let mut cluster = on_kmip(
        &server,
        &impatient()
            .conf("pagevault.revalidate_interval = 1s")
            .conf("pagevault.revoked_key_action = 'lock'")
            .conf("pagevault.revoked_key_grace = 1s"),
    )?;
    cluster.allow_log("pagevault");
    cluster.without_witness("its key is revoked at the end");
    // A key server that is away, or fails, says nothing about the key.
    let key = "SELECT state FROM pagevault.database_keys";
    let class = "SELECT last_error_class FROM pagevault.providers";
    server.stop();
    cluster.eventually("SELECT reachable::text FROM pagevault.providers", "false")?;
    ensure!(cluster.text(class)? == "unreachable" && cluster.text(key)? == "unlocked");
    server.also(&json!({"refuse": {"Decrypt": [256, 1_000_000]}}))?;
    server.restart()?;
    std::thread::sleep(std::time::Duration::from_secs(3));
    ensure!(cluster.text(key)? == "unlocked" && cluster.text(STATE)? == "unlocked");
    server.also(&json!({}))?;
    cluster.eventually("SELECT reachable::text FROM pagevault.providers", "true")?;
    readable(&cluster)?;
    server.administer(json!(["revoke", "1", "KEY_COMPROMISE"]))?;
    cluster.eventually(STATE, "locked")?;
    let error = cluster.error("SELECT count(*) FROM secret")?;
    ensure!(error.sqlstate == "55000" && error.text().contains("kmip"), "{error}");
    ensure!(cluster.text("SELECT id FROM open")? == "1");
    cluster.finish()
}
