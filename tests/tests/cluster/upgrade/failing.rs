//! Failed upgrades: nothing is done if a key would be missing, and the old cluster is unchanged.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, StopMode, process};

use super::scene::{Scene, files_below};
use super::{alone, failure, new_cluster, old_cluster, settings, upgrading};

#[test]
fn upgrades_that_would_lose_keys_are_refused() -> Result<()> {
    let (mut old, keys) = old_cluster("")?;
    old.allow_log("pg_upgrade alone would leave");
    old.sql("CREATE TABLE t AS SELECT 7 AS id; SELECT pagevault.encrypt('t')")?;
    let new = new_cluster()?;
    let refused = |new: &Cluster, why: &str| -> Result<()> {
        let response = failure(&mut upgrading(&old, new), new)?;
        ensure!(response.contains(why), "{response}\nand not: {why}");
        Ok(())
    };
    refused(&new, "a server is running in")?;
    old.stop(StopMode::Fast)?;

    // pg_upgrade without exec.
    let response = failure(&mut alone(&old, &new), &new)?;
    ensure!(
        response.contains("pg_upgrade alone would leave the keys of encrypted relations behind"),
        "{response}"
    );
    ensure!(response.contains("pagevault-keyring exec -- pg_upgrade"), "{response}");

    // The provider does not respond.
    keys.take_away()?;
    refused(&new, "key file")?;
    keys.bring_back()?;

    // The new server would not load pagevault.
    new.append_conf("shared_preload_libraries = ''")?;
    refused(&new, "does not load pagevault")?;
    new.append_conf("shared_preload_libraries = 'pagevault'")?;
    // pg_upgrade joins its options, and a shell splits them.
    let with = |options: [&str; 2]| {
        let mut command = upgrading(&old, &new);
        command.args(options.iter().flat_map(|option| ["-O", option]));
        failure(&mut command, &new)
    };
    let response = with(["-c shared_preload_libraries=", "-c work_mem=8MB"])?;
    ensure!(response.contains("does not load pagevault"), "{response}");
    let response = with(["-c archive_mode='off'", "-c work_mem='8"])?;
    ensure!(response.contains("end within quotes"), "{response}");
    let response = with(["-c archive_mode='off'", "-c shared_preload_libraries=''"])?;
    ensure!(response.contains("does not load pagevault"), "{response}");

    // The same directory twice, a directory without a cluster, and a missing directory.
    refused(&old, "the same data directory")?;
    let mut nowhere = upgrading(&old, &new);
    let response = failure(nowhere.arg("-D").arg(new.directory()), &new)?;
    ensure!(response.contains("is not a data directory"), "{response}");
    let mut command = new.installation().command("pagevault-keyring");
    let response = failure(command.args(["exec", "--", "pg_upgrade", "-U", "postgres"]), &new)?;
    ensure!(response.contains("pg_upgrade needs -d or --old-datadir"), "{response}");
    ensure!(!new.data_directory().join("pagevault/cluster.keys").exists(), "keys were brought");

    // A new cluster with its own keys.
    let (mut taken, _its_keys) = Cluster::with_keys(&settings())?;
    taken.allow_log("cannot encrypt WAL: the cluster has no master key");
    taken.stop(StopMode::Fast)?;
    refused(&taken, "It already has keys of its own")?;
    taken.start_server()?;
    taken.finish()?;

    // None of these attempts changed anything.
    run(&mut upgrading(&old, &new))?;
    new.start_server()?;
    ensure!(new.text("SELECT id FROM t")? == "7", "the table");
    new.sql("CREATE TABLE more (id int); SELECT pagevault.encrypt('more')")?;
    new.stop(StopMode::Fast)?;
    // An upgraded cluster cannot be upgraded again.
    refused(&new, "the cluster was already upgraded")?;
    new.start_server()?;
    ensure!(new.text("SELECT id FROM t")? == "7", "the table");
    old.start_server()?;
    ensure!(old.text("SELECT id FROM t")? == "7", "the table in the old cluster");
    old.finish()?;
    new.finish()
}

/// The new server notices that its keystore was removed or replaced during pg_upgrade.
#[test]
fn the_new_server_notices_a_changed_keystore() -> Result<()> {
    let (mut old, _keys) = old_cluster("")?;
    old.sql("CREATE TABLE t AS SELECT 7 AS id; SELECT pagevault.encrypt('t')")?;
    old.stop(StopMode::Fast)?;
    old.allow_log("the cluster has a keystore that is not");
    old.allow_log("database system is shut down");
    let new = new_cluster()?;
    for (ticket, why) in [
        ("0123456789abcdef0123456789abcdef", "a keystore that is not the one"),
        ("all", "has an unknown value"),
    ] {
        let response = failure(alone(&old, &new).env("PAGEVAULT_UPGRADE", ticket), &new)?;
        ensure!(response.contains(why), "{response}");
    }
    old.allow_log("has an unknown value");
    let inspected = run(old.program("pagevault-keyring").arg("inspect").arg(old.data_directory()))?;
    let id = inspected.split(|c: char| !c.is_ascii_hexdigit()).find(|word| word.len() == 32);
    let response =
        failure(alone(&old, &new).env("PAGEVAULT_UPGRADE", id.unwrap_or_default()), &new)?;
    ensure!(
        response.contains("the keystore of the cluster to be upgraded is not here"),
        "{inspected}\n{response}"
    );
    old.start_server()?;
    ensure!(old.text("SELECT id FROM t")? == "7", "the table in the old cluster");
    old.finish()
}

/// Killed while it restores the schema: the old cluster starts, and the upgrade can be repeated
/// into another new cluster.
#[test]
fn killed_in_the_middle() -> Result<()> {
    let scene = Scene::make()?;
    let new = new_cluster()?;
    let mut upgrade = upgrading(&scene.old, &new)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()?;
    let output = new.data_directory().join("pg_upgrade_output.d");
    let restores = |file: &PathBuf| {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(file).unwrap_or_default();
        name.starts_with("pg_upgrade_dump_") && text.contains("pg_restore")
    };
    scene.old.eventually_that("pg_upgrade", || {
        ensure!(files_below(&output)?.iter().any(restores), "it restores nothing");
        Ok(())
    })?;
    upgrade.kill()?;
    upgrade.wait()?;
    process::kill_all(&new.data_directory())?;
    scene.old.kill()?;
    scene.check_old()?;
    scene.clear_tablespace(&new)?;
    drop(new);
    let new = new_cluster()?;
    run(&mut upgrading(&scene.old, &new))?;
    new.start_server()?;
    scene.check_all(&new)?;
    new.finish()
}
