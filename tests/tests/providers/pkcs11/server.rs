//! A server with its master keys in a token.

use anyhow::{Result, ensure};
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::kms::{Credentials, Emulator};
use pagevault_tests::key_servers::softhsm::{PIN, SoftHsm};
use pagevault_tests::key_servers::vault::Vault;
use pagevault_tests::{Cluster, Settings, StopMode};

use super::make;
use crate::Test;
use crate::bench::{TABLES, add_provider, impatient, readable};

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, run| Test { name, needs: &[Server::SoftHsm], run };
    vec![
        test("pkcs11::keys_live_in_a_token", keys_live_in_a_token),
        test("pkcs11::a_token_that_is_away_at_the_start_means_locked_until_it_returns", away),
        test("pkcs11::a_deleted_key_is_told_and_locks_if_so_set", deleted),
        test("pkcs11::a_module_needs_the_right_to_run_programs", rights),
        Test {
            name: "pkcs11::moved_to_and_from_every_other_provider",
            needs: &[Server::SoftHsm, Server::Vault, Server::Moto],
            run: moved,
        },
    ]
}

const STATE: &str = "SELECT state FROM pagevault.status";

fn on_token(hsm: &SoftHsm, settings: &Settings) -> Result<Cluster> {
    let cluster = Cluster::start(settings)?;
    cluster.sql("CREATE EXTENSION pagevault")?;
    cluster.sql(&add_provider("hsm", "pkcs11", &hsm.options()))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('hsm', 'db-kek')")?;
    cluster.sql(TABLES)?;
    Ok(cluster)
}

fn keys_live_in_a_token() -> Result<()> {
    let hsm = SoftHsm::start()?;
    make(&hsm, "db-own", "01", &["wrap=true", "unwrap=true"])?;
    let mut cluster = on_token(&hsm, &impatient())?;
    cluster.without_witness("at the end the token refuses the credentials");
    cluster.allow_log("pagevault");
    ensure!(cluster.text("SELECT pagevault.rotate_cluster_master_key()")? == "2");
    cluster.sql("SELECT pagevault.set_database_master_key('hsm', 'db-own')")?;
    ensure!(cluster.text("SELECT pagevault.rotate_database_master_key()")? == "2");
    cluster.crash()?;
    readable(&cluster)?;
    let checks = "SELECT bool_and(ok)::text || ' ' || count(DISTINCT master_key)::text
        FROM pagevault.check_provider('hsm')";
    ensure!(cluster.text(checks)? == "true 2", "{}", cluster.text(checks)?);
    let error = cluster.error("SELECT pagevault.set_cluster_master_key('hsm', 'typo')")?;
    ensure!(error.sqlstate == "42704" && error.text().contains("hsm"), "{error}");
    hsm.set_pin("000000")?;
    let error = cluster.error("SELECT pagevault.set_cluster_master_key('hsm', 'db-kek')")?;
    ensure!(error.sqlstate == "28000" && error.text().contains("CKR_PIN_INCORRECT"), "{error}");
    ensure!(!cluster.log().contains(PIN), "the PIN is in the log");
    cluster.finish()
}

fn away() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let mut cluster = on_token(&hsm, &impatient())?;
    cluster.allow_log("pagevault");
    cluster.allow_log("encrypted relations locked");
    cluster.stop(StopMode::Fast)?;
    std::fs::rename(hsm.path("tokens"), hsm.path("unplugged"))?;
    hsm.make_directory("tokens")?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT id FROM open")? == "1" && cluster.text(STATE)? == "locked");
    let why = cluster.text("SELECT unlock_error FROM pagevault.status")?;
    ensure!(why.contains("there is no token with label"), "{why}");
    std::fs::remove_dir(hsm.path("tokens"))?;
    std::fs::rename(hsm.path("unplugged"), hsm.path("tokens"))?;
    cluster.eventually(STATE, "unlocked")?;
    readable(&cluster)?;
    cluster.finish()
}

