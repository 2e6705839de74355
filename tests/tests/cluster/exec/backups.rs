//! `pg_basebackup`, `pg_verifybackup`, `pg_resetwal`.

use std::cell::Cell;
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;

use anyhow::{Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::wal::{Segment, WalPage};
use pagevault_tests::{Cluster, Settings, StopMode};
use rustix::fs::{CWD, Mode, OFlags};

use super::{count, directory, exec, exec_with_keystore, failure, insert, sealing};
use crate::wal::{assert_hidden, leaks, segments};

/// The WAL streamed with a backup is sealed, the backup passes `pg_verifybackup` including its WAL,
/// and it can be restored.
#[test]
fn streamed_wal_of_a_base_backup_is_sealed() -> Result<()> {
    let (mut cluster, _keys) = sealing(&Settings::default())?;
    cluster.allow_log("connection to client lost");
    cluster.pgbench(&["-i", "-q", "-s", "1"])?;
    let mut load = cluster.pgbench_in_background(&["-n", "-c", "2", "-T", "600"])?;
    insert(&cluster, "drossel", 1000)?;
    let restored = Cluster::from_files(|target| {
        let mut backup = exec_with_keystore(&cluster, "pg_basebackup");
        run(backup.args(["--checkpoint=fast", "-X", "stream", "-D"]).arg(target))?;
        let wal = Segment::all(&target.join("pg_wal"))?;
        let pages = wal.iter().map(|s| s.pages()).collect::<Result<Vec<_>>>()?.concat();
        ensure!(pages.contains(&WalPage::Sealed(1)), "nothing is sealed");
        ensure!(!pages.contains(&WalPage::Plain), "plaintext in the WAL of the backup");
        // With the keystore of the backup itself.
        run(exec(&cluster, &[], "pg_verifybackup").arg(target))?;
        // Without exec, its pg_waldump has no access to the keys.
        let error = failure(cluster.program("pg_verifybackup").arg(target))?;
        ensure!(error.contains("WAL parsing failed"), "{error}");
        Ok(())
    })?;
    let _ = load.kill();
    load.wait()?;
    restored.start_server()?;
    ensure!(count(&restored, "drossel")? == "1000", "rows are missing");
    let balanced = "SELECT (SELECT sum(abalance) FROM pgbench_accounts)
        = (SELECT coalesce(sum(delta), 0) FROM pgbench_history)";
    ensure!(restored.text(balanced)? == "t", "balances differ");
    insert(&restored, "meise", 1000)?;
    restored.crash()?;
    ensure!(count(&restored, "meise")? == "1000", "rows are missing");
    assert_hidden(&restored, "meise")?;
    restored.finish()?;
    cluster.finish()
}

/// `pg_verifybackup` holds the keys for the `pg_waldump` that it starts at the end. Other processes
/// of its user cannot read them: its files in /proc belong to root.
#[test]
fn keys_for_a_later_program_are_not_accessible() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default())?;
    let target = directory(&cluster, "backup")?;
    let manifest = target.join("manifest");
    // `pg_verifybackup` opens the manifest first, and waits for a writer of the FIFO.
    rustix::fs::mkfifoat(CWD, &manifest, Mode::RUSR | Mode::WUSR)?;
    cluster.installation().give(&manifest)?;
    let mut verify = exec_with_keystore(&cluster, "pg_verifybackup");
    let mut verify = verify.arg("-m").arg(&manifest).arg(&target).spawn()?;
    let process = std::path::PathBuf::from(format!("/proc/{}", verify.id()));
    // Opening a FIFO with these flags succeeds only if it has a reader.
    let writer = || {
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(rustix::fs::open(&manifest, flags, Mode::empty())?)
    };
    let waits = Cell::new(None);
    cluster.eventually_that("pg_verifybackup", || writer().map(|fifo| waits.set(Some(fifo))))?;
    for what in ["fd", "mem", "environ"] {
        let owner = std::fs::metadata(process.join(what))?.uid();
        ensure!(owner == 0, "{what} belongs to {owner}");
    }
    drop(waits);
    ensure!(!verify.wait()?.success(), "a manifest with nothing in it will do");
    cluster.finish()
}

