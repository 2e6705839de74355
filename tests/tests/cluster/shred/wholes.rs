//! Partitions, schemas and databases.

use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::thread;

use pagevault_tests::unreading::UnreadingClient;

use super::*;

/// DROP TABLE of the partitioned table drops it.
#[test]
fn a_partition_whose_detaching_was_interrupted_is_shredded_with_its_table() -> Result<()> {
    let (cluster, _keys) = cluster("")?;
    cluster.sql(
        "SET pagevault.default_encryption = on; CREATE TABLE p (id int) PARTITION BY LIST (id);
         CREATE TABLE one PARTITION OF p FOR VALUES IN (1); INSERT INTO p VALUES (1)",
    )?;
    let mut reader = cluster.client()?;
    run_sql(&mut reader, "BEGIN; SELECT * FROM p")?;
    let detach = "SET lock_timeout = '100ms'; ALTER TABLE p DETACH PARTITION one CONCURRENTLY";
    let mut client = cluster.client()?;
    for statement in detach.split("; ") {
        let interrupted = run_sql(&mut client, statement).is_err();
        ensure!(interrupted == statement.contains("DETACH"), "nobody had to be waited for");
    }
    run_sql(&mut reader, "COMMIT")?;
    ensure!(cluster.text("SELECT count(*) FROM p")? == "0", "the partition is not away");
    let destroyed = "SELECT string_agg(object, ' ') FROM pagevault.shred('p', 'public.p') WHERE item = 'destroyed'";
    let destroyed = cluster.text(destroyed)?;
    ensure!(destroyed.contains("one"), "{destroyed}");
    drop((reader, client));
    cluster.finish()
}

#[test]
fn partitions_and_schemas_are_shredded_as_a_whole() -> Result<()> {
    let (cluster, _keys) = cluster("")?;
    cluster.sql(
        "SET pagevault.default_encryption = on; CREATE SCHEMA s; CREATE SCHEMA other;
         CREATE TABLE s.p (id int PRIMARY KEY, name text) PARTITION BY RANGE (id);
         CREATE TABLE s.p1 PARTITION OF s.p FOR VALUES FROM (0) TO (100);
         CREATE TABLE other.p2 PARTITION OF s.p FOR VALUES FROM (100) TO (200) PARTITION BY RANGE (id);
         CREATE TABLE other.p3 PARTITION OF other.p2 FOR VALUES FROM (100) TO (200);
         INSERT INTO s.p SELECT i, 'meise' FROM generate_series(0, 199) i;
         CREATE TABLE s.x (id serial, name text); INSERT INTO s.x (name) VALUES ('meise');
         CREATE UNLOGGED TABLE s.y AS SELECT 1 AS id;
         CREATE MATERIALIZED VIEW s.m AS SELECT count(*) FROM s.p;
         CREATE SEQUENCE s.q; SELECT nextval('s.q');
         CREATE TABLE other.keep AS SELECT 1 AS id",
    )?;
    // One partition; the others stay.
    cluster.sql("SELECT * FROM pagevault.shred('s.p1', 's.p1')")?;
    ensure!(cluster.text("SELECT count(*) FROM s.p WHERE id >= 100")? == "100", "pruned");
    let error = cluster.error("SELECT count(*) FROM s.p")?;
    ensure!(error.text().contains("were destroyed"), "{error}");
    cluster.sql("DROP TABLE s.p1")?;
    ensure!(cluster.text("SELECT count(*) FROM s.p")? == "100", "without the partition");

    let rows = column(
        &mut cluster.client()?,
        "SELECT object FROM pagevault.shred_schema('s', 's') WHERE item = 'destroyed'",
    )?;
    for name in ["other.p3", "other.p3_pkey", "s.x", "s.x_id_seq", "s.y", "s.m", "s.q"] {
        ensure!(rows.iter().any(|row| row == name), "{name} is not in {rows:?}");
    }
    for name in ["s.p", "other.p3", "s.x", "s.y", "s.m", "s.q"] {
        let error = cluster.error(&format!("SELECT * FROM {name}"))?;
        ensure!(error.text().contains("were destroyed"), "{name}: {error}");
    }
    cluster.crash()?;
    // After a crash an unlogged table is reset from its init fork, which is shredded too.
    let error = cluster.error("SELECT * FROM s.y")?;
    ensure!(error.text().contains("were destroyed"), "{error}");
    ensure!(cluster.text("SELECT id FROM other.keep")? == "1", "another schema");
    cluster.sql("CHECKPOINT; DROP SCHEMA s CASCADE")?;
    cluster.restart()?;
    ensure!(cluster.text("SELECT id FROM other.keep")? == "1", "another schema");
    cluster.finish()
}

