//! `pagevault-keyring verify`: tablespaces that are not linked yet, and those that are not there.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use age::secrecy::ExposeSecret;
use age::x25519::Identity;
use anyhow::{Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Settings, StopMode};

/// The number of the tablespace `space`.
fn number_of_space(cluster: &Cluster) -> Result<String> {
    cluster.text("SELECT oid FROM pg_tablespace WHERE spcname = 'space'")
}

/// Moves a tablespace away, and extracts a backup in tar format as for a restore. Returns its data
/// directory.
fn extracted(cluster: &Cluster, space: &Path, number: &str) -> Result<PathBuf> {
    let archives = cluster.directory().join("archives");
    cluster.base_backup_with(&archives, &["-X", "fetch", "--format=tar"])?;
    fs::rename(space, cluster.directory().join("away"))?;
    let restored = cluster.directory().join("restored");
    for (archive, target) in [("base", restored.as_path()), (number, space)] {
        fs::create_dir(target)?;
        cluster.installation().give(target)?;
        let archive = archives.join(format!("{archive}.tar"));
        let mut tar = Command::new("tar");
        run(tar.args(["--numeric-owner", "-xf"]).arg(archive).arg("-C").arg(target))?;
    }
    Ok(restored)
}

/// Before the first start only `tablespace_map` says where the database is.
#[test]
fn a_database_in_a_tablespace_that_is_not_linked_is_not_taken_for_dropped() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let space = cluster.make_tablespace("space")?;
    cluster.sql("CREATE DATABASE app TABLESPACE space")?;
    let (identity, bundle) = (cluster.directory().join("identity"), cluster.directory().join("b"));
    let secret = Identity::generate();
    fs::write(&identity, secret.to_string().expose_secret())?;
    fs::set_permissions(&identity, fs::Permissions::from_mode(0o600))?;
    cluster.installation().give(&identity)?;
    let mut export = cluster.program("pagevault-keyring");
    export.args(["escrow", "export", "--recipient", &secret.to_public().to_string()]);
    run(export.arg(cluster.data_directory()).arg("--output").arg(&bundle))?;
    let mut app = cluster.client_to("app")?;
    run_sql(&mut app, "CREATE EXTENSION pagevault")?;
    run_sql(&mut app, "SELECT pagevault.set_database_master_key('local', 'main')")?;
    run_sql(&mut app, "CREATE TABLE t AS SELECT i FROM generate_series(1, 1000) i")?;
    run_sql(&mut app, "SELECT pagevault.encrypt('t')")?;
    drop(app);
    let restored = extracted(&cluster, &space, &number_of_space(&cluster)?)?;
    cluster.expect_verified(&restored, 0, &["No damage found."])?;

    // A bundle that was exported before the database had its own key does not serve.
    let mut check = cluster.program("pagevault-keyring");
    check.args(["escrow", "check"]).arg(&bundle).arg("--identity").arg(&identity);
    let checked = check.arg("--data-directory").arg(&restored).output()?;
    ensure!(!checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
    fs::remove_dir_all(&space)?;
    fs::rename(cluster.directory().join("away"), &space)?;
    cluster.finish()
}

#[test]
fn a_tablespace_that_is_not_mounted_is_damage() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("not properly shut down");
    let space = cluster.make_tablespace("space")?;
    let number = number_of_space(&cluster)?;
    cluster.stop(StopMode::Fast)?;
    let data = cluster.data_directory();
    let away = cluster.directory().join("away");
    let damage = format!("damaged      pg_tblspc/{number}: no directory PG_");
    let absent = |cluster: &Cluster| -> Result<()> {
        fs::rename(&space, &away)?;
        cluster.expect_verified(&data, 2, &[&damage, "Damage found: 1."])?;
        fs::create_dir(&space)?;
        cluster.expect_verified(&data, 2, &[&damage, "Damage found: 1."])?;
        fs::remove_dir(&space)?;
        Ok(fs::rename(&away, &space)?)
    };
    // An empty tablespace has a directory, too.
    cluster.expect_verified(&data, 0, &["No damage found."])?;
    absent(&cluster)?;
    cluster.start_server()?;
    cluster.sql("CREATE TABLE t TABLESPACE space AS SELECT i FROM generate_series(1, 1000) i")?;
    cluster.stop(StopMode::Fast)?;
    absent(&cluster)?;

    // Recovery removes the link.
    cluster.start_server()?;
    cluster.sql("DROP TABLE t; CHECKPOINT")?;
    let link = data.join("pg_tblspc").join(&number);
    let target = fs::read_link(&link)?;
    cluster.sql("DROP TABLESPACE space")?;
    cluster.kill()?;
    symlink(&target, &link)?;
    cluster.expect_verified(&data, 0, &["No damage found."])?;
    cluster.start_server()?;
    cluster.finish()
}
