//! Escrow: the provider is lost permanently, and the data is recovered.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use age::secrecy::ExposeSecret;
use age::x25519::Identity;
use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::datafile::holds;
use pagevault_tests::installation::run;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, KeyFile, Settings, StopMode};

use crate::wal::{count, insert, sealing};

mod dropped;
mod lost;

const ESCROW: &str = "SELECT concat_ws(' ', last_escrow_at IS NOT NULL, database_keys_not_in_escrow) FROM pagevault.status";

/// A private key in a file of the server user, and its public key.
fn key_pair(cluster: &Cluster, name: &str) -> Result<(PathBuf, String)> {
    let identity = Identity::generate();
    let path = cluster.directory().join(name);
    fs::write(&path, format!("# a test's\n{}\n", identity.to_string().expose_secret()))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    cluster.installation().give(&path)?;
    Ok((path, identity.to_public().to_string()))
}

fn export(cluster: &Cluster, recipients: &[&str], output: &Path) -> Command {
    let mut command = cluster.program("pagevault-keyring");
    command.args(["escrow", "export"]).arg(cluster.data_directory()).arg("--output").arg(output);
    for recipient in recipients {
        command.args(["--recipient", recipient]);
    }
    command
}

/// A command that opens a bundle: `escrow check`, or `escrow restore` without its options.
fn open(cluster: &Cluster, verb: &str, bundle: &Path, identity: &Path) -> Command {
    let mut command = cluster.program("pagevault-keyring");
    command.args(["escrow", verb]).arg(bundle).arg("--identity").arg(identity);
    command.arg("--data-directory").arg(cluster.data_directory());
    command
}

fn restore(cluster: &Cluster, bundle: &Path, identity: &Path, keys: &KeyFile) -> Command {
    let mut command = open(cluster, "restore", bundle, identity);
    command.args(["--provider-kind", "file", "--key", "new"]);
    command.args(["--options", &format!("{{\"path\": \"{}\"}}", keys.path().display())]);
    command
}

/// The output of a program that must fail.
fn refused(command: &mut Command) -> Result<String> {
    let error = run(command).err().with_context(|| format!("succeeded: {command:?}"))?;
    Ok(format!("{error:#}"))
}

/// All files of the keystore directory with their contents, without the audit trail, which records
/// attempts.
fn keystore(cluster: &Cluster) -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(cluster.data_directory().join("pagevault"))? {
        let path = entry?.path();
        if !path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("audit.")) {
            files.push((path.clone(), fs::read(path)?));
        }
    }
    files.sort();
    Ok(files)
}

/// Waits until the server uses the restored keys.
fn taken_over(cluster: &Cluster) -> Result<()> {
    cluster
        .eventually("SELECT count(*) FROM pg_ls_dir('pagevault') f WHERE f = 'restored'", "0")?;
    ensure!(
        cluster.text("SELECT string_agg(DISTINCT provider, ' ') FROM pagevault.database_keys")?
            == "restored"
    );
    Ok(())
}

#[test]
fn a_bundle_restores_keys_to_another_provider() -> Result<()> {
    let (mut cluster, lost) = sealing(&Settings::default())?;
    cluster.without_witness("WAL from before needs keys that are gone");
    cluster.allow_log("cannot start without keys");
    cluster.sql("CREATE TABLE sealed AS SELECT i AS id FROM generate_series(1, 1000) i")?;
    cluster.sql("SELECT pagevault.encrypt('sealed')")?;
    cluster.sql("SELECT pagevault.set_database_master_key('local', 'main')")?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    let (identity, recipient) = key_pair(&cluster, "identity")?;
    let bundle = cluster.directory().join("bundle");
    run(&mut export(&cluster, &[&recipient], &bundle))?;
    // Data keys that are newer than the bundle, and a newer version of the master key.
    cluster.sql("CREATE TABLE younger AS SELECT 7 AS id; SELECT pagevault.encrypt('younger')")?;
    cluster.sql("SELECT pagevault.rotate_wal_key(), pagevault.rotate_cluster_master_key()")?;
    insert(&cluster, "drossel", 100)?;
    let response = run(&mut open(&cluster, "check", &bundle, &identity))?;
    ensure!(response.contains("contains 3 database keys, which unwrap all"), "{response}");
    // Recovery will replay records with keys wrapped by the lost provider.
    cluster.kill()?;
    fs::remove_file(lost.path())?;
    ensure!(cluster.start_server().is_err(), "the server starts without keys");

    let found = cluster.key_file("found", "new")?;
    run(&mut restore(&cluster, &bundle, &identity, &found))?;
    // Without the server, the keys are already those of the new provider.
    run(cluster.program("pagevault-keyring").arg("verify").arg(cluster.data_directory()))?;
    cluster.start_server()?;
    taken_over(&cluster)?;
    cluster.sql("SELECT pagevault.drop_provider('local')")?;
    cluster.restart()?;
    ensure!(cluster.text("SELECT count(*) FROM sealed")? == "1000", "rows are missing");
    ensure!(cluster.text("SELECT id FROM younger")? == "7", "rows are missing");
    ensure!(count(&cluster, "drossel")? == "100", "rows are missing");
    // The bundle still contains all keys.
    ensure!(cluster.text(ESCROW)? == "t 0", "{}", cluster.text(ESCROW)?);
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    insert(&cluster, "fink", 100)?;
    cluster.crash()?;
    ensure!(count(&cluster, "fink")? == "100", "rows are missing");
    cluster.finish()
}