fn deleted() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let mut cluster = on_token(
        &hsm,
        &impatient()
            .conf("pagevault.revalidate_interval = 1s")
            .conf("pagevault.revoked_key_action = 'lock'")
            .conf("pagevault.revoked_key_grace = 1s"),
    )?;
    cluster.allow_log("pagevault");
    // It may not be used for some time.
    let attributes = ["encrypt", "decrypt", "wrap", "unwrap"];
    let all = |to: &str| -> Result<()> {
        let values = attributes.map(|attribute| format!("{attribute}={to}"));
        let mut arguments = vec!["set", "db-kek", "01"];
        arguments.extend(values.iter().map(String::as_str));
        hsm.object(pagevault_tests::key_servers::softhsm::TOKEN, &arguments)
    };
    all("false")?;
    cluster.eventually(STATE, "locked")?;
    let error = cluster.error("SELECT count(*) FROM secret")?;
    ensure!(error.sqlstate == "55000" && error.text().contains("hsm"), "{error}");
    all("true")?;
    cluster.eventually(STATE, "unlocked")?;
    readable(&cluster)?;
    // A wrong PIN says nothing about the key, and a token that is away neither.
    let state = "SELECT state FROM pagevault.database_keys";
    let class = "SELECT last_error_class FROM pagevault.providers";
    hsm.set_pin("000000")?;
    cluster.eventually(class, "unauthenticated")?;
    ensure!(cluster.text(state)? == "unlocked");
    hsm.set_pin(PIN)?;
    std::fs::rename(hsm.path("tokens"), hsm.path("unplugged"))?;
    hsm.make_directory("tokens")?;
    cluster.eventually("SELECT reachable::text FROM pagevault.providers", "false")?;
    ensure!(cluster.text(class)? == "unreachable" && cluster.text(state)? == "unlocked");
    std::fs::remove_dir(hsm.path("tokens"))?;
    std::fs::rename(hsm.path("unplugged"), hsm.path("tokens"))?;
    cluster.eventually("SELECT reachable::text FROM pagevault.providers", "true")?;
    cluster.finish()
}

fn rights() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let cluster = Cluster::start(&impatient())?;
    cluster.sql("CREATE EXTENSION pagevault")?;
    cluster.sql("CREATE ROLE keeper IN ROLE pagevault_admin")?;
    let add = add_provider("hsm", "pkcs11", &hsm.options());
    let error = cluster.error(&format!("SET SESSION AUTHORIZATION keeper; {add}"))?;
    ensure!(matches!(error.sqlstate.as_str(), "F0000" | "42501"), "{error}");
    cluster.sql("GRANT pg_execute_server_program TO keeper")?;
    cluster.sql(&format!("SET SESSION AUTHORIZATION keeper; {add}"))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('hsm', 'db-kek')")?;
    cluster.finish()
}

fn moved() -> Result<()> {
    let hsm = SoftHsm::start()?;
    let vault = Vault::start()?;
    let kms = Emulator::moto()?;
    let credentials = Credentials::root()?;
    let kms_key = kms.create_key()?;
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(TABLES)?;
    cluster.sql(&add_provider("hsm", "pkcs11", &hsm.options()))?;
    cluster.sql(&add_provider("vault", "vault", &vault.approle()?))?;
    cluster.sql(&add_provider("kms", "aws_kms", &kms.provider(&credentials).options))?;
    let program = pagevault_tests::key_servers::program::Program::new()?;
    cluster.sql(&add_provider("own", "command", &program.options()))?;
    for (provider, key) in
        [("local", "main"), ("vault", "db-kek"), ("kms", kms_key.as_str()), ("own", "db-kek")]
    {
        for (provider, key) in [(provider, key), ("hsm", "db-kek")] {
            cluster
                .sql(&format!("SELECT pagevault.set_cluster_master_key('{provider}', '{key}')"))?;
            let found = "SELECT DISTINCT provider FROM pagevault.database_keys";
            ensure!(cluster.text(found)? == provider);
        }
        cluster.crash()?;
        readable(&cluster)?;
    }
    cluster.finish()
}
