//! Base backups during key changes: files copied before and after the change are consistent.

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use anyhow::{Context, Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, Installation, Settings};
use rustix::process::{Pid, Signal, kill_process};

use super::{CONTENT, check, each, ends_as_its_original, everything, rotate_all};
use crate::wal::{assert_hidden, insert};

/// Runs `pg_basebackup` of `source`, interrupted three times for `meanwhile`.
fn interrupted(
    source: &Cluster,
    target: &Path,
    options: &[&str],
    meanwhile: impl Fn(u32) -> Result<()>,
) -> Result<()> {
    let mut program = source.program("pg_basebackup");
    program.args(["--checkpoint=fast", "--max-rate=16M", "-D"]).arg(target).args(options);
    let mut backup = program.stdout(Stdio::null()).stderr(Stdio::inherit()).spawn()?;
    let stopped = (1..=3).try_for_each(|step| {
        let sent = "SELECT backup_streamed * 4 >= backup_total * STEP AND phase LIKE 'streaming%'
            FROM pg_stat_progress_basebackup";
        source.eventually(&sent.replace("STEP", &step.to_string()), "t")?;
        signal(&backup, Signal::STOP)?;
        let done = meanwhile(step);
        signal(&backup, Signal::CONT)?;
        done
    });
    if stopped.is_err() {
        backup.kill()?;
    }
    let ended = backup.wait()?;
    stopped?;
    ensure!(ended.success(), "pg_basebackup {options:?}: {ended}");
    Ok(())
}

fn signal(process: &Child, signal: Signal) -> Result<()> {
    let pid = i32::try_from(process.id()).ok().and_then(Pid::from_raw).context("a process")?;
    Ok(kill_process(pid, signal)?)
}

/// Changes keys while the backup is stopped. The pages of `large` are rewritten when the backup
/// continues: a backup whose client does not read delays the barrier that rekeying waits for.
fn change_keys(cluster: &Cluster, step: u32) -> Result<()> {
    cluster.sql("SELECT pagevault.rotate_data_key('large')")?;
    super::rotate_wrapping(cluster)?;
    let during = format!("CREATE TABLE during{step} AS SELECT * FROM t");
    each(cluster, &[&during, "VACUUM FULL t", "CHECKPOINT"])?;
    if step > 1 {
        cluster.sql(&format!("DROP TABLE during{}", step - 1))?;
    }
    insert(cluster, "drossel", 100)
}

fn restored(backup: &Path) -> Result<Cluster> {
    let copy = Cluster::from_files(|target| Ok(std::fs::rename(backup, target)?))?;
    copy.start_server()?;
    Ok(copy)
}

/// Unpacks a backup made with `--format=tar`.
fn unpacked(cluster: &Cluster, tar: &Path) -> Result<PathBuf> {
    let target = tar.with_extension("unpacked");
    run(cluster.program("/bin/mkdir").args(["-m", "700"]).arg(&target))?;
    run(cluster.program("/bin/tar").arg("-xf").arg(tar.join("base.tar")).arg("-C").arg(&target))?;
    let wal = tar.join("pg_wal.tar");
    if wal.exists() {
        let into = target.join("pg_wal");
        run(cluster.program("/bin/tar").arg("-xf").arg(wal).arg("-C").arg(into))?;
    }
    run(cluster.program("/bin/cp").arg(tar.join("backup_manifest")).arg(&target))?;
    Ok(target)
}

fn keys_change_during_a_backup(name: &str, options: &[&str]) -> Result<()> {
    let settings = Settings::default().conf("wal_keep_size = 1GB");
    let (mut cluster, _keys) = everything(settings)?;
    cluster.allow_log("connection to client lost");
    cluster.pgbench(&["-i", "-q", "-s", "2"])?;
    let mut load = cluster.pgbench_in_background(&["-n", "-c", "2", "-T", "600"])?;
    let backup = cluster.directory().join(name);
    interrupted(&cluster, &backup, options, |step| change_keys(&cluster, step))?;
    let _ = load.kill();
    load.wait()?;
    let backup =
        if backup.join("base.tar").exists() { unpacked(&cluster, &backup)? } else { backup };
    let mut verify = cluster.program("pg_verifybackup");
    run(verify.arg("--no-parse-wal").arg(&backup))?;
    let copy = restored(&backup)?;
    ends_as_its_original(copy, cluster)
}

