//! A key server that is down, sealed, slow or throttling.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use pagevault_tests::key_servers::Server;
use pagevault_tests::{Settings, StopMode};

use crate::Test;
use crate::bench::{cluster_on_vault, impatient, readable};

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, run| Test { name, needs: &[Server::Vault], run };
    vec![
        test("outages::down_at_start_means_locked_until_it_returns", down_at_start),
        test("outages::sealed_at_start_means_locked_until_it_is_unsealed", sealed_at_start),
        test("outages::back_in_time_nobody_notices", back_in_time),
        test("outages::unsealed_in_time_nobody_notices", unsealed_in_time),
        test("outages::down_in_recovery_means_no_start", down_in_recovery),
        test("outages::down_while_running_is_told_and_nothing_else", down_while_running),
        test("outages::a_slow_server_holds_up_only_who_asks", slow),
        test("outages::a_revoked_key_is_told_and_locks_if_so_set", revoked),
        test("outages::each_refusal_has_its_sqlstate", sqlstates),
    ]
}

const STATE: &str = "SELECT state FROM pagevault.status";

fn down_at_start() -> Result<()> {
    let (mut cluster, mut vault) = cluster_on_vault(&impatient())?;
    cluster.allow_log("pagevault");
    cluster.allow_log("encrypted relations locked");
    cluster.stop(StopMode::Fast)?;
    vault.stop();
    cluster.start_server()?;
    ensure!(cluster.text("SELECT id FROM open")? == "1" && cluster.text(STATE)? == "locked");
    let error = cluster.error("SELECT count(*) FROM secret")?;
    ensure!(error.sqlstate == "55000" && !error.hint.is_empty(), "{error}");
    let why = cluster.text("SELECT unlock_error FROM pagevault.status")?;
    ensure!(why.contains(&vault.address()), "{why}");
    vault.restart()?;
    cluster.eventually(STATE, "unlocked")?;
    readable(&cluster)?;
    cluster.finish()
}

fn sealed_at_start() -> Result<()> {
    let (mut cluster, vault) = cluster_on_vault(&impatient())?;
    cluster.allow_log("pagevault");
    cluster.allow_log("encrypted relations locked");
    cluster.stop(StopMode::Fast)?;
    vault.seal()?;
    cluster.start_server()?;
    ensure!(cluster.text(STATE)? == "locked");
    let why = cluster.text("SELECT unlock_error FROM pagevault.status")?;
    ensure!(why.contains("is sealed"), "{why}");
    vault.unseal()?;
    cluster.eventually(STATE, "unlocked")?;
    readable(&cluster)?;
    cluster.finish()
}

fn back_in_time() -> Result<()> {
    let settings = Settings::default().conf("pagevault.unlock_timeout = 60s");
    let (mut cluster, mut vault) = cluster_on_vault(&settings)?;
    cluster.allow_log("pagevault");
    cluster.kill()?;
    vault.stop();
    std::thread::scope(|scope| -> Result<()> {
        let start = scope.spawn(|| cluster.start_server());
        std::thread::sleep(Duration::from_secs(2));
        ensure!(!start.is_finished(), "the server started without its keys");
        vault.restart()?;
        start.join().map_err(|_| anyhow::anyhow!("panic"))?
    })?;
    readable(&cluster)?;
    cluster.finish()
}

fn unsealed_in_time() -> Result<()> {
    let settings = Settings::default().conf("pagevault.unlock_timeout = 60s");
    let (mut cluster, vault) = cluster_on_vault(&settings)?;
    cluster.allow_log("pagevault");
    cluster.kill()?;
    vault.seal()?;
    std::thread::scope(|scope| -> Result<()> {
        let start = scope.spawn(|| cluster.start_server());
        std::thread::sleep(Duration::from_secs(2));
        ensure!(!start.is_finished(), "the server did not wait for its keys");
        vault.unseal()?;
        start.join().map_err(|_| anyhow::anyhow!("panic"))?
    })?;
    readable(&cluster)?;
    cluster.finish()
}

