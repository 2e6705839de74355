//! Some injected errors, each with what it must lead to. The long form is `make inject`.

use anyhow::{Result, ensure};
use pagevault_injection::campaign::{Campaign, Outcome};
use pagevault_injection::catalogue::ALL;
use pagevault_injection::injector::{Fault, Injection, Injector};
use pagevault_tests::choice::named;
use pagevault_tests::cluster::run_sql;
use pagevault_tests::{Cluster, KeyFile, Settings, StopMode};

/// Has calls fail, and compares what becomes of it.
fn each(scenario: &str, expected: &[(&str, u32, &str, Outcome)]) -> Result<()> {
    let mut campaign = Campaign::new(named(ALL, scenario)?)?;
    for (call, number, fault, outcome) in expected {
        let injection =
            Injection { call: (*call).to_owned(), number: *number, fault: fault.parse()? };
        let repeat = format!("pagevault-injection {scenario} {injection}");
        let found = campaign
            .inject(&injection)
            .map_err(|error| anyhow::anyhow!("{repeat}: {error:#}\n{}", campaign.log()))?;
        ensure!(
            found == *outcome,
            "{repeat}: {found:?} instead of {outcome:?}\n{}",
            campaign.log()
        );
    }
    Ok(())
}

use Outcome::{Refused, Stopped, Succeeded};

#[test]
fn a_failed_change_of_keys_changes_nothing() -> Result<()> {
    each(
        "rotate-database-key",
        &[
            ("open pagevault/cluster.keys backend", 1, "EMFILE", Refused),
            ("read pagevault/cluster.keys backend", 1, "EIO", Refused),
            ("read pagevault/cluster.keys backend", 1, "EINTR", Succeeded),
            ("read pagevault/cluster.keys backend", 1, "short", Succeeded),
            ("write pagevault/cluster.keys backend", 1, "ENOSPC", Refused),
            ("write pagevault/cluster.keys backend", 1, "EINTR", Succeeded),
            ("write pagevault/cluster.keys backend", 1, "short", Succeeded),
            // Then the change is in WAL. What leaves the file as it is is tried again.
            ("open pagevault/cluster.keys backend", 4, "EMFILE", Succeeded),
            ("open pagevault/cluster.keys backend", 5, "EACCES", Succeeded),
            ("open pagevault/cluster.keys backend", 7, "EMFILE", Succeeded),
            ("fstat pagevault/cluster.keys backend", 9, "EIO", Succeeded),
            ("lseek pagevault/cluster.keys backend", 3, "EIO", Succeeded),
            ("open pagevault/cluster.keys backend", 4, "EMFILE+", Stopped),
            // No file holds it for certain.
            ("fsync pagevault/cluster.keys backend", 1, "EIO", Stopped),
            ("fork - backend", 1, "EAGAIN", Refused),
            ("execvp - backend", 1, "EACCES", Refused),
            ("pipe - backend", 1, "EMFILE", Refused),
            ("poll pipe backend", 1, "EINTR", Succeeded),
            // Asked again.
            ("read keyfile pagevault-keyring", 1, "EIO", Succeeded),
            ("read keyfile pagevault-keyring", 1, "EIO+", Refused),
            ("write pagevault/audit.state backend", 1, "ENOSPC+", Succeeded),
        ],
    )
}

/// Only a failed sync leaves it unknown what the disk holds.
#[test]
fn a_checkpoint_stops_the_server_after_failed_syncs_only() -> Result<()> {
    each(
        "new-table",
        &[
            ("open pagevault/#.keys checkpointer", 1, "EMFILE", Refused),
            ("open pagevault/#.keys checkpointer", 2, "EMFILE", Refused),
            ("read pagevault/#.keys checkpointer", 1, "EIO", Refused),
            ("write pagevault/#.keys checkpointer", 1, "ENOSPC", Refused),
            ("fsync pagevault/#.keys checkpointer", 1, "EIO", Stopped),
            ("fsync pagevault/#.keys checkpointer", 2, "EIO", Stopped),
        ],
    )
}

#[test]
fn temporary_files_report_errors() -> Result<()> {
    let file = |function| format!("{function} base/pgsql_tmp/pgsql_tmp#.# backend");
    let (open, read, write) = (file("open"), file("read"), file("write"));
    each(
        "sort",
        &[
            // The first attempt may find no directory.
            (&open, 1, "EIO", Succeeded),
            (&open, 1, "EIO+", Refused),
            (&read, 1, "EIO", Refused),
            (&write, 1, "ENOSPC", Refused),
            (&write, 1, "short", Succeeded),
            (&write, 40, "ENOSPC+", Refused),
        ],
    )
}

