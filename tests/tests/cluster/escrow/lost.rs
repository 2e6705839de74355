//! Restoring where some providers are lost and others answer, one after the other, and beside a
//! server that is started.

use super::*;

/// A restore to another provider than `restored`, instead of one that is lost.
fn instead(
    cluster: &Cluster,
    bundle: &Path,
    identity: &Path,
    keys: &KeyFile,
    (name, lost): (&str, &str),
) -> Command {
    let mut command = restore(cluster, bundle, identity, keys);
    command.args(["--provider-name", name, "--lost", lost]);
    command
}

/// A server is started while the new provider is asked. If it does not read the file now, it would
/// at a later start, when the keys may be elsewhere.
#[test]
fn nothing_is_restored_beside_a_server_that_was_started_meanwhile() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default())?;
    let (identity, recipient) = key_pair(&cluster, "identity")?;
    let bundle = cluster.directory().join("bundle");
    run(&mut export(&cluster, &[&recipient], &bundle))?;
    cluster.stop(StopMode::Fast)?;
    let lock = cluster.data_directory().join("postmaster.pid");
    // While the new provider unwraps a key, a server starts.
    let options = cluster.key_program("program", &format!(": > '{}'", lock.display()))?;
    let before = keystore(&cluster)?;
    let mut command = open(&cluster, "restore", &bundle, &identity);
    command.args(["--provider-kind", "command", "--key", "new", "--options", &options]);
    let response = refused(&mut command)?;
    ensure!(response.contains("a server is running in the data directory"), "{response}");
    ensure!(lock.exists(), "the provider was not asked");
    ensure!(keystore(&cluster)? == before, "the keystore was changed");
    fs::remove_file(&lock)?;
    cluster.start_server()?;
    ensure!(cluster.text(ESCROW)? == "t 0");
    cluster.finish()
}

/// The new provider is slow, and the command has an option for that.
#[test]
fn the_new_provider_has_the_time_that_is_given() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default())?;
    let (identity, recipient) = key_pair(&cluster, "identity")?;
    let bundle = cluster.directory().join("bundle");
    run(&mut export(&cluster, &[&recipient], &bundle))?;
    cluster.stop(StopMode::Fast)?;
    let options = cluster.key_program("program", "sleep 600")?;
    let mut command = open(&cluster, "restore", &bundle, &identity);
    command.args(["--provider-kind", "command", "--key", "new", "--options", &options]);
    let response = refused(command.args(["--timeout", "1"]))?;
    ensure!(response.contains("Try again, or raise --timeout."), "{response}");
    cluster.start_server()?;
    cluster.finish()
}

/// Two providers are lost, each with a database of its own.
#[test]
fn a_second_restore_adds_to_the_first() -> Result<()> {
    let (mut cluster, lost) = sealing(&Settings::default())?;
    cluster.without_witness("WAL from before needs keys that are gone");
    cluster.allow_log("cannot start without keys");
    let own = cluster.key_file("own", "tenant")?;
    cluster.sql("CREATE TABLE sealed AS SELECT 7 AS id; SELECT pagevault.encrypt('sealed')")?;
    cluster.sql("CREATE DATABASE other")?;
    let mut other = cluster.client_to("other")?;
    run_sql(&mut other, "CREATE EXTENSION pagevault")?;
    run_sql(&mut other, &own.add_provider("own"))?;
    run_sql(&mut other, "SELECT pagevault.set_database_master_key('own', 'tenant')")?;
    run_sql(&mut other, "CREATE TABLE t AS SELECT 8 AS id; SELECT pagevault.encrypt('t')")?;
    drop(other);
    let (identity, recipient) = key_pair(&cluster, "identity")?;
    let bundle = cluster.directory().join("bundle");
    run(&mut export(&cluster, &[&recipient], &bundle))?;
    cluster.kill()?;
    fs::remove_file(lost.path())?;
    fs::remove_file(own.path())?;

    let keys = [cluster.key_file("one", "new")?, cluster.key_file("two", "new")?];
    run(&mut instead(&cluster, &bundle, &identity, &keys[0], ("one", "local")))?;
    run(&mut instead(&cluster, &bundle, &identity, &keys[1], ("two", "own")))?;
    // The first one is not the last word: its keys are given to another provider.
    let third = cluster.key_file("three", "new")?;
    run(&mut instead(&cluster, &bundle, &identity, &third, ("three", "one")))?;
    fs::remove_file(keys[0].path())?;
    cluster.start_server()?;
    cluster
        .eventually("SELECT count(*) FROM pg_ls_dir('pagevault') f WHERE f = 'restored'", "0")?;
    let holders = "SELECT string_agg(DISTINCT concat_ws(' ', scope, database, provider), ', ')
        FROM pagevault.database_keys";
    let holders = cluster.text(holders)?;
    ensure!(holders == "cluster three, database other two", "{holders}");
    let providers = "SELECT string_agg(provider, ' ' ORDER BY provider) FROM pagevault.providers";
    let providers = cluster.text(providers)?;
    ensure!(providers == "local own three two", "{providers}");
    ensure!(cluster.text("SELECT id FROM sealed")? == "7", "a row is missing");
    ensure!(text(&mut cluster.client_to("other")?, "SELECT id FROM t")? == "8", "a row is missing");
    cluster.finish()
}