/// They belong to no partition, and their table has no file.
#[test]
fn sequences_of_partitioned_tables_are_shredded_too() -> Result<()> {
    let (cluster, _keys) = cluster("")?;
    for (schema, shred) in [
        ("a", "SELECT object FROM pagevault.shred('a.p', 'a.p') WHERE item = 'destroyed'"),
        ("b", "SELECT object FROM pagevault.shred_schema('b', 'b') WHERE item = 'destroyed'"),
    ] {
        cluster.sql(&format!(
            "SET pagevault.default_encryption = on; CREATE SCHEMA {schema};
             CREATE TABLE {schema}.p (id bigint GENERATED ALWAYS AS IDENTITY, n serial) PARTITION BY LIST (n);
             CREATE TABLE {schema}.one PARTITION OF {schema}.p DEFAULT;
             INSERT INTO {schema}.p DEFAULT VALUES"
        ))?;
        let sequence = format!("{schema}.p_n_seq");
        let alone = format!("SELECT pagevault.shred('{sequence}', '{sequence}')");
        let error = cluster.error(&alone)?;
        ensure!(error.message.contains("goes along with another relation"), "{error}");
        let mut rows = column(&mut cluster.client()?, shred)?;
        rows.sort();
        let wanted = ["one", "p_id_seq", "p_n_seq"].map(|name| format!("{schema}.{name}"));
        ensure!(rows == wanted, "{rows:?}");
        for name in wanted {
            let error = cluster.error(&format!("SELECT * FROM {name}"))?;
            ensure!(error.text().contains("were destroyed"), "{name}: {error}");
        }
    }
    cluster.finish()
}

#[test]
fn a_database_is_shredded_as_a_whole() -> Result<()> {
    let (mut primary, _keys) = cluster("")?;
    // The rekey launcher may connect to the database when it is dropped.
    primary.allow_log("pagevault rekey FATAL:  database");
    primary.sql("CREATE DATABASE app")?;
    let mut app = primary.client_to("app")?;
    run_sql(&mut app, "CREATE EXTENSION pagevault; SET pagevault.default_encryption = on")?;
    run_sql(
        &mut app,
        "CREATE TABLE secret (id int PRIMARY KEY, name text);
         INSERT INTO secret SELECT i, 'meise ' || i FROM generate_series(1, 1000) i;
         CREATE TABLE old AS SELECT * FROM secret",
    )?;
    let mut keys = wrapped_keys(&primary, "app", "old")?;
    // The key of a removed file is kept.
    run_sql(&mut app, "DROP TABLE old")?;
    drop(app);
    primary.sql("CREATE DATABASE clone TEMPLATE app STRATEGY file_copy")?;
    keys.extend(wrapped_keys(&primary, "app", "secret")?);
    ensure!(keys.len() == 2, "{} keys", keys.len());
    let mut standby = standby_of(&primary, &["shared_buffers = 512kB"])?;
    standby.allow_log("terminating connection due to conflict with recovery");
    let mut reader = standby.client_to("app")?;
    ensure!(text(&mut reader, "SELECT count(*) FROM secret")? == "1000", "standby");

    let shred =
        "SELECT item || ' ' || object FROM pagevault.shred_database('app', confirm => 'app')";
    let app = primary.client_to("app")?;
    let error = primary.error(shred)?;
    ensure!(error.sqlstate == "55006" && error.text().contains("Sessions: 1"), "{error}");
    drop(app);
    let rows = column(&mut primary.client()?, shred)?;
    ensure!(rows.iter().any(|row| row.starts_with("same key")), "{rows:?}");
    ensure_gone(&primary, &keys)?;
    let unreadable = |cluster: &Cluster| -> Result<()> {
        let error = expect_error(&mut cluster.client_to("app")?, "SELECT * FROM secret")?;
        ensure!(error.text().contains("were destroyed"), "{error}");
        let clone = text(&mut cluster.client_to("clone")?, "SELECT count(*) FROM secret")?;
        ensure!(clone == "1000", "the copy");
        Ok(())
    };
    unreadable(&primary)?;
    wait_for(&standby, &primary)?;
    ensure!(reader.batch_execute("SELECT 1").is_err(), "a session of the standby is still there");
    unreadable(&standby)?;
    ensure_gone(&standby, &keys)?;
    standby.kill()?;
    standby.start_server()?;
    unreadable(&standby)?;

    // Shredded files are copied unchanged.
    primary.sql("CREATE DATABASE late TEMPLATE app STRATEGY file_copy")?;
    let error = expect_error(&mut primary.client_to("late")?, "SELECT * FROM secret")?;
    ensure!(error.text().contains("were destroyed"), "{error}");
    primary.crash()?;
    unreadable(&primary)?;
    primary.sql("DROP DATABASE app")?;
    primary.sql("CHECKPOINT")?;
    wait_for(&standby, &primary)?;
    standby.finish()?;
    primary.finish()
}

