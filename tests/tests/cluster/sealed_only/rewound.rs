//! `pg_rewind` of a former primary, when one of two timelines has said of a file that it contains
//! encrypted pages only, or that it does not any more, or of which keys.

use anyhow::{Context, Result, ensure};
use pagevault_tests::backup::Backup;
use pagevault_tests::standby::{allow_what_failovers_say, fail_over, rewind, standby_of, wait_for};
use pagevault_tests::{Cluster, Settings, Standby, StopMode};

use super::{cluster, is_sealed_only, read_again, wait};

/// Encrypted in place, decrypted, or rotated, by one of the two servers after their timelines have
/// parted.
const TABLES: [&str; 6] =
    ["proven_here", "proven_there", "lifted_here", "lifted_there", "rotated_here", "rotated_there"];

fn change(cluster: &Cluster) -> Result<()> {
    for table in TABLES {
        cluster.sql(&format!(
            "UPDATE {table} SET id = id + 1 WHERE id % 50 = 0;
             INSERT INTO {table} SELECT i, 'honest' FROM generate_series(1, 500) i"
        ))?;
    }
    Ok(())
}

#[test]
fn a_former_primary_follows() -> Result<()> {
    let settings =
        Settings::default().conf("pagevault.rekey_threshold = 0").conf("wal_keep_size = 1GB");
    let (mut a, _keys) = cluster(&settings)?;
    for table in TABLES {
        let encryption = if table.starts_with("proven") { "off" } else { "on" };
        a.sql(&format!(
            "SET pagevault.default_encryption = {encryption};
             CREATE TABLE {table} AS SELECT i AS id, 'honest' AS name FROM generate_series(1, 2000) i"
        ))?;
    }
    let mut b = standby_of(&a, &[])?;
    [&mut a, &mut b].into_iter().for_each(allow_what_failovers_say);
    change(&a)?;
    wait_for(&b, &a)?;
    b.promote()?;
    b.sql("CHECKPOINT")?;
    // `here` is what becomes of history, `there` what is rewound.
    for (cluster, place) in [(&b, "here"), (&a, "there")] {
        change(cluster)?;
        wait(cluster, &format!("SELECT pagevault.encrypt('proven_{place}')"))?;
        wait(cluster, &format!("SELECT pagevault.decrypt('lifted_{place}')"))?;
        wait(cluster, &format!("SELECT pagevault.rotate_data_key('rotated_{place}')"))?;
        change(cluster)?;
        ensure!(is_sealed_only(cluster, &format!("proven_{place}"))?);
        ensure!(!is_sealed_only(cluster, &format!("lifted_{place}"))?);
    }
    a.without_witness("pg_rewind takes its WAL away");
    a.stop(StopMode::Fast)?;
    rewind(&a, &b)?;
    let agree = |round: &str| -> Result<()> {
        wait_for(&a, &b)?;
        for table in TABLES {
            let query = format!("SELECT count(*) || ' ' || sum(id) FROM {table}");
            ensure!(a.text(&query)? == b.text(&query)?, "{round}: {table}");
            let expected =
                matches!(table, "proven_here" | "lifted_there") || table.starts_with("rotated");
            ensure!(is_sealed_only(&b, table)? == expected, "{round}: {table}");
            ensure!(is_sealed_only(&a, table)? == expected, "{round}: {table}, rewound");
        }
        Ok(())
    };
    agree("rewound")?;
    change(&b)?;
    agree("changed")?;
    a.crash()?;
    agree("crashed")?;
    b.sql("CHECKPOINT")?;
    wait_for(&a, &b)?;
    a.sql("CHECKPOINT")?;
    // Everything from disk.
    read_again(&a)?;
    agree("read again")?;
    a.finish()?;
    b.finish()
}

/// Checkpoints only when a test says so.
fn settings() -> Settings {
    Settings::default()
        .conf("pagevault.rekey_threshold = 0")
        .conf("wal_keep_size = 1GB")
        .conf("checkpoint_timeout = 1d")
        .conf("bgwriter_lru_maxpages = 0")
        .conf("autovacuum = off")
}

/// The rows of the rewound server, in shared buffers and on disk, after a restart point, and after
/// its promotion.
fn has_all(rewound: &Cluster, source: &Cluster, rows: &str) -> Result<()> {
    let count = "SELECT count(*) || ' ' || sum(id) FROM t";
    wait_for(rewound, source)?;
    ensure!(rewound.text(count)? == rows, "rewound: {}", rewound.text(count)?);
    source.sql("UPDATE t SET id = id; CHECKPOINT")?;
    wait_for(rewound, source)?;
    rewound.sql("CHECKPOINT")?;
    read_again(rewound)?;
    ensure!(rewound.text(count)? == rows, "read again");
    wait_for(rewound, source)?;
    rewound.promote()?;
    ensure!(rewound.text(count)? == rows, "promoted");
    let failures = "SELECT decrypt_failures FROM pagevault.stats WHERE kind = 'relation'";
    ensure!(rewound.text(failures)? == "0");
    Ok(())
}

/// Stops the standby, and lets a job of the primary switch `t`, and not go on. Returns the rows.
fn switch_behind(primary: &Cluster, standby: &Cluster, change: &str) -> Result<String> {
    wait_for(standby, primary)?;
    let rows = primary.text("SELECT count(*) || ' ' || sum(id) FROM t")?;
    standby.stop(StopMode::Fast)?;
    primary.stop_at("rekey.switched")?;
    primary.sql(&format!("SELECT pagevault.{change}('t')"))?;
    primary.stopped_at("rekey.switched")?;
    Ok(rows)
}