/// A database with a master key of its own, whose provider answers, stays with it.
#[test]
fn only_keys_of_a_lost_provider_are_restored() -> Result<()> {
    let (mut cluster, lost) = sealing(&Settings::default())?;
    cluster.without_witness("WAL from before needs keys that are gone");
    cluster.allow_log("cannot start without keys");
    let own = cluster.key_file("own", "tenant")?;
    cluster.sql("CREATE TABLE sealed AS SELECT 7 AS id; SELECT pagevault.encrypt('sealed')")?;
    cluster.sql("CREATE DATABASE other")?;
    let mut other = cluster.client_to("other")?;
    run_sql(&mut other, "CREATE EXTENSION pagevault")?;
    let add = "SELECT pagevault.add_provider('own', 'file', '{\"path\": \"PATH\"}')";
    run_sql(&mut other, &add.replace("PATH", &own.path().display().to_string()))?;
    run_sql(&mut other, "SELECT pagevault.set_database_master_key('own', 'tenant')")?;
    run_sql(&mut other, "CREATE TABLE t AS SELECT 8 AS id; SELECT pagevault.encrypt('t')")?;
    drop(other);
    let (identity, recipient) = key_pair(&cluster, "identity")?;
    let bundle = cluster.directory().join("bundle");
    run(&mut export(&cluster, &[&recipient], &bundle))?;
    cluster.kill()?;
    fs::remove_file(lost.path())?;
    ensure!(cluster.start_server().is_err(), "the server starts without keys");

    let found = cluster.key_file("found", "new")?;
    let before = keystore(&cluster)?;
    let mut of_nobody = restore(&cluster, &bundle, &identity, &found);
    let response = refused(of_nobody.args(["--lost", "local", "--lost", "locale"]))?;
    ensure!(response.contains("provider \"locale\" wraps no database key"), "{response}");
    ensure!(keystore(&cluster)? == before, "the keystore was changed");
    run(restore(&cluster, &bundle, &identity, &found).args(["--lost", "local"]))?;
    cluster.start_server()?;
    cluster
        .eventually("SELECT count(*) FROM pg_ls_dir('pagevault') f WHERE f = 'restored'", "0")?;
    let holders =
        "SELECT string_agg(DISTINCT concat_ws(' ', scope, database, provider, master_key), ', ')
        FROM pagevault.database_keys";
    let holders = cluster.text(holders)?;
    ensure!(holders == "cluster restored new, database other own tenant", "{holders}");
    ensure!(cluster.text("SELECT id FROM sealed")? == "7", "a row is missing");
    ensure!(text(&mut cluster.client_to("other")?, "SELECT id FROM t")? == "8", "a row is missing");
    cluster.finish()
}

