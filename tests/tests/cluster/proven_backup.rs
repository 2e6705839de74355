//! `pagevault-keyring verify` of base backups: what is missing, changed or added is noticed.

use std::fs;

use anyhow::{Context, Result, ensure};
use pagevault_tests::backup::Backup;
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::installation::run;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::wal::Segment;
use pagevault_tests::{Cluster, Settings, StopMode};

use crate::wal::{insert, sealing};

#[test]
fn a_backup_proves_that_it_is_complete() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default().wal_segment_size(1))?;
    cluster.sql(
        "CREATE TABLE sealed AS SELECT i AS id FROM generate_series(1, 1000) i;
         CREATE TABLE gone AS SELECT * FROM sealed",
    )?;
    cluster.sql("SELECT pagevault.encrypt('sealed'); SELECT pagevault.encrypt('gone')")?;
    let space = cluster.make_tablespace("space")?;
    cluster.sql("CREATE TABLE elsewhere TABLESPACE space AS SELECT * FROM sealed")?;
    insert(&cluster, "drossel", 100)?;
    let gone = cluster.text("SELECT pg_relation_filepath('gone')")?;
    let backup = cluster.directory().join("backup");
    let copied = cluster.directory().join("copied");
    let mapping = format!("--tablespace-mapping={}={}", space.display(), copied.display());
    cluster.base_backup_with(&backup, &["-X", "fetch", &mapping])?;
    cluster.expect_verified(&backup, 0, &["No damage found.", "manifest     compared with"])?;

    // A whole relation: no other check of this program can notice that.
    let elsewhere = cluster.text("SELECT pg_relation_filepath('elsewhere')")?;
    let away = cluster.directory().join("away");
    for gone in [gone, elsewhere] {
        let relation = backup.join(&gone);
        fs::rename(&relation, &away)?;
        let missing = format!("{gone}: missing, according to backup_manifest");
        cluster.expect_verified(&backup, 2, &[&missing, "Damage found: 1."])?;
        fs::rename(&away, &relation)?;
    }

    // The label: a server would begin recovery at the wrong place.
    let label = backup.join("backup_label");
    fs::rename(&label, &away)?;
    cluster.expect_verified(&backup, 2, &["backup_label: missing"])?;
    fs::rename(&away, &label)?;

    let ident = backup.join("pg_ident.conf");
    let whole = fs::read(&ident)?;
    let mut changed = whole.clone();
    changed[0] ^= 1;
    fs::write(&ident, &changed)?;
    cluster.expect_verified(
        &backup,
        2,
        &["pg_ident.conf: another checksum", "Damage found: 1."],
    )?;
    fs::write(&ident, &whole[1..])?;
    cluster.expect_verified(&backup, 2, &["pg_ident.conf: another size", "Damage found: 1."])?;
    fs::write(&ident, &whole)?;

    fs::write(backup.join("base/1/4711"), "")?;
    cluster.expect_verified(
        &backup,
        2,
        &["base/1/4711: not in backup_manifest", "Damage found: 1."],
    )?;
    fs::remove_file(backup.join("base/1/4711"))?;
    fs::write(backup.join("recovery.signal"), "")?;
    cluster.expect_verified(&backup, 0, &["No damage found."])?;

    let manifest = backup.join("backup_manifest");
    let text = fs::read_to_string(&manifest)?;
    fs::write(&manifest, text.replacen("\"Size\": 3,", "\"Size\": 4,", 1))?;
    cluster.expect_verified(&backup, 2, &["backup_manifest: its own checksum is wrong"])?;
    fs::remove_file(&manifest)?;
    cluster.expect_verified(&backup, 0, &["manifest     none"])?;
    fs::write(&manifest, &text)?;
    cluster.expect_verified(&backup, 0, &["No damage found."])?;
    cluster.finish()
}

