//! Programs that receive WAL with a copy of the keystore that was made while WAL was plaintext.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::wal::{Segment, WalPage};
use pagevault_tests::{Cluster, Settings};

use super::{assert_nowhere, count, directory, exec, failure, insert, sealing, switch};

/// A copy of the keystore in a directory of its own.
fn copy_of_keystore(cluster: &Cluster) -> Result<PathBuf> {
    let copy = directory(cluster, "copy")?;
    let mut command = cluster.installation().command("/bin/cp");
    run(command.arg("-a").arg(cluster.data_directory().join("pagevault")).arg(&copy))?;
    Ok(copy)
}

fn receive(cluster: &Cluster, copy: &str, target: &std::path::Path) -> Result<()> {
    cluster.sql("SELECT pg_switch_wal()")?;
    let end = cluster.text("SELECT pg_current_wal_lsn()")?;
    let mut receive = exec(cluster, &["--keystore", copy], "pg_receivewal");
    run(receive.args(["--slot=slot", "--no-loop", "--endpos", &end, "-D"]).arg(target))?;
    Ok(())
}

#[test]
fn wal_received_with_a_copy_from_before_the_switch_is_sealed() -> Result<()> {
    let (mut cluster, _keys) = sealing(&Settings::default().conf("wal_keep_size = 1GB"))?;
    cluster.allow_log("connection to client lost");
    switch(&cluster, false)?;
    let copy = copy_of_keystore(&cluster)?;
    let copy = copy.to_string_lossy();
    cluster.sql("SELECT pg_switch_wal(); CHECKPOINT")?;
    cluster.sql("SELECT pg_create_physical_replication_slot('slot', true)")?;
    let backup = cluster.directory().join("backup");
    cluster.base_backup_with(&backup, &["-c", "fast", "-X", "none", "--no-manifest"])?;
    switch(&cluster, true)?;
    insert(&cluster, "drossel", 1000)?;
    let target = directory(&cluster, "received")?;
    receive(&cluster, &copy, &target)?;
    // What the server leaves in plaintext is encrypted, too.
    switch(&cluster, false)?;
    insert(&cluster, "fink", 1000)?;
    receive(&cluster, &copy, &target)?;
    for canary in ["drossel", "fink"] {
        assert_nowhere(&target, canary)?;
    }
    let received = Segment::all(&target)?;
    let pages = received.iter().map(Segment::pages).collect::<Result<Vec<_>>>()?.concat();
    ensure!(!pages.contains(&WalPage::Plain), "pages are plaintext");
    ensure!(pages.contains(&WalPage::Sealed(1)), "pages are not under the newest key of the copy");

    // A backup of a server that writes plaintext.
    insert(&cluster, "meise", 1000)?;
    let streamed = Cluster::from_files(|target| {
        let mut backup = exec(&cluster, &["--keystore", &copy], "pg_basebackup");
        run(backup.args(["--checkpoint=fast", "-X", "stream", "-D"]).arg(target))?;
        let wal = Segment::all(&target.join("pg_wal"))?;
        let pages = wal.iter().map(Segment::pages).collect::<Result<Vec<_>>>()?.concat();
        ensure!(!pages.contains(&WalPage::Plain), "plaintext in the WAL of the backup");
        run(exec(&cluster, &[], "pg_verifybackup").arg(target))?;
        let (text, code) = cluster.verify_offline(target)?;
        ensure!(code == Some(0), "{text}");
        Ok(())
    })?;
    streamed.start_server()?;
    ensure!(count(&streamed, "meise")? == "1000", "rows are missing");
    streamed.finish()?;

    let restored = Cluster::from_files(|data| Ok(std::fs::rename(&backup, data)?))?;
    std::fs::write(restored.data_directory().join("recovery.signal"), "")?;
    restored.append_conf(&format!(
        "restore_command = 'cp {}/%f %p'\nrecovery_target_timeline = current",
        target.display()
    ))?;
    restored.start_server()?;
    restored.eventually("SELECT pg_is_in_recovery()", "f")?;
    for canary in ["drossel", "fink"] {
        ensure!(count(&restored, canary)? == "1000", "{canary}: rows are missing");
    }
    restored.crash()?;
    restored.finish()?;
    cluster.finish()
}

/// It has a key, and does not say from where on it is used.
#[test]
fn a_copy_from_between_the_first_key_and_its_switch_is_refused() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.stop_at("wal_switch.barrier")?;
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    cluster.stopped_at("wal_switch.barrier")?;
    let copy = copy_of_keystore(&cluster)?;
    cluster.resume();
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    let target = directory(&cluster, "received")?;
    let mut receive = exec(&cluster, &["--keystore", &copy.to_string_lossy()], "pg_receivewal");
    let refused = failure(receive.arg("-D").arg(&target))?;
    ensure!(refused.contains("is from before WAL was encrypted"), "{refused}");
    cluster.finish()
}
