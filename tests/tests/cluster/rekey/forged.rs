//! Somebody who can write to the data directory puts pages into a file that gets another key. A
//! page that changes without WAL keeps the key that it has on disk; so such a page must not make
//! the server write plaintext, or under a key that the file had given up before.
//!
//! Of these files it is not recorded that they contain encrypted pages only: that case is in
//! `sealed_only::attacks`.

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::datafile::{DataFile, PageState};
use pagevault_tests::{Cluster, Settings};
use postgres::Client;

/// Rows whose pages have no hint bits yet.
const TABLE: &str =
    "CREATE TABLE t AS SELECT i AS id, 'MARKER-' || i AS name FROM generate_series(1, 2000) i";

fn cluster() -> Result<Cluster> {
    let settings = Settings::default()
        .without_checksums()
        .conf("pagevault.rekey_threshold = 0")
        .conf("autovacuum = off");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE TABLE first (); SELECT pagevault.encrypt('first')")?;
    Ok(cluster)
}

fn rekey(client: &mut Client, function: &str) -> Result<()> {
    run_sql(client, &format!("SELECT pagevault.{function}('t')"))?;
    let done = text(client, "SELECT pagevault.wait_for_rekey('t'::regclass, '1min')")?;
    ensure!(done == "t", "the job does not end");
    Ok(())
}

fn file_of_t(cluster: &Cluster, client: &mut Client) -> Result<DataFile> {
    let path = text(client, "SELECT pg_relation_filepath('t')")?;
    Ok(DataFile { path: cluster.data_directory().join(path) })
}

/// A page of the same LSN with nothing in it.
fn empty(page: &[u8]) -> Vec<u8> {
    let mut empty = vec![0; page.len()];
    empty[..8].copy_from_slice(&page[..8]);
    for (at, value) in [(12, 24_u16), (14, 8192), (16, 8192), (18, 0x2004)] {
        empty[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }
    empty
}

/// A page of the same LSN that names the first version.
fn earlier(page: &[u8]) -> Vec<u8> {
    let mut earlier = page.to_vec();
    earlier[10..12].copy_from_slice(&(1_u16 << 3).to_le_bytes());
    earlier
}

/// While `t` gets the key `version`, somebody writes `forge` of block 0 over it. `crash`: the
/// server was killed in between, so that it has read its keystore again.
fn is_not_followed(
    cluster: &Cluster,
    database: &str,
    version: u16,
    forge: fn(&[u8]) -> Vec<u8>,
    crash: bool,
) -> Result<()> {
    let mut client = cluster.client_to(database)?;
    let file = file_of_t(cluster, &mut client)?;
    run_sql(&mut client, "CHECKPOINT")?;
    cluster.stop_at("rekey.barrier_passed")?;
    run_sql(&mut client, "SELECT pagevault.rotate_data_key('t')")?;
    cluster.stopped_at("rekey.barrier_passed")?;
    if crash {
        drop(client);
        cluster.kill()?;
        cluster.resume();
        cluster.stop_at("rekey.claimed")?;
        cluster.start_server()?;
        cluster.stopped_at("rekey.claimed")?;
        client = cluster.client_to(database)?;
    }
    let before = file.read_page(0)?;
    ensure!(PageState::of(&before) == PageState::Sealed(version - 1), "not under the key before");
    run_sql(&mut client, "CREATE EXTENSION IF NOT EXISTS pg_prewarm; SELECT pg_prewarm('t')")?;
    file.write_page(0, &forge(&before))?;
    // Sets hint bits, without WAL.
    ensure!(text(&mut client, "SELECT count(*) FROM t WHERE name LIKE 'MARKER%'")? == "2000");
    run_sql(&mut client, "CHECKPOINT")?;
    let after = file.read_page(0)?;
    ensure!(after[..8] == before[..8], "the page has another LSN");
    ensure!(PageState::of(&after) == PageState::Sealed(version), "{:?}", PageState::of(&after));
    ensure!(!file.contains_text("MARKER")?, "plaintext");
    cluster.resume();
    ensure!(text(&mut client, "SELECT pagevault.wait_for_rekey('t'::regclass, '1min')")? == "t");
    ensure!(text(&mut client, "SELECT count(*) FROM t WHERE name LIKE 'MARKER%'")? == "2000");
    Ok(())
}

#[test]
fn a_page_in_plaintext_is_not_followed() -> Result<()> {
    for crash in [false, true] {
        let cluster = cluster()?;
        cluster.without_witness("somebody changes the files of this server only");
        let mut client = cluster.client()?;
        run_sql(&mut client, TABLE)?;
        rekey(&mut client, "encrypt")?;
        drop(client);
        is_not_followed(&cluster, "postgres", 2, empty, crash).context(crash)?;
        cluster.finish()?;
    }
    Ok(())
}

/// Of a raw copy it is not known how old its pages are, but that none is in plaintext.
#[test]
fn nor_in_a_raw_copy_of_a_database() -> Result<()> {
    let cluster = cluster()?;
    cluster.sql("CREATE DATABASE template")?;
    let mut client = cluster.client_to("template")?;
    run_sql(
        &mut client,
        &format!("CREATE EXTENSION pagevault; SET pagevault.default_encryption = on; {TABLE}"),
    )?;
    drop(client);
    cluster.sql("CREATE DATABASE raw TEMPLATE template STRATEGY file_copy")?;
    is_not_followed(&cluster, "raw", 2, empty, false)?;
    cluster.finish()
}

/// Otherwise the server would write under a key without a tag, perhaps.
#[test]
fn a_page_under_an_earlier_key_is_not_followed() -> Result<()> {
    let cluster = cluster()?;
    let mut client = cluster.client()?;
    run_sql(&mut client, TABLE)?;
    rekey(&mut client, "encrypt")?;
    rekey(&mut client, "rotate_data_key")?;
    drop(client);
    is_not_followed(&cluster, "postgres", 3, earlier, false)?;
    cluster.finish()
}

/// Here it counts: nobody has rewritten the page. If it were written under the key and torn, it
/// would be a mixture.
#[test]
fn a_page_that_is_still_in_plaintext_stays_so() -> Result<()> {
    let cluster = cluster()?;
    let mut client = cluster.client()?;
    run_sql(&mut client, TABLE)?;
    cluster.stop_at("rekey.barrier_passed")?;
    let job = text(&mut client, "SELECT pagevault.encrypt('t')")?;
    cluster.stopped_at("rekey.barrier_passed")?;
    cluster.kill()?;
    cluster.resume();
    cluster.append_conf("pagevault.rekey_workers = 0")?;
    cluster.start_server()?;
    let mut client = cluster.client()?;
    run_sql(&mut client, &format!("SELECT pagevault.cancel_rekey({job})"))?;
    cluster.stop_at("rekey.barrier_passed")?;
    cluster.set(&[("pagevault.rekey_workers", "1")])?;
    run_sql(&mut client, "SELECT pagevault.rotate_data_key('t')")?;
    cluster.stopped_at("rekey.barrier_passed")?;
    let file = file_of_t(&cluster, &mut client)?;
    ensure!(PageState::of(&file.read_page(0)?) == PageState::Plaintext, "the test shows nothing");
    ensure!(text(&mut client, "SELECT count(*) FROM t")? == "2000");
    run_sql(&mut client, "CHECKPOINT")?;
    ensure!(PageState::of(&file.read_page(0)?) == PageState::Plaintext);
    cluster.resume();
    ensure!(text(&mut client, "SELECT pagevault.wait_for_rekey('t'::regclass, '1min')")? == "t");
    pagevault_tests::datafile::assert_sealed(&[file])?;
    cluster.finish()
}