/// One of two master keys of the cluster is lost. What the other wraps stays, also after recovery.
#[test]
fn other_master_keys_stay() -> Result<()> {
    let (mut cluster, lost) = sealing(&Settings::default())?;
    cluster.without_witness("WAL from before needs keys that are gone");
    cluster.allow_log("could not unwrap");
    let spare = cluster.key_file("spare", "main")?;
    cluster.sql("CREATE TABLE sealed AS SELECT 7 AS id; SELECT pagevault.encrypt('sealed')")?;
    cluster.sql(&spare.add_provider("spare"))?;
    cluster.sql("SELECT pagevault.add_cluster_master_key('spare', 'main')")?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    let (identity, recipient) = key_pair(&cluster, "identity")?;
    let bundle = cluster.directory().join("bundle");
    run(&mut export(&cluster, &[&recipient], &bundle))?;
    cluster.kill()?;
    fs::remove_file(lost.path())?;
    let found = cluster.key_file("found", "new")?;
    run(&mut instead(&cluster, &bundle, &identity, &found, ("found", "local")))?;
    cluster.start_server()?;
    cluster
        .eventually("SELECT count(*) FROM pg_ls_dir('pagevault') f WHERE f = 'restored'", "0")?;
    let holders = "SELECT string_agg(DISTINCT concat_ws(' ', version, preference, provider), ', ')
        FROM pagevault.database_keys";
    let holders = cluster.text(holders)?;
    ensure!(holders == "1 1 found, 1 2 spare, 2 1 found, 2 2 spare", "{holders}");
    // Either is enough.
    for away in [&found, &spare] {
        cluster.stop(StopMode::Fast)?;
        away.take_away()?;
        cluster.start_server()?;
        ensure!(cluster.text("SELECT id FROM sealed")? == "7", "a row is missing");
        away.bring_back()?;
    }
    cluster.finish()
}

/// A crash takes a new key back after it was exported. The next one has its version.
#[test]
fn a_key_that_was_taken_back_does_not_stand_for_its_successor() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let (_, recipient) = key_pair(&cluster, "identity")?;
    cluster.stop_at("keys.in_file")?;
    let mut client = cluster.client()?;
    let rotating =
        std::thread::spawn(move || run_sql(&mut client, "SELECT pagevault.rotate_database_key()"));
    cluster.stopped_at("keys.in_file")?;
    run(&mut export(&cluster, &[&recipient], &cluster.directory().join("bundle")))?;
    cluster.kill()?;
    cluster.resume();
    cluster.start_server()?;
    ensure!(rotating.join().is_ok_and(|result| result.is_err()), "the key was rotated");
    ensure!(cluster.text(ESCROW)? == "t 0", "{}", cluster.text(ESCROW)?);
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    ensure!(cluster.text(ESCROW)? == "t 1", "{}", cluster.text(ESCROW)?);
    cluster.finish()
}
