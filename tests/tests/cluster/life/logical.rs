//! Logical replication between a server that encrypts everything and one that encrypts nothing;
//! decoding of sealed WAL across new keys and crashes; slots that survive a failover.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::datafile::{assert_plain, assert_sealed};
use pagevault_tests::installation::run;
use pagevault_tests::standby::wait_for;
use pagevault_tests::{Cluster, Installation, Settings, Standby};
use rustix::process::{Pid, Signal, kill_process};

use super::{each, encrypt_everything, rotate_all};
use crate::wal::{assert_hidden, insert};

fn logical() -> Settings {
    Settings::default().conf("wal_level = logical").conf("logical_decoding_work_mem = 64kB")
}

const TABLES: &str = "CREATE TABLE t (id serial PRIMARY KEY, name text);
    CREATE TABLE accounts (id int PRIMARY KEY, owner text, secret text, balance int)";

fn encrypted() -> Result<Cluster> {
    let (cluster, keys) = Cluster::with_keys(&logical())?;
    encrypt_everything(&cluster)?;
    cluster.sql(TABLES)?;
    drop(keys);
    Ok(cluster)
}

/// With pagevault loaded, and nothing encrypted.
fn plain() -> Result<Cluster> {
    let cluster = Cluster::start(&logical())?;
    cluster.sql(TABLES)?;
    Ok(cluster)
}

/// Makes `to` subscribe to `from`: all of `t`, and some columns and rows of `accounts`.
fn subscribe(to: &Cluster, from: &Cluster, name: &str) -> Result<()> {
    from.sql(&format!(
        "CREATE PUBLICATION {name} FOR TABLE t, TABLE accounts (id, owner, balance) WHERE (id % 2 = 0)"
    ))?;
    to.sql(&format!(
        "CREATE SUBSCRIPTION {name} CONNECTION 'host={} user=postgres dbname=postgres'
         PUBLICATION {name}",
        from.directory().display()
    ))?;
    to.eventually("SELECT count(*) FROM pg_subscription_rel WHERE srsubstate <> 'r'", "0")
}

const T: &str = "SELECT count(*) || ':' || coalesce(sum(hashtext(name)::bigint + id), 0) FROM t";
const EVEN: &str = "SELECT count(*) || ':' || coalesce(sum(hashtext(owner)::bigint + balance), 0)
    FROM accounts WHERE id % 2 = 0";

fn agree(to: &Cluster, from: &Cluster) -> Result<()> {
    to.eventually(T, &from.text(T)?)?;
    to.eventually(EVEN, &from.text(EVEN)?)?;
    let odd = to.text("SELECT count(*) FROM accounts WHERE id % 2 = 1 OR secret IS NOT NULL")?;
    ensure!(odd == "0", "{odd} rows are not as filtered");
    Ok(())
}

/// Transactions that are larger than logical_decoding_work_mem, and other changes.
fn change(publisher: &Cluster, round: i32) -> Result<()> {
    insert(publisher, "drossel", 3000)?;
    each(
        publisher,
        &[
            &format!(
                "INSERT INTO accounts SELECT i, 'zeisig', 'geheim', i FROM
                 generate_series({round} * 1000 + 1, {round} * 1000 + 1000) i"
            ),
            "UPDATE t SET name = name || '!' WHERE id % 3 = 0",
            "UPDATE accounts SET balance = balance + 1, id = id + 100000 WHERE id % 10 = 0 AND id < 100000",
            "DELETE FROM t WHERE id % 7 = 0",
        ],
    )
}

fn one_way(publisher: Cluster, subscriber: Cluster) -> Result<()> {
    let (mut publisher, mut subscriber) = (publisher, subscriber);
    for cluster in [&mut publisher, &mut subscriber] {
        cluster.allow_log("logical replication");
        cluster.allow_log("could not");
    }
    let encrypts = |cluster: &Cluster| {
        cluster.text("SELECT count(*) FROM pg_extension WHERE extname = 'pagevault'")
    };
    change(&publisher, 0)?;
    subscribe(&subscriber, &publisher, "birds")?;
    agree(&subscriber, &publisher).context("initial copy")?;
    for round in 1..=3 {
        change(&publisher, round)?;
        for cluster in [&publisher, &subscriber] {
            if encrypts(cluster)? == "1" {
                rotate_all(cluster)?;
            }
        }
        // Kill during decoding or applying, most likely.
        change(&publisher, round + 10)?;
        match round {
            1 => publisher.crash()?,
            2 => subscriber.crash()?,
            _ => {}
        }
        agree(&subscriber, &publisher).with_context(|| format!("round {round}"))?;
    }
    for cluster in [&publisher, &subscriber] {
        cluster.sql("CHECKPOINT")?;
        if encrypts(cluster)? == "1" {
            for table in ["t", "accounts"] {
                assert_sealed(&cluster.family_files(table)?)?;
            }
            assert_hidden(cluster, "drossel")?;
        } else {
            assert_plain(&cluster.family_files("t")?)?;
        }
    }
    subscriber.sql("DROP SUBSCRIPTION birds")?;
    subscriber.finish()?;
    publisher.finish()
}

