//! Keys that the server rotates by itself, when they have reached an age.

use anyhow::{Result, ensure};
use pagevault_tests::{Cluster, Settings, StopMode};

const TABLE: &str = "SET pagevault.default_encryption = on;
    CREATE TABLE t (id int PRIMARY KEY, name text);
    INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 2000) i";

/// A window that opens in three days.
fn closed_window(cluster: &Cluster) -> Result<String> {
    cluster.text(
        "SELECT to_char(now() AT TIME ZONE current_setting('log_timezone') + interval '3 days', 'Dy')",
    )
}

fn version_of(kind: &str) -> String {
    format!("SELECT max(version) FROM pagevault.key_ages WHERE kind = '{kind}'")
}

/// Names of settings in the order in which keys are used.
const KINDS: [&str; 3] = ["master", "database", "wal"];

#[test]
fn keys_are_rotated_at_an_age() -> Result<()> {
    let (cluster, keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(TABLE)?;
    keys.add_key("of-this-database")?;
    cluster.sql("SELECT pagevault.set_database_master_key('local', 'of-this-database')")?;
    cluster.set(&[("pagevault.wal_encryption", "on")])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    let ages = "SELECT string_agg(kind || ' ' || scope, ', ' ORDER BY kind, scope)
        FROM pagevault.key_ages WHERE relation IS NULL";
    let expected =
        "database cluster, database database, master cluster, master database, wal cluster";
    ensure!(cluster.text(ages)? == expected, "{}", cluster.text(ages)?);
    let unlimited = "SELECT count(*) FROM pagevault.key_ages WHERE rotate_after IS NULL
        AND due_at IS NULL AND NOT is_due";
    let all = cluster.text("SELECT count(*) FROM pagevault.key_ages")?;
    ensure!(cluster.text(unlimited)? == all, "no age is set yet");
    for kind in KINDS {
        let setting = format!("pagevault.rotate_{kind}_key_after");
        let least =
            format!("SELECT min(version) >= 3 FROM pagevault.key_ages WHERE kind = '{kind}'");
        cluster.set(&[(&setting, "1s")])?;
        cluster.eventually(&least, "t")?;
        cluster.set(&[(&setting, "0")])?;
    }
    for action in [
        "rotate_cluster_master_key",
        "rotate_database_master_key",
        "rotate_database_key",
        "rotate_wal_key",
    ] {
        let line = format!(r#""action":"{action}","by":"rotation_worker","role":null"#);
        ensure!(cluster.log().contains(&line), "no line in the audit trail: {line}");
    }
    cluster.crash()?;
    ensure!(cluster.text("SELECT count(name) FROM t")? == "2000", "rows are missing");
    cluster.finish()
}

#[test]
fn data_keys_are_rotated_at_an_age() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(TABLE)?;
    cluster.sql("CREATE TABLE plain (id int)")?;
    let oldest = "SELECT min(version) >= 2 FROM pagevault.key_ages WHERE kind = 'data'
        AND relation IN ('t'::regclass, 't_pkey'::regclass, 'pg_statistic'::regclass)";
    cluster.set(&[("pagevault.rotate_data_key_after", "1s")])?;
    cluster.eventually(oldest, "t")?;
    cluster.set(&[("pagevault.rotate_data_key_after", "0")])?;
    cluster.eventually("SELECT count(*) FROM pagevault.rekey_jobs WHERE state <> 'done'", "0")?;
    let asked = "SELECT DISTINCT kind || ' by ' || requested_by FROM pagevault.rekey_jobs";
    let found = cluster.text(asked)?;
    ensure!(found == "rotate by pagevault.rotate_data_key_after", "{found}");
    let line = r#""action":"rotate_data_key","by":"rotation_worker","role":null"#;
    ensure!(cluster.log().contains(line), "nothing in the audit trail");
    let of_plain = "SELECT count(*) FROM pagevault.key_ages WHERE relation = 'plain'::regclass";
    ensure!(cluster.text(of_plain)? == "0", "it has no key");
    cluster.crash()?;
    ensure!(cluster.text("SELECT count(name) FROM t")? == "2000", "rows are missing");
    cluster.finish()
}

/// A job of the server stops in the middle when the window closes, and goes on when it opens.
#[test]
fn nothing_is_rotated_outside_the_window() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(TABLE)?;
    cluster.sql("SET pagevault.default_encryption = on; CREATE TABLE other AS SELECT * FROM t")?;
    let closed = closed_window(&cluster)?;
    cluster.set(&[
        ("pagevault.rotation_window", &closed),
        ("pagevault.rotate_master_key_after", "1s"),
        ("pagevault.rotate_data_key_after", "1s"),
    ])?;
    cluster.eventually(
        "SELECT bool_and(is_due) FROM pagevault.key_ages WHERE kind <> 'database'",
        "t",
    )?;
    // A job that a user has requested is done, so the launcher has looked at what is due.
    cluster.sql("SELECT pagevault.rotate_data_key('other')")?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('other')")? == "t", "not done");
    let jobs = "SELECT count(*) FROM pagevault.rekey_jobs WHERE requested_by LIKE 'pagevault%'";
    ensure!(cluster.text(jobs)? == "0", "the window is closed");
    ensure!(cluster.text(&version_of("master"))? == "1", "the window is closed");

    cluster.set(&[("pagevault.rekey_rate", "64kB"), ("pagevault.rotation_window", "")])?;
    let of_t = "SELECT state || ' ' || (pages_done > 0 AND pages_done < pages_total)
        FROM pagevault.rekey_jobs WHERE relation = 't'::regclass ORDER BY job DESC LIMIT 1";
    cluster.eventually(of_t, "running true")?;
    let running = "SELECT count(*) <= 1 FROM pagevault.rekey_jobs WHERE state = 'running'";
    ensure!(cluster.text(running)? == "t", "one at a time");
    cluster.set(&[("pagevault.rotation_window", &closed), ("pagevault.rekey_rate", "0")])?;
    cluster.eventually("SELECT count(*) FROM pagevault.rekey_jobs WHERE state = 'running'", "0")?;
    cluster.crash()?;
    let waiting = "SELECT count(*) > 0 FROM pagevault.rekey_jobs WHERE state = 'waiting'";
    ensure!(cluster.text(waiting)? == "t", "nothing waits for the window");
    cluster.set(&[
        ("pagevault.rotation_window", "00:00-24:00"),
        ("pagevault.rotate_data_key_after", "0"),
    ])?;
    cluster.eventually("SELECT count(*) FROM pagevault.rekey_jobs WHERE state <> 'done'", "0")?;
    ensure!(cluster.text("SELECT count(name) FROM t")? == "2000", "rows are missing");
    cluster.finish()
}

