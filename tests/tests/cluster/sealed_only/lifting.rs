//! The keystore says that a file contains encrypted pages only until it is written in plaintext.

use anyhow::{Result, ensure};
use pagevault_tests::{Settings, StopMode};

use super::{HONEST, cluster, ensure_refused, file, is_sealed_only, plant, read_again, wait};

#[test]
fn decryption_ends_it_and_a_new_file_begins_it() -> Result<()> {
    let settings = Settings::default().conf("pagevault.rekey_threshold = 0");
    let (cluster, _keys) = cluster(&settings)?;
    let is = |expected: bool, when: &str| -> Result<()> {
        ensure!(is_sealed_only(&cluster, "t")? == expected, "{when}");
        ensure!(cluster.text(HONEST)? == "1000", "{when}: rows");
        read_again(&cluster)?;
        ensure!(is_sealed_only(&cluster, "t")? == expected, "{when}, after a restart");
        ensure!(cluster.text(HONEST)? == "1000", "{when}: rows after a restart");
        cluster.crash()?;
        ensure!(is_sealed_only(&cluster, "t")? == expected, "{when}, after a crash");
        ensure!(cluster.text(HONEST)? == "1000", "{when}: rows after a crash");
        Ok(())
    };
    is(true, "created")?;
    wait(&cluster, "SELECT pagevault.rotate_data_key('t')")?;
    is(true, "rotated")?;
    wait(&cluster, "SELECT pagevault.decrypt('t')")?;
    is(false, "decrypted")?;
    cluster.stop_at("rekey.proved")?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    cluster.stopped_at("rekey.proved")?;
    ensure!(!is_sealed_only(&cluster, "t")?, "encrypted again, and not recorded");
    cluster.resume();
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass, '1min')")? == "t");
    is(true, "encrypted again")?;
    cluster.sql("VACUUM FULL t")?;
    is(true, "in a new file")?;
    cluster.finish()
}

/// The remedy if a page is refused by mistake. Nothing of the file need be readable for it.
#[test]
fn decryption_accepts_what_is_there() -> Result<()> {
    let settings = Settings::default().conf("pagevault.rekey_threshold = 0");
    let (cluster, _keys) = cluster(&settings)?;
    let (forged, t) = (file(&cluster, "forged")?, file(&cluster, "t")?);
    cluster.stop(StopMode::Fast)?;
    plant(&forged, &t)?;
    cluster.start_server()?;
    ensure_refused(&cluster.error(HONEST)?)?;
    wait(&cluster, "SELECT pagevault.decrypt('t')")?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "1000");
    wait(&cluster, "SELECT pagevault.encrypt('t')")?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "1000");
    ensure!(cluster.text("SELECT pagevault.is_encrypted('t')")? == "t");
    cluster.finish()
}

/// A server without pagevault reads no encrypted page, but may fill an empty encrypted table.
#[test]
fn rows_that_were_inserted_without_pagevault_are_not_lost() -> Result<()> {
    let settings = Settings::default().conf("pagevault.rekey_threshold = 0");
    let (cluster, _keys) = cluster(&settings)?;
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE bare (id int)")?;
    cluster.append_conf("shared_preload_libraries = ''")?;
    read_again(&cluster)?;
    cluster.sql("INSERT INTO bare VALUES (1)")?;
    cluster.append_conf("shared_preload_libraries = 'pagevault'")?;
    read_again(&cluster)?;
    let error = cluster.error("SELECT id FROM bare")?;
    ensure_refused(&error)?;
    wait(&cluster, "SELECT pagevault.decrypt('bare')")?;
    ensure!(cluster.text("SELECT id FROM bare")? == "1");
    cluster.finish()
}

/// The record is durable before a page is written in plaintext: some have an older LSN, and do not
/// wait for it. Here nobody else has flushed WAL when the server is killed.
#[test]
fn the_record_is_durable_before_it_counts() -> Result<()> {
    let settings = Settings::default()
        .conf("pagevault.rekey_threshold = 0")
        .conf("autovacuum = off")
        .conf("wal_writer_delay = 10s");
    let (cluster, _keys) = cluster(&settings)?;
    ensure!(is_sealed_only(&cluster, "t")?);
    cluster.stop_at("rekey.switched")?;
    cluster.sql("SELECT pagevault.decrypt('t')")?;
    cluster.stopped_at("rekey.switched")?;
    // The job does not go on after the crash.
    cluster.stop_at("rekey.claimed")?;
    cluster.kill()?;
    cluster.start_server()?;
    ensure!(!is_sealed_only(&cluster, "t")?, "the record is lost");
    cluster.resume();
    cluster.sql("SELECT pg_reload_conf()")?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass, '1min')")? == "t");
    read_again(&cluster)?;
    ensure!(cluster.text(HONEST)? == "1000");
    cluster.finish()
}
