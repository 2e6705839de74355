//! Pages whose header names a key that the file does not have, because a bit of it is wrong. WAL
//! restores them, as any damaged page: nobody waits for a key that will never come.

use anyhow::{Result, ensure};
use pagevault_cipher::checksum::page_checksum;
use pagevault_tests::datafile::{DataFile, PAGE_SIZE, PageState};
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, Settings};

use super::cluster;

/// `z`: to fill shared buffers.
const TABLES: &str = "
    CREATE TABLE t AS SELECT i AS id, md5(i::text) AS name FROM generate_series(1, 2000) i;
    CREATE TABLE z AS SELECT i AS id, repeat('z', 1000) AS name FROM generate_series(1, 3000) i";
const ENCRYPT: &str = "SELECT pagevault.encrypt('t')";
const SUM: &str = "SELECT count(*) || ':' || sum(hashtext(t::text)::bigint) FROM t";
/// Changes block 1, with an image of it in WAL, and evicts it.
const CHANGE: &str =
    "CHECKPOINT; UPDATE t SET id = -id WHERE ctid = '(1,1)'; UPDATE z SET id = -id; CHECKPOINT";

/// The page names another version: one bit of it is wrong.
fn misnamed(page: &[u8], checksums: bool) -> Result<Vec<u8>> {
    let mut page = page.to_vec();
    page[11] ^= 1 << 1;
    ensure!(matches!(PageState::of(&page), PageState::Sealed(64..)), "{:?}", PageState::of(&page));
    summed(&mut page, checksums)?;
    Ok(page)
}

/// With a right checksum, as only a person makes it.
fn summed(page: &mut [u8], checksums: bool) -> Result<()> {
    let sum = page_checksum((&*page).try_into()?, 1);
    page[8..10].copy_from_slice(&if checksums { sum } else { 0 }.to_le_bytes());
    Ok(())
}

fn settings(checksums: bool) -> Settings {
    let settings = Settings::default().conf("shared_buffers = 128kB").conf("autovacuum = off");
    if checksums { settings } else { settings.without_checksums() }
}

fn encrypted(checksums: bool) -> Result<Cluster> {
    let cluster = cluster(settings(checksums))?;
    cluster.sql(TABLES)?;
    cluster.sql(ENCRYPT)?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass, '1min')")? == "t");
    Ok(cluster)
}

fn file(cluster: &Cluster) -> Result<DataFile> {
    Ok(cluster.files("t")?.remove(0))
}

/// A running standby meets the page, and it starts again.
fn heals_on_a_standby(primary: &Cluster, damage: impl Fn(&[u8]) -> Result<Vec<u8>>) -> Result<()> {
    primary.sql("CHECKPOINT")?;
    let mut standby = standby_of(primary, &[])?;
    standby.allow_log("could not");
    wait_for(&standby, primary)?;
    standby.sql("CHECKPOINT")?;
    let of_standby = file(&standby)?;
    let before = of_standby.read_page(1)?;
    of_standby.write_page(1, &damage(&before)?)?;
    primary.sql(CHANGE)?;
    wait_for(&standby, primary)?;
    standby.sql("CHECKPOINT")?;
    ensure!(standby.text(SUM)? == primary.text(SUM)?, "contents differ");
    let state = |page: &[u8]| PageState::of(page);
    ensure!(state(&of_standby.read_page(1)?) == state(&before), "it is still there");
    // Before the standby is consistent.
    primary.sql(CHANGE)?;
    wait_for(&standby, primary)?;
    standby.without_witness("somebody changes the files of this server only");
    standby.kill()?;
    of_standby.write_page(1, &damage(&before)?)?;
    standby.start_server()?;
    wait_for(&standby, primary)?;
    ensure!(standby.text(SUM)? == primary.text(SUM)?, "contents differ after a restart");
    standby.finish()
}

