//! A PostgreSQL whose cluster key is in a real Vault, and what tests ask of it.

use anyhow::{Result, ensure};
use pagevault_tests::key_servers::vault::Vault;
use pagevault_tests::{Cluster, Settings};
use serde_json::Value;

/// Plain and sealed tables with known contents.
pub(crate) const TABLES: &str = "CREATE TABLE open (id int);
    INSERT INTO open VALUES (1);
    SET pagevault.default_encryption = on;
    CREATE TABLE secret (id int PRIMARY KEY, name text);
    INSERT INTO secret SELECT i, md5(i::text) FROM generate_series(1, 1000) i";

/// Settings of a server that gives up soon.
pub(crate) fn impatient() -> Settings {
    Settings::default().conf("pagevault.unlock_timeout = 1s").conf("pagevault.keyring_timeout = 3s")
}

/// A cluster whose master key is `db-kek` of the provider `vault`, with tables.
pub(crate) fn cluster_on_vault(settings: &Settings) -> Result<(Cluster, Vault)> {
    let vault = Vault::start()?;
    let cluster = Cluster::start(settings)?;
    cluster.sql("CREATE EXTENSION pagevault")?;
    cluster.sql(&add_provider("vault", "vault", &vault.approle()?))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('vault', 'db-kek')")?;
    cluster.sql(TABLES)?;
    Ok((cluster, vault))
}

/// The statement that adds a provider.
pub(crate) fn add_provider(name: &str, kind: &str, options: &Value) -> String {
    let options = options.to_string().replace('\'', "''");
    format!("SELECT pagevault.add_provider('{name}', '{kind}', '{options}')")
}

/// Fails unless all of `TABLES` can be read.
pub(crate) fn readable(cluster: &Cluster) -> Result<()> {
    let sum = cluster.text(
        "SELECT count(*) FILTER (WHERE name = md5(id::text)) || ' ' || (SELECT count(*) FROM open)
         FROM secret WHERE id <= 1000",
    )?;
    ensure!(sum == "1000 1", "rows are missing: {sum}");
    Ok(())
}
