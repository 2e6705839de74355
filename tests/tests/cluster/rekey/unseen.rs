//! New storage of a relation that the job for it cannot see, because its transaction has not
//! committed. The policy that led to the job was not known when the storage was made.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::{Cluster, Installation, Settings};

use crate::assert_sealed;

const ADVISORY_LOCK: u32 = 4711;

fn cluster() -> Result<Cluster> {
    let settings = Settings::default().conf("pagevault.rekey_threshold = 0");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE TABLE t AS SELECT i AS id FROM generate_series(1, 1000) i")?;
    Ok(cluster)
}

/// Encrypts the database while `t` gets new storage, and looks whether the job for `t` tries to
/// begin, and does not.
fn encrypt_database(cluster: &Cluster) -> Result<()> {
    cluster.sql("SELECT * FROM pagevault.encrypt_database()")?;
    cluster.eventually(
        "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
         WHERE NOT granted AND backend_type = 'pagevault rekey'",
        "1",
    )
}

fn is_encrypted(cluster: &Cluster) -> Result<()> {
    let done = cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass, '60s')")?;
    ensure!(done == "t", "the job does not end");
    cluster.sql("CHECKPOINT")?;
    assert_sealed(&cluster.family_files("t")?)
}

#[test]
fn an_index_that_is_committed_later_is_encrypted() -> Result<()> {
    let cluster = cluster()?;
    let mut session = cluster.client()?;
    run_sql(&mut session, "BEGIN; CREATE INDEX ON t (id)")?;
    encrypt_database(&cluster)?;
    run_sql(&mut session, "COMMIT")?;
    is_encrypted(&cluster)?;
    cluster.finish()
}

/// Neither the session that sets a label sees them, nor its jobs.
#[test]
fn relations_that_are_committed_later_are_encrypted() -> Result<()> {
    let cluster = cluster()?;
    let mut session = cluster.client()?;
    run_sql(
        &mut session,
        "BEGIN; CREATE TABLE u (id serial PRIMARY KEY, name text);
         INSERT INTO u (name) SELECT repeat('x', 3000) FROM generate_series(1, 10);
         CREATE SEQUENCE q OWNED BY t.id;
         SAVEPOINT s; CREATE TABLE gone (id int); ROLLBACK TO s;
         SAVEPOINT s; CREATE TABLE w AS SELECT 1 AS id; RELEASE s;
         CREATE TABLE dropped (id int); DROP TABLE dropped",
    )?;
    cluster.sql("SECURITY LABEL FOR pagevault ON DATABASE postgres IS 'encrypted'")?;
    run_sql(&mut session, "INSERT INTO u (name) VALUES ('y'); COMMIT")?;
    cluster.sql("CHECKPOINT")?;
    for table in ["u", "w"] {
        assert_sealed(&cluster.family_files(table)?)?;
    }
    ensure!(cluster.text("SELECT count(*) FROM u")? == "11");
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    is_encrypted(&cluster)?;
    cluster.finish()
}

#[test]
fn a_sequence_that_is_committed_later_follows_its_table() -> Result<()> {
    let cluster = cluster()?;
    let mut session = cluster.client()?;
    run_sql(&mut session, "BEGIN; CREATE SEQUENCE q OWNED BY t.id; SELECT nextval('q')")?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    is_encrypted(&cluster)?;
    run_sql(&mut session, "COMMIT")?;
    cluster.sql("CHECKPOINT")?;
    assert_sealed(&cluster.files("q")?)?;
    cluster.finish()
}

#[test]
fn a_table_that_is_being_repacked_is_encrypted() -> Result<()> {
    if Installation::get()?.major < 19 {
        eprintln!("skipped: REPACK is new in PostgreSQL 19");
        return Ok(());
    }
    let cluster = cluster()?;
    // REPACK waits when it builds this index, and has the files of the new table by then.
    cluster.sql(&format!(
        "CREATE FUNCTION hold_repack(id int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS $$
         BEGIN
             IF current_query() LIKE 'REPACK%' THEN
                 PERFORM pg_advisory_lock_shared({ADVISORY_LOCK});
                 PERFORM pg_advisory_unlock_shared({ADVISORY_LOCK});
             END IF;
             RETURN id;
         END $$;
         ALTER TABLE t ADD PRIMARY KEY (id);
         CREATE INDEX ON t (hold_repack(id))"
    ))?;
    let mut lock = cluster.client()?;
    run_sql(&mut lock, &format!("SELECT pg_advisory_lock({ADVISORY_LOCK})"))?;
    std::thread::scope(|scope| {
        let repack = scope.spawn(|| cluster.sql("REPACK (CONCURRENTLY) t"));
        let asked = cluster
            .eventually("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory'", "1")
            .and_then(|()| encrypt_database(&cluster));
        run_sql(&mut lock, &format!("SELECT pg_advisory_unlock({ADVISORY_LOCK})"))?;
        let Ok(repacked) = repack.join() else { anyhow::bail!("the thread of REPACK panicked") };
        asked.and(repacked)
    })?;
    is_encrypted(&cluster)?;
    cluster.finish()
}
