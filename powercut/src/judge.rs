//! Whether a server is as it must be on what a power cut has left.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pagevault_tests::cluster::{column, text};
use pagevault_tests::{Cluster, StopMode};

use crate::facts::{Facts, databases, has_extension};
use crate::known;
use crate::ledger::Ledger;
use crate::said;
use crate::scenarios::Scenario;
use crate::workload::TABLES;

/// What a cut has come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All is as it must be.
    Good,
    /// And recovery has written pages under interim keys, because a provider was away.
    GoodInOutage,
    /// What is lost is what PostgreSQL itself loses: see the module `known`.
    Known(String),
}

/// What is wrong with a server that was started on an image; it is stopped. First it must be as was
/// promised, without a repair. Only what a command leaves that was under way is repaired.
pub(crate) fn judge(
    cluster: &mut Cluster,
    scenario: &Scenario,
    ledger: &Ledger,
    may_say: &[&str],
    others: impl FnOnce(&Cluster) -> Result<()>,
) -> Result<Verdict> {
    let lost = known::lost(cluster)?;
    let ledger = &ledger.without(&lost);
    let under_way = ledger.is_under_way();
    contents(cluster, scenario, ledger)?;
    Facts::of(cluster)?.judge(&ledger.before, under_way.then_some(&ledger.after))?;
    relations(cluster, scenario)?;
    if !lost.is_empty() {
        // With the next start they come back, after others have seen that they are not there, or
        // the server does not start, if the file was not written yet.
        cluster.stop(StopMode::Fast)?;
        said::judge(&cluster.log(), may_say)?;
        return Ok(Verdict::Known(known::PREPARED.to_owned()));
    }
    if scenario.encrypted {
        jobs(cluster).context("rekey jobs")?;
        if !under_way {
            Facts::drift(cluster)?.judge_drift(&ledger.before)?;
        }
        contents(cluster, scenario, ledger).context("after the jobs")?;
        repair(cluster)?;
        contents(cluster, scenario, ledger).context("after repairs")?;
    }
    others(cluster)?;
    let files = files(cluster)?;
    cluster.stop(StopMode::Fast)?;
    if scenario.checksums {
        checksums(cluster, &files)?;
    }
    if scenario.encrypted {
        verify(cluster)?;
    }
    cluster.start_server().context("the second start")?;
    contents(cluster, scenario, ledger).context("after the second start")?;
    cluster.stop(StopMode::Fast)?;
    said::judge(&cluster.log(), may_say)?;
    Ok(Verdict::Good)
}

/// The ledger, and sums that are the same in all tables, by the heap and by indexes.
pub(crate) fn contents(cluster: &Cluster, scenario: &Scenario, ledger: &Ledger) -> Result<()> {
    let mut client = cluster.client()?;
    ledger.judge(&mut client)?;
    for (step, done) in &ledger.steps {
        let Some(promise) = scenario.steps.get(*step).and_then(|step| step.promise) else {
            continue;
        };
        // Another one about the same may have begun, and undone it.
        let later = ledger.steps.keys().filter_map(|later| scenario.steps.get(*later));
        let undone = later
            .skip(step + 1)
            .any(|later| later.promise.is_some_and(|later| later.about == promise.about));
        if *done && !undone {
            let answer = text(&mut client, promise.holds)?;
            ensure!(
                answer == "t",
                "{} was done, but {} is {answer}",
                scenario.steps[*step].sql,
                promise.holds
            );
        }
    }
    if text(&mut client, "SELECT to_regclass('ledger') IS NULL")? == "t" {
        return Ok(());
    }
    let rows = text(&mut client, "SELECT count(*) FROM ledger")?;
    for table in TABLES {
        for how in [
            "SET enable_indexscan = off; SET enable_indexonlyscan = off; SET enable_bitmapscan = off; SET enable_seqscan = on",
            "SET enable_indexscan = on; SET enable_seqscan = off",
        ] {
            client.batch_execute(how)?;
            let query = format!("SELECT sum(v) FROM {table} WHERE v > 0 AND length(pad) > 0");
            let sum = text(&mut client, &query)?;
            let sum = if sum.is_empty() { "0" } else { &sum };
            ensure!(sum == rows, "{table}: {sum} instead of {rows} ({how})");
        }
    }
    Ok(())
}

/// Every table by the heap, every btree index against its table.
pub(crate) fn relations(cluster: &Cluster, scenario: &Scenario) -> Result<()> {
    for database in databases(cluster)? {
        let mut client = cluster.client_to(&database)?;
        let available = "SELECT count(*) FROM pg_available_extensions WHERE name = 'amcheck'";
        if text(&mut client, available)? == "0" {
            continue;
        }
        client.batch_execute(
            "SET statement_timeout = '60s'; SET client_min_messages = warning; CREATE EXTENSION IF NOT EXISTS amcheck",
        )?;
        let passed_over = scenario.passed_over;
        let broken = column(
            &mut client,
            &format!(
                "SELECT c.oid::regclass || ' block ' || h.blkno || ': ' || h.msg
               FROM pg_class c, verify_heapam(c.oid, check_toast => true) h
              WHERE c.relkind IN ('r', 't', 'm') AND c.relpersistence <> 't'
                AND c.relnamespace::regnamespace::text NOT IN ({passed_over})"
            ),
        )
        .with_context(|| format!("verify_heapam in {database}"))?;
        ensure!(broken.is_empty(), "in {database}: {broken:?}");
        column(
            &mut client,
            &format!(
                "SELECT bt_index_parent_check(c.oid, true) FROM pg_class c
               JOIN pg_am a ON a.oid = c.relam JOIN pg_index i ON i.indexrelid = c.oid
              WHERE a.amname = 'btree' AND c.relkind = 'i' AND i.indisvalid AND i.indisready
                AND c.relpersistence <> 't'
                AND c.relnamespace::regnamespace::text NOT IN ({passed_over})"
            ),
        )
        .with_context(|| format!("bt_index_parent_check in {database}"))?;
    }
    Ok(())
}

