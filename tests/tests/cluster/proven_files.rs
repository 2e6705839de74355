//! `pagevault-keyring verify`: files that look damaged, and that PostgreSQL accepts, are no damage;
//! those that look right, and that it does not use or accept, are.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Settings, StopMode};

fn flip(path: &Path, at: u64) -> Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at)?;
    Ok(file.write_all_at(&[byte[0] ^ 1], at)?)
}

/// As `mdextend` (md.c) leaves it when the disk is full.
#[test]
fn half_a_block_at_the_end_of_a_relation_is_no_damage() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("could not verify checksum in file");
    cluster.sql("CREATE TABLE t AS SELECT i AS id FROM generate_series(1, 1000) i")?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    let relation = cluster.relation_path("t")?;
    let data = cluster.data_directory();
    cluster.stop(StopMode::Fast)?;
    let path = data.join(&relation);
    let mut bytes = fs::read(&path)?;
    let blocks = bytes.len() / 8192;
    bytes.extend([7; 4096]);
    fs::write(&path, &bytes)?;
    let place = format!("partial      {} block {blocks}: the file ends", relation.display());
    cluster.expect_verified(&data, 0, &[&place, "No damage found."])?;
    cluster.start_server()?;
    let backup = cluster.directory().join("backup");
    cluster.base_backup_with(&backup, &["-X", "fetch"])?;
    cluster.expect_verified(&backup, 0, &[&place, "manifest     compared", "No damage found."])?;
    cluster.sql("INSERT INTO t SELECT i FROM generate_series(1, 5000) i")?;
    ensure!(cluster.text("SELECT count(*) FROM t")? == "6000");
    cluster.stop(StopMode::Fast)?;
    let (response, code) = cluster.verify_offline(&data)?;
    ensure!(code == Some(0) && !response.contains("partial"), "{response}");
    cluster.finish()
}

/// Each base backup after a crash contains the files of interrupted transactions.
#[test]
fn files_without_relation_in_a_backup_are_no_damage() -> Result<()> {
    let settings = Settings::default().conf("wal_writer_delay = 10s").conf("autovacuum = off");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql("CREATE TABLE kept AS SELECT i AS id FROM generate_series(1, 5000) i")?;
    cluster.sql("SELECT pagevault.encrypt('kept'); CHECKPOINT")?;
    let kept = cluster.relation_path("kept")?;
    let mut client = cluster.client()?;
    run_sql(&mut client, "BEGIN")?;
    run_sql(&mut client, "CREATE TABLE lost AS SELECT i FROM generate_series(1, 5000) i")?;
    let lost = pagevault_tests::cluster::text(&mut client, "SELECT pg_relation_filepath('lost')")?;
    cluster.crash()?;
    let lost = PathBuf::from(lost);
    let path = cluster.data_directory().join(&lost);
    // A page under a key that was not flushed.
    ensure!(fs::metadata(&path)?.len() >= 2 * 8192, "no file is left over");
    let reseal = |path: &Path, at: u64| -> Result<()> {
        let file = OpenOptions::new().write(true).open(path)?;
        file.write_all_at(&[7; 8192], at)?;
        Ok(file.write_all_at(&(77_u16 << 3).to_le_bytes(), at + 10)?)
    };
    reseal(&path, 8192)?;
    let line = format!("left over    {}: belongs to no relation", lost.display());
    let unverified = ["-X", "fetch", "--no-verify-checksums"];
    let backup = cluster.directory().join("backup");
    cluster.base_backup_with(&backup, &unverified)?;
    cluster.expect_verified(&backup, 0, &[&line, "No damage found."])?;

    // What a relation needs is damage, and so is everything if WAL does not tell.
    fs::remove_file(backup.join("backup_manifest"))?;
    flip(&backup.join(&kept), 5000)?;
    let damage = format!("{} block 0: the checksum", kept.display());
    cluster.expect_verified(&backup, 2, &[&line, &damage, "Damage found: 1."])?;
    flip(&backup.join(&kept), 5000)?;
    let (wal, away) = (backup.join("pg_wal"), cluster.directory().join("away"));
    fs::rename(&wal, &away)?;
    fs::create_dir(&wal)?;
    cluster.installation().give(&wal)?;
    let damage = format!("{} block 1: the keystore has no data key", lost.display());
    cluster.expect_verified(&backup, 2, &[&damage])?;
    fs::remove_dir(&wal)?;
    fs::rename(&away, &wal)?;
    cluster.expect_verified(&backup, 0, &[&line, "No damage found."])?;

    // A file that was made since: its row is only in WAL. Of the last page nothing is.
    cluster.sql("CREATE TABLE made AS SELECT i FROM generate_series(1, 5000) i")?;
    let made = cluster.relation_path("made")?;
    cluster.stop(StopMode::Immediate)?;
    let path = cluster.data_directory().join(&made);
    let end = fs::metadata(&path)?.len().next_multiple_of(8192);
    reseal(&path, end)?;
    let damage = format!("{} block {}: the keystore has no data", made.display(), end / 8192);
    cluster.expect_verified(&cluster.data_directory(), 2, &[&damage])?;
    let file = OpenOptions::new().write(true).open(&path)?;
    file.set_len(end)?;
    cluster.finish()
}