#[test]
fn a_rotation_that_fails_is_tried_again() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&Settings::default())?;
    keys.take_away()?;
    cluster.set(&[("pagevault.rotate_master_key_after", "1s")])?;
    cluster.eventually_logs("could not rotate a key by age: could not rotate master key")?;
    ensure!(cluster.text(&version_of("master"))? == "1", "without a provider");
    keys.bring_back()?;
    cluster.eventually(&format!("SELECT ({}) > 1", version_of("master")), "t")?;
    cluster.set(&[("pagevault.rotate_master_key_after", "0")])?;
    cluster.allow_log("could not rotate a key by age");
    cluster.finish()
}

/// A key that is wrapped again does not become younger, not by a compaction of the key log either.
#[test]
fn a_wrapping_does_not_make_a_key_younger() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(TABLE)?;
    let since = |kind: &str| {
        cluster.text(&format!(
            "SELECT string_agg(since::text, ' ' ORDER BY relation) FROM pagevault.key_ages WHERE kind = '{kind}'"
        ))
    };
    let (master, database, data) = (since("master")?, since("database")?, since("data")?);
    // Times are in seconds.
    cluster.sql("SELECT pg_sleep(1.1); SELECT pagevault.rotate_cluster_master_key()")?;
    ensure!(since("master")? > master, "the master key has a new version");
    ensure!(since("database")? == database, "the same database key");
    let master = since("master")?;
    cluster.sql("SELECT pg_sleep(1.1); SELECT pagevault.rotate_database_key()")?;
    ensure!(since("master")? == master, "the same version of the master key");
    ensure!(since("database")? > database, "a new database key");
    ensure!(since("data")? == data, "the same data keys");
    let database = since("database")?;
    for _ in 0..2 {
        cluster.stop(StopMode::Fast)?;
        cluster.start_server()?;
    }
    ensure!((since("master")?, since("database")?, since("data")?) == (master, database, data));
    cluster.finish()
}

