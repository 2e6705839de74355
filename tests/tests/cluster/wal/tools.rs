//! Stock tools that read WAL themselves refuse sealed pages like any page that is not WAL.

use anyhow::{Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::wal::Segment;
use pagevault_tests::{Settings, StopMode};

use super::{count, insert, leaks, sealing, segments};

#[test]
fn pg_waldump_refuses() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default())?;
    cluster.sql("SELECT pg_switch_wal()")?;
    insert(&cluster, "drossel", 100)?;
    let lsn = cluster.text("SELECT pg_current_wal_lsn()")?;
    let name = cluster.text(&format!("SELECT pg_walfile_name('{lsn}')"))?;
    let mut dump = cluster.program("pg_waldump");
    let result = run(dump.arg(cluster.data_directory().join("pg_wal").join(name)));
    let error = result.err().map(|e| format!("{e:#}")).unwrap_or_default();
    // It refuses the first page already, which contains the segment size.
    ensure!(
        error.contains("WAL segment size") || error.contains("could not find a valid record"),
        "{error}"
    );
    cluster.finish()
}

#[test]
fn pg_resetwal_works_and_the_server_continues() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default())?;
    insert(&cluster, "drossel", 100)?;
    cluster.stop(StopMode::Fast)?;
    let mut look = cluster.program("pg_resetwal");
    run(look.arg("-n").arg("-D").arg(cluster.data_directory()))?;
    run(cluster.program("pg_resetwal").arg("-D").arg(cluster.data_directory()))?;
    cluster.start_server()?;
    ensure!(count(&cluster, "drossel")? == "100", "rows are missing");
    insert(&cluster, "fink", 100)?;
    cluster.crash()?;
    ensure!(count(&cluster, "fink")? == "100", "rows are missing");
    ensure!(!leaks(&segments(&cluster)?, "fink"), "WAL is plaintext");
    cluster.without_witness("pg_resetwal begins other WAL");
    cluster.finish()
}

/// WAL is plaintext in the replication protocol, and so are the received files.
#[test]
fn pg_receivewal_receives_plaintext() -> Result<()> {
    let (mut cluster, _keys) = sealing(&Settings::default())?;
    cluster.allow_log("connection to client lost");
    cluster.sql("SELECT pg_create_physical_replication_slot('slot', true)")?;
    insert(&cluster, "drossel", 100)?;
    let end = cluster.text("SELECT pg_switch_wal()")?;
    let target = cluster.directory().join("received");
    std::fs::create_dir(&target)?;
    cluster.installation().give(&target)?;
    let mut receive = cluster.program("pg_receivewal");
    run(receive.args(["--slot=slot", "--no-loop", "--endpos", &end, "-D"]).arg(&target))?;
    let mut received = Segment::all(&target)?;
    for entry in std::fs::read_dir(&target)? {
        let path = entry?.path();
        received.push(Segment { bytes: std::fs::read(&path)?, path });
    }
    ensure!(leaks(&received, "drossel"), "the stream is sealed");
    cluster.finish()
}

#[test]
fn pg_verifybackup_cannot_parse_sealed_wal() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default())?;
    insert(&cluster, "drossel", 100)?;
    let backup = cluster.directory().join("backup");
    cluster.base_backup_with(&backup, &["-X", "fetch"])?;
    let refused = run(cluster.program("pg_verifybackup").arg(&backup));
    let error = refused.err().map(|e| format!("{e:#}")).unwrap_or_default();
    ensure!(error.contains("WAL parsing failed"), "{error}");
    run(cluster.program("pg_verifybackup").arg("--no-parse-wal").arg(&backup))?;
    cluster.finish()
}

#[test]
fn pg_rewind_refuses() -> Result<()> {
    let settings = Settings::default().conf("wal_log_hints = on");
    let (mut primary, _keys) = sealing(&settings)?;
    primary.allow_log("could not");
    let mut standby = standby_of(&primary, &[])?;
    standby.allow_log("could not receive data from WAL stream");
    standby.allow_log("terminating walreceiver process");
    insert(&primary, "drossel", 100)?;
    wait_for(&standby, &primary)?;
    standby.sql("SELECT pg_promote()")?;
    standby.sql("CHECKPOINT")?;
    insert(&primary, "fink", 100)?;
    primary.stop(StopMode::Fast)?;
    let mut rewind = primary.program("pg_rewind");
    rewind.arg(format!(
        "--source-server=host={} user=postgres dbname=postgres",
        standby.directory().display()
    ));
    let refused = run(rewind.arg("-D").arg(primary.data_directory()));
    let error = refused.err().map(|e| format!("{e:#}")).unwrap_or_default();
    ensure!(error.contains("invalid info bits"), "{error}");
    // It has changed nothing.
    primary.start_server()?;
    ensure!(count(&primary, "fink")? == "100", "rows are missing");
    standby.finish()?;
    primary.finish()
}
