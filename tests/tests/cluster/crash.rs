//! After kill -9, committed changes exist and no others.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};
use pagevault_tests::witnesses::Witnesses;
use pagevault_tests::{Cluster, Settings};

use crate::assert_sealed;

const BALANCES: &str = "SELECT concat_ws(' ',
    (SELECT sum(abalance) FROM pgbench_accounts),
    (SELECT sum(bbalance) FROM pgbench_branches),
    (SELECT sum(tbalance) FROM pgbench_tellers),
    (SELECT coalesce(sum(delta), 0) FROM pgbench_history))";

/// TPC-B's invariant: every transaction adds its delta once to each of the three balances.
fn assert_balanced(cluster: &Cluster) -> Result<()> {
    let sums = cluster.text(BALANCES)?;
    let mut sums_distinct: Vec<_> = sums.split(' ').collect();
    sums_distinct.dedup();
    ensure!(sums_distinct.len() == 1, "balances differ: {sums}");
    Ok(())
}

#[test]
fn balances_are_equal_after_kill_during_tpc_b() -> Result<()> {
    // Few buffers and frequent checkpoints, so that pages are written and read continually.
    let settings = Settings::default()
        .conf("shared_buffers = 2MB")
        .conf("checkpoint_timeout = 30s")
        .conf("wal_keep_size = 1GB")
        .conf("pagevault.default_encryption = on");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.pgbench(&["-i", "-q", "-s", "3"])?;
    let mut witnesses = Witnesses::of(&cluster)?;
    for round in 0..5_u64 {
        let mut load = cluster.pgbench_in_background(&["-n", "-c", "4", "-j", "2", "-T", "60"])?;
        sleep(Duration::from_millis(1500 + 400 * round));
        if round % 2 == 1 {
            cluster.sql("CHECKPOINT")?;
        }
        if round == 2 {
            witnesses.back_up(&cluster, "TPC-B")?;
        }
        cluster.kill()?;
        load.wait()?;
        cluster.start_server()?;
        assert_balanced(&cluster)?;
    }
    let done: u64 = cluster.text("SELECT count(*) FROM pgbench_history")?.parse()?;
    ensure!(done > 0, "no transaction was made");
    cluster.sql("CHECKPOINT")?;
    let tables = ["pgbench_accounts", "pgbench_branches", "pgbench_tellers", "pgbench_history"];
    for table in tables {
        assert_sealed(&cluster.family_files(table)?)?;
    }
    witnesses.judge(&cluster, &[BALANCES], &tables)?;
    cluster.finish()
}

