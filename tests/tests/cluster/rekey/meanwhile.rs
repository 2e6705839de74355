//! Other operations in the cluster while a relation is rekeyed.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::datafile::PageState;
use pagevault_tests::{Cluster, Settings};

use super::{SUM, assert_version, cluster, versions, versions_of};

/// The job, as soon as it has begun to write.
pub(super) fn begun(cluster: &Cluster) -> Result<String> {
    let job = cluster.text("SELECT pagevault.rotate_data_key('t')")?;
    let begun = "SELECT (max(pages_done) > 100)::text FROM pagevault.rekey_jobs";
    cluster.eventually(begun, "true")?;
    Ok(job)
}

pub(super) fn end(cluster: &Cluster, job: &str) -> Result<()> {
    cluster.set(&[("pagevault.rekey_rate", "0")])?;
    let done = cluster.text(&format!("SELECT pagevault.wait_for_rekey({job}, '60s')"))?;
    ensure!(done == "t", "the job did not end");
    Ok(())
}

#[test]
fn database_and_master_keys_are_rotated() -> Result<()> {
    let cluster = cluster("pagevault.rekey_rate = 1MB")?;
    let before = cluster.text(SUM)?;
    let job = begun(&cluster)?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    cluster.sql("SELECT pagevault.set_database_master_key('local', 'main')")?;
    end(&cluster, &job)?;
    cluster.crash()?;
    ensure!(cluster.text(SUM)? == before, "contents differ");
    assert_version(&cluster, 2)?;
    cluster.finish()
}

#[test]
fn a_base_backup_is_taken() -> Result<()> {
    let cluster = cluster("pagevault.rekey_rate = 2MB")?;
    let before = cluster.text(SUM)?;
    let job = begun(&cluster)?;
    // Including verification of checksums, which are computed over sealed pages.
    let restored = Cluster::from_files(|target| cluster.base_backup(target))?;
    end(&cluster, &job)?;
    restored.start_server()?;
    ensure!(restored.text(SUM)? == before, "the backup has other contents");
    end(&restored, &job)?;
    for (relation, versions) in versions(&restored)? {
        ensure!(versions == [2], "{relation}: {versions:?}");
    }
    restored.finish()?;
    cluster.finish()
}

#[test]
fn it_moves_to_another_tablespace() -> Result<()> {
    let cluster = cluster("pagevault.rekey_rate = 2MB")?;
    let before = cluster.text(SUM)?;
    cluster.make_tablespace("space")?;
    let job = begun(&cluster)?;
    cluster.sql("ALTER TABLE t SET TABLESPACE space")?;
    end(&cluster, &job)?;
    cluster.sql("CHECKPOINT")?;
    for (relation, versions) in versions(&cluster)? {
        ensure!(versions.len() == 1, "{relation}: {versions:?}");
    }
    ensure!(cluster.text(SUM)? == before, "contents differ");
    cluster.finish()
}

/// `ALTER TABLE` gives the file of an index to a new one if only the length of a type changes
/// (`TryReuseIndex`, tablecmds.c).
#[test]
fn the_file_of_an_index_passes_to_another() -> Result<()> {
    let cluster = cluster("pagevault.rekey_rate = 0")?;
    cluster.sql(
        "CREATE TABLE u (name varchar(60) PRIMARY KEY);
         INSERT INTO u SELECT 'drossel-' || i FROM generate_series(1, 20000) i",
    )?;
    let file = "SELECT pg_relation_filenode('u_pkey')";
    let before = cluster.text(file)?;
    for (length, request, wanted) in [
        (70, "SECURITY LABEL FOR pagevault ON TABLE u IS 'encrypted'", PageState::Sealed(1)),
        (80, "SELECT pagevault.rotate_data_key('u')", PageState::Sealed(2)),
        (90, "SELECT pagevault.decrypt('u')", PageState::Plaintext),
    ] {
        // The job has not come to the index yet.
        cluster.stop_at("rekey.batch_done")?;
        cluster.sql(&format!("SET pagevault.rekey_threshold = 0; {request}"))?;
        cluster.stopped_at("rekey.batch_done")?;
        cluster.sql(&format!("ALTER TABLE u ALTER name TYPE varchar({length})"))?;
        cluster.resume();
        let done = cluster.text("SELECT pagevault.wait_for_rekey('u'::regclass, '60s')")?;
        ensure!(done == "t", "{request}: the job does not end");
        ensure!(cluster.text(file)? == before, "the index has a file of its own");
        cluster.sql("CHECKPOINT")?;
        for file in cluster.files("u_pkey")? {
            let others = |state: &PageState| ![PageState::Zero, wanted].contains(state);
            let other = file.states()?.into_iter().find(others);
            ensure!(other.is_none(), "{request}: a page is {other:?}");
        }
    }
    cluster.finish()
}

