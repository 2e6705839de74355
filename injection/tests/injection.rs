//! Some injected errors, each with what it must lead to. The long form is `make inject`.

use anyhow::{Result, ensure};
use pagevault_injection::campaign::{Campaign, Outcome};
use pagevault_injection::catalogue::ALL;
use pagevault_injection::injector::{Fault, Injection, Injector};
use pagevault_tests::choice::named;
use pagevault_tests::{Cluster, Settings};

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
            // The change is in WAL, but no file holds it for certain.
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