/// A session of a standby waits for another connection of its own to the database, and cannot be
/// ended meanwhile (dblink, up to 16).
#[test]
fn a_session_that_connects_to_its_own_database_holds_up_no_redo() -> Result<()> {
    let (primary, _keys) = cluster("")?;
    primary.sql("CREATE DATABASE app")?;
    let mut app = primary.client_to("app")?;
    run_sql(&mut app, "CREATE EXTENSION pagevault; CREATE EXTENSION dblink")?;
    run_sql(&mut app, "CREATE TABLE secret (id int); SELECT pagevault.encrypt('secret')")?;
    drop(app);
    let mut standby = standby_of(&primary, &[])?;
    standby.allow_log("conflict with recovery");
    standby.allow_log("could not establish connection");
    standby.allow_log("accepts no connections while its keys are being destroyed");
    standby.allow_log("were destroyed");
    wait_for(&standby, &primary)?;
    let mut idle = standby.client_to("app")?;
    let pid = text(&mut idle, "SELECT pg_backend_pid()")?;
    let mut asking = standby.client_to("app")?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let connect = format!(
        "SELECT dblink_connect('host=127.0.0.1 port={} dbname=app user=postgres')",
        listener.local_addr()?.port()
    );
    let asking = thread::spawn(move || run_sql(&mut asking, &connect));
    let (client, _) = listener.accept()?;
    primary.sql("SELECT * FROM pagevault.shred_database('app', 'app')")?;
    // Now both sessions are told to end.
    let left = format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {pid}");
    standby.eventually(&left, "0")?;
    // Sessions that begin meanwhile read nothing.
    for _ in 0..3 {
        let read = standby.client_to("app").and_then(|mut client| {
            client.batch_execute("SELECT count(*) FROM secret").map_err(Into::into)
        });
        ensure!(read.is_err(), "a session reads what is shredded");
    }
    let server = UnixStream::connect(standby.directory().join(".s.PGSQL.5432"))?;
    let (mut from_client, mut to_client) = (client.try_clone()?, client);
    let (mut from_server, mut to_server) = (server.try_clone()?, server);
    thread::spawn(move || io::copy(&mut from_client, &mut to_server));
    thread::spawn(move || io::copy(&mut from_server, &mut to_client));
    wait_for(&standby, &primary)?;
    ensure!(asking.join().is_ok_and(|asked| asked.is_err()), "the session has not ended");
    standby.finish()?;
    primary.finish()
}

/// From 18 on, a session that sends to its client hears of no conflict with recovery.
#[test]
fn a_client_that_does_not_read_holds_up_no_redo() -> Result<()> {
    let (primary, _keys) = cluster("")?;
    primary.sql("CREATE DATABASE app")?;
    let mut app = primary.client_to("app")?;
    run_sql(&mut app, "CREATE EXTENSION pagevault")?;
    run_sql(&mut app, "CREATE TABLE secret (id int); SELECT pagevault.encrypt('secret')")?;
    drop(app);
    let mut standby = standby_of(&primary, &[])?;
    standby.allow_log("terminating connection");
    standby.allow_log("connection to client lost");
    wait_for(&standby, &primary)?;
    let query = "SELECT repeat('x', 1000) FROM generate_series(1, 1000000)";
    let unreading = UnreadingClient::new(&standby, "app", query)?;
    primary.sql("SELECT * FROM pagevault.shred_database('app', 'app')")?;
    wait_for(&standby, &primary)?;
    drop(unreading);
    standby.finish()?;
    primary.finish()
}