#[test]
fn a_database_is_dropped_before_its_worker_starts() -> Result<()> {
    let mut cluster = cluster("pagevault.rekey_rate = 1MB")?;
    cluster.allow_log("background worker \"pagevault rekey\"");
    cluster.sql("CREATE DATABASE app")?;
    let oid = cluster.text("SELECT oid FROM pg_database WHERE datname = 'app'")?;
    cluster.stop_at(&format!("rekey.worker {oid}"))?;
    let mut app = cluster.client_to("app")?;
    run_sql(
        &mut app,
        "CREATE EXTENSION pagevault; SET pagevault.default_encryption = on;
         CREATE TABLE t AS SELECT 1 AS id",
    )?;
    run_sql(&mut app, "SELECT pagevault.rotate_data_key('t')")?;
    drop(app);
    cluster.stopped_at("rekey.worker")?;
    cluster.sql("DROP DATABASE app")?;
    cluster.resume();
    cluster.eventually(
        "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pagevault rekey'",
        "0",
    )?;
    // The launcher continues with other jobs.
    let job = begun(&cluster)?;
    end(&cluster, &job)?;
    cluster.finish()
}

/// A database `app` with a table that a worker is rekeying; the client must be closed.
fn rekeying_in_app(cluster: &mut Cluster) -> Result<()> {
    cluster.allow_log("terminating background worker");
    cluster.sql("CREATE DATABASE app")?;
    let mut app = cluster.client_to("app")?;
    run_sql(
        &mut app,
        "CREATE EXTENSION pagevault; SET pagevault.default_encryption = on;
         CREATE TABLE t AS SELECT repeat(md5(i::text), 12) AS name FROM generate_series(1, 50000) i",
    )?;
    // Otherwise whoever reads rows first changes their pages, and all of them get the new key.
    run_sql(&mut app, "VACUUM t")?;
    run_sql(&mut app, "CHECKPOINT")?;
    run_sql(&mut app, "SELECT pagevault.rotate_data_key('t')")?;
    drop(app);
    is_rekeyed(cluster, "app")
}

fn is_rekeyed(cluster: &Cluster, database: &str) -> Result<()> {
    cluster.eventually(
        &format!(
            "SELECT count(*) FROM pg_stat_activity
             WHERE datname = '{database}' AND query LIKE 'pagevault: rotate%'"
        ),
        "1",
    )
}

#[test]
fn its_database_is_dropped() -> Result<()> {
    let mut cluster = cluster("pagevault.rekey_rate = 1MB")?;
    rekeying_in_app(&mut cluster)?;
    cluster.sql("DROP DATABASE app")?;
    // The launcher continues with other jobs.
    let job = begun(&cluster)?;
    end(&cluster, &job)?;
    assert_version(&cluster, 2)?;
    cluster.finish()
}

