//! Server starts with many key groups, each with a provider and a master key of its own.
//!
//! `cargo bench -p pagevault-benches --bench key_groups`, with a number of groups as argument if
//! wanted (1,000). Needs a server (`PAGEVAULT_PG_CONFIG`) with pagevault, and Vault or OpenBao
//! (`tools/key-servers`). All providers are one server on this machine, so what a network adds is
//! not in the figures.
#![allow(clippy::print_stdout, reason = "a benchmark prints its table")]

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagevault_tests::key_servers::vault::Vault;
use pagevault_tests::{Cluster, Settings, StopMode};
use serde_json::Value;

/// What a tenant's credentials may do at the provider.
const POLICY: &str = r#"path "transit/encrypt/+" { capabilities = ["update"] }
path "transit/decrypt/+" { capabilities = ["update"] }
path "transit/keys/+" { capabilities = ["read"] }
"#;

fn main() -> Result<()> {
    let count = std::env::args().skip(1).find_map(|argument| argument.parse().ok());
    let count: u32 = count.unwrap_or(1_000);
    let settings = Settings::default().conf("max_connections = 20");
    let (mut cluster, _key) = Cluster::with_keys(&settings)?;
    cluster.allow_log("key groups locked");

    let vault = Vault::start()?;
    vault.write_policy("tenant", POLICY)?;
    let token = vault.cli(&["token", "create", "-policy=tenant", "-field=token", "-ttl=24h"])?;
    let options = vault.token("token", token.trim())?;
    let made = Instant::now();
    for number in 1..=count {
        vault.cli(&["write", &format!("transit/keys/tenant-{number}"), "derived=true"])?;
    }
    println!("{count} master keys made: {:.1} s", made.elapsed().as_secs_f64());
    let made = Instant::now();
    for number in 1..=count {
        group(&cluster, number, &options)?;
        if number % 250 == 0 {
            // A start reserves room for more.
            stop(&cluster)?;
            cluster.start_server()?;
        }
    }
    println!("{count} key groups made: {:.1} s", made.elapsed().as_secs_f64());

    let groups = format!("{count} key groups");
    stop(&cluster)?;
    report(&groups, start(&cluster, count)?);
    cluster.sql("UPDATE tenant_1.t SET id = id")?;
    cluster.kill()?;
    report(&format!("{groups}, after a crash"), start(&cluster, count)?);

    // The provider of one more group takes connections and does not answer.
    let silent = Vault::start()?;
    silent.write_policy("tenant", POLICY)?;
    let token = silent.cli(&["token", "create", "-policy=tenant", "-field=token", "-ttl=24h"])?;
    silent.cli(&["write", &format!("transit/keys/tenant-{}", count + 1), "derived=true"])?;
    group(&cluster, count + 1, &silent.token("token", token.trim())?)?;
    stop(&cluster)?;
    silent.freeze()?;
    report(&format!("{groups}, and one whose provider does not answer"), start(&cluster, count)?);
    silent.wake()?;
    let woken = Instant::now();
    while cluster.text(UNLOCKED)? != (count + 1).to_string() {
        ensure!(woken.elapsed() < Duration::from_secs(120), "the last group stays locked");
        std::thread::sleep(Duration::from_millis(50));
    }
    println!("that one, after its provider answers again: {:.1} s", woken.elapsed().as_secs_f64());
    cluster.finish()
}

/// A key group with a provider and a table.
fn group(cluster: &Cluster, number: u32, options: &Value) -> Result<()> {
    cluster.sql(&format!(
        "SELECT pagevault.add_provider('provider_{number}', 'vault', '{options}');
         SELECT pagevault.create_key_group('tenant_{number}');
         SELECT pagevault.set_key_group_master_key('tenant_{number}', 'provider_{number}', 'tenant-{number}');
         CREATE SCHEMA tenant_{number};
         SECURITY LABEL FOR pagevault ON SCHEMA tenant_{number} IS 'encrypted key_group=tenant_{number}';
         CREATE TABLE tenant_{number}.t AS SELECT {number} AS id"
    ))
}

const UNLOCKED: &str = "SELECT count(*) FROM pagevault.key_groups WHERE state = 'unlocked'";

fn stop(cluster: &Cluster) -> Result<()> {
    cluster.stop(StopMode::Fast)
}

/// Seconds until the server accepts a connection and has read the last group's table.
fn start(cluster: &Cluster, count: u32) -> Result<f64> {
    let started = Instant::now();
    cluster.start_server()?;
    let id = cluster.text(&format!("SELECT id FROM tenant_{count}.t"))?;
    let seconds = started.elapsed().as_secs_f64();
    ensure!(id == count.to_string(), "the table of the last group holds {id}");
    let unlocked: u32 = cluster.text(UNLOCKED)?.parse().context("groups")?;
    ensure!(unlocked >= count, "{unlocked} groups are unlocked");
    Ok(seconds)
}

fn report(what: &str, seconds: f64) {
    println!("start with {what}: {seconds:.1} s");
}