#[test]
fn kill_during_key_creation_leaves_every_table_readable() -> Result<()> {
    // Key files must be correct at several moments, with fsync and without.
    let settings = Settings::default().conf("fsync = on").conf("wal_keep_size = 1GB");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE TABLE done (name text)")?;
    // Each transaction creates a table with an index and a TOAST table, truncates an older one, and
    // drops a third. So keys are created and removed in all ways.
    cluster.sql(
        "CREATE PROCEDURE churn() LANGUAGE plpgsql AS $$
         DECLARE n bigint := (SELECT count(*) FROM done); old text;
         BEGIN
             SET pagevault.default_encryption = on;
             LOOP
                 n := n + 1;
                 EXECUTE format('CREATE TABLE t_%s (id int PRIMARY KEY, name text)', n);
                 EXECUTE format('INSERT INTO t_%s SELECT i, repeat(md5(i::text), 100)
                                 FROM generate_series(1, 20) i', n);
                 INSERT INTO done VALUES ('t_' || n);
                 IF n % 3 = 0 THEN
                     EXECUTE format('TRUNCATE t_%s', n - 1);
                     EXECUTE format('INSERT INTO t_%s SELECT i, repeat(md5(i::text), 100)
                                     FROM generate_series(1, 20) i', n - 1);
                 END IF;
                 COMMIT;
             END LOOP;
         END $$",
    )?;
    cluster.sql(
        "CREATE FUNCTION rows_of(name text) RETURNS bigint LANGUAGE plpgsql AS $$
         DECLARE found bigint;
         BEGIN
             EXECUTE format('SELECT count(name) FROM %I', name) INTO found;
             RETURN found;
         END $$",
    )?;
    let mut witnesses = Witnesses::with(&cluster, &["fsync = off"])?;
    let wrong = "SELECT count(*) FROM done WHERE rows_of(name) <> 20";
    for round in 0..8_u64 {
        let churn = {
            let mut client = cluster.client()?;
            // Ends with an error when the server is killed, as intended.
            std::thread::spawn(move || drop(client.batch_execute("CALL churn()")))
        };
        sleep(Duration::from_millis(300 + 173 * round));
        if round == 4 {
            witnesses.back_up(&cluster, "keys are made")?;
        }
        cluster.crash()?;
        let _ = churn.join();
        let wrong = cluster.text(wrong)?;
        ensure!(wrong == "0", "{wrong} tables are damaged after round {round}");
    }
    let tables: u64 = cluster.text("SELECT count(*) FROM done")?.parse()?;
    ensure!(tables > 8, "only {tables} tables were made in all rounds");
    // Again after a clean stop, which rewrites nothing but must find every key.
    cluster.restart()?;
    for name in ["t_1", "t_2", "t_3"] {
        ensure!(cluster.text(&format!("SELECT count(name) FROM {name}"))? == "20", "{name}");
        assert_sealed(&cluster.family_files(name)?)?;
    }
    let made = "SELECT count(*) FROM done";
    witnesses.judge(&cluster, &[made, wrong], &["t_1", "t_2", "t_3"])?;
    cluster.finish()
}

#[test]
fn unlogged_tables_are_empty_and_usable_after_a_crash() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default().conf("wal_keep_size = 1GB"))?;
    cluster.sql(
        "SET pagevault.default_encryption = on; \
                 CREATE UNLOGGED TABLE u (id int PRIMARY KEY, name text); \
                 CREATE INDEX u_hash ON u USING hash (name); \
                 CREATE INDEX u_gin ON u USING gin (string_to_array(name, ' '))",
    )?;
    cluster.sql("INSERT INTO u SELECT i, 'kanarienvogel ' || i FROM generate_series(1, 5000) i")?;
    let witnesses = Witnesses::of(&cluster)?;
    // A checkpoint does not write unlogged relations, a shutdown does.
    cluster.restart()?;
    assert_sealed(&cluster.family_files("u")?)?;
    cluster.crash()?;
    ensure!(cluster.text("SELECT count(*) FROM u")? == "0", "an unlogged table kept rows");
    cluster.sql("INSERT INTO u SELECT i, 'kanarienvogel ' || i FROM generate_series(1, 5000) i")?;
    ensure!(
        cluster
            .text("SET enable_seqscan = off; SELECT id FROM u WHERE name = 'kanarienvogel 17'")?
            == "17",
        "the index does not find a row"
    );
    // A clean restart keeps the rows.
    cluster.restart()?;
    assert_sealed(&cluster.family_files("u")?)?;
    ensure!(cluster.text("SELECT count(*) FROM u")? == "5000", "rows are lost by a clean restart");
    // Witnesses create them again when they are promoted.
    witnesses.judge_and(&cluster, &["SELECT count(*) FROM pg_class"], &[], |witness| {
        ensure!(witness.text("SELECT count(*) FROM u")? == "0", "an unlogged table has rows");
        witness
            .sql("INSERT INTO u SELECT i, 'kanarienvogel ' || i FROM generate_series(1, 500) i")?;
        witness.restart()?;
        assert_sealed(&witness.family_files("u")?)?;
        ensure!(witness.text("SELECT count(*) FROM u")? == "500", "rows are lost");
        Ok(())
    })?;
    cluster.finish()
}