/// A backup is older than the bundle. Its recovery replays keys wrapped by the lost provider that
/// the backup's keystore does not contain. Afterwards archives and standbys get the keys of the new
/// provider.
#[test]
fn a_backup_is_recovered_with_the_bundle() -> Result<()> {
    let (cluster, lost) = sealing(&Settings::default().conf("wal_keep_size = 1GB"))?;
    cluster.sql("CREATE TABLE sealed AS SELECT i AS id FROM generate_series(1, 1000) i")?;
    cluster.sql("SELECT pagevault.encrypt('sealed')")?;
    let restored = Cluster::from_files(|target| {
        cluster.base_backup_with(target, &["-X", "none"])?;
        cluster.sql("SELECT pagevault.rotate_database_key()")?;
        cluster.sql("CREATE TABLE younger AS SELECT 7 AS id")?;
        cluster.sql("SELECT pagevault.encrypt('younger')")?;
        cluster.sql("SELECT pg_switch_wal()")
    })?;
    let (identity, recipient) = key_pair(&cluster, "identity")?;
    let bundle = cluster.directory().join("bundle");
    run(&mut export(&cluster, &[&recipient], &bundle))?;
    let found = restored.key_file("found", "new")?;
    fs::remove_file(lost.path())?;
    let archive = cluster.data_directory().join("pg_wal");
    restored.append_conf(&format!("restore_command = 'cp {}/%f %p'", archive.display()))?;
    let signal = restored.data_directory().join("recovery.signal");
    fs::write(&signal, "")?;
    restored.installation().give(&signal)?;
    let response = run(&mut restore(&restored, &bundle, &identity, &found))?;
    ensure!(response.contains("set a recovery target before that"), "{response}");
    restored.start_server()?;
    restored.eventually("SELECT pg_is_in_recovery()", "f")?;
    taken_over(&restored)?;
    let standby = standby_of(&restored, &[])?;
    restored.sql("SELECT pagevault.drop_provider('local')")?;
    wait_for(&standby, &restored)?;
    standby.restart()?;
    for server in [&restored, &standby] {
        ensure!(server.text("SELECT count(*) FROM sealed")? == "1000", "rows are missing");
        ensure!(server.text("SELECT id FROM younger")? == "7", "rows are missing");
    }
    standby.finish()?;
    restored.finish()?;
    cluster.finish()
}

#[test]
fn a_bundle_is_made_for_its_recipients_only() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let (first, one) = key_pair(&cluster, "first")?;
    let (second, two) = key_pair(&cluster, "second")?;
    let (stranger, _) = key_pair(&cluster, "stranger")?;
    for armor in [false, true] {
        let bundle = cluster.directory().join(format!("bundle-{armor}"));
        let mut command = export(&cluster, &[&one, &two], &bundle);
        let response = run(command.args(armor.then_some("--armor")))?;
        ensure!(response.contains(": 1."), "{response}");
        let bytes = fs::read(&bundle)?;
        let begin: &[u8] =
            if armor { b"-----BEGIN AGE ENCRYPTED FILE-----" } else { b"age-encryption.org/v1\n" };
        ensure!(bytes.starts_with(begin), "not of age's format");
        ensure!(!holds(&bytes, b"keystore"), "the bundle is readable");
        ensure!(fs::metadata(&bundle)?.permissions().mode() & 0o777 == 0o600, "mode");
        for identity in [&first, &second] {
            let response = run(&mut open(&cluster, "check", &bundle, identity))?;
            ensure!(response.contains("contains 1 database keys"), "{response}");
        }
        let response = refused(&mut open(&cluster, "check", &bundle, &stranger))?;
        ensure!(response.contains("no identity can decrypt the bundle"), "{response}");
        let response = refused(&mut export(&cluster, &[&one], &bundle))?;
        ensure!(response.contains("already exists"), "{response}");
        ensure!(fs::read(&bundle)? == bytes, "the bundle was overwritten");
    }
    // An identity that is not read from a file.
    let mut command =
        open(&cluster, "check", &cluster.directory().join("bundle-true"), Path::new("-"));
    let file = fs::File::open(&first)?;
    ensure!(command.stdin(Stdio::from(file)).output()?.status.success(), "from standard input");

    let other = cluster.directory().join("other");
    let secret = fs::read_to_string(&first)?;
    let secret = secret.lines().last().unwrap_or_default();
    let response = refused(&mut export(&cluster, &[secret], &other))?;
    ensure!(
        response.contains("This is a private key") && !response.contains("error: AGE"),
        "{response}"
    );
    let response = refused(&mut export(&cluster, &["age1xyz"], &other))?;
    ensure!(response.contains("recipient is not an age public key"), "{response}");
    let inside = cluster.data_directory().join("base/bundle");
    let response = refused(&mut export(&cluster, &[&one], &inside))?;
    ensure!(response.contains("must not be inside the data directory"), "{response}");
    fs::set_permissions(&first, fs::Permissions::from_mode(0o644))?;
    let bundle = cluster.directory().join("bundle-true");
    let response = refused(&mut open(&cluster, "check", &bundle, &first))?;
    ensure!(response.contains("is accessible to other users"), "{response}");
    let response = refused(&mut open(&cluster, "check", &bundle, &bundle))?;
    ensure!(response.contains("is not an age identity file"), "{response}");
    for entry in fs::read_dir(cluster.directory())? {
        let name = entry?.file_name();
        ensure!(!name.to_string_lossy().starts_with(".escrow"), "left: {}", name.display());
    }
    cluster.finish()
}

