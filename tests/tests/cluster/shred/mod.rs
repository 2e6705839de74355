//! Shredding: shredded data cannot be read, all other data can, and no crash, standby or older WAL
//! changes that.

mod commit;
mod crashes;
mod decoding;
mod former_files;
mod races;
mod refusals;
mod remnants;
mod wholes;

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{column, expect_error, run_sql, text};
use pagevault_tests::datafile::{PageState, holds};
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, Settings, StopMode};

use crate::assert_sealed;

/// A table with TOAST, indexes, a sequence and a view, and another table.
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
    let settings = Settings::default().conf("checkpoint_timeout = 1h").conf("wal_keep_size = 1GB");
    let settings = settings.conf(conf);
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

/// All bytes in the keystore directory.
fn keystore(cluster: &Cluster) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for entry in std::fs::read_dir(cluster.data_directory().join("pagevault"))? {
        bytes.extend(std::fs::read(entry?.path())?);
    }
    Ok(bytes)
}

/// The wrapped keys of a relation file, found by the layout of their records
/// (keystore/src/record/encoding.rs).
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
    for at in 6..bytes.len().saturating_sub(36) {
        if bytes[at..].starts_with(&wanted) && bytes[at - 6..].starts_with(&[4, 1]) {
            let length = usize::try_from(u32::from_le_bytes(bytes[at + 32..at + 36].try_into()?))?;
            found.push(bytes[at + 36..at + 36 + length].to_vec());
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

/// Fails unless no statement can read anything of `t`, and all of `u` is readable.
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
        "SECURITY LABEL FOR pagevault ON TABLE t IS 'plaintext'",
    ] {
        let error = cluster.error(statement)?;
        ensure!(error.text().contains("were destroyed"), "{statement}: {error}");
        ensure!(error.sqlstate == "55000", "{statement}: {error}");
        let is_other = ["t_id_seq", "pagevault"].iter().any(|part| statement.contains(part));
        let is_named = error.message == "the data keys of relation \"t\" were destroyed";
        ensure!(is_named || is_other, "{statement}: {error}");
    }
    let state = "SELECT string_agg(DISTINCT state, ' ' ORDER BY state) FROM pagevault.verify('t') WHERE state <> 'empty'";
    ensure!(cluster.text(state)? == "destroyed", "{}", cluster.text(state)?);
    ensure!(cluster.text(U)? == u, "the other table is not as it was");
    Ok(())
}

#[test]
fn shredded_data_is_unreadable_and_all_other_data_readable() -> Result<()> {
    let (cluster, _keys) = cluster("")?;
    cluster.sql("ANALYZE")?;
    let u = cluster.text(U)?;
    // A session with the expanded keys in its cache, and with the pages in shared buffers.
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
    let line = line.lines().find(|line| line.contains(r#""action":"destroy_keys""#));
    let line = line.context("no audit line")?;
    for part in [r#""object":"public.t""#, r#""files":6"#, r#""data_keys":6"#, r#""outcome":"ok""#]
    {
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
    // Repeating it has no effect.
    let again = column(&mut cluster.client()?, SHRED)?;
    ensure!(again.iter().filter(|item| *item == "destroyed").count() == 6, "{again:?}");
    ensure_shredded(&cluster, &u)?;

    // Operations that the user can still perform on it.
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
