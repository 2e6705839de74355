//! The audit trail: one line of JSON for each operation on a provider, without sensitive data.

mod evasions;
mod operations;
mod sinks;
mod verify;

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{expect_error, run_sql};
use pagevault_tests::{Cluster, Settings, StopMode};
use serde_json::Value;

const MARK: &str = "LOG:  pagevault audit: ";

/// Every line of the audit trail, but for one that is being written.
fn trail(cluster: &Cluster) -> Result<Vec<Value>> {
    let log = cluster.log();
    let whole = log.rfind('\n').map_or("", |end| &log[..end]);
    let lines = whole.lines().filter(|line| line.contains("pagevault audit:"));
    lines
        .map(|line| {
            let (_, json) = line.split_once(MARK).with_context(|| line.to_owned())?;
            serde_json::from_str(json).with_context(|| line.to_owned())
        })
        .collect()
}

/// The last line with this action, outcome and cause (`by`).
fn last(cluster: &Cluster, action: &str, by: &str, outcome: &str) -> Result<Value> {
    let fits =
        |line: &Value| line["action"] == action && line["by"] == by && line["outcome"] == outcome;
    let trail = trail(cluster)?;
    let found = trail.iter().rev().find(|line| fits(line)).cloned();
    found.with_context(|| format!("no {action} by {by} that ended {outcome} in {trail:#?}"))
}

#[test]
fn every_operation_leaves_a_line() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&Settings::default())?;
    let line = last(&cluster, "add_provider", "add_provider", "ok")?;
    ensure!(line["provider"] == "local" && line["master_key"].is_null(), "{line}");
    last(&cluster, "add_provider", "add_provider", "attempted")?;
    let line = last(&cluster, "wrap", "set_cluster_master_key", "ok")?;
    ensure!(line["scope"] == "cluster" && line["master_key"] == "main", "{line}");
    ensure!(line["master_key_version"] == 1 && line["provider"] == "local", "{line}");
    ensure!(line["role"] == "postgres" && line["database"] == "postgres", "{line}");
    ensure!(line["duration_ms"].as_f64().is_some(), "{line}");

    keys.add_key("second")?;
    cluster.sql("SELECT pagevault.set_database_master_key('local', 'second')")?;
    cluster.sql("SELECT pagevault.rotate_database_master_key()")?;
    let by = "rotate_database_master_key";
    let scope = last(&cluster, "rewrap", by, "ok")?["scope"].clone();
    let oid = cluster.text("SELECT oid FROM pg_database WHERE datname = 'postgres'")?;
    ensure!(scope == format!("database {oid}").as_str(), "{scope}");
    let rotation: Vec<_> = trail(&cluster)?
        .into_iter()
        .filter(|line| line["by"] == by && line["action"] != by)
        .map(|line| (line["action"].clone(), line["master_key_version"].clone()))
        .collect();
    let expected = ["rotate", "rewrap", "unwrap"].map(|action| (action.into(), 2.into()));
    ensure!(rotation == expected, "{rotation:?}");
    cluster.sql("SELECT pagevault.set_database_master_key('local', 'main')")?;
    let line = last(&cluster, "rewrap", "set_database_master_key", "ok")?;
    ensure!(line["from_master_key"] == "second" && line["master_key"] == "main", "{line}");

    cluster.error("SELECT pagevault.set_database_master_key('local', 'typo')")?;
    last(&cluster, "rewrap", "set_database_master_key", "key_missing")?;
    keys.take_away()?;
    cluster.error("SELECT pagevault.rotate_cluster_master_key()")?;
    last(&cluster, "rotate", "rotate_cluster_master_key", "unreachable")?;
    keys.bring_back()?;
    let hanging = cluster.script("hanging", "exec sleep 600")?;
    cluster.set(&[("pagevault.keyring_command", &hanging)])?;
    let rotate = "SELECT pagevault.rotate_cluster_master_key()";
    cluster.error(&format!("SET statement_timeout = '300ms'; {rotate}"))?;
    last(&cluster, "rotate", "rotate_cluster_master_key", "cancelled")?;
    cluster.error(&format!("SET pagevault.keyring_timeout = '1s'; {rotate}"))?;
    last(&cluster, "rotate", "rotate_cluster_master_key", "deadline")?;
    cluster.set(&[("pagevault.keyring_command", "/nonexistent/helper")])?;
    cluster.error(rotate)?;
    last(&cluster, "rotate", "rotate_cluster_master_key", "no_reply")?;
    cluster.set(&[("pagevault.keyring_command", "")])?;

    // The server itself has neither role nor database.
    keys.take_away()?;
    cluster.allow_log("pagevault");
    cluster.append_conf("pagevault.unlock_timeout = 0")?;
    cluster.restart()?;
    let line = last(&cluster, "unwrap", "start", "unreachable")?;
    ensure!(line["role"].is_null() && line["database"].is_null(), "{line}");
    cluster.eventually_that("audit", || {
        last(&cluster, "unwrap", "unlock_worker", "unreachable").map(drop)
    })?;
    keys.bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    // The worker may have unlocked first.
    last(&cluster, "unwrap", "unlock", "ok")
        .or_else(|_| last(&cluster, "unwrap", "unlock_worker", "ok"))?;
    cluster.finish()
}

#[test]
fn names_cannot_forge_a_line() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let role = "evil\n2020-01-01 LOG:  pagevault audit: {\"outcome\":\"ok\"}\u{85}\u{2028}\\\"";
    let quoted = format!("\"{}\"", role.replace('"', "\"\""));
    let mut client = cluster.client()?;
    run_sql(&mut client, &format!("CREATE ROLE {quoted}; GRANT pagevault_admin TO {quoted}"))?;
    let before = trail(&cluster)?.len();
    run_sql(
        &mut client,
        &format!("SET ROLE {quoted}; SELECT pagevault.rotate_cluster_master_key()"),
    )?;
    drop(client);
    let trail = trail(&cluster)?;
    ensure!(trail.len() == before + 5, "{} lines", trail.len() - before);
    let kept = cluster.text("SELECT rolname FROM pg_roles WHERE rolname LIKE 'evil%'")?;
    let line = trail.last().context("no line")?;
    ensure!(line["current_role"] == kept.as_str(), "{line}, not {kept:?}");
    ensure!(line["role"] == "postgres", "{line}");
    ensure!(!cluster.log().contains(['\u{85}', '\u{2028}']), "a line could end early");
    cluster.finish()
}

#[test]
fn neither_options_nor_statements_are_logged() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let keys = cluster.key_file("a-telling-name", "main")?;
    cluster.sql(&keys.add_provider("other"))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('other', 'main')")?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "SET client_min_messages = log")?;
    let error = expect_error(&mut client, "SELECT pagevault.drop_provider('other')")?;
    ensure!(error.sqlstate == "2BP01", "{error}");
    drop(client);
    cluster.sql("SELECT pagevault.drop_provider('local')")?;
    last(&cluster, "drop_provider", "drop_provider", "ok")?;
    ensure!(!cluster.log().contains("a-telling-name"), "an option is in the log");
    cluster.stop(StopMode::Fast)?;
    cluster.finish()
}