#[test]
fn a_start_succeeds_or_ends_with_a_message() -> Result<()> {
    each(
        "start",
        &[
            ("open pagevault/cluster.keys postmaster", 1, "EIO", Stopped),
            ("fsync pagevault/cluster.keys postmaster", 1, "EIO", Stopped),
            ("mmap - postmaster", 5, "ENOMEM", Stopped),
            ("mmap - postmaster", 1, "ENOMEM+", Stopped),
            ("madvise - postmaster", 1, "EINVAL", Stopped),
            ("mlock - postmaster", 1, "ENOMEM", Succeeded),
            // Asked again.
            ("execvp - postmaster", 1, "EAGAIN", Succeeded),
            ("read keyfile pagevault-keyring", 1, "EIO", Succeeded),
        ],
    )
}

/// Writes of the server's own that find no room, as on file systems that copy on write.
#[test]
fn sessions_are_admitted_when_there_is_no_room_for_the_self_check() -> Result<()> {
    let cannot = "cannot find out whether this server reads and writes through it";
    for (process, workers, admitted) in [("backend", 0, 1), ("pagevault-self-check", 8, 0)] {
        let settings = Settings::default().conf(&format!("max_worker_processes = {workers}"));
        let mut cluster = Cluster::create(&settings)?;
        let keys = cluster.key_file("keys", "main")?;
        let injector = Injector::under(&mut cluster, keys.path())?;
        cluster.allow_log(cannot);
        // The first write is our own.
        let call = format!("write global/# {process}");
        injector.arm(&Injection { call, number: 2, fault: Fault::Fails(libc::ENOSPC) })?;
        cluster.start_server()?;
        if workers == 0 {
            ensure!(cluster.text("SELECT 1")? == "1", "not admitted");
        } else {
            cluster.eventually_that("the self-check", || {
                ensure!(cluster.log().contains(cannot), "no message");
                Ok(())
            })?;
        }
        let log = cluster.log();
        for text in
            ["No space left on device", "HINT:  Free space. Until then sessions are admitted"]
        {
            ensure!(log.contains(text), "{process}: {log}");
        }
        ensure!(log.matches("WARNING").count() == admitted, "{process}: {log}");
        ensure!(injector.disarm()? == 1, "{process}: not reached");
        ensure!(cluster.text("SELECT 1")? == "1", "not admitted");
        let scratch = cluster.data_directory().join("global/9161");
        ensure!(!scratch.exists(), "{process}: the scratch file is left");
        cluster.finish()?;
    }
    Ok(())
}

/// A server with a master key and no table.
fn with_keys(conf: &str) -> Result<(Cluster, KeyFile, Injector)> {
    let mut cluster = Cluster::create(&Settings::default().conf(conf))?;
    let keys = cluster.key_file("keys", "main")?;
    let injector = Injector::under(&mut cluster, keys.path())?;
    cluster.start_server()?;
    cluster.sql("CREATE EXTENSION pagevault")?;
    cluster.sql(&keys.add_provider("local"))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('local', 'main')")?;
    Ok((cluster, keys, injector))
}

/// Files with what starts have cut off key files.
fn beside(cluster: &Cluster) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(cluster.data_directory().join("pagevault"))?;
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let is_one = |name: &Result<String>| name.as_ref().is_ok_and(|n| n.ends_with(".unsettled"));
    names.filter(is_one).collect()
}

