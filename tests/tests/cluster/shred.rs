//! Shredding: what was shredded cannot be read by anyone, everything else can, and no crash, standby or older WAL
//! changes that.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{column, expect_error, run_sql, text};
use pagevault_tests::datafile::{PageState, holds};
use pagevault_tests::{Cluster, Settings, StopMode};

use crate::assert_sealed;

/// A table with TOAST, indexes, a sequence and a view, and another one.
const TABLES: &str = "SET pagevault.default_encryption = on;
    CREATE TABLE t (id serial PRIMARY KEY, name text, long text);
    ALTER TABLE t ALTER long SET STORAGE EXTERNAL;
    INSERT INTO t (name, long) SELECT 'kanarienvogel ' || i, repeat(md5(i::text), 100)
      FROM generate_series(1, 1000) i;
    CREATE INDEX t_name ON t (name);
    CREATE VIEW v AS SELECT name FROM t;
    CREATE TABLE u AS SELECT i AS id, 'zeisig ' || i AS name FROM generate_series(1, 1000) i;
    CREATE INDEX u_name ON u (name)";

const SHRED: &str = "SELECT * FROM pagevault.shred('t', confirm => 'public.t')";
const U: &str = "SET enable_seqscan = off; SELECT count(*) || ' ' || sum(hashtext(name)) FROM u WHERE name > 'a'";

fn cluster(conf: &str) -> Result<(Cluster, pagevault_tests::KeyFile)> {
    let settings = Settings::default().conf("checkpoint_timeout = 1h").conf(conf);
    let (cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.sql(TABLES)?;
    Ok((cluster, keys))
}

/// Table, indexes, TOAST table and index, sequence.
fn family(cluster: &Cluster) -> Result<Vec<String>> {
    column(
        &mut cluster.client()?,
        "WITH tables AS (SELECT oid FROM pg_class WHERE oid = 't'::regclass
             UNION ALL SELECT reltoastrelid FROM pg_class WHERE oid = 't'::regclass)
         SELECT oid::regclass FROM tables
         UNION ALL SELECT indexrelid::regclass FROM pg_index JOIN tables ON indrelid = oid
         UNION ALL SELECT 't_id_seq'",
    )
}

/// Everything in the keystore's directory.
fn keystore(cluster: &Cluster) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for entry in std::fs::read_dir(cluster.data_directory().join("pagevault"))? {
        bytes.extend(std::fs::read(entry?.path())?);
    }
    Ok(bytes)
}

/// The wrapped keys of a relation's file, found by the layout of their records (keystore/src/record.rs).
fn wrapped_keys(cluster: &Cluster, database: &str, relation: &str) -> Result<Vec<Vec<u8>>> {
    let ids = text(
        &mut cluster.client_to(database)?,
        &format!(
            "SELECT CASE c.reltablespace WHEN 0 THEN d.dattablespace ELSE c.reltablespace END
                    || ' ' || d.oid || ' ' || pg_relation_filenode(c.oid)
               FROM pg_class c, pg_database d
              WHERE c.oid = '{relation}'::regclass AND d.datname = current_database()"
        ),
    )?;
    let mut wanted = vec![];
    for id in ids.split(' ') {
        wanted.extend(id.parse::<u32>()?.to_le_bytes());
    }
    let bytes = keystore(cluster)?;
    let mut found = vec![];
    for at in 6..bytes.len().saturating_sub(40) {
        if bytes[at..].starts_with(&wanted) && bytes[at - 6..].starts_with(&[4, 1]) {
            let length = usize::try_from(u32::from_le_bytes(bytes[at + 36..at + 40].try_into()?))?;
            found.push(bytes[at + 40..at + 40 + length].to_vec());
        }
    }
    Ok(found)
}

fn family_keys(cluster: &Cluster) -> Result<Vec<Vec<u8>>> {
    let mut keys = vec![];
    for name in family(cluster)? {
        let found = wrapped_keys(cluster, "postgres", &name)?;
        ensure!(!found.is_empty(), "no key of {name} in the keystore");
        keys.extend(found);
    }
    Ok(keys)
}

fn ensure_gone(cluster: &Cluster, keys: &[Vec<u8>]) -> Result<()> {
    let bytes = keystore(cluster)?;
    for (at, key) in keys.iter().enumerate() {
        ensure!(!holds(&bytes, key), "wrapped key {at} is still in the keystore");
    }
    Ok(())
}

