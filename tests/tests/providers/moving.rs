//! Moving from one provider to another in one call, during operation and across kills.

use std::process::Child;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::kms::{Credentials, Emulator};
use pagevault_tests::key_servers::vault::Vault;
use pagevault_tests::{Cluster, Settings, StopMode};

use crate::Test;
use crate::bench::{TABLES, add_provider, impatient, readable};

pub(crate) fn tests() -> Vec<Test> {
    vec![
        Test {
            name: "moving::file_to_vault_to_kms_under_load",
            needs: &[Server::Vault, Server::Moto],
            run: under_load,
        },
        Test {
            name: "moving::killed_at_any_moment_it_is_wholly_here_or_there",
            needs: &[Server::Vault],
            run: killed,
        },
        Test {
            name: "moving::a_server_saves_its_keys_from_a_provider_that_is_lost",
            needs: &[Server::Vault],
            run: lost,
        },
        Test {
            name: "moving::a_move_that_fails_changes_nothing",
            needs: &[Server::Vault],
            run: refused,
        },
    ]
}

/// A cluster with the provider `file`.
fn on_file(settings: &Settings) -> Result<Cluster> {
    let (cluster, _keys) = Cluster::with_keys(settings)?;
    cluster.sql(TABLES)?;
    Ok(cluster)
}

fn provider_in_use(cluster: &Cluster) -> Result<String> {
    cluster.text("SELECT string_agg(DISTINCT provider, ' ') FROM pagevault.database_keys")
}

struct Load(Child);

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn under_load() -> Result<()> {
    let mut cluster = on_file(&Settings::default())?;
    cluster.allow_log("connection to client lost"); // pgbench is killed in the end
    cluster.sql("ALTER SYSTEM SET pagevault.default_encryption = on")?;
    cluster.sql("SELECT pg_reload_conf()")?;
    cluster.pgbench(&["-i", "-q", "-s", "1"])?;
    let vault = Vault::start()?;
    let kms = Emulator::moto()?;
    let credentials = Credentials::root()?;
    let key = kms.create_key()?;
    let options = kms.provider(&credentials).options;
    cluster.sql(&add_provider("vault", "vault", &vault.approle()?))?;
    cluster.sql(&add_provider("kms", "aws_kms", &options))?;

    let mut load = Load(cluster.pgbench_in_background(&["-c", "2", "-T", "600"])?);
    std::thread::sleep(Duration::from_secs(1));
    // The database has its own master key, so it moves independently.
    cluster.sql("SELECT pagevault.set_database_master_key('local', 'main')")?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('vault', 'db-kek')")?;
    ensure!(provider_in_use(&cluster)? == "local vault");
    cluster.error("SELECT pagevault.drop_provider('local')")?;
    cluster.sql("SELECT pagevault.set_database_master_key('vault', 'db-kek')")?;
    ensure!(provider_in_use(&cluster)? == "vault");
    cluster.sql("SELECT pagevault.drop_provider('local')")?;
    ensure!(cluster.text("SELECT pagevault.rotate_cluster_master_key()")? == "2");
    cluster.sql(&format!("SELECT pagevault.set_cluster_master_key('kms', '{key}')"))?;
    cluster.sql(&format!("SELECT pagevault.set_database_master_key('kms', '{key}')"))?;
    ensure!(provider_in_use(&cluster)? == "kms");
    // To another key of the same provider, which rewraps by itself.
    let other = kms.create_key()?;
    cluster.sql(&format!("SELECT pagevault.set_cluster_master_key('kms', '{other}')"))?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    ensure!(load.0.try_wait()?.is_none(), "the load has ended: somebody was held up or failed");
    drop(load);

    cluster.sql("SELECT pagevault.drop_provider('vault')")?;
    drop(vault);
    let balance = "SELECT sum(abalance) FROM pgbench_accounts";
    let before = cluster.text(balance)?;
    cluster.crash()?;
    readable(&cluster)?;
    ensure!(cluster.text(balance)? == before, "balances differ after recovery");
    cluster.finish()
}

fn killed() -> Result<()> {
    let mut cluster = on_file(&impatient())?;
    cluster.allow_log("pagevault");
    let vault = Vault::start()?;
    cluster.sql(&add_provider("vault", "vault", &vault.approle()?))?;
    let homes = [("vault", "db-kek"), ("local", "main")];
    for round in 0..10 {
        let from = provider_in_use(&cluster)?;
        let (provider, key) =
            homes.into_iter().find(|(name, _)| *name != from).context("nowhere to go")?;
        let mut client = cluster.client()?;
        let moving = std::thread::spawn(move || {
            let _ = client.batch_execute(&format!(
                "SELECT pagevault.set_cluster_master_key('{provider}', '{key}')"
            ));
        });
        std::thread::sleep(Duration::from_millis(10 + 30 * round));
        cluster.crash()?;
        let _ = moving.join();
        let now = provider_in_use(&cluster)?;
        ensure!(now == from || now == provider, "round {round}: neither here nor there: {now}");
        readable(&cluster)?;
    }
    cluster.finish()
}

fn lost() -> Result<()> {
    let vault = Vault::start()?;
    let mut cluster = Cluster::start(&impatient())?;
    cluster.without_witness("WAL from before needs a provider that is lost");
    cluster.allow_log("pagevault");
    cluster.sql("CREATE EXTENSION pagevault")?;
    cluster.sql(&add_provider("vault", "vault", &vault.approle()?))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('vault', 'db-kek')")?;
    cluster.sql(TABLES)?;
    drop(vault);
    let keys = cluster.key_file("keys", "main")?;
    cluster.sql(&keys.add_provider("local"))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('local', 'main')")?;
    cluster.sql("SELECT pagevault.drop_provider('vault')")?;
    cluster.stop(StopMode::Immediate)?;
    cluster.start_server()?;
    readable(&cluster)?;
    cluster.finish()
}

fn refused() -> Result<()> {
    let mut cluster = on_file(&impatient())?;
    cluster.allow_log("pagevault");
    let vault = Vault::start()?;
    cluster.sql(&add_provider("vault", "vault", &vault.approle()?))?;
    let before = cluster.text("SELECT string_agg(m::text, ' ') FROM pagevault.database_keys m")?;
    // It may wrap but not unwrap, so the new wrapping cannot be proven.
    let policy = pagevault_tests::key_servers::vault::POLICY.replace("decrypt", "elsewhere");
    vault.write_policy("db-kek", &policy)?;
    let error = cluster.error("SELECT pagevault.set_cluster_master_key('vault', 'db-kek')")?;
    ensure!(error.sqlstate == "42501" && error.hint.contains("transit/decrypt/db-kek"), "{error}");
    let after = cluster.text("SELECT string_agg(m::text, ' ') FROM pagevault.database_keys m")?;
    ensure!(after == before, "{after}");
    cluster.sql("SELECT pagevault.drop_provider('vault')")?;
    cluster.restart()?;
    readable(&cluster)?;
    cluster.finish()
}
