//! A cluster with keys in Vault: creation, rotation, restart, restore, status.

use anyhow::{Context, Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::key_servers::Server;
use pagevault_tests::{Cluster, Installation, Settings};

use crate::Test;
use crate::bench::{cluster_on_vault, impatient, readable};

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, run| Test { name, needs: &[Server::Vault], run };
    vec![
        Test { name: "serving::every_kind_is_built_in", needs: &[], run: every_kind },
        test("serving::keys_live_in_vault", keys_live_in_vault),
        test("serving::an_old_backup_opens_after_many_rotations", old_backup),
        test("serving::nothing_secret_is_left_behind", nothing_secret),
        test("serving::the_helper_is_alone_with_its_request", helper_alone),
        test("serving::a_kill_in_the_middle_of_a_rotation_loses_nothing", killed_rotation),
    ]
}

/// The program as it is installed. What it says of a kind that is not built in, only other builds
/// can show (`providers/mod.rs` of the helper).
fn every_kind() -> Result<()> {
    let output = run(Installation::get()?.command("pagevault-keyring").arg("providers"))?;
    let kinds: Vec<&str> =
        output.lines().filter_map(|line| line.strip_suffix(" built in")).collect();
    let kinds: Vec<&str> = kinds.iter().map(|kind| kind.trim_end()).collect();
    ensure!(
        kinds
            == [
                "file",
                "vault",
                "aws_kms",
                "gcp_kms",
                "azure_key_vault",
                "pkcs11",
                "kmip",
                "command"
            ],
        "{output}"
    );
    Ok(())
}

fn keys_live_in_vault() -> Result<()> {
    let (cluster, vault) = cluster_on_vault(&Settings::default())?;
    ensure!(cluster.text("SELECT pagevault.rotate_cluster_master_key()")? == "2");
    // Rotated in Vault by another client: the same call adopts the new version.
    vault.cli(&["write", "-f", "transit/keys/db-kek/rotate"])?;
    ensure!(cluster.text("SELECT pagevault.rotate_cluster_master_key()")? == "3");
    vault.make_key("db-own")?;
    cluster.sql("SELECT pagevault.set_database_master_key('vault', 'db-own')")?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    ensure!(cluster.text("SELECT pagevault.rotate_database_master_key()")? == "2");
    ensure!(
        cluster.text("SELECT count(*) FROM pagevault.database_keys WHERE provider = 'vault'")?
            == "3"
    );
    readable(&cluster)?;
    cluster.crash()?;
    readable(&cluster)?;

    let reply = "SELECT reachable::text || ' ' || (last_success_at > now() - interval '5 min')::text
        || ' ' || (latency_ms > 0)::text || ' ' || master_key_versions::text FROM pagevault.providers";
    let reply = cluster.text(reply)?;
    ensure!(reply.starts_with("true true true"), "{reply}");
    ensure!(reply.contains("\"db-kek\": 3") && reply.contains("\"db-own\": 2"), "{reply}");
    let checks = "SELECT count(*) FILTER (WHERE ok)::text || ' of ' || count(*)::text
        FROM pagevault.check_provider('vault')";
    let checks = cluster.text(checks)?;
    let all: Vec<&str> = checks.split(" of ").collect();
    ensure!(all[0] == all[1] && all[0] != "0", "{checks}");
    cluster.finish()
}

fn old_backup() -> Result<()> {
    let (cluster, _vault) = cluster_on_vault(&Settings::default())?;
    let backup = cluster.directory().join("backup");
    cluster.base_backup(&backup)?;
    for _ in 0..10 {
        cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
        cluster.sql("SELECT pagevault.rotate_database_key()")?;
    }
    let restored = Cluster::from_files(|to| Ok(std::fs::rename(&backup, to)?))?;
    restored.start_server()?;
    readable(&restored)?;
    readable(&cluster)?;
    restored.finish()?;
    cluster.finish()
}