#[test]
fn temporary_tables_work_and_end_with_their_session() -> Result<()> {
    let settings = Settings::default().conf("temp_buffers = 800kB");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    let mut client = cluster.client()?;
    pagevault_tests::cluster::run_sql(
        &mut client,
        "SET pagevault.default_encryption = on;
         CREATE TEMPORARY TABLE scratch (id int PRIMARY KEY, name text);
         INSERT INTO scratch
             SELECT i, 'kanarienvogel ' || i || repeat('x', 300) FROM generate_series(1, 20000) i;
         CREATE TABLE beside (id int);",
    )?;
    let count = "SELECT count(*) FROM scratch WHERE name LIKE 'kanarienvogel%'";
    ensure!(pagevault_tests::cluster::text(&mut client, count)? == "20000", "rows are missing");
    pagevault_tests::cluster::run_sql(
        &mut client,
        "UPDATE scratch SET name = name || 'y'; REINDEX TABLE scratch",
    )?;
    pagevault_tests::cluster::run_sql(&mut client, "VACUUM FULL scratch")?;
    ensure!(pagevault_tests::cluster::text(&mut client, count)? == "20000", "rows are missing");
    let path =
        pagevault_tests::cluster::text(&mut client, "SELECT pg_relation_filepath('scratch')")?;
    let files = pagevault_tests::DataFile::find(&cluster.data_directory().join(path))?;
    for file in &files {
        ensure!(!file.contains_text("kanarienvogel")?, "plaintext in {}", file.path.display());
    }
    cluster.kill()?;
    drop(client);
    cluster.start_server()?;
    ensure!(cluster.text("SELECT count(*) FROM beside")? == "0", "a table beside is lost");
    cluster.finish()
}

#[test]
fn a_backend_crash_restarts_without_asking_the_provider() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&Settings::default().conf("wal_keep_size = 1GB"))?;
    cluster.allow_log("terminating connection because of crash of another server process");
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE t (id int)")?;
    cluster.sql("INSERT INTO t SELECT generate_series(1, 1000)")?;
    let witnesses = Witnesses::of(&cluster)?;
    keys.take_away()?;

    let mut client = cluster.client()?;
    let pid = pagevault_tests::cluster::text(&mut client, "SELECT pg_backend_pid()")?;
    let pid = rustix::process::Pid::from_raw(pid.parse()?)
        .ok_or_else(|| anyhow::anyhow!("backend {pid}"))?;
    cluster.crash_process(pid)?;
    drop(client);
    let count = cluster.text("SELECT count(*) FROM t")?;
    ensure!(count == "1000", "{count} rows after the restart");
    // New tables can be created too: the database key is available, not only data keys.
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE u (id int)")?;
    cluster.sql("INSERT INTO u VALUES (1)")?;
    keys.bring_back()?;
    witnesses.judge(
        &cluster,
        &["SELECT count(*) FROM t", "SELECT count(*) FROM u"],
        &["t", "u"],
    )?;
    cluster.finish()
}

/// From 19 on, scans of tables set bits of the visibility map as VACUUM does. Without checksums the
/// record has no image of the heap page.
#[test]
fn visibility_maps_that_scans_have_set_are_sealed_and_replayed() -> Result<()> {
    const ROWS: &str = "SELECT count(*) || ' ' || sum(id) FROM t";
    const BY_INDEX: &str = "SET enable_seqscan = off; SET enable_bitmapscan = off;
        SELECT count(id) || ' ' || sum(id) FROM t WHERE id > 0";
    for settings in [Settings::default(), Settings::default().without_checksums()] {
        let settings = settings.conf("autovacuum = off").conf("pagevault.default_encryption = on");
        let (cluster, _keys) = Cluster::with_keys(&settings)?;
        cluster.sql(
            "CREATE TABLE t (id int PRIMARY KEY, name text);
             INSERT INTO t SELECT i, 'name' FROM generate_series(1, 5000) i",
        )?;
        cluster.sql("CHECKPOINT")?;
        let expected = cluster.text(ROWS)?;
        let pages = "SELECT pg_relation_size('t', 'vm') > 0";
        let has_map = cluster.text(pages)? == "t";
        ensure!(has_map == (cluster.installation().major >= 19), "after a scan: {has_map}");
        cluster.sql("VACUUM t")?;
        cluster.sql("UPDATE t SET name = 'other' WHERE id % 500 = 0")?;
        ensure!(cluster.text(ROWS)? == expected, "other rows");
        cluster.crash()?;
        ensure!(cluster.text(BY_INDEX)? == expected, "other rows by the index after the crash");
        ensure!(cluster.text(ROWS)? == expected, "other rows after the crash");
        cluster.sql("CHECKPOINT")?;
        assert_sealed(&cluster.family_files("t")?)?;
        cluster.finish()?;
    }
    Ok(())
}