/// Up to 17 bits of the visibility map are cleared without WAL (`visibilitymap_clear`), and the
/// free space map is not logged at all.
#[test]
fn torn_pages_of_maps_are_read_as_empty() -> Result<()> {
    for cipher in ["aes-256-xts", "aes-256-xts-auth"] {
        for has_checksums in [true, false] {
            maps(cipher, has_checksums).with_context(|| format!("{cipher} {has_checksums}"))?;
        }
    }
    Ok(())
}

fn maps(cipher: &str, has_checksums: bool) -> Result<()> {
    let mut settings = Settings::default().conf("autovacuum = off");
    if !has_checksums {
        settings = settings.without_checksums().conf("wal_log_hints = on");
    }
    let (mut cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.allow_log("not properly shut down");
    cluster.allow_log("invalid page in block");
    cluster.allow_log("page verification failed");
    cluster.sql("CREATE TABLE t AS SELECT i AS id FROM generate_series(1, 5000) i")?;
    cluster.sql(&format!("SET pagevault.cipher = '{cipher}'; SELECT pagevault.encrypt('t')"))?;
    cluster.sql("DELETE FROM t WHERE id % 50 = 0")?;
    cluster.sql("VACUUM t")?;
    let data = cluster.data_directory();
    let relation = cluster.relation_path("t")?;
    let fork = |name: &str| data.join(format!("{}{name}", relation.display()));
    let is_noticed = has_checksums || cipher != "aes-256-xts";
    let words = ["maps         2 damaged pages of free space", "No damage found."];
    let words = if is_noticed { &words[..] } else { &words[1..] };
    // After a clean shutdown, and after a crash with a change of the map in WAL.
    for round in 0..2 {
        if round == 0 {
            cluster.stop(StopMode::Fast)?;
        } else {
            cluster.sql("CHECKPOINT; DELETE FROM t WHERE id = 1")?;
            cluster.kill()?;
        }
        flip(&fork("_vm"), 5000)?;
        flip(&fork("_fsm"), 5000)?;
        cluster.expect_verified(&data, 0, words)?;
        cluster.start_server()?;
        let rows = 4900 - round;
        ensure!(cluster.text("SELECT count(*) FROM t")? == rows.to_string(), "rows are lost");
        cluster.sql("VACUUM (DISABLE_PAGE_SKIPPING) t")?;
    }
    cluster.finish()
}

/// With a `tablespace_map` a server makes its own links.
#[test]
fn tablespaces_are_where_the_map_of_a_backup_says() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let space = cluster.make_tablespace("space")?;
    cluster.sql("CREATE TABLE t TABLESPACE space AS SELECT i FROM generate_series(1, 1000) i")?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    let number = cluster.text("SELECT oid FROM pg_tablespace WHERE spcname = 'space'")?;
    let relation = cluster.relation_path("t")?;
    let inside = relation.strip_prefix(format!("pg_tblspc/{number}"))?.to_owned();
    let archives = cluster.directory().join("archives");
    cluster.base_backup_with(&archives, &["-X", "fetch", "--format=tar"])?;

    // Of another major, which PostgreSQL does not read.
    cluster.stop(StopMode::Fast)?;
    let data = cluster.data_directory();
    let foreign = space.join("PG_14_202107181").join(inside.iter().nth(1).context("a database")?);
    fs::create_dir_all(&foreign)?;
    fs::write(foreign.join("16384"), vec![7; 8192])?;
    cluster.expect_verified(&data, 0, &["No damage found."])?;

    // Extracted as for a restore: there is no link yet.
    let away = cluster.directory().join("away");
    fs::rename(&space, &away)?;
    let restored = cluster.directory().join("restored");
    let extract = |archive: &str, target: &Path| -> Result<()> {
        fs::create_dir(target)?;
        cluster.installation().give(target)?;
        let mut tar = Command::new("tar");
        run(tar
            .args(["--numeric-owner", "-xf"])
            .arg(archives.join(archive))
            .arg("-C")
            .arg(target))?;
        Ok(())
    };
    extract("base.tar", &restored)?;
    extract(&format!("{number}.tar"), &space)?;
    fs::copy(archives.join("backup_manifest"), restored.join("backup_manifest"))?;
    cluster.installation().give(&restored.join("backup_manifest"))?;
    let compared = ["manifest     compared", "No damage found."];
    cluster.expect_verified(&restored, 0, &compared)?;

    // A link that leads to a good copy does not count.
    let copy = cluster.directory().join("copy");
    extract(&format!("{number}.tar"), &copy)?;
    symlink(&copy, restored.join("pg_tblspc").join(&number))?;
    cluster.expect_verified(&restored, 0, &compared)?;
    let file = space.join(&inside);
    let whole = fs::read(&file)?;
    fs::write(&file, "")?;
    let damage = format!("{}: another size", relation.display());
    cluster.expect_verified(&restored, 2, &[&damage, "Damage found: 1."])?;
    fs::write(&file, &whole)?;
    flip(&file, 5000)?;
    let page = format!("{} block 0: the checksum", file.display());
    cluster.expect_verified(&restored, 2, &[&page, &format!("{}: another", relation.display())])?;
    fs::write(&file, &whole)?;
    fs::remove_dir_all(&copy)?;
    cluster.expect_verified(&restored, 0, &compared)?;

    fs::remove_dir_all(&space)?;
    fs::rename(&away, &space)?;
    cluster.start_server()?;
    cluster.finish()
}