/// If the catalogs are sealed, nobody can log in any more.
#[test]
fn a_labelled_database_is_shredded_with_its_catalogs() -> Result<()> {
    let (mut cluster, _keys) = cluster("")?;
    cluster.allow_log("were destroyed");
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    cluster.sql("CREATE DATABASE app")?;
    cluster.sql("CREATE DATABASE half")?;
    for database in ["app", "half"] {
        let mut client = cluster.client_to(database)?;
        run_sql(&mut client, "CREATE EXTENSION pagevault")?;
        if database == "app" {
            run_sql(&mut client, "SECURITY LABEL FOR pagevault ON DATABASE app IS 'encrypted'")?;
            run_sql(&mut client, "SELECT pagevault.encrypt_database()")?;
        }
        run_sql(
            &mut client,
            "CREATE TABLE secret (id int PRIMARY KEY, name text);
             SECURITY LABEL FOR pagevault ON TABLE secret IS 'encrypted';
             CREATE TABLE open (id int);
             INSERT INTO secret SELECT i, 'meise ' || i FROM generate_series(1, 1000) i",
        )?;
        run_sql(&mut client, "ANALYZE")?;
    }
    let statistics = wrapped_keys(&cluster, "half", "pg_statistic")?;
    ensure!(!statistics.is_empty(), "statistics are not sealed");
    let mut keys = wrapped_keys(&cluster, "app", "pg_class")?;
    ensure!(!keys.is_empty(), "catalogs are not sealed");
    keys.extend(statistics);
    keys.extend(wrapped_keys(&cluster, "app", "secret")?);
    let u = cluster.text(U)?;
    cluster.sql("SELECT * FROM pagevault.shred_database('app', 'app')")?;
    cluster.sql("SELECT * FROM pagevault.shred_database('half', 'half')")?;
    ensure_gone(&cluster, &keys)?;
    let check = || -> Result<()> {
        let error = match cluster.client_to("app") {
            Err(error) => format!("{error:#} {error:?}"),
            Ok(mut client) => expect_error(&mut client, "SELECT * FROM secret")?.to_string(),
        };
        ensure!(error.contains("were destroyed"), "{error}");
        let mut half = cluster.client_to("half")?;
        let error = expect_error(&mut half, "SELECT * FROM secret WHERE id = 1")?;
        ensure!(error.text().contains("were destroyed"), "{error}");
        // Planned without statistics.
        text(&mut half, "SELECT count(*) FROM open WHERE id = 1")?;
        ensure!(cluster.text(U)? == u, "the other table is not as it was");
        Ok(())
    };
    check()?;
    cluster.kill()?;
    cluster.start_server()?;
    check()?;
    cluster.sql("SELECT pagevault.rotate_wal_key()")?;
    cluster.sql("DROP DATABASE app")?;
    cluster.sql("DROP DATABASE half")?;
    cluster.sql("CHECKPOINT")?;
    cluster.crash()?;
    ensure!(cluster.text(U)? == u, "the other table is not as it was");
    cluster.finish()
}

/// A standby's buffers of unencrypted files are not yet on its disk.
#[test]
fn plaintext_files_of_a_shredded_database_stay_intact() -> Result<()> {
    let (primary, _keys) = cluster("")?;
    primary.sql("CREATE DATABASE app")?;
    run_sql(&mut primary.client_to("app")?, "CREATE EXTENSION pagevault")?;
    let mut standby = standby_of(&primary, &["restart_after_crash = off"])?;
    standby.allow_log("terminating connection due to conflict with recovery");
    let mut app = primary.client_to("app")?;
    run_sql(
        &mut app,
        "SET pagevault.default_encryption = on;
         CREATE TABLE secret AS SELECT 'meise' AS name;
         SET pagevault.default_encryption = off;
         CREATE TABLE open (id int PRIMARY KEY); INSERT INTO open SELECT generate_series(1, 1000)",
    )?;
    drop(app);
    wait_for(&standby, &primary)?;
    primary.sql("SELECT * FROM pagevault.shred_database('app', confirm => 'app')")?;
    wait_for(&standby, &primary)?;
    let count = |server: &Cluster| text(&mut server.client_to("app")?, "SELECT count(*) FROM open");
    ensure!(count(&primary)? == "1000", "primary");
    ensure!(count(&standby)? == "1000", "standby: {}", count(&standby)?);
    run_sql(&mut primary.client_to("app")?, "INSERT INTO open SELECT generate_series(1001, 1100)")?;
    wait_for(&standby, &primary)?;
    standby.crash()?;
    wait_for(&standby, &primary)?;
    ensure!(count(&standby)? == "1100", "standby");
    standby.finish()?;
    primary.finish()
}