#[test]
fn keys_change_during_a_backup_with_streamed_wal() -> Result<()> {
    keys_change_during_a_backup("plain", &["-X", "stream"])
}

#[test]
fn keys_change_during_a_backup_into_tar_files() -> Result<()> {
    keys_change_during_a_backup("tar", &["--format=tar", "-X", "fetch"])
}

/// The standby has its own state of the keystore, and its backup starts without a checkpoint.
#[test]
fn keys_change_during_a_backup_of_a_standby() -> Result<()> {
    let settings = Settings::default().conf("wal_keep_size = 1GB");
    let (primary, _keys) = everything(settings)?;
    let standby = standby_of(&primary, &[])?;
    primary.sql("CHECKPOINT")?;
    wait_for(&standby, &primary)?;
    let backup = primary.directory().join("backup");
    interrupted(&standby, &backup, &["-X", "fetch"], |step| {
        change_keys(&primary, step)?;
        wait_for(&standby, &primary)?;
        standby.sql("CHECKPOINT")
    })?;
    ensure!(primary.text("SELECT pagevault.wait_for_rekey('large'::regclass, '1min')")? == "t");
    run(standby.program("pg_verifybackup").arg("--no-parse-wal").arg(&backup))?;
    std::fs::remove_file(backup.join("standby.signal"))?;
    let copy = restored(&backup)?;
    check(&copy, &primary.text(CONTENT)?)?;
    copy.finish()?;
    standby.finish()?;
    primary.finish()
}

/// A chain of backups in which relations get other keys and other files. The last backup's keystore
/// opens the pages of all.
#[test]
fn a_chain_of_incremental_backups_over_new_keys() -> Result<()> {
    if Installation::get()?.major < 17 {
        return Ok(());
    }
    let settings = Settings::default().conf("summarize_wal = on");
    let (cluster, _keys) = everything(settings)?;
    cluster.sql(
        "CREATE TABLE still AS SELECT i AS id, repeat('x', 200) AS name FROM generate_series(1, 5000) i",
    )?;
    let mut chain = vec![cluster.directory().join("full")];
    cluster.base_backup_with(&chain[0], &["-X", "none"])?;
    for round in 1..=3_u32 {
        rotate_all(&cluster)?;
        match round {
            1 => each(&cluster, &["SELECT pagevault.decrypt('large')"])?,
            2 => each(&cluster, &["SELECT pagevault.encrypt('large')", "VACUUM FULL t"])?,
            _ => each(
                &cluster,
                &["DELETE FROM large WHERE id > 10000", "VACUUM large", "TRUNCATE still"],
            )?,
        }
        for table in ["large", "t"] {
            cluster
                .sql(&format!("SELECT pagevault.wait_for_rekey('{table}'::regclass, '1min')"))?;
        }
        cluster.sql("UPDATE large SET name = 'zeisig' WHERE id % 500 = 0")?;
        insert(&cluster, "drossel", 100)?;
        let next = cluster.directory().join(format!("incremental{round}"));
        let manifest = chain[chain.len() - 1].join("backup_manifest");
        let incremental = format!("--incremental={}", manifest.display());
        // The changes since are found by reading sealed WAL.
        cluster.base_backup_with(&next, &["-X", "fetch", &incremental])?;
        chain.push(next);
    }
    ensure!(
        cluster.text("SELECT count(*) > 2 FROM pg_available_wal_summaries()")? == "t",
        "WAL is not summarized"
    );
    let copy = Cluster::from_files(|target| {
        let mut combine = cluster.program("pg_combinebackup");
        run(combine.args(&chain).arg("-o").arg(target))?;
        run(cluster.program("pg_verifybackup").arg("--no-parse-wal").arg(target)).map(drop)
    })?;
    copy.start_server()?;
    ensure!(copy.text("SELECT count(*) FROM still")? == "0", "rows come back");
    check(&copy, &cluster.text(CONTENT)?)?;
    assert_hidden(&cluster, "drossel")?;
    copy.finish()?;
    cluster.finish()
}