fn nothing_secret() -> Result<()> {
    let (mut cluster, vault) = cluster_on_vault(&Settings::default().conf("log_statement = all"))?;
    cluster.allow_log("pagevault");
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    vault.seal()?;
    cluster.error("SELECT pagevault.rotate_cluster_master_key()")?;
    let log = cluster.log();
    ensure!(log.contains("pagevault audit:"), "no audit: the test would prove nothing");
    let secret_id = std::fs::read_to_string(vault.path("secret-id"))?;
    for (what, secret) in [("secret id", secret_id.trim()), ("token", "hvs.")] {
        ensure!(!log.contains(secret), "the server log holds a {what}");
        for file in std::fs::read_dir(cluster.data_directory().join("pagevault"))? {
            let bytes = std::fs::read(file?.path())?;
            let found = bytes.windows(secret.len()).any(|window| window == secret.as_bytes());
            ensure!(!found, "the keystore holds a {what}");
        }
    }
    cluster.finish()
}

fn helper_alone() -> Result<()> {
    let (mut cluster, vault) = cluster_on_vault(&Settings::default())?;
    cluster.allow_log("pagevault");
    let secret_id = std::fs::read_to_string(vault.path("secret-id"))?;
    let mut session = cluster.client()?;
    let cancel = session.cancel_token();
    vault.freeze()?;
    let asking = std::thread::spawn(move || {
        let _ = session.batch_execute("SELECT pagevault.rotate_cluster_master_key()");
    });
    std::thread::sleep(std::time::Duration::from_secs(2));
    let helper = pagevault_tests::process::processes_in(&cluster.data_directory())
        .into_iter()
        .map(|pid| std::path::PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero())))
        .find(|process| {
            std::fs::read(process.join("cmdline")).is_ok_and(|line| line.ends_with(b"\0serve\0"))
        })
        .context("no helper runs: the test proves nothing")?;
    let read = |name: &str| -> Result<String> {
        Ok(String::from_utf8_lossy(&std::fs::read(helper.join(name))?).into_owned())
    };
    let status = read("status")?;
    let line = read("cmdline")?;
    let environment = read("environ")?;
    let open = open_files(&helper)?;
    let backend =
        status.lines().find_map(|line| line.strip_prefix("PPid:\t")).context("no parent")?;
    let of_backend = open_files(&std::path::Path::new("/proc").join(backend))?;
    vault.wake()?;
    cancel.cancel_query(postgres::NoTls)?;
    asking.join().map_err(|_| anyhow::anyhow!("panic"))?;

    ensure!(line.split('\0').filter(|part| !part.is_empty()).count() == 2, "{line:?}");
    ensure!(!environment.contains(secret_id.trim()), "a secret is in the environment");
    ensure!(status.contains("NoNewPrivs:\t1"), "it may gain privileges: {status}");
    // The server's log is its standard error; it opened all other files itself.
    let log = cluster.directory().join("log").display().to_string();
    for file in &open {
        let own = file == &log || !file.starts_with('/') || file == "/dev/null";
        ensure!(own, "it holds {file}");
    }
    let sockets: Vec<&String> =
        of_backend.iter().filter(|file| file.starts_with("socket:")).collect();
    ensure!(!sockets.is_empty(), "the backend has no client: the test proves nothing");
    ensure!(!sockets.iter().any(|socket| open.contains(socket)), "it holds {sockets:?}: {open:?}");
    cluster.finish()
}

/// Open files of a process, given by its directory in /proc.
fn open_files(process: &std::path::Path) -> Result<Vec<String>> {
    let mut open = Vec::new();
    for file in std::fs::read_dir(process.join("fd"))? {
        open.push(std::fs::read_link(file?.path())?.display().to_string());
    }
    Ok(open)
}

fn killed_rotation() -> Result<()> {
    let (mut cluster, _vault) = cluster_on_vault(&impatient())?;
    cluster.allow_log("pagevault");
    let mut before = 1;
    for round in 0..8_u64 {
        let mut client = cluster.client()?;
        let rotation = std::thread::spawn(move || {
            let _ = client.batch_execute("SELECT pagevault.rotate_cluster_master_key()");
        });
        std::thread::sleep(std::time::Duration::from_millis(20 + 35 * round));
        cluster.crash()?;
        let _ = rotation.join();
        readable(&cluster)?;
        let now: u64 =
            cluster.text("SELECT max(master_key_version) FROM pagevault.database_keys")?.parse()?;
        ensure!(now >= before, "version {now} after {before}");
        before = now;
    }
    let last: u64 = cluster.text("SELECT pagevault.rotate_cluster_master_key()")?.parse()?;
    ensure!(last > before, "version {last} after {before}");
    cluster.restart()?;
    readable(&cluster)?;
    cluster.finish()
}