fn down_in_recovery() -> Result<()> {
    let (mut cluster, mut vault) = cluster_on_vault(&impatient())?;
    cluster.allow_log("pagevault");
    cluster.allow_log("cannot start without keys");
    cluster.kill()?;
    vault.stop();
    let Err(error) = cluster.start_server() else { bail!("it recovered without keys") };
    let output = format!("{error:#}");
    for part in ["FATAL", "vault", &vault.address(), "refused"] {
        ensure!(output.contains(part), "the log does not say {part:?}: {output}");
    }
    vault.restart()?;
    cluster.start_server()?;
    readable(&cluster)?;
    cluster.finish()
}

fn down_while_running() -> Result<()> {
    let (mut cluster, mut vault) =
        cluster_on_vault(&impatient().conf("pagevault.revalidate_interval = 1s"))?;
    cluster.allow_log("pagevault");
    let reachable = "SELECT reachable::text FROM pagevault.providers";
    cluster.eventually(reachable, "true")?;
    vault.stop();
    cluster.eventually(reachable, "false")?;
    let reply = "SELECT last_error_class || ' ' || (last_error_at > now() - interval '1 min')::text
        || ' ' || (SELECT unreachable_providers::text FROM pagevault.status) FROM pagevault.providers";
    ensure!(cluster.text(reply)? == "unreachable true {vault}", "{}", cluster.text(reply)?);
    // Work continues, including creation of data keys.
    readable(&cluster)?;
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE more (id int); CHECKPOINT")?;
    let error = cluster.error("SELECT pagevault.rotate_cluster_master_key()")?;
    ensure!(error.sqlstate.starts_with("08"), "{error}");
    ensure!(cluster.text(STATE)? == "unlocked");
    vault.restart()?;
    cluster.eventually(reachable, "true")?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    cluster.finish()
}

fn slow() -> Result<()> {
    let settings = Settings::default().conf("pagevault.keyring_timeout = 60s");
    let (mut cluster, vault) = cluster_on_vault(&settings)?;
    cluster.allow_log("pagevault");
    let mut session = cluster.client()?;
    let cancel = session.cancel_token();
    vault.freeze()?;
    let asking = std::thread::spawn(move || {
        let asked = session.batch_execute("SELECT pagevault.rotate_cluster_master_key()");
        (asked, Instant::now())
    });
    std::thread::sleep(Duration::from_secs(2));
    // Other sessions continue: reads, writes, new sealed tables, labels, checkpoints, connections.
    let start = Instant::now();
    readable(&cluster)?;
    cluster.sql("INSERT INTO secret VALUES (1001, 'x')")?;
    cluster
        .sql("SET pagevault.default_encryption = on; CREATE TABLE more AS SELECT * FROM secret")?;
    cluster.sql("SELECT pagevault.encrypt('open')")?;
    cluster.sql("CHECKPOINT")?;
    cluster.text("SELECT count(*) FROM pagevault.providers")?;
    cluster.text(STATE)?;
    ensure!(!asking.is_finished(), "the rotation is over: the test proves nothing");
    ensure!(start.elapsed() < Duration::from_secs(40), "others were held up");
    let cancelled = Instant::now();
    cancel.cancel_query(postgres::NoTls)?;
    let (asked, ended) = asking.join().map_err(|_| anyhow::anyhow!("panic"))?;
    let error = asked.err().and_then(|error| error.code().cloned());
    ensure!(error.as_ref().is_some_and(|code| code.code() == "57014"), "{error:?}");
    ensure!(ended - cancelled < Duration::from_secs(20), "cancel took {:?}", ended - cancelled);
    vault.wake()?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    readable(&cluster)?;
    cluster.finish()
}

fn revoked() -> Result<()> {
    let (mut cluster, vault) = cluster_on_vault(
        &impatient()
            .conf("pagevault.revalidate_interval = 1s")
            .conf("pagevault.revoked_key_grace = 2s"),
    )?;
    cluster.allow_log("pagevault");
    let deny = "path \"transit/keys/db-kek\" { capabilities = [\"read\"] }";
    let allow = pagevault_tests::key_servers::vault::POLICY;
    let key_state = "SELECT state FROM pagevault.database_keys";

    // By default it is only logged.
    vault.write_policy("db-kek", deny)?;
    cluster.eventually(key_state, "revoked")?;
    std::thread::sleep(Duration::from_secs(4));
    readable(&cluster)?;
    vault.write_policy("db-kek", allow)?;
    cluster.eventually(key_state, "unlocked")?;

    // Locked after the grace period, with pages in memory or not, and unlocked automatically.
    cluster.sql("ALTER SYSTEM SET pagevault.revoked_key_action = 'lock'")?;
    cluster.sql("SELECT pg_reload_conf()")?;
    vault.write_policy("db-kek", deny)?;
    cluster.eventually(STATE, "locked")?;
    let error = cluster.error("SELECT count(*) FROM secret")?;
    ensure!(error.sqlstate == "55000" && error.text().contains("vault"), "{error}");
    ensure!(cluster.text("SELECT id FROM open")? == "1");
    cluster.sql("CHECKPOINT")?;
    vault.write_policy("db-kek", allow)?;
    cluster.eventually(STATE, "unlocked")?;
    readable(&cluster)?;
    cluster.finish()
}

