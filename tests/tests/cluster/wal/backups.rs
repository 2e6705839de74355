//! Base backups with their WAL.

use anyhow::{Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::wal::{PAGE, Segment, WalPage};
use pagevault_tests::{Cluster, Installation, Settings};

use super::{assert_hidden, count, insert, last_page, leaks, marks, sealing, segments, state_at};

fn restored_after_load(method: &str) -> Result<(Cluster, Cluster, Vec<Segment>)> {
    let (mut cluster, _keys) = sealing(&Settings::default())?;
    cluster.allow_log("connection to client lost");
    cluster.pgbench(&["-i", "-q", "-s", "1"])?;
    insert(&cluster, "drossel", 1000)?;
    let mut load = cluster.pgbench_in_background(&["-n", "-c", "2", "-T", "600"])?;
    let mut wal = Vec::new();
    let restored = Cluster::from_files(|target| {
        cluster.base_backup_with(target, &["-X", method])?;
        wal = Segment::all(&target.join("pg_wal"))?;
        // The WAL is parsed by pg_waldump, which cannot read sealed pages.
        let mut verify = cluster.program("pg_verifybackup");
        run(verify.arg(target).args((method == "fetch").then_some("--no-parse-wal"))).map(drop)
    })?;
    let _ = load.kill();
    load.wait()?;
    restored.start_server()?;
    let balanced = "SELECT (SELECT sum(abalance) FROM pgbench_accounts)
        = (SELECT coalesce(sum(delta), 0) FROM pgbench_history)";
    ensure!(restored.text(balanced)? == "t", "balances differ");
    ensure!(count(&restored, "drossel")? == "1000", "rows are missing");
    insert(&restored, "meise", 10)?;
    restored.crash()?;
    ensure!(count(&restored, "meise")? == "10", "rows are missing");
    restored.sql("SELECT pg_switch_wal()")?;
    insert(&restored, "zaunkoenig", 1000)?;
    assert_hidden(&restored, "zaunkoenig")?;
    restored.crash()?;
    ensure!(count(&restored, "zaunkoenig")? == "1000", "rows are missing");
    ensure!(restored.text(balanced)? == "t", "balances differ");
    Ok((cluster, restored, wal))
}

#[test]
fn fetched_wal_stays_sealed() -> Result<()> {
    let (cluster, restored, wal) = restored_after_load("fetch")?;
    ensure!(marks(&wal)? == [1], "keys {:?}", marks(&wal)?);
    restored.finish()?;
    cluster.finish()
}

#[test]
fn streamed_wal_is_plaintext_until_the_server_starts() -> Result<()> {
    let (cluster, restored, wal) = restored_after_load("stream")?;
    ensure!(marks(&wal)?.is_empty(), "keys {:?}", marks(&wal)?);
    let now = segments(&restored)?;
    ensure!(marks(&now)? == [1], "keys {:?}", marks(&now)?);
    for segment in now {
        ensure!(!segment.pages()?.contains(&WalPage::Plain), "plaintext in {segment:?}");
    }
    restored.finish()?;
    cluster.finish()
}

/// WAL in a backup of a standby ends in the middle of a page, which is sealed when the server
/// starts. Further writes to that page keep its state: otherwise, after a torn write, it would be
/// partly plaintext and partly sealed, and unreadable.
#[test]
fn a_partly_written_page_keeps_its_key() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default())?;
    let standby = standby_of(&cluster, &[])?;
    insert(&cluster, "drossel", 1000)?;
    wait_for(&standby, &cluster)?;
    let mut wal = Vec::new();
    let restored = Cluster::from_files(|target| {
        standby.base_backup_with(target, &["-X", "stream"])?;
        wal = Segment::all(&target.join("pg_wal"))?;
        Ok(std::fs::remove_file(target.join("standby.signal"))?)
    })?;
    let last = last_page(&wal)?;
    ensure!(last.1 == WalPage::Plain, "the stream is sealed");
    restored.start_server()?;
    insert(&restored, "meise", 1000)?;
    let now = last_page(&segments(&restored)?)?;
    ensure!(now.1 == WalPage::Sealed(1), "the page at {:X} is {:?}", now.0, now.1);
    let kept = state_at(&segments(&restored)?, last.0)?;
    ensure!(kept == WalPage::Sealed(1), "the page at {:X} is {kept:?}", last.0);
    let next = state_at(&segments(&restored)?, last.0 + PAGE as u64)?;
    ensure!(next == WalPage::Sealed(1), "the page behind it is {next:?}");
    restored.crash()?;
    for (canary, rows) in [("drossel", "1000"), ("meise", "1000")] {
        ensure!(count(&restored, canary)? == rows, "{canary}: {}", count(&restored, canary)?);
    }
    restored.finish()?;
    standby.finish()?;
    cluster.finish()
}

