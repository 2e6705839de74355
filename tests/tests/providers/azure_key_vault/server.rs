//! A PostgreSQL whose master key is in Key Vault.

use anyhow::{Result, ensure};
use pagevault_tests::key_servers::azure::KeyVault;
use pagevault_tests::{Cluster, StopMode};

use crate::Test;
use crate::bench::{TABLES, add_provider, impatient, readable};
use crate::contract::KEY;

pub(super) const TESTS: &[Test] =
    &[Test { name: "azure_key_vault::a_server_lives_on_it", needs: &[], run: lives }];

fn lives() -> Result<()> {
    let vault = KeyVault::start("RSA")?;
    let mut cluster = Cluster::start(&impatient())?;
    cluster.allow_log("pagevault");
    cluster.sql("CREATE EXTENSION pagevault")?;
    cluster.sql(&add_provider("azure", "azure_key_vault", &vault.options()))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('azure', 'db-kek')")?;
    cluster.sql(TABLES)?;
    let before = cluster.text("SELECT max(master_key_version) FROM pagevault.database_keys")?;
    let after = cluster.text("SELECT pagevault.rotate_cluster_master_key()")?;
    ensure!(after > before && after.len() == 14, "{before}, {after}");
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    cluster.sql("SELECT pagevault.set_database_master_key('azure', 'db-next')")?;
    let failed = "SELECT coalesce(string_agg(item, ' ') FILTER (WHERE NOT ok), '') FROM pagevault.check_provider('azure')";
    let failed = cluster.text(failed)?;
    ensure!(failed.is_empty(), "{failed}");
    cluster.restart()?;
    readable(&cluster)?;
    cluster.sql("SELECT pagevault.set_database_master_key('azure', 'db-kek')")?;
    vault.with_key(KEY, |key| key.set_enabled(1, false))?;
    let error = cluster.error("SELECT pagevault.rotate_database_key()")?;
    ensure!(error.detail.contains("KeyDisabled"), "{error}");
    vault.with_key(KEY, |key| key.set_enabled(1, true))?;
    cluster.stop(StopMode::Immediate)?;
    cluster.start_server()?;
    readable(&cluster)?;
    cluster.finish()
}