/// WAL in a tar file cannot be sealed.
#[test]
fn a_tar_file_with_streamed_wal_is_refused() -> Result<()> {
    let (mut cluster, _keys) = sealing(&Settings::default())?;
    cluster.allow_log("connection to client lost");
    cluster.allow_log("unexpected EOF on standby connection");
    cluster.allow_log("terminating connection due to");
    cluster.allow_log("could not send");
    cluster.allow_log("Broken pipe");
    cluster.allow_log("aborting backup");
    insert(&cluster, "drossel", 1000)?;
    let target = cluster.directory().join("backup");
    let mut backup = exec_with_keystore(&cluster, "pg_basebackup");
    backup.args(["--checkpoint=fast", "--format=tar", "-X", "stream", "-D"]);
    let error = failure(backup.arg(&target))?;
    ensure!(error.contains("WAL in a tar file cannot be encrypted"), "{error}");
    ensure!(!target.join("pg_wal.tar").exists(), "pg_wal.tar was written");
    let mut backup = exec_with_keystore(&cluster, "pg_basebackup");
    backup.args(["--checkpoint=fast", "--format=tar", "-X", "fetch", "-D"]);
    run(backup.arg(cluster.directory().join("fetched")))?;
    cluster.finish()
}

#[test]
fn pg_resetwal_seals_what_it_writes() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default())?;
    cluster.without_witness("pg_resetwal begins other WAL");
    insert(&cluster, "drossel", 100)?;
    cluster.stop(StopMode::Fast)?;
    let before = segments(&cluster)?;
    let mut look = exec(&cluster, &[], "pg_resetwal");
    run(look.arg("-n").arg("-D").arg(cluster.data_directory()))?;
    ensure!(segments(&cluster)?.len() == before.len(), "a dry run has changed something");
    let mut reset = exec(&cluster, &[], "pg_resetwal");
    run(reset.arg("-D").arg(cluster.data_directory()))?;
    let pages = segments(&cluster)?[0].pages()?;
    ensure!(pages[0] == WalPage::Sealed(1), "the new WAL begins with {:?}", pages[0]);
    cluster.start_server()?;
    ensure!(count(&cluster, "drossel")? == "100", "rows are missing");
    insert(&cluster, "fink", 100)?;
    cluster.crash()?;
    ensure!(count(&cluster, "fink")? == "100", "rows are missing");
    ensure!(!leaks(&segments(&cluster)?, "fink"), "WAL is plaintext");
    cluster.finish()
}

/// Whatever else is named: a server is started on the directory that is written to, and needs the
/// keys of that WAL.
#[test]
fn pg_resetwal_takes_the_keys_of_the_directory_that_it_writes() -> Result<()> {
    let [(a, _of_a), (b, _of_b)] = [sealing(&Settings::default())?, sealing(&Settings::default())?];
    let none = Cluster::create(&Settings::default())?;
    for server in [&a, &b] {
        server.without_witness("pg_resetwal begins other WAL");
        insert(server, "drossel", 100)?;
        server.stop(StopMode::Fast)?;
    }
    let (of_a, of_b) = (a.data_directory(), b.data_directory());
    let long = format!("--pgd={}", of_b.display());
    let named: [&[&OsStr]; 3] = [
        &[of_b.as_os_str(), OsStr::new("-f")],
        &[OsStr::new(&long)],
        &[OsStr::new("-fD"), of_b.as_os_str()],
    ];
    for arguments in named {
        let mut reset = exec(&b, &[], "pg_resetwal");
        run(reset.args(arguments).env("PGDATA", &of_a))?;
        b.start_server()?;
        ensure!(count(&b, "drossel")? == "100", "rows are missing");
        b.stop(StopMode::Fast)?;
    }
    let mut other = exec(&b, &["--keystore", &of_a.to_string_lossy()], "pg_resetwal");
    let refused = failure(other.arg("-D").arg(&of_b))?;
    ensure!(refused.contains("has another keystore"), "{refused}");
    let mut without = exec(&b, &[], "pg_resetwal");
    let refused = failure(without.arg(none.data_directory()).env("PGDATA", &of_a))?;
    ensure!(refused.contains("there is no keystore in"), "{refused}");
    let mut other = exec(&b, &["--keystore", &of_a.to_string_lossy()], "pg_resetwal");
    let refused = failure(other.arg(none.data_directory()))?;
    ensure!(refused.contains("has no keystore"), "{refused}");
    let without = none.data_directory().to_string_lossy().into_owned();
    let mut needed = exec(&b, &["--if-needed", "--keystore", &without], "pg_resetwal");
    let refused = failure(needed.arg("-f").arg(&of_b))?;
    ensure!(refused.contains("there is no keystore in"), "{refused}");
    for server in [a, b] {
        server.start_server()?;
        server.finish()?;
    }
    Ok(())
}