/// Fails unless nothing of `t` can be read by any statement, and everything of `u` can.
fn ensure_shredded(cluster: &Cluster, u: &str) -> Result<()> {
    for statement in [
        "SELECT count(*) FROM t",
        "SELECT * FROM v LIMIT 1",
        "SET enable_seqscan = off; SELECT id FROM t WHERE id = 7",
        "COPY t TO STDOUT",
        "INSERT INTO t (id, name) VALUES (-1, 'x')",
        "UPDATE t SET name = 'x'",
        "DELETE FROM t WHERE id = 1",
        "SELECT nextval('t_id_seq')",
        "SELECT last_value FROM t_id_seq",
        "VACUUM t",
        "VACUUM FULL t",
        "ANALYZE t",
        "REINDEX TABLE t",
        "CREATE INDEX ON t (long)",
        "ALTER TABLE t ADD other double precision DEFAULT random()",
        "SELECT pagevault.rotate_data_key('t')",
        "SECURITY LABEL FOR pagevault ON TABLE t IS 'plain'",
    ] {
        let error = cluster.error(statement)?;
        ensure!(error.text().contains("were destroyed"), "{statement}: {error}");
        ensure!(error.sqlstate == "55000", "{statement}: {error}");
    }
    let state = "SELECT string_agg(DISTINCT state, ' ' ORDER BY state) FROM pagevault.verify('t') WHERE state <> 'empty'";
    ensure!(cluster.text(state)? == "destroyed", "{}", cluster.text(state)?);
    ensure!(cluster.text(U)? == u, "the other table is not as it was");
    Ok(())
}