#[test]
fn from_encrypted_to_plain() -> Result<()> {
    one_way(encrypted()?, plain()?)
}

#[test]
fn from_plain_to_encrypted() -> Result<()> {
    one_way(plain()?, encrypted()?)
}

/// The stream of changes, across new keys and a crash in between, contains each row once.
#[test]
fn pg_recvlogical_reads_sealed_wal() -> Result<()> {
    let mut cluster = encrypted()?;
    for text in ["connection to client lost", "could not"] {
        cluster.allow_log(text);
    }
    let slot = "SELECT pg_create_logical_replication_slot('changes', 'test_decoding')";
    if !cluster.installation().library_directory().join("test_decoding.so").exists() {
        eprintln!("skipped: test_decoding is not installed");
        return cluster.finish();
    }
    cluster.sql(slot)?;
    let out = cluster.directory().join("changes");
    let mut receive = cluster.program("pg_recvlogical");
    receive
        .args([
            "--slot=changes",
            "--start",
            "--no-loop",
            "--fsync-interval=0",
            "-d",
            "postgres",
            "-f",
        ])
        .arg(&out)
        .stderr(Stdio::null());
    let mut receiver = receive.spawn()?;
    for round in 0..3 {
        insert(&cluster, "drossel", 2000)?;
        cluster.sql("SELECT pagevault.rotate_wal_key()")?;
        if round == 1 {
            cluster.crash()?;
            receiver.wait()?;
            receiver = receive.spawn()?;
        }
    }
    let seen = || -> Result<Vec<u32>> {
        let text = std::fs::read_to_string(&out).unwrap_or_default();
        let ids = text.lines().filter_map(|line| {
            line.split_once("name[text]:'drossel-")?.0.split_once("id[integer]:")
        });
        ids.map(|(_, id)| Ok(id.trim().parse()?)).collect()
    };
    cluster.eventually_that("pg_recvlogical", || {
        let mut ids = seen()?;
        ids.sort_unstable();
        ids.dedup();
        ensure!(ids.len() == 6000, "{} rows", ids.len());
        Ok(())
    })?;
    let pid = i32::try_from(receiver.id()).ok().and_then(Pid::from_raw).context("a process")?;
    kill_process(pid, Signal::INT)?;
    receiver.wait()?;
    assert_hidden(&cluster, "drossel")?;
    let mut drop = cluster.program("pg_recvlogical");
    run(drop.args(["--slot=changes", "--drop-slot", "-d", "postgres"]))?;
    cluster.finish()
}

/// The standby, which reads sealed WAL for it, keeps a copy of the slot and continues with it.
#[test]
fn a_slot_survives_a_failover() -> Result<()> {
    if Installation::get()?.major < 17 {
        return Ok(());
    }
    let mut publisher = encrypted()?;
    let mut subscriber = plain()?;
    let mut standby = Standby::default()
        .slot("physical")
        .conf("hot_standby_feedback = on")
        .conf("sync_replication_slots = on")
        .start(&publisher)?;
    for cluster in [&mut publisher, &mut subscriber, &mut standby] {
        for text in [
            "logical replication",
            "could not",
            "terminating",
            "replication slot",
            "connection to client lost",
        ] {
            cluster.allow_log(text);
        }
    }
    publisher.set(&[("synchronized_standby_slots", "physical")])?;
    subscribe(&subscriber, &publisher, "birds")?;
    each(
        &subscriber,
        &[
            "ALTER SUBSCRIPTION birds DISABLE",
            "ALTER SUBSCRIPTION birds SET (failover = true)",
            "ALTER SUBSCRIPTION birds ENABLE",
        ],
    )?;
    for round in 0..2 {
        change(&publisher, round)?;
        rotate_all(&publisher)?;
        agree(&subscriber, &publisher)?;
    }
    standby.eventually(
        "SELECT bool_and(synced AND NOT temporary AND invalidation_reason IS NULL)
         FROM pg_replication_slots WHERE slot_name = 'birds'",
        "t",
    )?;
    // Changes that the subscriber has not received yet when the primary is lost.
    subscriber.sql("ALTER SUBSCRIPTION birds DISABLE")?;
    let mut session = publisher.client()?;
    run_sql(
        &mut session,
        "INSERT INTO t (name) SELECT 'fink-' || i FROM generate_series(1, 3000) i",
    )?;
    rotate_all(&publisher)?;
    wait_for(&standby, &publisher)?;
    let wanted = publisher.text(T)?;
    publisher.kill()?;
    standby.promote()?;
    subscriber.sql(&format!(
        "ALTER SUBSCRIPTION birds CONNECTION 'host={} user=postgres dbname=postgres'",
        standby.directory().display()
    ))?;
    subscriber.sql("ALTER SUBSCRIPTION birds ENABLE")?;
    subscriber.eventually(T, &wanted)?;
    change(&standby, 5)?;
    rotate_all(&standby)?;
    change(&standby, 6)?;
    agree(&subscriber, &standby)?;
    assert_hidden(&standby, "fink")?;
    subscriber.sql("DROP SUBSCRIPTION birds")?;
    subscriber.finish()?;
    standby.finish()?;
    publisher.finish()
}