#[test]
fn its_database_is_copied_renamed_and_moved() -> Result<()> {
    let mut cluster = cluster("pagevault.rekey_rate = 512kB")?;
    cluster.make_tablespace("space")?;
    // Redo of a move finds that the old directory is gone.
    cluster.allow_log("could not open directory");
    cluster.allow_log("some useless files may be left behind");
    rekeying_in_app(&mut cluster)?;
    let contents = |database: &str| -> Result<String> {
        let query = "SELECT count(*) || ' ' || sum(hashtext(name)) FROM t";
        text(&mut cluster.client_to(database)?, query)
    };
    let before = contents("app")?;
    cluster.sql("CREATE DATABASE logged TEMPLATE app STRATEGY wal_log")?;
    is_rekeyed(&cluster, "app")?;
    cluster.sql("CREATE DATABASE copied TEMPLATE app STRATEGY file_copy")?;
    is_rekeyed(&cluster, "app")?;
    cluster.sql("ALTER DATABASE app SET TABLESPACE space")?;
    is_rekeyed(&cluster, "app")?;
    cluster.sql("ALTER DATABASE app RENAME TO named")?;
    is_rekeyed(&cluster, "named")?;
    cluster.set(&[("pagevault.rekey_rate", "0")])?;
    let done = "SELECT pagevault.wait_for_rekey(job, '60s') FROM pagevault.rekey_jobs";
    ensure!(text(&mut cluster.client_to("named")?, done)? == "t", "the job did not end");
    cluster.crash()?;
    for database in ["named", "logged", "copied"] {
        ensure!(contents(database)? == before, "{database} has other contents");
    }
    cluster.finish()
}

#[test]
fn somebody_waits_for_its_lock() -> Result<()> {
    let cluster = cluster("pagevault.rekey_rate = 1MB")?;
    let job = begun(&cluster)?;
    // Whoever has waited for `deadlock_timeout` cancels what the worker does.
    cluster.sql(
        "SELECT pg_cancel_backend(pid) FROM pg_stat_activity
         WHERE backend_type = 'pagevault rekey'",
    )?;
    cluster.eventually("SELECT state FROM pagevault.rekey_jobs", "running")?;
    end(&cluster, &job)?;
    assert_version(&cluster, 2)?;
    cluster.finish()
}

/// Files that are gone have no page under a former key; but they may come back.
#[test]
fn a_file_system_that_is_not_mounted_ends_no_job() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("could not open file");
    let space = cluster.directory().join("space");
    let away = cluster.directory().join("away");
    std::fs::create_dir(&space)?;
    cluster.installation().give(&space)?;
    cluster.sql(&format!("CREATE TABLESPACE space LOCATION '{}'", space.display()))?;
    cluster.sql(
        "CREATE TABLE far TABLESPACE space AS SELECT i AS id FROM generate_series(1, 1000) i",
    )?;
    cluster.sql("SELECT pagevault.encrypt('far')")?;
    let unmount = || -> Result<()> {
        std::fs::rename(&space, &away)?;
        std::fs::create_dir(&space)?;
        cluster.installation().give(&space)
    };
    let mount = || -> Result<()> {
        std::fs::remove_dir(&space)?;
        Ok(std::fs::rename(&away, &space)?)
    };
    let fails = |job: &str| -> Result<()> {
        let wait = format!("SELECT pagevault.wait_for_rekey({job}, '60s')");
        let error = cluster.error(&wait)?;
        ensure!(error.text().contains("could not open file"), "{error}");
        for call in ["is_encrypted('far')", "shred('far', confirm => 'public.far')"] {
            let error = cluster.error(&format!("SELECT pagevault.{call}"))?;
            ensure!(error.text().contains("could not read file"), "{call}: {error}");
        }
        Ok(())
    };
    let resume = |job: &str, version| -> Result<()> {
        cluster.sql(&format!("SELECT pagevault.resume_rekey({job})"))?;
        cluster.text(&format!("SELECT pagevault.wait_for_rekey({job}, '60s')"))?;
        for file in cluster.files("far")? {
            let mut found = versions_of(&file)?;
            found.dedup();
            ensure!(found == [version], "{found:?}");
        }
        Ok(())
    };
    // From the beginning.
    cluster.sql("CHECKPOINT")?;
    unmount()?;
    let job = cluster.text("SELECT pagevault.rotate_data_key('far')")?;
    fails(&job)?;
    mount()?;
    resume(&job, 2)?;
    // After the pages were written.
    cluster.stop_at("rekey.flushed")?;
    let job = cluster.text("SELECT pagevault.rotate_data_key('far')")?;
    cluster.stopped_at("rekey.flushed")?;
    unmount()?;
    cluster.resume();
    fails(&job)?;
    mount()?;
    resume(&job, 3)?;
    cluster.crash()?;
    ensure!(cluster.text("SELECT sum(id) FROM far")? == "500500", "rows");
    cluster.finish()
}