/// Without WAL up to its end a backup does not become consistent.
#[test]
fn wal_that_is_cut_before_the_end_of_the_backup_is_noticed() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default().wal_segment_size(1))?;
    insert(&cluster, "drossel", 100)?;
    let backup = cluster.directory().join("backup");
    cluster.base_backup_with(&backup, &["-X", "fetch"])?;
    cluster.expect_verified(&backup, 0, &["No damage found."])?;
    let text = fs::read_to_string(backup.join("backup_manifest"))?;
    let end = text.split("\"End-LSN\": \"").nth(1).and_then(|rest| rest.split('"').next());
    let end = end.context("the manifest's End-LSN")?;
    let low = end.split('/').nth(1).context("an LSN")?;
    let low = u64::from_str_radix(low, 16)? % (1 << 20);
    let name = cluster.text(&format!("SELECT pg_walfile_name('{end}')"))?;
    let segments = Segment::all(&backup.join("pg_wal"))?;
    let segment = segments.iter().find(|segment| segment.path.ends_with(&name));
    let path = &segment.context("the last segment")?.path;
    let whole = fs::read(path)?;

    // As if WAL had ended before the page with the end of the backup.
    let mut cut = whole.clone();
    let from = (low - 1) as usize / 8192 * 8192;
    cut[from..].fill(0);
    fs::write(path, &cut)?;
    cluster.expect_verified(&backup, 2, &["the backup needs it up to", end])?;
    fs::remove_file(path)?;
    cluster.expect_verified(&backup, 2, &["the backup needs it up to", end])?;

    // It may be elsewhere.
    let archive = cluster.directory().join("archive");
    fs::create_dir(&archive)?;
    fs::write(archive.join(&name), &whole)?;
    cluster.installation().give(&archive)?;
    cluster.installation().give(&archive.join(&name))?;
    let mut verify = cluster.program("pagevault-keyring");
    verify.arg("verify").arg("--wal-directory").arg(&archive).arg(&backup);
    ensure!(run(&mut verify)?.contains("No damage found."));
    fs::write(path, &whole)?;
    cluster.expect_verified(&backup, 0, &["No damage found."])?;
    cluster.finish()
}

/// Of the primary and of a standby, on two timelines, between rotations of keys and switches of
/// WAL.
#[test]
fn backups_of_each_server_and_timeline_are_complete() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default().wal_segment_size(1))?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    run(cluster.program("pgbench").args(["-i", "-q", "-s", "1"]))?;
    cluster.sql("SELECT pagevault.encrypt('pgbench_accounts')")?;
    let script = cluster.directory().join("script");
    fs::write(
        &script,
        "INSERT INTO t (name) SELECT 'drossel-' || i FROM generate_series(1, 100) i;\n\
         SELECT pg_logical_emit_message(false, 'x', repeat('x', 20000));\n\
         UPDATE pgbench_accounts SET abalance = abalance + 1 WHERE aid % 1000 = (random() * 9)::int;\n\
         SELECT pg_switch_wal() WHERE random() < 0.1;\n",
    )?;
    let standby = standby_of(&cluster, &[])?;
    for (round, server) in [&cluster, &standby, &standby].into_iter().enumerate() {
        if round == 2 {
            wait_for(&standby, &cluster)?;
            standby.promote()?;
        }
        let writer = if round == 2 { &standby } else { &cluster };
        let file = script.display().to_string();
        for method in ["fetch", "stream"] {
            writer.pgbench(&["-n", "-c", "2", "-t", "20", "-f", &file])?;
            writer.sql("SELECT pagevault.rotate_wal_key(), pagevault.rotate_data_key('t')")?;
            let backup = server.directory().join(format!("backup-{round}-{method}"));
            server.base_backup_with(&backup, &["-X", method, "--manifest-checksums=SHA256"])?;
            let mut seal = server.program("pagevault-keyring");
            run(seal.arg("seal-manifest").arg(&backup))?;
            server.expect_verified(&backup, 0, &["No damage found.", "manifest     compared"])?;
            fs::remove_dir_all(&backup)?;
        }
    }
    standby.finish()?;
    cluster.finish()
}

