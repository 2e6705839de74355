//! docs/examples/monitoring: a monitoring role may run the queries, their columns are as declared,
//! and alerts and dashboard use existing metrics.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use pagevault_tests::{Cluster, Settings};
use postgres::SimpleQueryMessage;
use serde_json::Value;
use yaml_rust2::{Yaml, YamlLoader};

const ROLE: &str = "CREATE ROLE monitor LOGIN;
    GRANT pg_monitor TO monitor;
    GRANT SELECT ON pagevault.providers, pagevault.database_keys TO monitor;
    GRANT EXECUTE ON FUNCTION pagevault.provider_rows(), pagevault.database_key_rows() TO monitor;";

pub(crate) fn fit_together() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(ROLE)?;
    cluster.sql("CREATE TABLE t (id int); SELECT pagevault.encrypt('t')")?;
    let metrics = metrics(&cluster)?;

    for rule in alerts()? {
        known(&rule, &metrics)?;
    }
    let dashboard: Value = serde_json::from_str(&example("dashboard.json")?)?;
    let panels = dashboard["panels"].as_array().context("no panels")?;
    ensure!(!panels.is_empty(), "no panels");
    for target in panels.iter().flat_map(|panel| panel["targets"].as_array()).flatten() {
        known(target["expr"].as_str().context("a target without expr")?, &metrics)?;
    }
    let servers = &dashboard["templating"]["list"][1]["query"]["query"];
    known(servers.as_str().context("no list of servers")?, &metrics)?;
    let page = fs::read_to_string(crate::root().join("docs/monitoring.md"))?;
    for grant in ROLE.split(';').map(str::trim).filter(|grant| !grant.is_empty()) {
        ensure!(page.contains(grant), "docs/monitoring.md does not say {grant}");
    }
    promtool()?;
    cluster.finish()
}

fn example(name: &str) -> Result<String> {
    let path = crate::root().join("docs/examples/monitoring").join(name);
    fs::read_to_string(&path).with_context(|| path.display().to_string())
}

fn yaml(name: &str) -> Result<Yaml> {
    YamlLoader::load_from_str(&example(name)?)?.into_iter().next().context("no document")
}

/// The metrics of queries.yaml; each query is run as the monitoring role.
fn metrics(cluster: &Cluster) -> Result<BTreeSet<String>> {
    let mut client = postgres::Config::new()
        .host_path(cluster.directory())
        .user("monitor")
        .dbname("postgres")
        .connect(postgres::NoTls)?;
    let mut names = BTreeSet::new();
    let queries = yaml("queries.yaml")?;
    for (prefix, query) in queries.as_hash().context("no queries")? {
        let prefix = prefix.as_str().context("a name")?;
        let mut columns = Vec::new();
        for metric in query["metrics"].as_vec().context("metrics")? {
            let (name, response) =
                metric.as_hash().and_then(|hash| hash.iter().next()).context(prefix.to_owned())?;
            let name = name.as_str().context("a metric's name")?;
            ensure!(
                response["description"].as_str().is_some(),
                "{prefix}_{name} has no description"
            );
            match response["usage"].as_str() {
                Some("LABEL") => {}
                Some("GAUGE" | "COUNTER") => drop(names.insert(format!("{prefix}_{name}"))),
                other => bail!("usage of {prefix}_{name}: {other:?}"),
            }
            columns.push(name.to_owned());
        }
        let text = query["query"].as_str().context("query")?;
        let messages = client.simple_query(text).with_context(|| text.to_owned())?;
        let row = messages.iter().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        let row = row.with_context(|| format!("{prefix}: no row"))?;
        let answered: Vec<_> =
            row.columns().iter().map(|column| column.name().to_owned()).collect();
        ensure!(
            answered == columns,
            "{prefix}: the query gives {answered:?}, described are {columns:?}"
        );
    }
    Ok(names)
}

/// The expressions of alerts.yaml.
fn alerts() -> Result<Vec<String>> {
    let document = yaml("alerts.yaml")?;
    let page = fs::read_to_string(crate::root().join("docs/monitoring.md"))?;
    let mut expressions = Vec::new();
    for group in document["groups"].as_vec().context("groups")? {
        for rule in group["rules"].as_vec().context("rules")? {
            let name = rule["alert"].as_str().context("alert")?;
            ensure!(rule["annotations"]["summary"].as_str().is_some(), "{name} has no summary");
            ensure!(
                page.contains(&format!("`{name}`")),
                "docs/monitoring.md does not explain {name}"
            );
            expressions.push(rule["expr"].as_str().context("expr")?.to_owned());
        }
    }
    ensure!(!expressions.is_empty(), "no alerts");
    Ok(expressions)
}

/// Fails if an expression uses an unknown metric of pagevault.
fn known(expression: &str, metrics: &BTreeSet<String>) -> Result<()> {
    let words = expression.split(|c: char| !(c.is_alphanumeric() || c == '_'));
    for word in words.filter(|word| word.starts_with("pagevault")) {
        ensure!(
            metrics.contains(word),
            "no query gives {word}, which is asked for in: {expression}"
        );
    }
    ensure!(expression.contains("pagevault_"), "no metric in: {expression}");
    Ok(())
}

/// Has promtool check the rules, if it is installed.
fn promtool() -> Result<()> {
    let rules = crate::root().join("docs/examples/monitoring/alerts.yaml");
    match Command::new("promtool").args(["check", "rules"]).arg(rules).output() {
        Ok(output) => {
            let response = String::from_utf8_lossy(&output.stdout);
            ensure!(output.status.success(), "promtool: {response}");
        }
        Err(_) => eprintln!("SKIPPED promtool check rules: there is no promtool on this machine"),
    }
    Ok(())
}
