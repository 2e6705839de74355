//! Archives contain sealed segments, and recovery reads them.

use anyhow::{Result, ensure};
use pagevault_tests::wal::Segment;
use pagevault_tests::{Cluster, Settings};

use super::{count, insert, lacks, leaks, marks, sealing, switch};

/// Creates the directory `archive` next to the data directory, and configures archiving to it.
fn archive_of(cluster: &Cluster) -> Result<std::path::PathBuf> {
    let archive = cluster.directory().join("archive");
    std::fs::create_dir(&archive)?;
    cluster.installation().give(&archive)?;
    Ok(archive)
}

/// Waits until all WAL so far is archived.
fn archived(cluster: &Cluster) -> Result<()> {
    let last = cluster.text("SELECT pg_walfile_name(pg_switch_wal())")?;
    let query = format!("SELECT last_archived_wal >= '{last}' FROM pg_stat_archiver");
    cluster.eventually(&query, "t")
}

/// From a backup before WAL encryption, across the first and the second key, to a point in between.
#[test]
fn recovery_to_a_point_across_sealed_and_plaintext_wal() -> Result<()> {
    let settings = Settings::default().conf("archive_mode = on").conf("archive_timeout = 0");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    let archive = archive_of(&cluster)?;
    cluster.set(&[("archive_command", &format!("cp %p {}/%f", archive.display()))])?;
    cluster.sql("CREATE TABLE t (id serial PRIMARY KEY, name text)")?;
    insert(&cluster, "amsel", 1000)?;
    let backup = cluster.directory().join("backup");
    cluster.base_backup_with(&backup, &["-X", "none", "--no-manifest"])?;
    insert(&cluster, "amsel", 1000)?;
    switch(&cluster, true)?;
    insert(&cluster, "drossel", 1000)?;
    cluster.sql("SELECT pagevault.rotate_wal_key()")?;
    insert(&cluster, "fink", 1000)?;
    switch(&cluster, false)?;
    insert(&cluster, "gimpel", 1000)?;
    switch(&cluster, true)?;
    cluster.sql("SELECT pg_create_restore_point('here')")?;
    insert(&cluster, "meise", 1000)?;
    archived(&cluster)?;
    let segments = Segment::all(&archive)?;
    ensure!(marks(&segments)? == [1, 2, 3], "keys {:?}", marks(&segments)?);
    for canary in ["drossel", "fink", "meise"] {
        ensure!(!leaks(&segments, canary), "the archive holds {canary}");
    }
    ensure!(leaks(&segments, "gimpel"), "the scan sees nothing");

    // With any size of the read-ahead buffer, no page is read before its key is replayed.
    for buffer in ["512kB", "64MB"] {
        let restored = Cluster::from_files(|target| {
            let mut copy = std::process::Command::new("cp");
            pagevault_tests::installation::run(copy.arg("-a").arg(&backup).arg(target))?;
            let signal = target.join("recovery.signal");
            std::fs::write(&signal, "")?;
            cluster.installation().give(&signal)
        })?;
        restored.append_conf(&format!(
            "archive_mode = off
             restore_command = 'cp {}/%f %p'
             recovery_target_name = 'here'
             recovery_target_action = 'promote'
             wal_decode_buffer_size = {buffer}",
            archive.display()
        ))?;
        restored.start_server()?;
        restored.eventually("SELECT pg_is_in_recovery()", "f")?;
        for (canary, rows) in [
            ("amsel", "2000"),
            ("drossel", "1000"),
            ("fink", "1000"),
            ("gimpel", "1000"),
            ("meise", "0"),
        ] {
            ensure!(count(&restored, canary)? == rows, "{canary}: {}", count(&restored, canary)?);
        }
        // The new timeline continues with the key in use at that point.
        restored.sql("SELECT pg_switch_wal()")?;
        insert(&restored, "zaunkoenig", 1000)?;
        super::assert_hidden(&restored, "zaunkoenig")?;
        restored.crash()?;
        ensure!(count(&restored, "zaunkoenig")? == "1000", "rows are missing");
        restored.finish()?;
    }
    cluster.finish()
}

/// A library copies segments within the server, through the same redirected calls.
#[test]
fn an_archive_library_copies_sealed_segments() -> Result<()> {
    if lacks("basic_archive")? {
        return Ok(());
    }
    let settings = Settings::default()
        .conf("archive_mode = on")
        .conf("archive_library = 'basic_archive'")
        .conf("wal_level = replica");
    let (cluster, _keys) = {
        let cluster = Cluster::create(&settings)?;
        let archive = archive_of(&cluster)?;
        cluster
            .append_conf(&format!("basic_archive.archive_directory = '{}'", archive.display()))?;
        cluster.start_server()?;
        let keys = cluster.key_file("keys", "main")?;
        cluster.sql("CREATE EXTENSION pagevault")?;
        cluster.sql(&keys.add_provider("local"))?;
        cluster.sql("SELECT pagevault.set_cluster_master_key('local', 'main')")?;
        cluster.sql("CREATE TABLE t (id serial PRIMARY KEY, name text)")?;
        (cluster, keys)
    };
    switch(&cluster, true)?;
    insert(&cluster, "drossel", 1000)?;
    archived(&cluster)?;
    let archive = Segment::all(&cluster.directory().join("archive"))?;
    ensure!(marks(&archive)? == [1] && !leaks(&archive, "drossel"), "the archive is not sealed");
    for archived in &archive {
        let original = cluster
            .data_directory()
            .join("pg_wal")
            .join(archived.path.file_name().unwrap_or_default());
        if original.exists() {
            ensure!(std::fs::read(&original)? == archived.bytes, "{original:?} is not the same");
        }
    }
    cluster.finish()
}

/// A standby that reads only from the archive.
#[test]
fn a_standby_follows_the_archive() -> Result<()> {
    let settings = Settings::default().conf("archive_mode = on");
    let (cluster, _keys) = sealing(&settings)?;
    let archive = archive_of(&cluster)?;
    cluster.set(&[("archive_command", &format!("cp %p {}/%f", archive.display()))])?;
    let mut standby = Cluster::from_files(|target| {
        cluster.base_backup_with(target, &["-X", "none", "--no-manifest"])?;
        let signal = target.join("standby.signal");
        std::fs::write(&signal, "")?;
        cluster.installation().give(&signal)
    })?;
    standby.allow_log("could not");
    standby.append_conf(&format!(
        "archive_mode = off\nrestore_command = 'cp {}/%f %p'\nwal_retrieve_retry_interval = 200ms",
        archive.display()
    ))?;
    insert(&cluster, "drossel", 1000)?;
    archived(&cluster)?;
    standby.start_server()?;
    for (round, rows) in [("drossel", "1000"), ("fink", "500"), ("gimpel", "500")] {
        if round != "drossel" {
            cluster.sql("SELECT pagevault.rotate_wal_key()")?;
            insert(&cluster, round, 500)?;
            archived(&cluster)?;
        }
        let query = format!("SELECT count(*) FROM t WHERE name LIKE '{round}-%'");
        standby.eventually(&query, rows)?;
    }
    standby.crash()?;
    standby.eventually("SELECT count(*) FROM t WHERE name LIKE 'gimpel-%'", "500")?;
    standby.sql("SELECT pg_promote()")?;
    standby.kill()?;
    standby.start_server()?;
    ensure!(count(&standby, "gimpel")? == "500", "rows are missing");
    standby.finish()?;
    cluster.finish()
}