/// Unfinished jobs go on by themselves and end, in each database.
pub(crate) fn jobs(cluster: &Cluster) -> Result<()> {
    for database in databases(cluster)? {
        if has_extension(cluster, &database)? {
            jobs_of(cluster, &database).with_context(|| format!("in {database}"))?;
        }
    }
    Ok(())
}

fn jobs_of(cluster: &Cluster, database: &str) -> Result<()> {
    let mut client = cluster.client_to(database)?;
    let deadline = Instant::now() + Duration::from_secs(90);
    loop {
        let left = column(&mut client,
            "SELECT concat_ws(' ', job, relation, kind, state, pages_done, pages_total, error)
               FROM pagevault.rekey_jobs WHERE state IN ('waiting', 'running', 'failed') AND relation IS NOT NULL")?;
        if left.is_empty() {
            return Ok(());
        }
        if Instant::now() > deadline || left.iter().any(|job| job.contains(" failed ")) {
            bail!("unfinished: {left:?}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Commands that had not come to their end leave a mixture. What drift says ends it, also jobs that
/// had been stopped.
fn repair(cluster: &Cluster) -> Result<()> {
    for database in databases(cluster)? {
        if !has_extension(cluster, &database)? {
            continue;
        }
        let mut client = cluster.client_to(&database)?;
        // A job that ends may leave what another fix is for.
        for _ in 0..3 {
            let fixes = "SELECT DISTINCT fix FROM pagevault.drift(true) WHERE fix IS NOT NULL";
            for fix in column(&mut client, fixes)? {
                client.batch_execute(&fix).with_context(|| fix.clone())?;
            }
            jobs_of(cluster, &database).with_context(|| format!("after repairs in {database}"))?;
        }
        let drift = column(&mut client, "SELECT d::text FROM pagevault.drift(true) d")?;
        ensure!(drift.is_empty(), "drift in {database}: {drift:?}");
    }
    Ok(())
}

/// Which files there should be: of each database all, or those of its relations.
fn files(cluster: &Cluster) -> Result<BTreeSet<String>> {
    let mut client = cluster.client()?;
    let mut files: BTreeSet<_> = column(
        &mut client,
        "SELECT oid::text FROM pg_database WHERE NOT datallowconn OR datname = 'template1'",
    )?
    .into_iter()
    .collect();
    for database in databases(cluster)? {
        let relations = "SELECT pg_relation_filepath(oid) FROM pg_class WHERE pg_relation_filepath(oid) IS NOT NULL";
        files.extend(column(&mut cluster.client_to(&database)?, relations)?);
    }
    Ok(files)
}

/// Stock `pg_checksums`. Files that belong to nobody, as an unfinished command leaves them, may be
/// torn: nobody reads them.
fn checksums(cluster: &Cluster, files: &BTreeSet<String>) -> Result<()> {
    let Err(error) = cluster.pg_checksums() else { return Ok(()) };
    let report = format!("{error:#}");
    let bad: Vec<_> = report
        .lines()
        .filter_map(|line| line.split_once("failed in file \"")?.1.split_once("/data/"))
        .filter_map(|(_, path)| path.split_once('"'))
        .filter(|(path, _)| {
            let directory = path.rsplit('/').nth(1).unwrap_or_default();
            let file = path.rsplit('/').next().unwrap_or_default();
            let main = path.len() - file.len() + file.find(['_', '.']).unwrap_or(file.len());
            files.contains(directory) || files.contains(&path[..main])
        })
        .map(|(path, what)| format!("{path}{what}"))
        .collect();
    ensure!(bad.is_empty() && report.contains("Bad checksums"), "{bad:?} {report}");
    Ok(())
}

/// `pagevault-keyring verify`, of a server that is down.
fn verify(cluster: &Cluster) -> Result<()> {
    let (response, code) = cluster.verify_offline(&cluster.data_directory())?;
    ensure!(code == Some(0), "pagevault-keyring verify ends with {code:?}:\n{response}");
    Ok(())
}

/// What a server has said at last, but for its audit trail.
pub(crate) fn end_of_log(cluster: &Cluster) -> String {
    let log = cluster.log();
    let told = |line: &&str| {
        !["audit: {", "background worker", "shut"].iter().any(|said| line.contains(said))
    };
    let lines: Vec<_> = log.lines().filter(told).collect();
    format!("log:\n{}\n", lines[lines.len().saturating_sub(14)..].join("\n"))
}
