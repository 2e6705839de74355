//! Data is the same: a server with the module opens what one without has written, and the reverse,
//! after a stop and after a crash, and as its standby.

use anyhow::{Context, Result, ensure};
use pagevault_tests::datafile::assert_sealed;
use pagevault_tests::leaks::{Canary, Scanner, report};
use pagevault_tests::standby::{ORDINARY, Standby, wait_for};
use pagevault_tests::{Cluster, Installation, KeyFile, Settings, StopMode};

use crate::{ordinary, validated};

/// A table in a cluster that encrypts everything, WAL and temporary data too, with both ciphers
/// that all builds have.
fn encrypted(server: &'static Installation, canary: &Canary) -> Result<(Cluster, KeyFile)> {
    let settings = Settings::default()
        .on(server)
        .conf("pagevault.default_encryption = on")
        .conf("pagevault.cipher = 'aes-256-xts'")
        .conf("work_mem = 64kB");
    let (cluster, keys) = Cluster::with_keys(&settings)?;
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    cluster.sql(&format!(
        "CREATE TABLE plain_xts (id int PRIMARY KEY, note text);
         SET pagevault.cipher = 'aes-256-xts-hmac';
         CREATE TABLE with_tags (LIKE plain_xts INCLUDING ALL);
         INSERT INTO plain_xts SELECT i, '{0}' || i FROM generate_series(1, 5000) i;
         INSERT INTO with_tags SELECT * FROM plain_xts;
         CHECKPOINT",
        canary.as_str()
    ))?;
    Ok((cluster, keys))
}

/// Both tables have their rows, temporary files work, and new keys of every kind are made.
fn is_whole(cluster: &Cluster, canary: &Canary) -> Result<()> {
    for table in ["plain_xts", "with_tags"] {
        let query = format!(
            "SELECT count(*) FROM (SELECT * FROM {table} ORDER BY note) t WHERE note LIKE '{}%'",
            canary.as_str()
        );
        ensure!(cluster.text(&query)? == "5000", "rows of {table}");
        cluster.sql(&format!("UPDATE {table} SET note = note || '.' WHERE id % 7 = 0"))?;
        cluster.sql(&format!("SELECT pagevault.rotate_data_key('{table}')"))?;
        cluster.sql(&format!("SELECT pagevault.wait_for_rekey('{table}'::regclass)"))?;
    }
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    cluster.sql("SELECT pagevault.rotate_wal_key()")?;
    cluster.sql("CHECKPOINT")?;
    for table in ["plain_xts", "with_tags"] {
        assert_sealed(&cluster.family_files(table)?)?;
    }
    let found = Scanner::new([canary]).scan_trees(&[cluster.data_directory().as_path()])?;
    ensure!(found.is_empty(), "in plaintext on disk:\n{}", report(&found));
    Ok(())
}

fn take_turns(first: &'static Installation, second: &'static Installation) -> Result<()> {
    let canary = Canary::text("of both builds");
    let (mut cluster, _keys) = encrypted(first, &canary)?;
    is_whole(&cluster, &canary)?;
    for (server, crashes) in [(second, true), (first, true), (second, false), (first, false)] {
        cluster.sql("UPDATE plain_xts SET note = note || ','; UPDATE with_tags SET note = note")?;
        if crashes {
            cluster.kill()?
        } else {
            cluster.stop(StopMode::Fast)?
        }
        cluster.run_by(server);
        cluster.start_server()?;
        is_whole(&cluster, &canary)?;
    }
    cluster.end()?;
    cluster.keep_quiet();
    Ok(())
}

#[test]
fn builds_take_turns_with_one_data_directory() -> Result<()> {
    take_turns(validated()?, ordinary()?)
}

fn stand_by(primary: &'static Installation, other: &'static Installation) -> Result<()> {
    let canary = Canary::text("of a primary");
    let (mut former, _keys) = encrypted(primary, &canary)?;
    let mut next = Standby::default().create(&former)?;
    next.run_by(other);
    for cluster in [&mut former, &mut next] {
        ORDINARY.iter().for_each(|text| cluster.allow_log(text));
    }
    next.start_server().context("a standby")?;
    is_whole(&former, &canary)?;
    next.kill()?;
    next.start_server().context("a standby that was killed")?;
    is_whole(&former, &canary)?;
    wait_for(&next, &former)?;
    former.stop(StopMode::Fast)?;
    next.promote()?;
    is_whole(&next, &canary)?;
    for cluster in [former, next] {
        cluster.end()?;
        let mut cluster = cluster;
        cluster.keep_quiet();
    }
    Ok(())
}

#[test]
fn an_ordinary_standby_follows_a_server_with_the_module() -> Result<()> {
    stand_by(validated()?, ordinary()?)
}

#[test]
fn a_standby_with_the_module_follows_an_ordinary_server() -> Result<()> {
    stand_by(ordinary()?, validated()?)
}