#[test]
fn nothing_of_it_can_be_read_and_everything_else_can() -> Result<()> {
    let (cluster, _keys) = cluster("")?;
    cluster.sql("ANALYZE")?;
    let u = cluster.text(U)?;
    // A session whose process has the keys expanded, and the pages in shared buffers.
    let mut session = cluster.client()?;
    run_sql(&mut session, "SELECT sum(length(long)) FROM t")?;
    let keys = family_keys(&cluster)?;
    let sampled = "SELECT count(*) FROM pg_statistic WHERE starelid = 't'::regclass";
    ensure!(cluster.text(sampled)? != "0", "no statistics");

    let rows = cluster.client()?.simple_query(SHRED)?;
    let rows: Vec<_> = rows
        .iter()
        .filter_map(|message| match message {
            postgres::SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        })
        .collect();
    let destroyed: Vec<_> = rows.iter().filter(|row| row.get(0) == Some("destroyed")).collect();
    ensure!(destroyed.len() == 6, "{} files", destroyed.len());
    ensure!(destroyed.iter().all(|row| row.get(3) == Some("1")), "one key each");
    for item in ["statistics", "wal", "standbys", "backups", "master key", "sessions", "next step"]
    {
        ensure!(rows.iter().any(|row| row.get(0) == Some(item)), "no row {item}");
    }
    ensure_gone(&cluster, &keys)?;
    ensure!(cluster.text(sampled)? == "0", "statistics are left");
    let line = cluster.log();
    let line = line.lines().find(|line| line.contains(r#""action":"shred""#));
    let line = line.context("no audit line")?;
    for part in [r#""object":"public.t""#, r#""files":6"#, r#""keys":6"#, r#""outcome":"ok""#] {
        ensure!(line.contains(part), "{line}");
    }

    let error = expect_error(&mut session, "SELECT sum(length(long)) FROM t")?;
    ensure!(error.message.ends_with("were destroyed"), "{error}");
    ensure_shredded(&cluster, &u)?;
    cluster.sql("CHECKPOINT")?;
    cluster.restart()?;
    ensure_shredded(&cluster, &u)?;
    cluster.crash()?;
    ensure_shredded(&cluster, &u)?;
    ensure_gone(&cluster, &keys)?;
    for name in family(&cluster)? {
        assert_sealed(&cluster.files(&name)?)?;
    }
    // Once more does no harm.
    let again = column(&mut cluster.client()?, SHRED)?;
    ensure!(again.iter().filter(|item| *item == "destroyed").count() == 6, "{again:?}");
    ensure_shredded(&cluster, &u)?;

    // What the user may do with it.
    cluster.sql(
        "TRUNCATE t; INSERT INTO t (id, name) SELECT i, 'neu' FROM generate_series(1, 100) i",
    )?;
    ensure!(cluster.text("SELECT count(*) FROM v")? == "100", "rows after TRUNCATE");
    cluster.sql("VACUUM t")?;
    cluster.sql("CHECKPOINT")?;
    assert_sealed(&cluster.files("t")?)?;
    cluster.crash()?;
    ensure!(cluster.text("SELECT count(*) FROM v")? == "100", "rows after TRUNCATE and crash");
    cluster.sql("DROP TABLE t CASCADE")?;
    cluster.sql("CHECKPOINT")?;
    ensure!(cluster.text(U)? == u, "the other table is not as it was");
    cluster.restart()?;
    cluster.finish()
}

#[test]
fn it_is_refused_unless_it_is_meant_and_complete() -> Result<()> {
    let (mut cluster, _keys) = cluster("pagevault.rekey_rate = 1")?;
    cluster.allow_log("there is");
    cluster.sql(
        "CREATE TABLE open (id int PRIMARY KEY); INSERT INTO open VALUES (1);
         CREATE ROLE bob LOGIN; GRANT pagevault_admin TO bob; CREATE ROLE eve LOGIN; ALTER TABLE u OWNER TO eve;
         CREATE FUNCTION hidden() RETURNS bigint LANGUAGE plpgsql AS
            $$ BEGIN RETURN (SELECT count(*) FROM pagevault.shred('t', 'public.t')); END $$;
         CREATE FUNCTION looped() RETURNS void LANGUAGE plpgsql AS
            $$ DECLARE r record; BEGIN FOR r IN SELECT * FROM pagevault.shred('t', 'public.t') LOOP END LOOP; END $$;
         CREATE FUNCTION plain() RETURNS bigint LANGUAGE sql AS
            $$ SELECT count(*) FROM pagevault.shred('t', 'public.t') $$;
         SET pagevault.default_encryption = on; CREATE TEMPORARY TABLE z (id int);
         CREATE TABLE mixed (id int); INSERT INTO mixed VALUES (1)",
    )?;
    let sums = ["t", "u"]
        .map(|table| format!("SELECT count(*) || ' ' || sum(hashtext(name)) FROM {table}"));
    let before = [cluster.text(&sums[0])?, cluster.text(&sums[1])?];
    let refused = |statement: &str, sqlstate: &str, part: &str| -> Result<()> {
        let error = cluster.error(statement)?;
        ensure!(error.sqlstate == sqlstate && error.text().contains(part), "{statement}: {error}");
        Ok(())
    };
    refused("SELECT pagevault.shred('t')", "42883", "does not exist")?;
    for name in ["t", "public.u", "PUBLIC.T", "yes", ""] {
        let statement = format!("SELECT * FROM pagevault.shred('t', '{name}')");
        refused(&statement, "22023", "confirm => 'public.t'")?;
    }
    refused("SELECT * FROM pagevault.shred_schema('public', 'publi')", "22023", "not confirmed")?;
    for statement in [
        format!("BEGIN; {SHRED}"),
        format!("SELECT 1; {SHRED}"),
        format!("EXPLAIN ANALYZE {SHRED}"),
        format!("CREATE TABLE proof AS {SHRED}"),
        format!("DO $$ BEGIN PERFORM count(*) FROM ({SHRED}) s; END $$"),
        "SELECT hidden()".to_owned(),
        "SELECT looped()".to_owned(),
        "SELECT plain()".to_owned(),
    ] {
        refused(&statement, "25001", "cannot run in a transaction block")?;
    }
    refused(
        "SELECT * FROM pagevault.shred('open', 'public.open')",
        "55000",
        "1 page of it is in plaintext",
    )?;
    refused("SELECT * FROM pagevault.shred('t_name', 'public.t_name')", "42809", "goes along")?;
    refused("SELECT * FROM pagevault.shred('t_id_seq', 'public.t_id_seq')", "42809", "goes along")?;
    refused("SELECT * FROM pagevault.shred('v', 'public.v')", "42809", "holds nothing")?;
    refused(
        "SELECT * FROM pagevault.shred('pg_statistic', 'pg_catalog.pg_statistic')",
        "42809",
        "part of the system",
    )?;
    refused("SELECT * FROM pagevault.shred_schema('pagevault', 'pagevault')", "42809", "system")?;
    refused("SELECT * FROM pagevault.shred_schema('pg_catalog', 'pg_catalog')", "42809", "system")?;
    refused(
        "SELECT * FROM pagevault.shred_database('postgres', 'postgres')",
        "55006",
        "connected",
    )?;
    refused("SELECT * FROM pagevault.shred_database('none', 'none')", "3D000", "does not exist")?;
    // The schema holds a table in plaintext: none of it is shredded.
    refused(
        "SELECT * FROM pagevault.shred_schema('public', 'public')",
        "55000",
        "not wholly encrypted",
    )?;
    // Neither owners nor anyone but administrators.
    let mut eve = cluster.client()?;
    run_sql(&mut eve, "SET ROLE eve")?;
    let error = expect_error(&mut eve, "SELECT * FROM pagevault.shred('u', 'public.u')")?;
    ensure!(error.sqlstate == "42501", "{error}");
    // One page in plaintext is enough.
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE mixed IS 'plain'")?;
    refused(
        "SELECT * FROM pagevault.shred('mixed', 'public.mixed')",
        "55000",
        "not wholly encrypted",
    )?;
    // A relation that is being rekeyed.
    let job = cluster.text("SELECT pagevault.rotate_data_key('t')")?;
    refused(SHRED, "55006", &format!("Rekey job {job} is not finished"))?;
    cluster.sql(&format!("SELECT pagevault.rekey_cancel({job})"))?;
    for (sum, before) in sums.iter().zip(before) {
        ensure!(cluster.text(sum)? == before, "contents differ after refusals");
    }
    // An administrator who is no superuser and owns nothing may.
    let mut bob = cluster.client()?;
    run_sql(&mut bob, "SET ROLE bob")?;
    run_sql(&mut bob, "SELECT * FROM pagevault.shred('u', 'public.u')")?;
    let error = cluster.error("SELECT * FROM u")?;
    ensure!(error.text().contains("were destroyed"), "{error}");
    cluster.finish()
}

/// Changes of every kind, by records that redo cannot do without the page as it was.
const CHANGES: &str = "UPDATE t SET name = name || '!' WHERE id % 2 = 0;
    DELETE FROM t WHERE id % 3 = 0;
    INSERT INTO t (name, long) SELECT 'neu ' || i, repeat(md5(i::text), 100) FROM generate_series(1, 500) i;
    UPDATE u SET name = name || '!' WHERE id % 2 = 0;
    INSERT INTO u SELECT i, 'zeisig ' || i FROM generate_series(1001, 1500) i";

/// There was no checkpoint since the changes: recovery begins before them, and meets changes of pages that it cannot
/// open.
fn killed_before_the_checkpoint(conf: &str) -> Result<()> {
    let (cluster, _keys) = cluster(conf)?;
    cluster.sql("CHECKPOINT")?;
    cluster.sql(CHANGES)?;
    cluster.sql("VACUUM t")?;
    cluster.sql("VACUUM u")?;
    let mut keys = family_keys(&cluster)?;
    // WAL records with wrapped keys of both tables, the first of which changes those of the other one when it is
    // replayed to a keystore that has the second.
    for _ in 0..2 {
        cluster.sql("SELECT pagevault.rotate_database_key()")?;
        keys.extend(family_keys(&cluster)?);
    }
    cluster.sql(CHANGES)?;
    let u = cluster.text(U)?;
    cluster.sql(SHRED)?;
    ensure_gone(&cluster, &keys)?;
    cluster.kill()?;
    for round in 0..2 {
        cluster.start_server().with_context(|| format!("recovery {round}"))?;
        ensure_shredded(&cluster, &u)?;
        ensure_gone(&cluster, &keys)?;
        cluster.sql("INSERT INTO u VALUES (0, 'A'); DELETE FROM u WHERE id = 0; CHECKPOINT")?;
        cluster.kill()?;
    }
    cluster.start_server()?;
    cluster.sql("DROP TABLE t CASCADE")?;
    cluster.sql("CHECKPOINT")?;
    cluster.finish()
}

#[test]
fn recovery_from_before_goes_through() -> Result<()> {
    // Too few buffers to keep the pages that WAL brings as a whole.
    killed_before_the_checkpoint("shared_buffers = 512kB")
}

#[test]
fn recovery_from_before_goes_through_without_full_page_writes() -> Result<()> {
    killed_before_the_checkpoint("full_page_writes = off")
}

#[test]
fn recovery_from_before_goes_through_with_minimal_wal() -> Result<()> {
    killed_before_the_checkpoint("wal_level = minimal\nmax_wal_senders = 0")
}

fn standby_of(primary: &Cluster) -> Result<Cluster> {
    let backup = primary.directory().join("backup");
    primary.base_backup(&backup)?;
    let mut standby = Cluster::from_files(|data| {
        std::fs::rename(&backup, data)?;
        let signal = data.join("standby.signal");
        std::fs::write(&signal, "")?;
        primary.installation().give(&signal)
    })?;
    standby.allow_log("terminating walreceiver process");
    standby.allow_log("could not receive data from WAL stream");
    standby.allow_log("could not connect to the primary server");
    standby.append_conf(&format!(
        "primary_conninfo = 'host={} user=postgres'\nshared_buffers = 512kB",
        primary.directory().display()
    ))?;
    standby.start_server()?;
    Ok(standby)
}

fn caught_up(primary: &Cluster, standby: &Cluster) -> Result<()> {
    let end = primary.text("SELECT pg_current_wal_flush_lsn()")?;
    standby.eventually(&format!("SELECT pg_last_wal_replay_lsn() >= '{end}'"), "t")
}

#[test]
fn standbys_follow_and_survive_a_restart_from_before() -> Result<()> {
    let (primary, _keys) = cluster("max_wal_size = 4GB")?;
    primary.sql("CHECKPOINT")?;
    let mut standby = standby_of(&primary)?;
    standby.allow_log("canceling statement due to conflict with recovery");
    primary.sql(CHANGES)?;
    primary.sql("VACUUM t")?;
    primary.sql(CHANGES)?;
    caught_up(&primary, &standby)?;
    let keys = family_keys(&standby)?;
    standby.text("SELECT sum(length(long)) FROM t")?;
    let u = primary.text(U)?;
    primary.sql(SHRED)?;
    caught_up(&primary, &standby)?;
    ensure_gone(&standby, &keys)?;
    let unreadable = |standby: &Cluster| -> Result<()> {
        for statement in ["SELECT sum(length(long)) FROM t", "SELECT last_value FROM t_id_seq"] {
            let error = standby.error(statement)?;
            ensure!(error.text().contains("were destroyed"), "{error}");
        }
        ensure!(standby.text(U)? == u, "the other table is not as it was");
        Ok(())
    };
    unreadable(&standby)?;
    // Its last restart point is the backup's.
    standby.kill()?;
    standby.start_server()?;
    unreadable(&standby)?;
    caught_up(&primary, &standby)?;
    ensure_gone(&standby, &keys)?;
    standby.stop(StopMode::Fast)?;
    standby.start_server()?;
    unreadable(&standby)?;
    primary.sql("INSERT INTO u VALUES (5000, 'later')")?;
    caught_up(&primary, &standby)?;
    ensure!(standby.text("SELECT count(*) FROM u WHERE id = 5000")? == "1", "it does not follow");
    standby.sql("CHECKPOINT")?;
    standby.sql("SELECT pg_promote()")?;
    standby.sql("DELETE FROM u WHERE id = 5000; CHECKPOINT")?;
    ensure_shredded(&standby, &u)?;
    standby.sql("DROP TABLE t CASCADE")?;
    standby.sql("CHECKPOINT")?;
    standby.crash()?;
    ensure!(standby.text(U)? == u, "the other table is not as it was");
    standby.finish()?;
    primary.finish()
}

/// The server is killed after the tombstone is in the keystore and before it is in WAL; or a standby ends its
/// recovery short of it. What recovery had in memory is not shown to anyone.
#[test]
fn recovery_that_does_not_meet_the_tombstone_shows_nothing() -> Result<()> {
    let (cluster, _keys) = cluster("")?;
    cluster.sql("CHECKPOINT")?;
    cluster.sql(CHANGES)?;
    let u = cluster.text(U)?;
    let copy = cluster.directory().join("before");
    cluster.kill()?;
    copy_tree(&cluster.data_directory(), &copy)?;
    cluster.start_server()?;
    cluster.sql(SHRED)?;
    cluster.stop(StopMode::Fast)?;
    // The keystore of afterwards in the data directory of before.
    let keystore = copy.join("pagevault");
    std::fs::remove_dir_all(&keystore)?;
    copy_tree(&cluster.data_directory().join("pagevault"), &keystore)?;
    let cut_short = Cluster::from_files(|data| Ok(std::fs::rename(&copy, data)?))?;
    cut_short.start_server()?;
    ensure_shredded(&cut_short, &u)?;
    cut_short.sql("CHECKPOINT")?;
    // Once more, and the standbys hear of it.
    cut_short.sql(SHRED)?;
    cut_short.restart()?;
    ensure_shredded(&cut_short, &u)?;
    cut_short.finish()?;
    cluster.finish()
}

fn copy_tree(from: &std::path::Path, to: &std::path::Path) -> Result<()> {
    let status = std::process::Command::new("cp").arg("-a").arg(from).arg(to).status()?;
    ensure!(status.success(), "cp: {status}");
    Ok(())
}

#[test]
fn partitions_and_schemas_go_as_a_whole() -> Result<()> {
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
    // One partition: the others stay.
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
    // An unlogged table begins anew after a crash, from a file that is shredded too.
    let error = cluster.error("SELECT * FROM s.y")?;
    ensure!(error.text().contains("were destroyed"), "{error}");
    ensure!(cluster.text("SELECT id FROM other.keep")? == "1", "another schema");
    cluster.sql("CHECKPOINT; DROP SCHEMA s CASCADE")?;
    cluster.restart()?;
    ensure!(cluster.text("SELECT id FROM other.keep")? == "1", "another schema");
    cluster.finish()
}

#[test]
fn a_database_goes_as_a_whole() -> Result<()> {
    let (primary, _keys) = cluster("")?;
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
    // A file that is gone has a key that is kept.
    run_sql(&mut app, "DROP TABLE old")?;
    drop(app);
    primary.sql("CREATE DATABASE clone TEMPLATE app STRATEGY file_copy")?;
    keys.extend(wrapped_keys(&primary, "app", "secret")?);
    ensure!(keys.len() == 2, "{} keys", keys.len());
    let mut standby = standby_of(&primary)?;
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
    caught_up(&primary, &standby)?;
    ensure!(reader.batch_execute("SELECT 1").is_err(), "a session of the standby is still there");
    unreadable(&standby)?;
    ensure_gone(&standby, &keys)?;
    standby.kill()?;
    standby.start_server()?;
    unreadable(&standby)?;

    // What was shredded is copied as it is.
    primary.sql("CREATE DATABASE late TEMPLATE app STRATEGY file_copy")?;
    let error = expect_error(&mut primary.client_to("late")?, "SELECT * FROM secret")?;
    ensure!(error.text().contains("were destroyed"), "{error}");
    primary.crash()?;
    unreadable(&primary)?;
    primary.sql("DROP DATABASE app")?;
    primary.sql("CHECKPOINT")?;
    caught_up(&primary, &standby)?;
    standby.finish()?;
    primary.finish()
}

/// Neither a command nor a job rewrites it.
#[test]
fn labels_are_refused() -> Result<()> {
    let (mut cluster, _keys) = cluster("")?;
    cluster.allow_log("were destroyed");
    cluster.sql("ALTER TABLE t ALTER id DROP DEFAULT; DROP SEQUENCE t_id_seq")?;
    cluster.sql(SHRED)?;
    cluster.sql("CHECKPOINT")?;
    let before = cluster.files("t")?.remove(0).states()?;
    for threshold in ["0", "8GB"] {
        for statement in [
            "SECURITY LABEL FOR pagevault ON TABLE t IS 'plain'",
            "SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted aes-128-xts'",
            "SELECT pagevault.reconcile('t')",
            "SELECT pagevault.rotate_data_key('t')",
        ] {
            let set = format!("SET pagevault.rekey_threshold = '{threshold}'; ");
            let error = cluster.error(&(set + statement))?;
            ensure!(error.sqlstate == "55000", "{statement}: {error}");
            ensure!(error.message == "the data keys of public.t were destroyed", "{error}");
            ensure!(error.hint.contains("TRUNCATE"), "{error}");
        }
    }
    // What is asked of the whole database passes over it.
    cluster.sql("SET pagevault.rekey_threshold = 0; SELECT pagevault.encrypt_database()")?;
    cluster.sql("CHECKPOINT")?;
    ensure!(cluster.files("t")?.remove(0).states()? == before, "pages were written");
    // Its keys are not rotated with all others.
    ensure!(cluster.text("SELECT pagevault.rotate_all_data_keys()")? != "0", "no other job");
    cluster.eventually(
        "SELECT count(*) FILTER (WHERE state <> 'done') || ' ' || count(*) FILTER (WHERE relation = 't')
         FROM pagevault.rekey_progress",
        "0 0",
    )?;
    cluster.sql("TRUNCATE t")?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "0", "after TRUNCATE");
    cluster.finish()
}

/// Where the catalogs are sealed there is nothing left to log in to.
#[test]
fn a_labelled_database_goes_with_its_catalogs() -> Result<()> {
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

/// A file number that is used again goes on after the destroyed epochs.
#[test]
fn a_reused_file_number_is_not_destroyed() -> Result<()> {
    let (cluster, _keys) = cluster("")?;
    let numbers = "SELECT string_agg(pg_relation_filenode(n)::text, ',') FROM unnest(ARRAY['t', 't_pkey', 't_name']::regclass[]) n";
    let numbers = cluster.text(numbers)?;
    cluster.sql(SHRED)?;
    cluster.sql("DROP TABLE t CASCADE")?;
    cluster.sql("VACUUM pg_class")?; // dead rows count as well
    cluster.sql("CHECKPOINT")?;
    cluster.stop(StopMode::Fast)?;
    // OIDs come round again.
    let first = numbers.split(',').next().unwrap_or_default();
    let mut reset = cluster.installation().command("pg_resetwal");
    let output = reset.args(["-o", first, "-D"]).arg(cluster.data_directory()).output()?;
    ensure!(output.status.success(), "{output:?}");
    cluster.start_server()?;
    cluster.sql(
        "SET pagevault.default_encryption = on;
         DO $$ BEGIN FOR i IN 1..20 LOOP
             EXECUTE format('CREATE TABLE again_%s AS SELECT 1 AS id', i);
         END LOOP; END $$",
    )?;
    cluster.sql("CHECKPOINT")?;
    let query = format!(
        "SELECT relname FROM pg_class WHERE relname LIKE 'again%' AND relfilenode IN ({numbers})"
    );
    let again = column(&mut cluster.client()?, &query)?;
    ensure!(!again.is_empty(), "no file number was used again");
    for name in &again {
        let states = cluster.files(name)?.remove(0).states()?;
        ensure!(states == [PageState::Sealed(2)], "{name}: {states:?}");
    }
    cluster.crash()?;
    cluster.restart()?;
    for name in &again {
        ensure!(cluster.text(&format!("SELECT id FROM {name}"))? == "1", "the new table");
    }
    cluster.finish()
}

const FORMER: &str = "SELECT * FROM pagevault.shred_former_files(confirm => 'postgres')";

/// TRUNCATE, VACUUM FULL and DROP leave keys of files that nobody can read any more but from backups.
#[test]
fn former_files_lose_their_keys() -> Result<()> {
    let (cluster, _keys) = cluster("")?;
    cluster.sql("CHECKPOINT")?;
    let mut old = wrapped_keys(&cluster, "postgres", "t")?;
    old.extend(wrapped_keys(&cluster, "postgres", "u")?);
    let error = cluster.error("SELECT * FROM pagevault.shred_former_files('other')")?;
    ensure!(error.sqlstate == "22023", "{error}");
    cluster.sql("CREATE TABLE gone AS SELECT * FROM u")?;
    for statement in ["VACUUM FULL u", "TRUNCATE t", "DROP TABLE gone"] {
        cluster.sql(statement)?;
    }
    let before = cluster.text(U)?;
    ensure!(
        old.len() == 2 && old.iter().all(|key| holds(&keystore(&cluster).unwrap_or_default(), key))
    );
    let items = column(&mut cluster.client()?, &FORMER.replace('*', "item"))?;
    // The table with TOAST, three indexes, the other with its index.
    ensure!(items.iter().filter(|item| *item == "destroyed").count() >= 6, "{items:?}");
    ensure!(!items.iter().any(|item| item == "next step" || item == "same key"), "{items:?}");
    let kept = keystore(&cluster)?;
    ensure!(!old.iter().any(|key| holds(&kept, key)), "the keystore holds a key of a former file");
    let error = cluster.error(FORMER)?;
    ensure!(
        error.sqlstate == "55000" && error.message.contains("no keys of files that are gone"),
        "{error}"
    );
    for _ in 0..2 {
        ensure!(cluster.text(U)? == before, "another table");
        cluster.sql("INSERT INTO t (name) VALUES ('amsel')")?;
        cluster.crash()?;
    }
    ensure!(cluster.text("SELECT count(*) FROM t")? == "2", "rows are lost");
    cluster.finish()
}

/// A key is made just before its file.
#[test]
fn a_file_that_is_about_to_be_is_not_gone() -> Result<()> {
    let (cluster, _keys) = cluster("")?;
    cluster.sql("TRUNCATE u")?;
    cluster.stop_at("storage.decided 0")?;
    let mut maker = cluster.client()?;
    let maker = std::thread::spawn(move || {
        run_sql(
            &mut maker,
            "SET pagevault.default_encryption = on; CREATE TABLE n AS SELECT 17 AS id",
        )
    });
    cluster.stopped_at("storage.decided 0")?;
    let mut shredder = cluster.client()?;
    let shredder = std::thread::spawn(move || run_sql(&mut shredder, FORMER));
    cluster.eventually(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'ProcSignalBarrier'",
        "1",
    )?;
    cluster.go_on();
    maker.join().map_err(|_| anyhow::anyhow!("panic"))??;
    shredder.join().map_err(|_| anyhow::anyhow!("panic"))??;
    ensure!(cluster.text("SELECT id FROM n")? == "17");
    cluster.crash()?;
    ensure!(cluster.text("SELECT id FROM n")? == "17", "after a crash");
    cluster.finish()
}

/// Standbys and the server itself, killed between any two steps of shredding: the keys are there or they are
/// destroyed, and calling once more destroys them everywhere.
#[test]
fn killed_at_any_step() -> Result<()> {
    let (mut cluster, _keys) = cluster("")?;
    cluster.allow_log("were destroyed");
    cluster.allow_log("terminating connection because of crash of another server process");
    let u = cluster.text(U)?;
    let sum = "SELECT count(*) || ' ' || sum(hashtext(name)) FROM t";
    let t = cluster.text(sum)?;
    for step in [
        "shred.decided",
        "keys.in_file",
        "keys.in_wal",
        "shred.destroyed",
        "keys.compaction",
        "shred.compacted",
    ] {
        cluster.stop_at(step)?;
        let mut client = cluster.client()?;
        let session = std::thread::spawn(move || run_sql(&mut client, SHRED));
        let stands = cluster.stopped_at(step)?;
        if step == "keys.in_wal" {
            // The others come back by themselves.
            rustix::process::kill_process(stands, rustix::process::Signal::KILL)?;
            cluster.eventually_logs("all server processes terminated")?;
            cluster.go_on();
        } else {
            cluster.kill()?;
            cluster.go_on();
            cluster.start_server()?;
        }
        ensure!(session.join().is_ok_and(|ended| ended.is_err()), "{step}: it ended");
        cluster.eventually_that(step, || cluster.text("SELECT 1").map(drop))?;
        ensure!(cluster.text(U)? == u, "{step}: another table");
        match cluster.text(sum) {
            Ok(found) => ensure!(found == t && step == "shred.decided", "{step}: {found}"),
            Err(error) => ensure!(
                format!("{error:#}").contains("were destroyed") && step != "shred.decided",
                "{step}: {error:#}"
            ),
        }
    }
    cluster.sql(SHRED)?;
    cluster.crash()?;
    ensure!(cluster.text(U)? == u, "another table");
    ensure!(cluster.error(sum)?.text().contains("were destroyed"));
    cluster.sql("DROP TABLE t CASCADE")?;
    cluster.finish()
}