#[test]
fn a_wrong_bit_does_not_end_recovery_of_a_standby() -> Result<()> {
    for checksums in [false, true] {
        let primary = encrypted(checksums)?;
        heals_on_a_standby(&primary, |page| misnamed(page, checksums))?;
        primary.finish()?;
    }
    Ok(())
}

/// In a file that has no key, of a page that looks like ciphertext.
#[test]
fn nor_in_a_table_in_plaintext() -> Result<()> {
    let primary = cluster(settings(false).conf("wal_compression = off"))?;
    primary.sql(
        "CREATE EXTENSION pgcrypto;
         CREATE TABLE t (id int, name bytea);
         ALTER TABLE t ALTER name SET STORAGE PLAIN;
         INSERT INTO t SELECT i, string_agg(gen_random_bytes(1000), gen_random_bytes(10))
             || gen_random_bytes(40) FROM generate_series(1, 50) i, generate_series(1, 8) GROUP BY 1;
         CREATE TABLE z AS SELECT i AS id, repeat('z', 1000) AS name FROM generate_series(1, 3000) i",
    )?;
    heals_on_a_standby(&primary, |page| {
        let most = (0..=255).map(|byte| page.iter().filter(|other| **other == byte).count()).max();
        ensure!(most < Some(128), "it does not look like ciphertext: {most:?}");
        misnamed(page, false)
    })?;
    primary.finish()
}

#[test]
fn a_wrong_bit_does_not_end_recovery_after_a_crash() -> Result<()> {
    for checksums in [false, true] {
        let cluster = encrypted(checksums)?;
        cluster.without_witness("somebody changes the files of this server only");
        cluster.sql("CHECKPOINT; UPDATE t SET id = -id WHERE ctid = '(1,1)'")?;
        let sum = cluster.text(SUM)?;
        let file = file(&cluster)?;
        cluster.kill()?;
        let before = file.read_page(1)?;
        file.write_page(1, &misnamed(&before, checksums)?)?;
        cluster.start_server()?;
        ensure!(cluster.text(SUM)? == sum, "contents differ");
        cluster.finish()?;
    }
    Ok(())
}

/// A page that opens under no key might be under a newer one. Only the DBA knows better.
#[test]
fn with_ignore_invalid_pages_what_looks_encrypted_is_written_over() -> Result<()> {
    let mut cluster = encrypted(false)?;
    for output in ["WAL has not brought", "no data key of version", "startup process", "shutting"] {
        cluster.allow_log(output);
    }
    cluster.without_witness("somebody changes the files of this server only");
    let file = file(&cluster)?;
    // The page is evicted during redo, or it is not.
    for (row, others) in [(1, ""), (2, "UPDATE z SET id = -id")] {
        cluster.sql(&format!(
            "CHECKPOINT; UPDATE t SET id = -id WHERE ctid = '(1,{row})'; {others}"
        ))?;
        let sum = cluster.text(SUM)?;
        cluster.kill()?;
        let mut page = file.read_page(1)?;
        let other = file.read_page(2)?;
        page[PAGE_SIZE / 2..].copy_from_slice(&other[PAGE_SIZE / 2..]);
        page[16..32].copy_from_slice(&other[16..32]);
        file.write_page(1, &misnamed(&page, false)?)?;
        let error = cluster.start_server().err().map(|error| format!("{error:#}"));
        let error = error.unwrap_or_default();
        ensure!(
            error.contains("data key of version") && error.contains("the page is damaged: "),
            "{error}"
        );
        ensure!(error.contains("ignore_invalid_pages = on"), "no way out: {error}");
        cluster.start_server_with(&["-c", "ignore_invalid_pages=on"])?;
        ensure!(cluster.text(SUM)? == sum, "contents differ");
        ensure!(cluster.log().contains("because ignore_invalid_pages is on"), "no warning");
        cluster.restart()?;
        ensure!(cluster.text(SUM)? == sum, "contents differ after a restart");
    }
    cluster.finish()
}
