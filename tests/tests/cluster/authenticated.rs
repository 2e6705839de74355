//! Ciphers that authenticate pages: what is changed or moved on disk is refused, and what the
//! server itself wrote never is. Without data checksums, so that nothing but the tag can notice.

use anyhow::{Context, Result, ensure};
use pagevault_tests::datafile::DataFile;
use pagevault_tests::errors::SqlError;
use pagevault_tests::{Cluster, KeyFile, Settings, StopMode};

const CIPHERS: [&str; 2] = ["aes-256-xts-auth", "aes-256-xts-hmac"];

const TABLES: [&str; 4] = [
    "CREATE TABLE t AS SELECT i AS id, 'row ' || i AS name FROM generate_series(1, 5000) i",
    "CREATE TABLE other AS SELECT i AS id, 'row ' || i AS name FROM generate_series(1, 5000) i",
    "CREATE INDEX t_id ON t (id)",
    "VACUUM t",
];

const SUM: &str = "SELECT count(*) || ' ' || sum(id) FROM t";
const EXPECTED: &str = "5000 12502500";

fn settings() -> Settings {
    Settings::default().without_checksums().conf("full_page_writes = on")
}

fn cluster(cipher: &str) -> Result<(Cluster, KeyFile)> {
    let settings = settings()
        .conf("wal_log_hints = on")
        .conf("pagevault.default_encryption = on")
        .conf(&format!("pagevault.cipher = '{cipher}'"));
    let (cluster, keys) = Cluster::with_keys(&settings)?;
    TABLES.iter().try_for_each(|statement| cluster.sql(statement))?;
    let used = "SELECT string_agg(DISTINCT cipher, ' ') FROM pagevault.relations
        WHERE relation IN ('t'::regclass, 't_id'::regclass)";
    ensure!(cluster.text(used)? == cipher);
    ensure!(all_authenticated(&cluster)?, "born with tags");
    Ok((cluster, keys))
}

/// Whether the table and its index must have tags in all pages.
fn all_authenticated(cluster: &Cluster) -> Result<bool> {
    let all = "SELECT bool_and(authenticated) FROM pagevault.relations
        WHERE relation IN ('t'::regclass, 't_id'::regclass)";
    Ok(cluster.text(all)? == "t")
}

fn main_fork(cluster: &Cluster, relation: &str) -> Result<DataFile> {
    cluster.files(relation)?.into_iter().next().context("a file")
}

/// Restarts the server, and makes a change on disk in between.
fn while_down(cluster: &Cluster, change: impl FnOnce() -> Result<()>) -> Result<()> {
    cluster.stop(StopMode::Fast)?;
    change()?;
    cluster.start_server()
}

fn ensure_refused(error: &SqlError, what: &str) -> Result<()> {
    let says = error.message.ends_with("is not as it was encrypted");
    ensure!(error.sqlstate == "XX001" && says, "{what}: {error}");
    Ok(())
}

#[test]
fn changed_and_moved_pages_are_refused() -> Result<()> {
    for cipher in CIPHERS {
        let (cluster, _keys) = cluster(cipher)?;
        let (t, other) = (main_fork(&cluster, "t")?, main_fork(&cluster, "other")?);
        cluster.stop(StopMode::Fast)?;
        let first = t.read_page(0)?;
        let changed = |at: usize| {
            let mut page = first.clone();
            page[at] ^= 1;
            page
        };
        for (what, page) in [
            ("a bit of a row", changed(8000)),
            ("a bit of the LSN", changed(3)),
            ("pd_lower", changed(12)),
            ("another block", t.read_page(1)?),
            ("another file", other.read_page(0)?),
        ] {
            t.write_page(0, &page)?;
            cluster.start_server()?;
            ensure_refused(&cluster.error(SUM)?, what)?;
            for setting in ["ignore_checksum_failure", "zero_damaged_pages"] {
                ensure_refused(&cluster.error(&format!("SET {setting} = on; {SUM}"))?, what)?;
            }
            ensure!(cluster.text("SELECT count(*) > 0 FROM t WHERE ctid >= '(1,0)'")? == "t");
            cluster.stop(StopMode::Fast)?;
            ensure!(t.read_page(0)? == page, "{what}: the server has changed the page");
            let (text, code) = cluster.verify_offline(&cluster.data_directory())?;
            let says = text.contains("block 0: the page is not as it was sealed");
            ensure!(code == Some(2) && says, "{what}: {text}");
        }
        t.write_page(0, &first)?;
        let (text, code) = cluster.verify_offline(&cluster.data_directory())?;
        ensure!(code == Some(0) && text.contains("by tags of 128 bits"), "{text}");
        cluster.start_server()?;
        ensure!(cluster.text(SUM)? == EXPECTED);
        cluster.finish()?;
    }
    Ok(())
}