fn sqlstates() -> Result<()> {
    let (mut cluster, mut vault) = cluster_on_vault(&impatient())?;
    cluster.allow_log("pagevault");
    let mut seen = Vec::new();
    let mut expect = |class: &str, statement: &str| -> Result<()> {
        let error = cluster.error(statement)?;
        let text = error.text();
        ensure!(text.contains("vault"), "{class}: the provider is not named: {error}");
        ensure!(!error.detail.is_empty() && !error.hint.is_empty(), "{class}: {error}");
        seen.push((class.to_owned(), error.sqlstate));
        Ok(())
    };
    let rotate = "SELECT pagevault.rotate_cluster_master_key()";
    vault.write_policy("db-kek", "path \"transit/keys/db-kek\" { capabilities = [\"read\"] }")?;
    expect("denied", rotate)?;
    vault.write_policy("db-kek", pagevault_tests::key_servers::vault::POLICY)?;
    let policy = pagevault_tests::key_servers::vault::POLICY.replace("db-kek", "nokey");
    vault.write_policy(
        "db-kek",
        &format!("{policy}\n{}", pagevault_tests::key_servers::vault::POLICY),
    )?;
    expect("key_missing", "SELECT pagevault.set_cluster_master_key('vault', 'nokey')")?;

    let good = std::fs::read_to_string(vault.path("secret-id"))?;
    vault.write("secret-id", "00000000-0000-0000-0000-000000000000", 0o600)?;
    expect("unauthenticated", rotate)?;
    vault.write("secret-id", &good, 0o600)?;

    let authority = std::fs::read_to_string(vault.path("ca.pem"))?;
    let stranger = pagevault_tests::key_servers::certificates::Authority::new()?;
    vault.write("ca.pem", stranger.pem(), 0o644)?;
    expect("tls", rotate)?;
    vault.write("ca.pem", &authority, 0o644)?;

    vault.limit_requests()?;
    expect("throttled", rotate)?;
    vault.allow_requests()?;
    vault.seal()?;
    expect("sealed", rotate)?;
    vault.unseal()?;
    vault.freeze()?;
    let late = expect("deadline", rotate);
    vault.wake()?;
    late?;
    vault.stop();
    expect("unreachable", rotate)?;
    vault.restart()?;

    // The old versions are disabled in Vault while the cluster's key is wrapped by one of them.
    for _ in 0..2 {
        vault.cli(&["write", "-f", "transit/keys/db-kek/rotate"])?;
    }
    vault.cli(&["write", "transit/keys/db-kek/config", "min_decryption_version=3"])?;
    expect("key_disabled", rotate)?;
    vault.cli(&["write", "transit/keys/db-kek/config", "min_decryption_version=1"])?;
    // The key was deleted and created again: old wrappings cannot be opened.
    vault.cli(&["write", "transit/keys/db-kek/config", "deletion_allowed=true"])?;
    vault.cli(&["delete", "transit/keys/db-kek"])?;
    vault.cli(&["write", "transit/keys/db-kek", "derived=true"])?;
    vault.cli(&["write", "-f", "transit/keys/db-kek/rotate"])?;
    expect("wrong_ciphertext", rotate)?;

    let mut states: Vec<&str> = seen.iter().map(|(_, state)| state.as_str()).collect();
    states.sort_unstable();
    states.dedup();
    // key_disabled and sealed may share one: both require that an operator enables something.
    ensure!(states.len() + 1 >= seen.len(), "classes share SQLSTATEs: {seen:?}");
    ensure!(states.iter().all(|state| *state != "XX000" && *state != "57014"), "{seen:?}");
    readable(&cluster)?;
    cluster.finish()
}
