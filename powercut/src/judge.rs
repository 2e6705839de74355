//! Whether a server is as it must be on what a power cut has left.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pagevault_tests::cluster::{column, text};
use pagevault_tests::{Cluster, StopMode};

use crate::ledger::Ledger;
use crate::scenarios::Scenario;
use crate::workload::TABLES;

/// What servers say after a power cut: a page of a map that is torn is made anew, and the removal
/// of a database is repeated.
const ORDINARY: [&str; 9] = [
    "page verification failed",
    "_fsm; zeroing",
    "_vm; zeroing",
    "_fsm\"; zeroing",
    "_vm\"; zeroing",
    "could not open directory \"base/",
    "some useless files may be left behind in old database directory",
    "could not send data to client",
    // Statistics are not synced.
    "found incorrect format ID",
];

pub(crate) const EXTENSION: &str = "SELECT count(*) FROM pg_extension WHERE extname = 'pagevault'";

/// Judges a server that was started on an image, and stops it.
pub(crate) fn judge(
    cluster: &mut Cluster,
    scenario: &Scenario,
    ledger: &Ledger,
    others: impl FnOnce(&Cluster) -> Result<()>,
) -> Result<()> {
    for line in ORDINARY.iter().chain(scenario.log) {
        cluster.allow_log(line);
    }
    contents(cluster, scenario, ledger)?;
    relations(cluster, scenario)?;
    if scenario.encrypted {
        jobs(cluster).context("rekey jobs")?;
        repair(cluster)?;
        jobs(cluster).context("rekey jobs of what was not as labels want it")?;
        drift(cluster)?;
        contents(cluster, scenario, ledger).context("after the jobs")?;
    }
    others(cluster)?;
    let files = files(cluster)?;
    cluster.stop(StopMode::Fast)?;
    if scenario.checksums {
        checksums(cluster, &files)?;
    }
    cluster.start_server().context("the second start")?;
    contents(cluster, scenario, ledger).context("after the second start")?;
    cluster.end()
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

fn databases(cluster: &Cluster) -> Result<Vec<String>> {
    column(
        &mut cluster.client()?,
        "SELECT datname FROM pg_database WHERE datallowconn AND datconnlimit <> -2 AND datname <> 'template1'",
    )
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

/// Unfinished jobs go on by themselves and end.
pub(crate) fn jobs(cluster: &Cluster) -> Result<()> {
    if text(&mut cluster.client()?, EXTENSION)? == "0" {
        return Ok(());
    }
    cluster.sql(
        "SELECT pagevault.resume_rekey(job) FROM pagevault.rekey_jobs WHERE state IN ('paused', 'cancelled') AND relation IS NOT NULL",
    )?;
    let deadline = Instant::now() + Duration::from_secs(90);
    loop {
        let mut client = cluster.client()?;
        let left = column(&mut client,
            "SELECT concat_ws(' ', job, relation, kind, state, pages_done, pages_total, error)
               FROM pagevault.rekey_jobs WHERE state IN ('waiting', 'running', 'failed') AND relation IS NOT NULL")?;
        if left.is_empty() {
            return Ok(());
        }
        if Instant::now() > deadline || left.iter().any(|job| job.contains(" failed ")) {
            bail!("unfinished: {left:?}");
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// What commands had not come to before the cut: they leave a mixture, and are repeated.
fn repair(cluster: &Cluster) -> Result<()> {
    let mut client = cluster.client()?;
    if text(&mut client, EXTENSION)? != "0" {
        for fix in column(
            &mut client,
            "SELECT DISTINCT fix FROM pagevault.drift(true) WHERE fix IS NOT NULL",
        )? {
            client.batch_execute(&fix).with_context(|| fix.clone())?;
        }
    }
    Ok(())
}

fn drift(cluster: &Cluster) -> Result<()> {
    let mut client = cluster.client()?;
    if text(&mut client, EXTENSION)? == "0" {
        return Ok(());
    }
    let drift = column(&mut client, "SELECT d::text FROM pagevault.drift(true) d")?;
    ensure!(drift.is_empty(), "drift: {drift:?}");
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

/// What a server has said at last, but for its audit trail.
pub(crate) fn end_of_log(cluster: &Cluster) -> String {
    let log = cluster.log();
    let told = |line: &&str| {
        !["audit: {", "background worker", "shut"].iter().any(|said| line.contains(said))
    };
    let lines: Vec<_> = log.lines().filter(told).collect();
    format!("log:\n{}\n", lines[lines.len().saturating_sub(14)..].join("\n"))
}
