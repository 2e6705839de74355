//! Point-in-time recovery: one backup from before the first key, and an archive across all kinds of
//! key changes.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Settings};

use super::{CONTENT, each, encrypt_everything, fill, rotate_all};
use crate::wal::{assert_hidden, count, insert};

/// A moment, and the contents of the tables.
struct Moment {
    what: &'static str,
    time: String,
    content: String,
    is_encrypted: bool,
}

fn moment(cluster: &Cluster, what: &'static str) -> Result<Moment> {
    let content = cluster.text(CONTENT)?;
    let is_encrypted = cluster.text(IS_ENCRYPTED)? == "t";
    let time = cluster.text("SELECT clock_timestamp()")?;
    // Recovery stops at the first later commit.
    cluster.sql("SELECT pg_sleep(0.01)")?;
    insert(cluster, "later", 10)?;
    Ok(Moment { what, time, content, is_encrypted })
}

const IS_ENCRYPTED: &str = "SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'pagevault')
    AND (SELECT bool_or(provider = 'pagevault' AND label = 'encrypted') FROM pg_shseclabel)";

fn archive(cluster: &Cluster) -> Result<PathBuf> {
    let archive = cluster.directory().join("archive");
    std::fs::create_dir(&archive)?;
    cluster.installation().give(&archive)?;
    cluster.set(&[("archive_command", &format!("cp %p {}/%f", archive.display()))])?;
    Ok(archive)
}

/// A copy of the backup, recovered to a time and promoted.
fn restored(backup: &Path, archive: &Path, time: &str) -> Result<Cluster> {
    let copy = Cluster::from_files(|target| {
        run(std::process::Command::new("cp").arg("-a").arg(backup).arg(target)).map(drop)
    })?;
    let signal = copy.data_directory().join("recovery.signal");
    std::fs::write(&signal, "")?;
    copy.installation().give(&signal)?;
    copy.append_conf(&format!(
        "archive_mode = off\nrestore_command = 'cp {}/%f %p'\nrecovery_target_time = '{time}'\n\
         recovery_target_action = 'promote'",
        archive.display()
    ))?;
    copy.start_server()?;
    copy.eventually("SELECT pg_is_in_recovery()", "f")?;
    Ok(copy)
}

#[test]
fn recovery_to_any_time_between_key_changes() -> Result<()> {
    let cluster = Cluster::start(&Settings::default().conf("archive_mode = on"))?;
    let archive = archive(&cluster)?;
    fill(&cluster)?;
    let backup = cluster.directory().join("backup");
    cluster.base_backup_with(&backup, &["-X", "none", "--no-manifest"])?;
    let mut moments = vec![moment(&cluster, "before the first key")?];
    // The keystore, the providers and their keys are in WAL.
    let keys = cluster.key_file("keys", "main")?;
    cluster.sql("CREATE EXTENSION pagevault")?;
    cluster.sql(&keys.add_provider("local"))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('local', 'main')")?;
    encrypt_everything(&cluster)?;
    insert(&cluster, "drossel", 1000)?;
    moments.push(moment(&cluster, "everything is encrypted")?);
    for _ in 0..2 {
        rotate_all(&cluster)?;
        insert(&cluster, "fink", 1000)?;
    }
    each(
        &cluster,
        &["CREATE TABLE made AS SELECT * FROM t", "VACUUM FULL large", "REINDEX TABLE t"],
    )?;
    moments.push(moment(&cluster, "every key is another")?);
    // During a job: pages of two keys.
    cluster.set(&[("pagevault.rekey_rate", "1MB")])?;
    let job = cluster.text("SELECT pagevault.rotate_data_key('large')")?;
    cluster.eventually(
        &format!("SELECT pages_done > 100 FROM pagevault.rekey_jobs WHERE job = {job}"),
        "t",
    )?;
    moments.push(moment(&cluster, "a job is under way")?);
    cluster.set(&[("pagevault.rekey_rate", "0")])?;
    ensure!(cluster.text(&format!("SELECT pagevault.wait_for_rekey({job}, '1min')"))? == "t");
    let other = cluster.key_file("other", "elsewhere")?;
    cluster.sql(&other.add_provider("other"))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('other', 'elsewhere')")?;
    cluster.sql("SELECT pagevault.drop_provider('local')")?;
    rotate_all(&cluster)?;
    insert(&cluster, "gimpel", 1000)?;
    moments.push(moment(&cluster, "the provider is another")?);
    let last = cluster.text("SELECT pg_walfile_name(pg_switch_wal())")?;
    cluster
        .eventually(&format!("SELECT last_archived_wal >= '{last}' FROM pg_stat_archiver"), "t")?;

    for moment in &moments {
        let what = moment.what;
        let mut copy = restored(&backup, &archive, &moment.time)?;
        // The archived server started without this setting.
        copy.allow_log("cannot encrypt WAL");
        let content = copy.text(CONTENT)?;
        ensure!(content == moment.content, "{what}: {content}, not {}", moment.content);
        let is_encrypted = copy.text(IS_ENCRYPTED)? == "t";
        ensure!(is_encrypted == moment.is_encrypted, "{what}: encrypted {is_encrypted}");
        if is_encrypted {
            copy.sql("SELECT pg_switch_wal()")?;
            rotate_all(&copy)?;
            insert(&copy, "meise", 100)?;
            copy.sql("CHECKPOINT")?;
            crate::assert_sealed(&copy.family_files("t")?)?;
            assert_hidden(&copy, "meise")?;
            copy.crash()?;
            ensure!(count(&copy, "meise")? == "100", "{what}: rows are missing");
        }
        copy.finish()?;
    }
    cluster.finish()
}
