//! Files that do not exist, and are not gone.

use super::*;

/// Files that do not exist yet, because they are being copied, are not gone.
#[test]
fn keys_of_files_being_copied_are_kept() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let sum = cluster.text(SUM)?;
    cluster.sql("CREATE DATABASE model TEMPLATE postgres")?;
    cluster.stop_at("database.keys_copied")?;
    let mut creator = cluster.client()?;
    let creator = thread::spawn(move || {
        run_sql(&mut creator, "CREATE DATABASE made TEMPLATE model STRATEGY file_copy")
    });
    cluster.stopped_at("database.keys_copied")?;
    cluster.sql("CHECKPOINT")?;
    thread::sleep(TWO_ROUNDS);
    cluster.sql("CHECKPOINT")?;
    thread::sleep(TWO_ROUNDS);
    cluster.resume();
    creator.join().map_err(|_| anyhow::anyhow!("the creator failed"))??;
    let mut made = cluster.client_to("made")?;
    ensure!(text(&mut made, SUM)? == sum, "rows of the copy differ");
    run_sql(&mut made, "UPDATE t SET name = name; CHECKPOINT")?;
    // They are gone from now on, not since they did not exist yet.
    let scope = cluster.text("SELECT oid FROM pg_database WHERE datname = 'made'")?.parse()?;
    let scope = Scope::database(scope);
    let end = cluster.text("SELECT pg_current_wal_lsn()")?;
    let end = parse_lsn(&end).context("an address")?;
    drop(made);
    cluster.sql("DROP DATABASE made")?;
    cluster.eventually_that("keys of a dropped database are forgotten", || {
        cluster.sql("CHECKPOINT")?;
        ensure!(state_of(&cluster, scope)?.files().next().is_none(), "there are keys");
        Ok(())
    })?;
    let former = state_of(&cluster, scope)?.former_files().clone();
    ensure!(former.ranges().all(|range| range.gone >= end), "{former:?} were gone before {end}");
    Ok(())
}

/// A tablespace that is not mounted looks as if all its files were gone.
#[test]
fn keys_of_files_in_a_missing_tablespace_are_kept() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let sum = cluster.text(SUM)?;
    let path = cluster.make_tablespace("far")?;
    cluster.sql("ALTER TABLE t SET TABLESPACE far")?;
    forgets(&cluster)?;
    let left = with_keys(&cluster)?;
    let away = path.with_extension("away");
    fs::rename(&path, &away)?;
    fs::create_dir(&path)?;
    cluster.sql("CREATE TABLE gone AS SELECT 1")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE gone IS 'encrypted'; DROP TABLE gone")?;
    ensure!(with_keys(&cluster)? != left, "nothing is to be forgotten");
    forgets_all_but(&cluster, &left)?;
    fs::remove_dir(&path)?;
    fs::rename(&away, &path)?;
    cluster.restart()?;
    ensure!(cluster.text(SUM)? == sum, "rows changed");
    Ok(())
}

/// Recovery makes the directory of such a tablespace, and files in it that it changes.
#[test]
fn keys_of_files_in_a_tablespace_that_recovery_has_made_are_kept() -> Result<()> {
    let (mut cluster, _keys) = cluster()?;
    let path = cluster.make_tablespace("far")?;
    cluster.sql("ALTER TABLE t SET TABLESPACE far")?;
    cluster.sql(
        "CREATE TABLE changed (id int) TABLESPACE far;
         SECURITY LABEL FOR pagevault ON TABLE changed IS 'encrypted'",
    )?;
    let sum = cluster.text(SUM)?;
    forgets(&cluster)?;
    let left = with_keys(&cluster)?;
    cluster.sql("INSERT INTO changed VALUES (1)")?;
    cluster.without_witness("recovery does not find a tablespace");
    cluster.kill()?;
    let away = path.with_extension("away");
    fs::rename(&path, &away)?;
    fs::create_dir(&path)?;
    cluster.installation().give(&path)?;
    // The second start finds a directory.
    for _ in 0..2 {
        cluster.start_server()?;
        cluster.sql("CREATE TABLE gone AS SELECT 1")?;
        cluster
            .sql("SECURITY LABEL FOR pagevault ON TABLE gone IS 'encrypted'; DROP TABLE gone")?;
        ensure!(with_keys(&cluster)? != left, "nothing is to be forgotten");
        forgets_all_but(&cluster, &left)?;
        cluster.stop(StopMode::Fast)?;
    }
    fs::rename(&path, path.with_extension("made"))?;
    fs::rename(&away, &path)?;
    cluster.start_server()?;
    ensure!(cluster.text(SUM)? == sum, "rows changed");
    // It is trusted again.
    cluster.sql("DROP TABLE changed")?;
    forgets(&cluster)?;
    cluster.allow_log("could not");
    Ok(())
}
