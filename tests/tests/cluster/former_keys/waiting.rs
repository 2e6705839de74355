//! Nobody can hold up the forgetting of others' keys, nor the end of the server.

use super::*;

/// The owner of the database `theirs` locks it by a prepared transaction, so that no worker can
/// connect to it.
fn lock_by_owner(cluster: &Cluster) -> Result<()> {
    // Workers of pagevault and of the server may be there, and are waited for.
    cluster.eventually_that("the database is locked", || {
        let mut session = cluster.client()?;
        run_sql(&mut session, "SET ROLE owner; BEGIN")?;
        run_sql(&mut session, "ALTER DATABASE theirs RENAME TO mine")?;
        run_sql(&mut session, "PREPARE TRANSACTION 'lock'")
    })
}

/// A locked database of a role without further rights, in which an encrypted table was dropped.
fn locked_by_its_owner() -> Result<(Cluster, KeyFile)> {
    let settings = settings().conf("max_prepared_transactions = 2");
    let (cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.sql(
        "CREATE TABLE t (id int PRIMARY KEY, name text);
         SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted';
         INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 3000) i;
         CREATE ROLE owner LOGIN CREATEDB",
    )?;
    cluster.sql("CREATE DATABASE theirs OWNER owner")?;
    let mut theirs = cluster.client_to("theirs")?;
    run_sql(&mut theirs, "CREATE TABLE u AS SELECT 1 AS id")?;
    run_sql(&mut theirs, "SECURITY LABEL FOR pagevault ON TABLE u IS 'encrypted'")?;
    run_sql(&mut theirs, "DROP TABLE u")?;
    drop(theirs);
    lock_by_owner(&cluster)?;
    Ok((cluster, keys))
}

#[test]
fn a_locked_database_delays_neither_others_nor_the_end_of_the_server() -> Result<()> {
    let (mut cluster, _keys) = locked_by_its_owner()?;
    cluster.allow_log("canceling statement due to lock timeout");
    for _ in 0..2 {
        cluster.sql("VACUUM FULL t")?;
        forgets(&cluster)?;
    }
    // Workers try to connect now. Each of them ends at once.
    cluster.sql("CHECKPOINT")?;
    thread::sleep(TWO_ROUNDS);
    cluster.stop(StopMode::Fast)?;
    cluster.start_server()?;
    cluster.sql("CHECKPOINT")?;
    thread::sleep(TWO_ROUNDS);
    cluster.stop(StopMode::Fast)?;
    cluster.start_server()?;
    cluster.sql("ROLLBACK PREPARED 'lock'")?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "3000");
    Ok(())
}

/// A worker for the jobs of a locked database does not keep the server from stopping, nor other
/// databases from getting a worker.
#[test]
fn jobs_of_a_locked_database_delay_neither_others_nor_the_end_of_the_server() -> Result<()> {
    let settings = settings()
        .conf("max_prepared_transactions = 2")
        .conf("pagevault.rekey_workers = 1")
        .conf("pagevault.keep_former_keys = -1");
    let (mut cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.allow_log("canceling statement due to lock timeout");
    cluster.sql("CREATE ROLE owner LOGIN CREATEDB")?;
    cluster.sql("CREATE DATABASE theirs OWNER owner")?;
    let mut theirs = cluster.client_to("theirs")?;
    run_sql(&mut theirs, "CREATE EXTENSION pagevault; CREATE TABLE u AS SELECT 1 AS id")?;
    // The job begins when the database is locked.
    cluster.set(&[("pagevault.rekey_workers", "0")])?;
    cluster.eventually("SHOW pagevault.rekey_workers", "0")?;
    run_sql(&mut theirs, "SELECT pagevault.encrypt('u')")?;
    drop(theirs);
    lock_by_owner(&cluster)?;
    cluster.sql("CREATE TABLE v AS SELECT 2 AS id")?;
    cluster.sql("SET pagevault.rekey_threshold = 0; SELECT pagevault.encrypt('v')")?;
    cluster.set(&[("pagevault.rekey_workers", "1")])?;
    cluster.eventually(
        "SELECT state FROM pagevault.rekey_jobs WHERE relation = 'v'::regclass",
        "done",
    )?;
    cluster.stop(StopMode::Fast)?;
    cluster.start_server()?;
    cluster.sql("ROLLBACK PREPARED 'lock'")?;
    Ok(())
}

/// VACUUM may take hours, and makes no files.
#[test]
fn a_vacuum_delays_nothing() -> Result<()> {
    let (cluster, _keys) = cluster()?;
    cluster.sql(
        "CREATE TABLE wide AS SELECT repeat(md5(i::text), 100) FROM generate_series(1, 20000) i",
    )?;
    let mut session = cluster.client()?;
    run_sql(&mut session, "SET vacuum_cost_delay = '100ms'; SET vacuum_cost_limit = 1")?;
    let pid = text(&mut session, "SELECT pg_backend_pid()")?;
    let vacuum = thread::spawn(move || session.batch_execute("VACUUM wide"));
    cluster.eventually("SELECT count(*) FROM pg_stat_progress_vacuum", "1")?;
    cluster.sql("VACUUM FULL t")?;
    forgets(&cluster)?;
    ensure!(cluster.text("SELECT count(*) FROM pg_stat_progress_vacuum")? == "1", "too short");
    cluster.sql(&format!("SELECT pg_cancel_backend({pid})"))?;
    ensure!(vacuum.join().is_ok_and(|ended| ended.is_err()), "it was not cancelled");
    Ok(())
}
