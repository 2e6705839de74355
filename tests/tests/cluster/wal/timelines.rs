//! Segments of a parent timeline in `pg_wal`, at addresses that a child timeline uses again.
//! PostgreSQL recognizes such pages by their timeline. Their keys may belong to an abandoned
//! future.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::wal::{PAGE, WalPage};
use pagevault_tests::{Cluster, KeyFile, Settings, StopMode};

use super::{assert_hidden, count, insert, sealing, segments};

/// A server on timeline 2, restored to a point before the second WAL key, and the two segments of
/// timeline 1 after that point, whose pages are under that key. The first of them was in `pg_wal`
/// at the promotion.
struct Restored {
    primary: Cluster,
    server: Cluster,
    saved: [PathBuf; 2],
    _keys: KeyFile,
}

impl Restored {
    fn new() -> Result<Restored> {
        let (primary, keys) = sealing(&Settings::default())?;
        let backup = primary.directory().join("backup");
        primary.base_backup_with(&backup, &["-X", "none", "--no-manifest"])?;
        insert(&primary, "amsel", 100)?;
        let last = walfile(&primary)?;
        primary.sql("SELECT pg_create_restore_point('here')")?;
        primary.sql("SELECT pagevault.rotate_wal_key()")?;
        let next_segment = || -> Result<PathBuf> {
            primary.sql("SELECT pg_switch_wal()")?;
            // After a segment switch the rest of the segment is zero.
            insert(&primary, "zeisig", 20_000)?;
            Ok(primary.data_directory().join("pg_wal").join(walfile(&primary)?))
        };
        let saved = [next_segment()?, next_segment()?];
        primary.sql("SELECT pg_switch_wal()")?;

        let mut server = Cluster::from_files(|target| {
            let mut copy = std::process::Command::new("cp");
            run(copy.arg("-a").arg(&backup).arg(target))?;
            let wal = target.join("pg_wal");
            for segment in segments(&primary)? {
                if name(&segment.path) <= last.as_str() || segment.path == saved[0] {
                    let mut copy = std::process::Command::new("cp");
                    run(copy.arg("-p").arg(&segment.path).arg(&wal))?;
                }
            }
            let signal = target.join("recovery.signal");
            std::fs::write(&signal, "")?;
            primary.installation().give(&signal)
        })?;
        server.allow_log("could not receive data from WAL stream");
        // The first free name is for this segment, not for older ones.
        server.append_conf(
            "wal_keep_size = '1GB'
             restore_command = 'false'
             recovery_target_name = 'here'
             recovery_target_action = 'promote'",
        )?;
        server.start_server()?;
        server.eventually("SELECT pg_is_in_recovery()", "f")?;
        let restored = Restored { primary, server, saved, _keys: keys };
        let used_again = restored.own_name(0);
        let bytes = std::fs::read(&used_again).context("the saved segment was not recycled")?;
        ensure!(
            bytes[PAGE + 4..PAGE + 8] == 1_u32.to_le_bytes(),
            "the recycled pages were overwritten"
        );
        Ok(restored)
    }

    /// The path of timeline 2's segment at the same address.
    fn own_name(&self, which: usize) -> PathBuf {
        let name = format!("00000002{}", &name(&self.saved[which])[8..]);
        self.server.data_directory().join("pg_wal").join(name)
    }

    /// Puts a segment of timeline 1 into a file of timeline 2, like a server that recycles it.
    fn recycle(&self, which: usize, to: &Cluster) -> Result<()> {
        let file = to.data_directory().join("pg_wal").join(name(&self.own_name(which)));
        std::fs::copy(&self.saved[which], &file)?;
        to.installation().give(&file)
    }

    fn finish(self) -> Result<()> {
        self.server.finish()?;
        self.primary.finish()
    }
}

fn name(path: &std::path::Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

fn walfile(cluster: &Cluster) -> Result<String> {
    cluster.text("SELECT pg_walfile_name(pg_current_wal_lsn())")
}

/// WAL of the new timeline ends before a page of the old one, which will be overwritten next.
#[test]
fn pages_of_a_parent_timeline_end_wal() -> Result<()> {
    let restored = Restored::new()?;
    let server = &restored.server;
    server.sql("SELECT pg_switch_wal()")?;
    server.crash()?;
    for round in 1..=3_u32 {
        insert(server, "drossel", 30 * round)?;
        server.crash()?;
    }
    ensure!(walfile(server)? == name(&restored.own_name(0)), "the segment is not used");
    for (canary, rows) in [("amsel", "100"), ("drossel", "180"), ("zeisig", "0")] {
        ensure!(count(server, canary)? == rows, "{canary}: {}", count(server, canary)?);
    }
    assert_hidden(server, "drossel")?;
    restored.finish()
}

/// The WAL receiver writes any range of a page, over pages left by the old timeline.
#[test]
fn a_standby_overwrites_pages_of_a_parent_timeline() -> Result<()> {
    let restored = Restored::new()?;
    let server = &restored.server;
    let standby = standby_of(server, &[])?;
    wait_for(&standby, server)?;
    standby.stop(StopMode::Fast)?;
    // The backup has switched to it.
    restored.recycle(1, &standby)?;
    standby.start_server()?;
    for _ in 0..5 {
        insert(server, "drossel", 7)?;
        wait_for(&standby, server)?;
    }
    standby.crash()?;
    insert(server, "drossel", 65)?;
    wait_for(&standby, server)?;
    ensure!(count(&standby, "drossel")? == "100", "rows are missing");
    ensure!(walfile(server)? == name(&restored.own_name(1)), "the segment is not used");
    let used_again = standby.data_directory().join("pg_wal").join(name(&restored.own_name(1)));
    let all = segments(&standby)?;
    let pages = all.iter().find(|s| s.path == used_again).context("no such segment")?.pages()?;
    ensure!(pages[0] == WalPage::Sealed(1), "the first page is {:?}", pages[0]);
    standby.finish()?;
    restored.finish()
}

/// Programs that read WAL without the server find the same end.
#[test]
fn programs_find_the_end_of_wal_before_pages_of_a_parent_timeline() -> Result<()> {
    let restored = Restored::new()?;
    let server = &restored.server;
    server.sql("SELECT pg_switch_wal()")?;
    insert(server, "drossel", 100)?;
    server.stop(StopMode::Fast)?;
    let mut dump = server.program("pagevault-keyring");
    dump.env("PGDATA", server.data_directory());
    dump.args(["exec", "--", "pg_waldump"]).arg(restored.own_name(0));
    let response = dump.output()?;
    let shown = String::from_utf8_lossy(&response.stdout).matches("INSERT").count();
    ensure!(shown >= 100, "{shown} records");
    let error = String::from_utf8_lossy(&response.stderr).into_owned();
    ensure!(error.contains("error in WAL record") && !error.contains("no key"), "{error}");
    let mut verify = server.program("pagevault-keyring");
    run(verify.arg("verify").arg(server.data_directory()))?;
    restored.finish()
}