#[test]
fn windows_are_checked() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let error = cluster.error("ALTER SYSTEM SET pagevault.rotation_window = 'nightly'")?;
    ensure!(error.sqlstate == "22023", "{error:?}");
    ensure!(error.detail.contains("\"nightly\" is neither a day"), "{error:?}");
    cluster.finish()
}

/// Whoever owns a table can keep it locked, or leave a transaction open that has asked for a job.
/// Nothing else waits for that, and what users want comes before what is due.
#[test]
fn nobody_holds_up_the_rotation_of_other_keys() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql(TABLE)?;
    cluster.sql(
        "SET pagevault.default_encryption = on;
         CREATE TABLE asked AS SELECT * FROM t; CREATE TABLE locked AS SELECT * FROM t;
         CREATE TABLE late AS SELECT * FROM t",
    )?;
    let mut asks = cluster.client()?;
    pagevault_tests::cluster::run_sql(
        &mut asks,
        "BEGIN; SELECT pagevault.rotate_data_key('asked')",
    )?;
    let mut locks = cluster.client()?;
    pagevault_tests::cluster::run_sql(&mut locks, "BEGIN; LOCK TABLE locked")?;
    let rotated = |table: &str| {
        format!("SELECT version > 1 FROM pagevault.key_ages WHERE relation = '{table}'::regclass")
    };
    cluster.set(&[
        ("pagevault.rotate_data_key_after", "1s"),
        ("pagevault.rotate_master_key_after", "1s"),
    ])?;
    cluster.eventually(&rotated("t"), "t")?;
    cluster.eventually(&rotated("late"), "t")?;
    cluster.eventually(&format!("SELECT ({}) > 2", version_of("master")), "t")?;
    let asked = "SELECT version FROM pagevault.key_ages WHERE relation = 'asked'::regclass";
    ensure!(cluster.text(asked)? == "1", "its job is not committed");

    // A scheduled job that waits for the window gives way. Workers that have not noticed the window
    // end first.
    let window = closed_window(&cluster)?;
    cluster.set(&[("pagevault.rotation_window", &window), ("pagevault.rekey_workers", "0")])?;
    let waits = "SELECT count(*) > 0 FROM pagevault.rekey_jobs WHERE relation = 'locked'::regclass
        AND requested_by LIKE 'pagevault%' AND state = 'waiting'";
    cluster.eventually(waits, "t")?;
    let workers = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pagevault rekey'";
    cluster.eventually(workers, "0")?;
    drop(locks);
    cluster.set(&[("pagevault.rekey_workers", "2")])?;
    ensure!(cluster.text(waits)? == "t", "it does not wait for the window");
    cluster.sql("SELECT pagevault.rotate_data_key('locked')")?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('locked')")? == "t", "not done");
    ensure!(cluster.text(waits)? == "f", "the scheduled job is there");
    drop(asks);
    cluster.set(&[
        ("pagevault.rotate_data_key_after", "0"),
        ("pagevault.rotate_master_key_after", "0"),
    ])?;
    cluster.finish()
}

/// The catalogs that all databases share are rotated by one of them.
#[test]
fn shared_catalogs_are_rotated_by_one_database() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.set(&[("pagevault.shared_catalog_encryption", "on")])?;
    cluster.sql("SELECT * FROM pagevault.encrypt_catalogs()")?;
    cluster.sql("CREATE DATABASE other")?;
    let version = "SELECT version FROM pagevault.key_ages WHERE relation = 'pg_authid'::regclass";
    ensure!(cluster.text(version)? == "1", "{}", cluster.text(version)?);
    cluster.set(&[("pagevault.rotate_data_key_after", "1s")])?;
    cluster.eventually(&format!("SELECT ({version}) > 1"), "t")?;
    cluster.set(&[("pagevault.rotate_data_key_after", "0")])?;
    cluster.eventually("SELECT count(*) FROM pagevault.rekey_jobs WHERE state <> 'done'", "0")?;
    // The other databases, which do not have the extension, are not asked to.
    ensure!(!cluster.log().contains("is not installed there"), "a database is asked in vain");
    cluster.finish()
}