/// What a start has cut off key files is in WAL, and is kept beside them, too.
#[test]
fn recovery_goes_on_when_what_was_cut_off_cannot_be_settled() -> Result<()> {
    let (mut cluster, _keys, injector) = with_keys("pagevault.default_encryption = on")?;
    cluster.without_witness("what calls fail is not in WAL");
    let gone = |cluster: &Cluster| {
        cluster.eventually_that("the end of what was cut off", || {
            let left = beside(cluster)?;
            ensure!(left.is_empty(), "{left:?}");
            Ok(())
        })
    };
    let call = "write pagevault/#.keys startup";
    let crash = |cluster: &mut Cluster, table: &str| {
        cluster.sql("CHECKPOINT")?;
        cluster.sql(&format!("CREATE TABLE {table} AS SELECT 1 AS id"))?;
        cluster.kill()
    };
    crash(&mut cluster, "a")?;
    injector.watch()?;
    cluster.start_server()?;
    // The last of them says that all before counts.
    let number = injector.calls()?.iter().filter(|made| *made == call).count();
    ensure!(number >= 2, "only {number} calls");
    gone(&cluster)?;

    crash(&mut cluster, "b")?;
    cluster.allow_log("could not write key file");
    let fault = Fault::FailsFromThere(libc::ENOSPC);
    injector.arm(&Injection { call: call.to_owned(), number: number as u32, fault })?;
    cluster.start_server()?;
    ensure!(injector.disarm()? > 0, "not reached");
    ensure!(cluster.log().contains("WARNING:  could not write key file"), "{}", cluster.log());
    ensure!(cluster.text("SELECT sum(a.id + b.id) FROM a, b")? == "2");
    gone(&cluster)?;

    // A start without recovery finds one, and cannot remove it at first.
    cluster.stop(StopMode::Fast)?;
    let (log, copy) = ("pagevault/5.keys", "pagevault/5.keys.unsettled");
    let data = cluster.data_directory();
    std::fs::copy(data.join(log), data.join(copy))?;
    cluster.installation().give(&data.join(copy))?;
    cluster.allow_log("could not remove key file");
    let call = "unlink pagevault/#.keys.unsettled pagevault-self-check".to_owned();
    injector.arm(&Injection { call, number: 1, fault: Fault::Fails(libc::EIO) })?;
    cluster.start_server()?;
    gone(&cluster)?;
    ensure!(injector.disarm()? == 1, "not reached");
    ensure!(cluster.log().contains("WARNING:  could not remove key file"), "{}", cluster.log());
    cluster.finish()
}

/// A worker that cannot be forked ends at once, which wakes whoever has asked for it.
#[test]
fn the_launcher_pauses_when_no_worker_can_be_forked() -> Result<()> {
    let (cluster, _keys, injector) = with_keys("pagevault.rekey_workers = 0")?;
    cluster.sql("CREATE TABLE t AS SELECT 1 AS id; SELECT pagevault.encrypt('t')")?;
    cluster.sql("SELECT pagevault.rotate_data_key('t')")?;
    let mut client = cluster.client()?;
    let call = "fork - postmaster".to_owned();
    injector.arm(&Injection { call, number: 1, fault: Fault::FailsFromThere(libc::EAGAIN) })?;
    run_sql(&mut client, "ALTER SYSTEM SET pagevault.rekey_workers = 1")?;
    run_sql(&mut client, "SELECT pg_reload_conf()")?;
    let failed = || cluster.log().matches("could not fork worker process").count();
    cluster.eventually_that("attempts", || {
        ensure!(failed() >= 3, "{}", failed());
        Ok(())
    })?;
    let before = failed();
    run_sql(&mut client, "SELECT pg_sleep(2)")?;
    let more = failed() - before;
    ensure!(more < 20, "{more} attempts in two seconds");
    injector.disarm()?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('t'::regclass, '1min')")? == "t");
    cluster.finish()
}

const STATE: &str = "SELECT string_agg(DISTINCT state, ' ') FROM pagevault.database_keys";

/// The time for which a key has been revoked is not the time of day, which may be set.
#[test]
fn a_clock_that_is_set_back_gives_no_revoked_key_back() -> Result<()> {
    let settings = Settings::default()
        .conf("pagevault.revalidate_interval = 1s")
        .conf("pagevault.revoked_key_action = lock")
        .conf("pagevault.revoked_key_grace = 1s");
    let mut cluster = Cluster::create(&settings)?;
    let keys = cluster.key_file("keys", "main")?;
    let injector = Injector::under(&mut cluster, keys.path())?;
    cluster.allow_log("pagevault");
    cluster.allow_log("revoked");
    cluster.start_server()?;
    cluster.sql("CREATE EXTENSION pagevault")?;
    cluster.sql(&keys.add_provider("local"))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('local', 'main')")?;
    keys.take_away()?;
    cluster.key_file("keys", "main")?;
    cluster.eventually(STATE, "revoked")?;
    let set = |seconds| {
        let call = "clock".to_owned();
        injector.arm(&Injection { call, number: 1, fault: Fault::Jumps(seconds) })
    };
    // Before the time is over, and after it.
    for seconds in [-3600, -7200] {
        set(seconds)?;
        cluster.eventually("SELECT state FROM pagevault.status", "locked")?;
        let asked = || cluster.log().matches("\"by\":\"revalidate_worker\"").count();
        let before = asked();
        cluster.eventually_that("revalidation", || {
            ensure!(asked() >= before + 4, "not asked again");
            Ok(())
        })?;
        let state = cluster.text("SELECT state FROM pagevault.status")?;
        ensure!(state == "locked", "{state}");
    }
    injector.disarm()?;
    keys.bring_back()?;
    cluster.eventually("SELECT state FROM pagevault.status", "unlocked")?;
    cluster.finish()
}