#[test]
fn directories_and_links_of_a_backup_are_compared() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let backup = cluster.directory().join("backup");
    cluster.base_backup_with(&backup, &["-X", "fetch", "--manifest-checksums=SHA256"])?;
    cluster.expect_verified(&backup, 0, &["manifest     compared", "No damage found."])?;

    // Without it a server does not start.
    for name in ["pg_notify", "pg_logical/snapshots"] {
        fs::remove_dir(backup.join(name))?;
        let damage = format!("{name}: the directory is missing");
        cluster.expect_verified(&backup, 2, &[&damage, "Damage found: 1."])?;
        fs::create_dir(backup.join(name))?;
        cluster.installation().give(&backup.join(name))?;
    }
    for name in ["backup_label.old", "recovery.signal", "pg_replslot/one"] {
        fs::create_dir(backup.join(name))?;
        let damage = format!("{name}: an additional directory");
        cluster.expect_verified(&backup, 2, &[&damage, "Damage found: 1."])?;
        fs::remove_dir(backup.join(name))?;
    }
    let status = backup.join("pg_wal/archive_status");
    fs::remove_dir_all(&status)?;
    cluster.expect_verified(&backup, 0, &["No damage found."])?;
    fs::write(&status, "")?;
    let damage = "pg_wal/archive_status: not a directory";
    cluster.expect_verified(&backup, 2, &[damage, "Damage found: 1."])?;
    fs::remove_file(&status)?;
    fs::create_dir(backup.join("conf.d"))?;
    cluster.expect_verified(&backup, 0, &["added        conf.d: a directory without files"])?;
    fs::remove_dir(backup.join("conf.d"))?;

    let hba = backup.join("pg_hba.conf");
    let elsewhere = cluster.directory().join("elsewhere");
    fs::rename(&hba, &elsewhere)?;
    symlink(&elsewhere, &hba)?;
    cluster.expect_verified(&backup, 2, &["pg_hba.conf: a link", "Damage found: 1."])?;
    fs::remove_file(&hba)?;
    fs::rename(&elsewhere, &hba)?;

    // What a killed `seal-manifest` leaves.
    let unfinished = backup.join("backup_manifest.pagevault.new");
    fs::write(&unfinished, "{")?;
    cluster.expect_verified(&backup, 0, &["No damage found."])?;
    run(cluster.program("pagevault-keyring").arg("seal-manifest").arg(&backup))?;
    ensure!(!unfinished.exists(), "it is still there");
    cluster.expect_verified(&backup, 0, &["seal         valid", "No damage found."])?;

    // A terminal would obey these.
    fs::remove_file(backup.join("backup_manifest.pagevault"))?;
    let hostile =
        r#"{"PostgreSQL-Backup-Manifest-Version": 1, "\u001b[1K\rNo damage found.\u001b[8m": 1}"#;
    fs::write(backup.join("backup_manifest"), format!("{hostile}\n"))?;
    fs::write(backup.join("base/1/16999"), vec![7; 8192])?;
    cluster.expect_verified(&backup, 2, &[r"`\u{1b}[1K\rNo damage found.\u{1b}[8m`"])?;
    fs::remove_file(backup.join("backup_manifest"))?;
    fs::remove_file(backup.join("base/1/16999"))?;

    // Only a backup whose label says so is incremental.
    fs::write(backup.join("base/1/INCREMENTAL.16999"), vec![7; 8192])?;
    fs::write(backup.join("base/1/16999.1"), vec![0; 8192])?;
    let damage = "base/1/INCREMENTAL.16999: of an incremental backup, and backup_label is not";
    cluster.expect_verified(&backup, 2, &[damage, "Damage found: 1."])?;
    let label = fs::read_to_string(backup.join("backup_label"))?;
    let incremental = format!("{label}INCREMENTAL FROM LSN: 0/2000028\nINCREMENTAL FROM TLI: 1\n");
    fs::write(backup.join("backup_label"), incremental)?;
    cluster.expect_verified(&backup, 0, &["incremental  1 files", "No damage found."])?;
    let place = backup.join("pg_tblspc/1\u{1b}[8m");
    fs::create_dir(&place)?;
    let output = cluster.program("pagevault-keyring").arg("seal-manifest").arg(&place).output()?;
    let said = String::from_utf8(output.stderr)?;
    ensure!(!output.status.success() && !said.contains('\u{1b}'), "{said}");
    cluster.finish()
}

/// A page of a catalog is found by its map.
#[test]
fn maps_of_catalogs_must_be_valid() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let database = cluster.text("SELECT oid FROM pg_database WHERE datname = 'postgres'")?;
    let data = cluster.data_directory();
    cluster.stop(StopMode::Fast)?;
    for map in ["global/pg_filenode.map".to_owned(), format!("base/{database}/pg_filenode.map")] {
        flip(&data.join(&map), 12)?;
        let damage = format!("damaged      {map}: not valid");
        cluster.expect_verified(&data, 2, &[&damage, "Damage found: 1."])?;
        flip(&data.join(&map), 12)?;
        cluster.expect_verified(&data, 0, &["No damage found."])?;
    }
    cluster.start_server()?;
    cluster.finish()
}