/// pg_rewind reads WAL from the record of the last common checkpoint, not from its redo pointer. A
/// page that was changed in between, and written under a new key that only the target has, is not
/// among those that it copies. (It recovers a target that has crashed, in single-user mode.)
#[test]
fn a_former_primary_that_crashed_in_a_rotation_follows() -> Result<()> {
    for change in ["rotate_data_key", "decrypt"] {
        let (mut a, _keys) = cluster(&settings())?;
        let mut b = standby_of(&a, &[])?;
        [&mut a, &mut b].into_iter().for_each(allow_what_failovers_say);
        // A checkpoint writes `forged`, and has no other page to write.
        a.sql("VACUUM t")?;
        a.sql("CHECKPOINT; UPDATE forged SET id = id")?;
        let other = a.text("SELECT pg_relation_filenode('forged')")?;
        a.stop_at(&format!("page.writing {other}"))?;
        std::thread::scope(|threads| -> Result<()> {
            let checkpoint = threads.spawn(|| a.sql("CHECKPOINT"));
            a.stopped_at("page.writing")?;
            a.sql("UPDATE t SET id = id WHERE id > 900")?;
            a.resume();
            checkpoint.join().map_err(|_| anyhow::anyhow!("the checkpoint"))?
        })?;
        a.sql("SELECT pg_logical_emit_message(true, '', '')")?;
        let rows = switch_behind(&a, &b, change)?;
        a.without_witness("pg_rewind takes its WAL away");
        a.kill()?;
        a.resume();
        b.start_server()?;
        b.promote()?;
        b.sql("CHECKPOINT")?;
        rewind(&a, &b)?;
        has_all(&a, &b, &rows).with_context(|| change.to_owned())?;
        a.finish()?;
        b.finish()?;
    }
    Ok(())
}

/// The same of a standby that has replayed more than the one that is promoted. What it has in
/// shared buffers may be older than any checkpoint of the primary.
#[test]
fn a_standby_ahead_of_the_promoted_one_follows() -> Result<()> {
    for change in ["rotate_data_key", "decrypt"] {
        let (mut a, _keys) = cluster(&settings())?;
        let mut ahead = standby_of(&a, &[])?;
        let mut b = standby_of(&a, &[])?;
        [&mut a, &mut b].into_iter().for_each(allow_what_failovers_say);
        a.sql("UPDATE t SET id = id; CHECKPOINT; SELECT pg_logical_emit_message(true, '', '')")?;
        let rows = switch_behind(&a, &b, change)?;
        wait_for(&ahead, &a)?;
        fail_over(&mut a, &mut ahead, &b)?;
        has_all(&ahead, &b, &rows).with_context(|| change.to_owned())?;
        ahead.finish()?;
        b.finish()?;
    }
    Ok(())
}

/// The same of one that was restored from a backup, and was not consistent yet when it replayed the
/// switch.
#[test]
fn a_restored_standby_ahead_of_the_promoted_one_follows() -> Result<()> {
    for change in ["rotate_data_key", "decrypt"] {
        let (mut a, _keys) = cluster(&settings())?;
        let mut b = standby_of(&a, &[])?;
        [&mut a, &mut b].into_iter().for_each(allow_what_failovers_say);
        a.sql("VACUUM t")?;
        let backup = Backup::begin_with_files(&a)?;
        a.sql("UPDATE t SET id = id WHERE id > 900; CHECKPOINT")?;
        a.sql("SELECT pg_logical_emit_message(true, '', '')")?;
        let rows = switch_behind(&a, &b, change)?;
        let mut ahead = backup.end()?;
        Standby::default().follow(&ahead, &a)?;
        ahead.start_server()?;
        wait_for(&ahead, &a)?;
        // Writes what it has in shared buffers.
        ahead.sql("CHECKPOINT")?;
        fail_over(&mut a, &mut ahead, &b)?;
        has_all(&ahead, &b, &rows).with_context(|| change.to_owned())?;
        ahead.finish()?;
        b.finish()?;
    }
    Ok(())
}

/// A job does not switch a file while a process is writing one of its pages: it could not write the
/// others before.
#[test]
fn a_job_waits_for_a_write_before_it_switches() -> Result<()> {
    for change in ["rotate_data_key", "decrypt"] {
        let (a, _keys) = cluster(&settings())?;
        let version = "SELECT pagevault.is_encrypted('t') || ' ' || max(data_key_version)
            FROM pagevault.relations WHERE relation = 't'::regclass";
        let before = a.text(version)?;
        a.sql("CHECKPOINT; UPDATE t SET id = id WHERE id > 900")?;
        let file = a.text("SELECT pg_relation_filenode('t')")?;
        a.stop_at(&format!("page.writing {file}"))?;
        std::thread::scope(|threads| -> Result<()> {
            let checkpoint = threads.spawn(|| a.sql("CHECKPOINT"));
            let writer = a.stopped_at("page.writing")?;
            a.sql(&format!("SELECT pagevault.{change}('t')"))?;
            let waits = format!(
                "SELECT count(*) > 0 FROM pg_stat_activity WHERE backend_type = 'pagevault rekey'
                 AND query LIKE 'pagevault:%waits for process {}'",
                writer.as_raw_nonzero()
            );
            a.eventually(&waits, "t")?;
            ensure!(a.text(version)? == before, "{change}: switched");
            a.resume();
            checkpoint.join().map_err(|_| anyhow::anyhow!("the checkpoint"))?
        })?;
        a.sql("SELECT pagevault.wait_for_rekey('t')")?;
        ensure!(a.text(version)? != before, "{change}");
        a.finish()?;
    }
    Ok(())
}