/// A map that was changed is read as an empty one, as PostgreSQL reads a damaged one. Then no row
/// is missed: a forged bit "all visible" would hide rows from index-only scans.
#[test]
fn changed_maps_are_empty() -> Result<()> {
    let (cluster, _keys) = cluster(CIPHERS[0])?;
    let maps: Vec<DataFile> = cluster.files("t")?.into_iter().skip(1).collect();
    ensure!(maps.len() == 2, "{maps:?}");
    while_down(&cluster, || {
        maps.iter().try_for_each(|map| {
            let mut page = map.read_page(0)?;
            page[5000] ^= 1;
            map.write_page(0, &page)
        })
    })?;
    cluster.sql("SET enable_seqscan = off; SELECT count(id) FROM t WHERE id > 0")?;
    ensure!(cluster.text(SUM)? == EXPECTED);
    cluster.sql("INSERT INTO t VALUES (5001, 'new'); DELETE FROM t WHERE id = 5001")?;
    cluster.sql("VACUUM t")?;
    let refused = "SELECT decrypt_failures > 0 FROM pagevault.stats WHERE kind = 'relation'";
    ensure!(cluster.text(refused)? == "t", "not counted");
    cluster.finish()
}

/// A page that a crash tears is refused, so WAL must have an image of each.
#[test]
fn torn_pages_must_be_restored() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&settings())?;
    let create = "CREATE TABLE t AS SELECT i AS id FROM generate_series(1, 5000) i";
    let label =
        |cipher: &str| format!("SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted {cipher}'");
    cluster.sql(create)?;
    let message = "cannot encrypt with aes-256-xts-auth: torn pages would not be restored";
    let refused = |cluster: &Cluster| -> Result<()> {
        let error = cluster.error(&label(CIPHERS[0]))?;
        ensure!(error.sqlstate == "55000" && error.message == message, "{error}");
        Ok(())
    };
    refused(&cluster)?;
    cluster.append_conf("wal_log_hints = on\nfull_page_writes = off")?;
    while_down(&cluster, || Ok(()))?;
    refused(&cluster)?;
    ensure!(cluster.text("SELECT pagevault.is_encrypted('t')")? == "f");

    let warning = "authenticated pages that a crash tears would be lost";
    cluster.set(&[("full_page_writes", "on")])?;
    cluster.sql(&label(CIPHERS[0]))?;
    ensure!(cluster.text("SELECT pagevault.is_encrypted('t')")? == "t");
    while_down(&cluster, || Ok(()))?;
    ensure!(!cluster.log().contains(warning));
    cluster.allow_log(warning);
    cluster.set(&[("full_page_writes", "off")])?;
    while_down(&cluster, || Ok(()))?;
    ensure!(cluster.log().contains(warning), "no warning at the start");
    ensure!(cluster.text(SUM)? == EXPECTED);
    cluster.finish()
}

/// From format 1 to format 2 and back, by jobs, with rows that change and a crash in between.
#[test]
fn relations_change_between_formats() -> Result<()> {
    let settings = settings().conf("wal_log_hints = on").conf("pagevault.rekey_threshold = 0");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE EXTENSION IF NOT EXISTS pagevault")?;
    TABLES.iter().try_for_each(|statement| cluster.sql(statement))?;
    let mut sum = 12_502_500;
    for cipher in ["aes-256-xts", "aes-256-xts-auth", "aes-256-xts-hmac", "aes-128-xts"] {
        cluster.sql(&format!("SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted {cipher}'"))?;
        cluster.sql("UPDATE t SET id = id + 1 WHERE id % 7 = 0")?;
        sum = cluster.text("SELECT sum(id) FROM t")?.parse::<i64>()?.max(sum);
        cluster.crash()?;
        cluster.sql("SELECT pagevault.wait_for_rekey('t')")?;
        let states = "SELECT string_agg(DISTINCT cipher, ' ') FROM pagevault.relations
            WHERE relation IN ('t'::regclass, 't_id'::regclass)";
        ensure!(cluster.text(states)? == cipher, "{cipher}");
        ensure!(cluster.text("SELECT sum(id) FROM t")? == sum.to_string(), "{cipher}");
        while_down(&cluster, || {
            let (text, code) = cluster.verify_offline(&cluster.data_directory())?;
            ensure!(code == Some(0), "{cipher}: {text}");
            let has_tags = cipher.starts_with("aes-256-xts-");
            ensure!(text.contains("by tags of 128 bits") == has_tags, "{cipher}: {text}");
            Ok(())
        })?;
        ensure!(cluster.text("SELECT sum(id) FROM t")? == sum.to_string(), "{cipher}");
        // Pages under the former key would be accepted, and only that of the third step has tags.
        ensure!(all_authenticated(&cluster)? == (cipher == "aes-256-xts-hmac"), "{cipher}");
        cluster.sql("VACUUM FULL t")?;
        ensure!(all_authenticated(&cluster)? == cipher.starts_with("aes-256-xts-"), "{cipher}");
    }
    cluster.finish()
}