/// The summarizer reads WAL; incremental backups rely on the summaries.
#[test]
fn incremental_backups_are_complete() -> Result<()> {
    if Installation::get()?.major < 17 {
        return Ok(());
    }
    let (cluster, _keys) = sealing(&Settings::default().conf("summarize_wal = on"))?;
    insert(&cluster, "amsel", 20_000)?;
    let full = cluster.directory().join("full");
    let sha = "--manifest-checksums=SHA256";
    cluster.base_backup_with(&full, &["-X", "fetch", sha])?;
    run(cluster.program("pagevault-keyring").arg("seal-manifest").arg(&full))?;
    cluster.sql("UPDATE t SET name = 'drossel-' || id WHERE id % 100 = 0")?;
    cluster.sql("SELECT pagevault.rotate_wal_key()")?;
    cluster.sql("UPDATE t SET name = 'fink-' || id WHERE id % 100 = 1")?;
    let incremental = cluster.directory().join("incremental");
    let manifest = full.join("backup_manifest");
    let option = format!("--incremental={}", manifest.display());
    cluster.base_backup_with(&incremental, &["-X", "fetch", sha, &option])?;
    run(cluster.program("pagevault-keyring").arg("seal-manifest").arg(&incremental))?;
    let (found, code) = cluster.verify_offline(&incremental)?;
    ensure!(code == Some(0) && found.contains("seal         valid"), "{found}");
    let restored = Cluster::from_files(|target| {
        let mut combine = cluster.program("pg_combinebackup");
        run(combine.arg(&full).arg(&incremental).arg("-o").arg(target))?;
        // The seals are those of other manifests.
        let (found, code) = cluster.verify_offline(target)?;
        ensure!(code == Some(0) && found.contains("manifest     compared with"), "{found}");
        ensure!(found.contains("seal         none"), "{found}");
        Ok(())
    })?;
    restored.start_server()?;
    for (canary, rows) in [("amsel", "19600"), ("drossel", "200"), ("fink", "200")] {
        ensure!(count(&restored, canary)? == rows, "{canary}: {}", count(&restored, canary)?);
    }
    ensure!(!leaks(&Segment::all(&incremental.join("pg_wal"))?, "fink"), "WAL is plaintext");
    restored.finish()?;
    cluster.finish()
}

/// A base backup gets segments as they are on disk. What its connection does after that does not.
#[test]
fn a_connection_reads_wal_after_a_base_backup() -> Result<()> {
    let settings = Settings::default().conf("wal_level = logical\nmax_prepared_transactions = 2");
    let (cluster, _keys) = sealing(&settings)?;
    let host = cluster.directory().display();
    let script = cluster.directory().join("script");
    std::fs::write(
        &script,
        " BASE_BACKUP (TARGET 'blackhole', CHECKPOINT 'fast', WAL, WAIT false);
        CREATE_REPLICATION_SLOT slot LOGICAL test_decoding;
        BEGIN;
        INSERT INTO t (name) VALUES ('drossel-1');
        PREPARE TRANSACTION 'x';
        COMMIT PREPARED 'x';",
    )?;
    // It takes the end of the backup for an error.
    let mut psql = cluster.program("psql");
    psql.args(["--no-psqlrc", "--quiet", "--file"]).arg(&script);
    psql.arg(format!("host={host} user=postgres dbname=postgres replication=database"));
    run(&mut psql)?;
    let slots = cluster.text("SELECT count(*) FROM pg_replication_slots")?;
    ensure!(slots == "1", "{slots} slots");
    ensure!(count(&cluster, "drossel")? == "1", "the row is missing");
    cluster.finish()
}
