//! Keys of dropped databases, which a bundle need not contain; and copies that do not show which
//! databases were dropped.

use super::*;

/// `escrow check` with a data directory, or a copy of one.
fn check(cluster: &Cluster, data: &Path, bundle: &Path, identity: &Path) -> Command {
    let mut command = cluster.program("pagevault-keyring");
    command.args(["escrow", "check"]).arg(bundle).arg("--identity").arg(identity);
    command.arg("--data-directory").arg(data);
    command
}

/// A copy of the keystore alone.
fn copy(cluster: &Cluster, name: &str) -> Result<PathBuf> {
    let copy = cluster.directory().join(name);
    fs::create_dir(&copy)?;
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o700))?;
    cluster.installation().give(&copy)?;
    let keystore = cluster.data_directory().join("pagevault");
    run(Command::new("cp").arg("-a").arg(keystore).arg(&copy))?;
    Ok(copy)
}

const UNSEEN: &str = "Only a complete data directory with all its tablespaces shows";

#[test]
fn only_a_complete_data_directory_shows_that_a_database_was_dropped() -> Result<()> {
    let (mut cluster, _keys) = sealing(&Settings::default())?;
    cluster.allow_log("tablespace");
    let (identity, recipient) = key_pair(&cluster, "identity")?;
    let bundle = cluster.directory().join("bundle");
    run(&mut export(&cluster, &[&recipient], &bundle))?;
    let apart = cluster.make_tablespace("apart")?;
    cluster.sql("CREATE DATABASE other TABLESPACE apart")?;
    let mut other = cluster.client_to("other")?;
    run_sql(&mut other, "CREATE EXTENSION pagevault")?;
    run_sql(&mut other, "SELECT pagevault.set_database_master_key('local', 'main')")?;
    run_sql(&mut other, "CREATE TABLE t AS SELECT 8 AS id; SELECT pagevault.encrypt('t')")?;
    let database = text(&mut other, "SELECT oid FROM pg_database WHERE datname = 'other'")?;
    drop(other);
    let lacks = format!("version 1 of the key of database {database}, which wraps ");
    let lacks_in = |data: &Path| -> Result<String> {
        let response = refused(&mut check(&cluster, data, &bundle, &identity))?;
        ensure!(response.contains(&lacks), "{response}");
        Ok(response)
    };
    let whole = cluster.data_directory();
    let response = lacks_in(&whole)?;
    ensure!(!response.contains(UNSEEN), "{response}");
    let response = lacks_in(&copy(&cluster, "copy")?)?;
    ensure!(response.contains(UNSEEN), "{response}");

    // Its tablespace is not mounted.
    cluster.stop(StopMode::Fast)?;
    let away = cluster.directory().join("away");
    fs::rename(&apart, &away)?;
    let response = lacks_in(&whole)?;
    ensure!(response.contains(UNSEEN), "{response}");
    let found = cluster.key_file("found", "new")?;
    let before = keystore(&cluster)?;
    let response = refused(&mut restore(&cluster, &bundle, &identity, &found))?;
    ensure!(response.contains(&lacks), "{response}");
    ensure!(keystore(&cluster)? == before, "the keystore was changed");
    fs::create_dir(&apart)?;
    cluster.installation().give(&apart)?;
    lacks_in(&whole)?;
    fs::remove_dir(&apart)?;
    fs::rename(&away, &apart)?;
    cluster.start_server()?;

    cluster.sql("DROP DATABASE other")?;
    let response = run(&mut check(&cluster, &whole, &bundle, &identity))?;
    let passed = "Passed over, as dropped databases, whose keys it does not contain: database ";
    ensure!(response.contains(&format!("{passed}{database}.")), "{response}");
    let response = lacks_in(&copy(&cluster, "later")?)?;
    ensure!(response.contains(UNSEEN), "{response}");
    cluster.finish()
}