/// Pages that cannot be seen may be plaintext, which outlives all keys.
#[test]
fn a_database_in_an_absent_tablespace_is_not_shredded() -> Result<()> {
    // The job looks from time to time whether it was cancelled: it must not end before.
    let (cluster, _keys) = cluster("pagevault.rekey_rate = 64kB")?;
    let space = cluster.make_tablespace("space")?;
    cluster.sql("CREATE DATABASE app")?;
    let mut app = cluster.client_to("app")?;
    run_sql(
        &mut app,
        "CREATE EXTENSION pagevault;
         CREATE TABLE half TABLESPACE space AS
           SELECT repeat('meise', 100) AS name FROM generate_series(1, 10000)",
    )?;
    cluster.sql("CHECKPOINT")?;
    cluster.stop_at("rekey.batch_done")?;
    run_sql(&mut app, "SET pagevault.rekey_threshold = 0; SELECT pagevault.encrypt('half')")?;
    cluster.stopped_at("rekey.batch_done")?;
    run_sql(&mut app, "SELECT pagevault.cancel_rekey(job) FROM pagevault.rekey_jobs")?;
    cluster.resume();
    drop(app);
    cluster.eventually("SELECT count(*) FROM pg_stat_activity WHERE datname = 'app'", "0")?;
    let shred = "SELECT * FROM pagevault.shred_database('app', confirm => 'app')";
    let error = cluster.error(shred)?;
    ensure!(error.text().contains("not wholly encrypted"), "{error}");
    let version = std::fs::read_dir(&space)?.next().context("a directory")??.path();
    let away = cluster.directory().join("away");
    std::fs::rename(&version, &away)?;
    let error = cluster.error(shred);
    std::fs::rename(&away, &version)?;
    let error = error?;
    ensure!(error.sqlstate == "55000" && error.text().contains("does not exist"), "{error}");
    ensure!(text(&mut cluster.client_to("app")?, "SELECT count(*) FROM half")? == "10000");
    cluster.finish()
}

/// A session that begins while a standby replays the destruction does not read pages any more.
#[test]
fn sessions_are_kept_out_until_the_keys_are_destroyed() -> Result<()> {
    let (primary, _keys) = cluster("")?;
    primary.sql("CREATE DATABASE app")?;
    run_sql(
        &mut primary.client_to("app")?,
        "CREATE EXTENSION pagevault; SET pagevault.default_encryption = on;
         CREATE TABLE t AS SELECT i AS id, 'meise' AS name FROM generate_series(1, 1000) i",
    )?;
    let mut standby = standby_of(&primary, &[])?;
    standby.allow_log("were destroyed");
    wait_for(&standby, &primary)?;
    standby.stop_at("redo.keys")?;
    primary.sql("SELECT * FROM pagevault.shred_database('app', 'app')")?;
    standby.stopped_at("redo.keys")?;
    std::thread::scope(|scope| -> Result<()> {
        let reading = scope.spawn(|| -> Result<String> {
            text(&mut standby.client_to("app")?, "SELECT count(*) FROM t")
        });
        // It waits for a lock now, which the startup process has.
        let end = std::time::Instant::now() + std::time::Duration::from_secs(2);
        while std::time::Instant::now() < end && !reading.is_finished() {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        standby.resume();
        let read = reading.join().map_err(|_| anyhow::anyhow!("the session has panicked"))?;
        ensure!(read.is_err(), "{read:?} rows were read");
        Ok(())
    })?;
    wait_for(&standby, &primary)?;
    standby.finish()?;
    primary.finish()
}