#[test]
fn a_bundle_that_does_not_fit_changes_nothing() -> Result<()> {
    let (cluster, keys) = sealing(&Settings::default())?;
    let (identity, recipient) = key_pair(&cluster, "identity")?;
    let found = cluster.key_file("found", "new")?;
    let bundle = cluster.directory().join("bundle");
    run(&mut export(&cluster, &[&recipient], &bundle))?;
    let response = refused(&mut restore(&cluster, &bundle, &identity, &found))?;
    ensure!(response.contains("a server is running"), "{response}");
    cluster
        .sql("SELECT pagevault.rotate_database_key(), pagevault.set_database_master_key('local', 'main')")?;
    cluster.stop(StopMode::Fast)?;
    let before = keystore(&cluster)?;

    let response = refused(&mut restore(&cluster, &bundle, &identity, &found))?;
    ensure!(response.contains("the bundle is older than keys of the data directory"), "{response}");
    ensure!(
        response.contains("version 2 of the cluster's database key, which wraps 1 data keys"),
        "{response}"
    );
    ensure!(response.contains("version 1 of the key of database "), "{response}");

    let newer = cluster.directory().join("newer");
    run(&mut export(&cluster, &[&recipient], &newer))?;
    let before_damage = keystore(&cluster)?;
    ensure!(before != before_damage, "no mark was left");
    let whole = fs::read(&newer)?;
    let damaged = cluster.directory().join("damaged");
    let mut all = Vec::new();
    let step = whole.len() / 24;
    for at in (0..whole.len()).step_by(step).chain([whole.len() - 1]) {
        let mut flipped = whole.clone();
        flipped[at] ^= 1;
        all.push((format!("byte {at}"), flipped));
        all.push((format!("{at} bytes"), whole.get(..at).unwrap_or_default().to_vec()));
    }
    all.push(("longer".to_owned(), [whole.as_slice(), b"x"].concat()));
    all.push(("of others".to_owned(), b"SELECT 1;\n".to_vec()));
    for (what, bytes) in all {
        fs::write(&damaged, bytes)?;
        cluster.installation().give(&damaged)?;
        let response = refused(&mut restore(&cluster, &damaged, &identity, &found))?;
        let clear = ["is damaged", "is not an escrow bundle", "no identity can decrypt the bundle"];
        ensure!(clear.iter().any(|text| response.contains(text)), "{what}: {response}");
    }

    let (other, _other_keys) = Cluster::with_keys(&Settings::default())?;
    let foreign = cluster.directory().join("foreign");
    run(&mut export(&other, &[&recipient], &foreign))?;
    let response = refused(&mut restore(&cluster, &foreign, &identity, &found))?;
    ensure!(response.contains("belongs to another cluster"), "{response}");
    // A provider without the key, and a name that another provider has.
    let response =
        refused(restore(&cluster, &newer, &identity, &found).args(["--provider-name", "local"]))?;
    ensure!(response.contains("another provider \"local\" exists already"), "{response}");
    found.take_away()?;
    let response = refused(&mut restore(&cluster, &newer, &identity, &found))?;
    ensure!(response.contains("found"), "{response}");
    found.bring_back()?;
    ensure!(keystore(&cluster)? == before_damage, "the keystore was changed");

    run(&mut restore(&cluster, &newer, &identity, &found))?;
    fs::remove_file(keys.path())?;
    cluster.start_server()?;
    taken_over(&cluster)?;
    other.finish()?;
    cluster.finish()
}

#[test]
fn status_lists_keys_that_are_not_in_escrow() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default())?;
    let (_, recipient) = key_pair(&cluster, "identity")?;
    let says = |expected: &str| -> Result<()> {
        let response = cluster.text(ESCROW)?;
        ensure!(response == expected, "{response}, not {expected}");
        Ok(())
    };
    let export =
        |name: &str| run(&mut export(&cluster, &[&recipient], &cluster.directory().join(name)));
    says("f 1")?;
    export("first")?;
    says("t 0")?;
    // Keys below the database keys need no new bundle.
    cluster.sql("CREATE TABLE sealed AS SELECT 1 AS id; SELECT pagevault.encrypt('sealed')")?;
    cluster.sql("SELECT pagevault.rotate_data_key('sealed'), pagevault.rotate_wal_key()")?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    says("t 0")?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    says("t 1")?;
    cluster.sql("SELECT pagevault.set_database_master_key('local', 'main')")?;
    says("t 2")?;
    export("second")?;
    says("t 0")?;
    cluster.crash()?;
    says("t 0")?;
    let mark = cluster.data_directory().join("pagevault/escrow");
    let text = fs::read_to_string(&mark)?;
    fs::write(&mark, text.replace("key 0 1 ", "key 0 3 "))?;
    says("f 3")?;
    export("third")?;
    says("t 0")?;
    cluster.finish()
}
