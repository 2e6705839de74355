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
    cluster.sql("DROP TABLE changed")?;
    forgets(&cluster)?;
    cluster.allow_log("could not");
    Ok(())
}

/// Creates and drops an encrypted table, whose key is forgotten.
fn drops_another(cluster: &Cluster) -> Result<()> {
    cluster.sql("CREATE TABLE gone AS SELECT 1")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE gone IS 'encrypted'; DROP TABLE gone")
}

/// What recovery has made in a mount point stays there, hidden by what is mounted, until that is
/// not mounted again. The directory of the database in it may be on another file system, too. Nor
/// are the keys destroyed by whoever destroys those of dropped files.
#[test]
fn keys_of_relations_whose_files_are_elsewhere_are_kept() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let sum = cluster.text(SUM)?;
    let path = cluster.make_tablespace("far")?;
    cluster.sql("ALTER TABLE t SET TABLESPACE far")?;
    forgets(&cluster)?;
    let left = with_keys(&cluster)?;
    let version = fs::read_dir(&path)?.next().context("nothing in the tablespace")??.file_name();
    let database = scope(&cluster)?.to_string();
    for place in [path.clone(), path.join(&version).join(&database)] {
        cluster.stop(StopMode::Fast)?;
        let away = path.with_extension("away");
        fs::rename(&place, &away)?;
        fs::create_dir_all(path.join(&version).join(&database))?;
        for made in [&path, &path.join(&version), &path.join(&version).join(&database)] {
            cluster.installation().give(made)?;
        }
        cluster.start_server()?;
        drops_another(&cluster)?;
        forgets_all_but(&cluster, &left)?;
        let error = cluster.error("SELECT * FROM pagevault.shred_former_files('postgres')")?;
        ensure!(error.sqlstate == "55000", "{error:?}");
        ensure!(error.message.contains("though a relation has it"), "{error:?}");
        cluster.stop(StopMode::Fast)?;
        fs::remove_dir_all(&place)?;
        fs::rename(&away, &place)?;
        cluster.start_server()?;
        ensure!(cluster.text(SUM)? == sum, "rows changed");
    }
    cluster.sql("VACUUM FULL t")?;
    forgets(&cluster)
}

/// A table of a prepared transaction is in no snapshot.
#[test]
fn keys_of_prepared_transactions_are_kept() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&settings().conf("max_prepared_transactions = 2"))?;
    let path = cluster.make_tablespace("far")?;
    cluster.sql(
        "SET pagevault.default_encryption = on; BEGIN;
         CREATE TABLE t TABLESPACE far AS SELECT i, md5(i::text) FROM generate_series(1, 3000) i;
         PREPARE TRANSACTION 'p'",
    )?;
    cluster.sql("CHECKPOINT")?;
    let left = with_keys(&cluster)?;
    ensure!(!left.is_empty(), "the table has no key");
    cluster.stop(StopMode::Fast)?;
    let away = path.with_extension("away");
    fs::rename(&path, &away)?;
    fs::create_dir(&path)?;
    cluster.installation().give(&path)?;
    cluster.start_server()?;
    drops_another(&cluster)?;
    forgets_all_but(&cluster, &left)?;
    cluster.stop(StopMode::Fast)?;
    fs::remove_dir_all(&path)?;
    fs::rename(&away, &path)?;
    cluster.start_server()?;
    cluster.sql("COMMIT PREPARED 'p'")?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "3000", "rows are missing");
    cluster.sql("DROP TABLE t")?;
    forgets(&cluster)
}

/// The directory of a database may be a link, too.
#[test]
fn keys_of_a_database_on_a_file_system_of_its_own_are_kept() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql("CREATE DATABASE apart TEMPLATE postgres STRATEGY file_copy")?;
    let sum = cluster.text(SUM)?;
    let apart: u32 =
        cluster.text("SELECT oid FROM pg_database WHERE datname = 'apart'")?.parse()?;
    forgets(&cluster)?;
    let kept = state_of(&cluster, Scope::database(apart))?.files().count();
    ensure!(kept > 0, "the copy has no keys");
    cluster.stop(StopMode::Fast)?;
    let place = cluster.data_directory().join("base").join(apart.to_string());
    let elsewhere = cluster.directory().join("elsewhere");
    fs::rename(&place, &elsewhere)?;
    std::os::unix::fs::symlink(cluster.directory().join("not-mounted"), &place)?;
    cluster.start_server()?;
    drops_another(&cluster)?;
    forgets_all_but(&cluster, &in_use(&cluster)?)?;
    ensure!(state_of(&cluster, Scope::database(apart))?.files().count() == kept, "keys are gone");
    cluster.stop(StopMode::Fast)?;
    fs::remove_file(&place)?;
    fs::rename(&elsewhere, &place)?;
    cluster.start_server()?;
    ensure!(text(&mut cluster.client_to("apart")?, SUM)? == sum, "rows differ");
    Ok(())
}

/// A standby decides for itself how long it keeps what its primary has forgotten.
#[test]
fn a_standby_may_keep_what_its_primary_has_forgotten() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let mut standby = standby_of(&cluster, &["pagevault.keep_former_keys = -1"])?;
    standby.allow_log("could not");
    let before = with_keys(&cluster)?;
    cluster.sql("VACUUM FULL t")?;
    forgets(&cluster)?;
    let left = with_keys(&cluster)?;
    cluster.sql("CHECKPOINT")?;
    wait_for(&standby, &cluster)?;
    standby.sql("CHECKPOINT")?;
    thread::sleep(TWO_ROUNDS);
    ensure!(with_keys(&standby)?.is_superset(&before), "they are forgotten");
    standby.promote()?;
    let sum = cluster.text(SUM)?;
    ensure!(standby.text(SUM)? == sum, "rows differ");
    standby.set(&[("pagevault.keep_former_keys", "0")])?;
    forgets_all_but(&standby, &left)
}

/// The files of a database that has moved are dropped in its former place, until it moves back:
/// with the same numbers, and the same keys.
#[test]
fn keys_of_a_database_that_has_moved_back_are_kept() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    let first = cluster.make_tablespace("first")?;
    cluster.make_tablespace("second")?;
    cluster.sql("CREATE DATABASE moved TEMPLATE postgres TABLESPACE first")?;
    let sum = cluster.text(SUM)?;
    for place in ["second", "first"] {
        cluster.sql(&format!("ALTER DATABASE moved SET TABLESPACE {place}"))?;
        drops_another(&cluster)?;
        forgets(&cluster)?;
    }
    // In the running server.
    let away = first.with_extension("away");
    fs::rename(&first, &away)?;
    fs::create_dir(&first)?;
    cluster.installation().give(&first)?;
    for _ in 0..2 {
        let left = with_keys(&cluster)?;
        drops_another(&cluster)?;
        forgets_all_but(&cluster, &left)?;
    }
    fs::remove_dir_all(&first)?;
    fs::rename(&away, &first)?;
    let mut moved = cluster.client_to("moved")?;
    ensure!(text(&mut moved, SUM)? == sum, "rows differ");
    ensure!(text(&mut moved, "SELECT pagevault.is_encrypted('t')")? == "t", "not encrypted");
    drop(moved);
    cluster.restart()?;
    ensure!(text(&mut cluster.client_to("moved")?, SUM)? == sum, "rows differ after a start");
    Ok(())
}
