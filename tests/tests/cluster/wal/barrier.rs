//! The barrier before a new WAL key: other sessions continue meanwhile, and it is long enough for
//! every reader.

use std::thread;

use anyhow::{Result, ensure};
use pagevault_tests::Settings;
use pagevault_tests::cluster::text;

use super::{STATE, assert_hidden, count, insert, sealing, switch};

/// While a session writes its barrier, keys are created, views are queried, and WAL encryption is
/// switched. The session can be cancelled.
#[test]
fn other_sessions_continue_while_a_barrier_is_written() -> Result<()> {
    let settings = Settings::default().conf("pagevault.default_encryption = on");
    let (cluster, _keys) = sealing(&settings)?;
    let key = || cluster.text("SELECT wal_key_version FROM pagevault.status");
    let rotate = |point: &str| -> Result<_> {
        cluster.stop_at(point)?;
        let mut client = cluster.client()?;
        let cancel = client.cancel_token();
        let rotation =
            thread::spawn(move || text(&mut client, "SELECT pagevault.rotate_wal_key()"));
        cluster.stopped_at(point)?;
        Ok((rotation, cancel))
    };
    let done = |rotation: thread::JoinHandle<Result<String>>| -> Result<String> {
        let output = rotation.join().map_err(|_| anyhow::anyhow!("a panic"))?;
        Ok(output.unwrap_or_else(|error| format!("{error:#}")))
    };
    let (rotation, cancel) = rotate("wal_switch.barrier")?;
    cluster.sql("CREATE TABLE another AS SELECT generate_series(1, 1000)")?;
    ensure!(key()? == "1", "key {}", key()?);
    cancel.cancel_query(postgres::NoTls)?;
    let output = done(rotation)?;
    cluster.resume();
    ensure!(output.contains("canceling statement due to user request"), "{output}");
    ensure!(key()? == "1", "key {}", key()?);

    // Switched off meanwhile: the key is not used.
    let (rotation, _) = rotate("wal_switch.barrier_of 3")?;
    switch(&cluster, false)?;
    cluster.resume();
    let output = done(rotation)?;
    ensure!(output.contains("WAL is not encrypted"), "{output}");
    ensure!(cluster.text(STATE)? == "f");
    switch(&cluster, true)?;
    ensure!(key()? == "4", "key {}", key()?);

    // Switched on again: that key is newer.
    let (rotation, _) = rotate("wal_switch.barrier_of 5")?;
    switch(&cluster, false)?;
    switch(&cluster, true)?;
    cluster.resume();
    let output = done(rotation)?;
    ensure!(output == "6" && key()? == "6", "{output}, key {}", key()?);
    insert(&cluster, "drossel", 1000)?;
    assert_hidden(&cluster, "drossel")?;
    cluster.crash()?;
    ensure!(count(&cluster, "drossel")? == "1000", "rows are missing");
    cluster.finish()
}

/// The reader's buffer has a fixed size, whatever the setting says.
#[test]
fn no_server_reads_ahead_beyond_a_barrier() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default().conf("wal_decode_buffer_size = 512MB"))?;
    ensure!(cluster.text("SHOW wal_decode_buffer_size")? == "4MB");
    ensure!(
        cluster.log().contains("wal_decode_buffer_size is 4 MB, not 512 MB"),
        "it says nothing"
    );
    let before = cluster.text("SELECT pg_current_wal_lsn()")?;
    for _ in 0..3 {
        cluster.sql("SELECT pagevault.rotate_wal_key()")?;
        insert(&cluster, "drossel", 100)?;
    }
    let written = cluster.text(&format!("SELECT pg_current_wal_lsn() - '{before}'"))?;
    ensure!((12 << 20..14 << 20).contains(&written.parse::<u64>()?), "{written} bytes");
    cluster.crash()?;
    ensure!(count(&cluster, "drossel")? == "300", "rows are missing");
    cluster.finish()
}
