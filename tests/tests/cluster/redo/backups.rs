//! A base backup taken while a relation is encrypted or rekeyed can be restored, whatever changes
//! meanwhile.

use anyhow::{Result, ensure};
use pagevault_tests::datafile::PageState;
use pagevault_tests::standby::{Standby, wait_for};
use pagevault_tests::{Cluster, Settings};

use super::{backup, cluster, rekey};

/// One index of each kind, with page changes that follow no full-page image. Few distinct values
/// fill overflow pages of the hash index.
const TABLE: &str =
    "CREATE TABLE t (id int PRIMARY KEY, kind int, tags int[], place point, name text);
    INSERT INTO t SELECT i, i % 7, ARRAY[i % 50, i % 51], point(i % 200, i / 200), md5(i::text)
      FROM generate_series(1, 12000) i;
    CREATE INDEX t_hash ON t USING hash (kind);
    CREATE INDEX t_gin ON t USING gin (tags);
    CREATE INDEX t_gist ON t USING gist (place);
    CREATE INDEX t_spgist ON t USING spgist (name);
    CREATE INDEX t_brin ON t USING brin (id)";

const CHANGES: [&str; 5] = [
    "DELETE FROM t WHERE id > 8000 AND id % 3 > 0",
    "VACUUM t",
    "INSERT INTO t SELECT i, i % 7, ARRAY[i % 50, 7], point(i % 200, 0), md5(i::text)
       FROM generate_series(20001, 21000) i",
    "UPDATE t SET kind = 8, name = 'changed' || id WHERE id BETWEEN 100 AND 150",
    "VACUUM t",
];

/// The contents of the table, by sequential scan and by each index.
fn content(cluster: &Cluster) -> Result<String> {
    let mut output =
        cluster.text("SELECT count(*) || ':' || sum(hashtext(t::text)::bigint) FROM t")?;
    for (index, condition) in [
        ("t_pkey", "id BETWEEN 50 AND 20500"),
        ("t_hash", "kind = 3"),
        ("t_hash", "kind = 8"),
        ("t_gin", "tags @> ARRAY[7]"),
        ("t_gist", "place <@ box '(10,10),(50,30)'"),
        ("t_spgist", "name >= 'a' AND name < 'd'"),
        ("t_brin", "id BETWEEN 50 AND 20500"),
    ] {
        let mut client = cluster.client()?;
        client.batch_execute("SET enable_seqscan = off; SET enable_indexonlyscan = on")?;
        if index == "t_brin" {
            client.batch_execute("SET enable_indexscan = off; SET enable_indexonlyscan = off")?;
        }
        let found: i64 =
            client.query_one(&format!("SELECT count(*) FROM t WHERE {condition}"), &[])?.get(0);
        let sequential: i64 = {
            client.batch_execute("SET enable_seqscan = on; SET enable_indexscan = off; SET enable_bitmapscan = off; SET enable_indexonlyscan = off")?;
            client.query_one(&format!("SELECT count(*) FROM t WHERE {condition}"), &[])?.get(0)
        };
        ensure!(found == sequential, "{index}, {condition}: {found} of {sequential}");
        output += &format!(" {found}");
    }
    Ok(output)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Restored {
    /// As an independent server.
    Alone,
    /// As a standby, which is queried as soon as it is consistent.
    Standby,
}

fn restored(settings: Settings, function: &str, as_what: Restored) -> Result<()> {
    let cluster = cluster(settings)?;
    cluster.sql(TABLE)?;
    if function == "rotate_data_key" {
        rekey(&cluster, "encrypt", "t")?;
    }
    let copy = backup(&cluster, || {
        CHANGES.iter().try_for_each(|change| cluster.sql(change))?;
        rekey(&cluster, function, "t")?;
        cluster.sql("UPDATE t SET kind = 9 WHERE id % 1000 = 0")?;
        cluster.sql("VACUUM t")?;
        cluster.sql("CHECKPOINT")
    })?;
    let wanted = content(&cluster)?;
    if as_what == Restored::Standby {
        Standby::default().follow(&copy, &cluster)?;
        copy.start_server()?;
        cluster.sql("UPDATE t SET kind = 10 WHERE id = 5")?;
        wait_for(&copy, &cluster)?;
        ensure!(content(&copy)? == content(&cluster)?, "the standby has other contents");
        copy.promote()?;
        cluster.sql("UPDATE t SET kind = 5 WHERE id = 5")?;
        copy.sql("UPDATE t SET kind = 5 WHERE id = 5")?;
    } else {
        copy.start_server()?;
        let found = content(&copy)?;
        ensure!(found == wanted, "{found} instead of {wanted}");
    }
    CHANGES.iter().skip(3).try_for_each(|change| copy.sql(change))?;
    copy.sql("CHECKPOINT")?;
    let last = if function == "encrypt" { 1 } else { 2 };
    for file in copy.family_files("t")? {
        let wrong = file
            .states()?
            .into_iter()
            .find(|state| !matches!(state, PageState::Zero) && *state != PageState::Sealed(last));
        ensure!(wrong.is_none(), "{}: {wrong:?}", file.path.display());
    }
    let before = content(&copy)?;
    copy.crash()?;
    ensure!(content(&copy)? == before, "contents differ after a crash");
    finish(copy)?;
    cluster.finish()
}

fn finish(mut copy: Cluster) -> Result<()> {
    for output in ["terminating walreceiver", "could not", "specified neither"] {
        copy.allow_log(output);
    }
    copy.finish()
}

/// Without checksums, records that make pages all-visible contain no full-page image.
#[test]
fn encrypted_meanwhile_without_checksums() -> Result<()> {
    restored(Settings::default().without_checksums(), "encrypt", Restored::Alone)
}

#[test]
fn encrypted_meanwhile_with_checksums() -> Result<()> {
    restored(Settings::default(), "encrypt", Restored::Alone)
}

#[test]
fn rekeyed_meanwhile_without_checksums() -> Result<()> {
    restored(Settings::default().without_checksums(), "rotate_data_key", Restored::Standby)
}

#[test]
fn rekeyed_meanwhile_with_checksums() -> Result<()> {
    restored(Settings::default(), "rotate_data_key", Restored::Standby)
}