/// A crash, or a backup, while pages are written.
#[test]
fn torn_pages_that_recovery_replaces_are_no_damage() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("not properly shut down");
    cluster.sql("CREATE TABLE t (id int, n int) WITH (autovacuum_enabled = off)")?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    cluster.sql("INSERT INTO t SELECT i, 0 FROM generate_series(1, 1000) i")?;
    cluster.sql("CHECKPOINT")?;
    // Of block 0 an image is in WAL then, and not of the others.
    cluster.sql("UPDATE t SET n = 1 WHERE ctid = '(0,1)'")?;
    let path = cluster.data_directory().join(cluster.text("SELECT pg_relation_filepath('t')")?);
    let lock = cluster.data_directory().join("postmaster.pid");
    let of_a_server = fs::read(&lock)?;
    cluster.kill()?;
    // As a crash leaves it, and as it is in snapshots.
    fs::write(&lock, of_a_server)?;
    let hint = "or was killed\nDetail: Lock file";
    cluster.expect_verified(&cluster.data_directory(), 1, &[hint, "remove it."])?;
    fs::remove_file(&lock)?;
    let whole = fs::read(&path)?;
    let damaged = |block: usize| {
        let mut bytes = whole.clone();
        bytes[block * 8192 + 4000] ^= 1;
        fs::write(&path, bytes)
    };
    let data = cluster.data_directory();
    damaged(1)?;
    cluster.expect_verified(&data, 2, &["block 1: the checksum of the encrypted page is wrong"])?;
    damaged(0)?;
    cluster.expect_verified(
        &data,
        0,
        &["torn         1 pages that were being written", "No damage"],
    )?;
    cluster.start_server()?;
    ensure!(cluster.text("SELECT sum(n) FROM t")? == "1", "the update is lost");
    cluster.stop(StopMode::Fast)?;
    cluster.expect_verified(&data, 0, &["No damage found."])?;
    damaged(0)?;
    cluster.expect_verified(&data, 2, &["block 0: the checksum of the encrypted page is wrong"])?;
    cluster.finish()
}

/// Their keys are not in the copied keystore. The first record about the page has no image: it
/// locks a bucket of a hash index, or changes a bit that needs none without checksums.
#[test]
fn pages_that_wal_mentions_before_it_restores_them_are_no_damage() -> Result<()> {
    for settings in [Settings::default(), Settings::default().without_checksums()] {
        let (cluster, _keys) = Cluster::with_keys(&settings)?;
        cluster.sql(
            "CREATE TABLE t (id int, name text) WITH (autovacuum_enabled = off);
             CREATE INDEX i ON t USING hash (name)",
        )?;
        cluster.sql("SELECT pagevault.encrypt('t')")?;
        cluster.sql("INSERT INTO t SELECT i, 'same' FROM generate_series(1, 3000) i")?;
        cluster.sql("DELETE FROM t WHERE id > 1500")?;
        cluster.sql("CHECKPOINT")?;
        let backup = Backup::begin(&cluster)?;
        cluster.sql("VACUUM t")?;
        cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
        cluster.sql("SELECT pagevault.wait_for_rekey('t'::regclass, '1min')")?;
        cluster.sql("CHECKPOINT")?;
        let restored = backup.end()?;
        let data = restored.data_directory();
        restored.expect_verified(&data, 0, &["No damage found.", "torn         "])?;
        restored.start_server()?;
        let mut client = restored.client()?;
        run_sql(&mut client, "SET enable_seqscan = off")?;
        let rows = text(&mut client, "SELECT count(*) FROM t WHERE name = 'same'")?;
        ensure!(rows == "1500", "{rows} rows");
        drop(client);
        restored.stop(StopMode::Fast)?;
        restored.expect_verified(&data, 0, &["No damage found."])?;
        restored.finish()?;
        cluster.finish()?;
    }
    Ok(())
}
