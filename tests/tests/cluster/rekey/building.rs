//! Indexes that are being built. PostgreSQL writes their pages past shared buffers, into which a
//! job must read none of them meanwhile.

use anyhow::{Result, ensure};
use pagevault_tests::Cluster;
use pagevault_tests::cluster::run_sql;

use super::{cluster, versions};

const ADVISORY_LOCK: u32 = 4711;

/// Requests a job while `build` waits in the midst of building `t_held`. The job must wait for the
/// lock of `build`.
fn rotate_during(cluster: &Cluster, build: &str) -> Result<()> {
    let mut lock = cluster.client()?;
    run_sql(&mut lock, &format!("SELECT pg_advisory_lock({ADVISORY_LOCK})"))?;
    std::thread::scope(|scope| {
        let builder = scope.spawn(|| cluster.sql(build));
        let advisory = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory'";
        let waits = "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
             WHERE NOT granted AND mode = 'ShareUpdateExclusiveLock' AND backend_type = 'pagevault rekey'";
        let waited = cluster
            .eventually(advisory, "1")
            .and_then(|()| cluster.sql("SELECT pagevault.rotate_data_key('t')"))
            .and_then(|()| cluster.eventually(waits, "1"));
        run_sql(&mut lock, &format!("SELECT pg_advisory_unlock({ADVISORY_LOCK})"))?;
        let Ok(built) = builder.join() else { anyhow::bail!("the builder has panicked") };
        waited.and(built)
    })?;
    let done = cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass, '60s')")?;
    ensure!(done == "t", "the job does not end");
    cluster.sql("INSERT INTO t (name) VALUES ('new')")?;
    cluster.sql("SELECT bt_index_check('t_held', true)")
}

#[test]
fn a_job_waits_for_an_index_that_is_being_built() -> Result<()> {
    let cluster = cluster("pagevault.rekey_rate = 0")?;
    cluster.sql(&format!(
        "CREATE EXTENSION amcheck;
         CREATE FUNCTION held(id int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS $$
         BEGIN
             IF id = 1 THEN
                 PERFORM pg_advisory_lock_shared({ADVISORY_LOCK});
                 PERFORM pg_advisory_unlock_shared({ADVISORY_LOCK});
             END IF;
             RETURN id;
         END $$"
    ))?;
    rotate_during(&cluster, "CREATE INDEX CONCURRENTLY t_held ON t (held(id))")?;
    rotate_during(&cluster, "REINDEX INDEX CONCURRENTLY t_held")?;
    let found = versions(&cluster)?;
    ensure!(found.len() == 7, "not the family of t: {found:?}");
    for (relation, versions) in found {
        // REINDEX has made a new file.
        let wanted = if relation == "t_held" { [2] } else { [3] };
        ensure!(versions == wanted, "{relation}: {versions:?}");
    }
    cluster.finish()
}

/// Nobody builds an index that an interrupted command has left.
#[test]
fn a_job_does_not_wait_for_an_index_that_was_left_half_built() -> Result<()> {
    let cluster = cluster("pagevault.rekey_rate = 0")?;
    let error = cluster.error("CREATE UNIQUE INDEX CONCURRENTLY t_left ON t ((id / id))")?;
    ensure!(error.sqlstate == "23505", "{error}");
    let ready = "SELECT indisready FROM pg_index WHERE indexrelid = 't_left'::regclass";
    ensure!(cluster.text(ready)? == "f", "the index is ready");
    cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
    let done = cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass, '60s')")?;
    ensure!(done == "t", "the job does not end");
    cluster.finish()
}
