//! `pagevault-keyring audit verify` detects forged, changed and missing lines.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, Settings, StopMode};

use super::MARK;

/// Exit status and output of `audit verify` of these files.
fn verified(cluster: &Cluster, files: &[&Path]) -> Result<(i32, String)> {
    let mut command = cluster.program("pagevault-keyring");
    command.args(["audit", "verify"]).args(files).arg("-D").arg(cluster.data_directory());
    let output = command.output()?;
    let response = [output.stdout, output.stderr].concat();
    let code = output.status.code().context("killed")?;
    Ok((code, String::from_utf8_lossy(&response).into_owned()))
}

fn log(cluster: &Cluster) -> PathBuf {
    cluster.directory().join("log")
}

/// Fails unless the trail in the server log is complete.
fn ensure_whole(cluster: &Cluster) -> Result<String> {
    let (code, response) = verified(cluster, &[&log(cluster)])?;
    ensure!(
        code == 0 && response.contains("Nothing is missing, changed or forged."),
        "{code}: {response}"
    );
    Ok(response)
}

/// The output of verify for a modified copy of the log.
fn tampered(cluster: &Cluster, change: impl FnOnce(&mut Vec<String>)) -> Result<String> {
    let mut lines: Vec<String> = cluster.log().lines().map(str::to_owned).collect();
    change(&mut lines);
    let path = cluster.directory().join("tampered");
    fs::write(&path, lines.join("\n"))?;
    cluster.installation().give(&path)?;
    let (code, response) = verified(cluster, &[&path])?;
    ensure!(code == 2, "{code}: {response}");
    Ok(response)
}

fn at(lines: &[String], what: &str) -> usize {
    lines.iter().position(|line| line.contains(MARK) && line.contains(what)).unwrap_or(usize::MAX)
}

fn count(response: &str) -> usize {
    let count = response.split_once("Problems found: ").map(|(_, rest)| rest);
    count.and_then(|rest| rest.split_once('.')?.0.parse().ok()).unwrap_or(0)
}

#[test]
fn a_trail_stays_complete_across_rotations_restarts_and_crashes() -> Result<()> {
    let (mut cluster, keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("pagevault");
    ensure_whole(&cluster)?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    cluster.restart()?;
    ensure_whole(&cluster)?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    cluster.crash()?;
    cluster.stop(StopMode::Immediate)?;
    cluster.start_server()?;
    let response = ensure_whole(&cluster)?;
    ensure!(response.contains("; runs: 4"), "{response}");
    // Lines written while the cluster is locked are verified by later lines.
    keys.take_away()?;
    cluster.append_conf("pagevault.unlock_timeout = 0")?;
    cluster.restart()?;
    cluster.error("SELECT pagevault.unlock()")?;
    keys.bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    ensure_whole(&cluster)?;
    // The earlier log, and the current one.
    let older = cluster.directory().join("older");
    fs::rename(log(&cluster), &older)?;
    cluster.restart()?;
    let (code, response) = verified(&cluster, &[&log(&cluster), &older])?;
    ensure!(code == 0 && response.contains("; runs: 6"), "{code}: {response}");
    let (code, response) = verified(&cluster, &[&log(&cluster)])?;
    ensure!(
        code == 0 && response.contains("earlier lines are not in these files"),
        "{code}: {response}"
    );
    cluster.finish()
}

#[test]
fn other_log_lines_are_not_taken_for_the_trail() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE ROLE nobody LOGIN")?;
    let mut client = cluster.client()?;
    // Log only the message, not the statement that raises it.
    run_sql(&mut client, "SET log_min_error_statement = panic")?;
    let genuine = cluster
        .log()
        .lines()
        .filter_map(|line| line.split_once(MARK))
        .next_back()
        .map(|l| l.1.to_owned());
    let genuine = genuine.context("no line")?;
    let changed = genuine.replace("\"ok\"", "\"denied\"");
    let bare = "{\"run\":\"0123456789abcdef0123456789abcdef\",\"seq\":1,\"time\":\"2026-01-01T00:00:00.000000Z\",\"prev\":null,\"action\":\"shred\",\"mac_key\":null}";
    for (forged, findings) in
        [("{\"action\":\"shred\",\"outcome\":\"ok\"}", 1), (&changed, 2), (bare, 3)]
    {
        let raise =
            format!("DO $$ BEGIN RAISE LOG '%', $forged$pagevault audit: {forged}$forged$; END $$");
        run_sql(&mut client, &format!("SET ROLE nobody; {raise}; RESET ROLE"))?;
        let (code, response) = verified(&cluster, &[&log(&cluster)])?;
        ensure!(code == 2 && response.contains("forged or changed"), "{code}: {response}");
        ensure!(count(&response) == findings, "{response}");
    }
    // A repeated line does not replace the real one.
    let repeat =
        format!("DO $$ BEGIN RAISE LOG '%', $forged$pagevault audit: {genuine}$forged$; END $$");
    run_sql(&mut client, &format!("SET ROLE nobody; {repeat}; RESET ROLE"))?;
    ensure!(count(&verified(&cluster, &[&log(&cluster)])?.1) == 3, "a repeated line counts");
    drop(client);
    cluster.finish()
}

#[test]
fn missing_lines_are_detected() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    cluster.restart()?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    ensure_whole(&cluster)?;
    // One line is missing.
    let response = tampered(&cluster, |lines| {
        lines.remove(at(lines, "\"action\":\"rotate\""));
    })?;
    ensure!(response.contains("missing: line ") && count(&response) == 1, "{response}");
    // The end is missing.
    let response = tampered(&cluster, |lines| {
        let keep = lines.iter().rposition(|line| line.contains("\"action\":\"rotate\""));
        lines.truncate(keep.unwrap_or(0));
    })?;
    ensure!(response.contains("missing: line") && count(&response) == 1, "{response}");
    // The end of the first run is missing, and a whole run.
    let second = |lines: &[String]| {
        lines.iter().rposition(|line| line.contains("\"action\":\"start\"")).unwrap_or(0)
    };
    let response = tampered(&cluster, |lines| {
        let end = second(lines);
        lines.drain(at(lines, "\"action\":\"rotate\"")..end);
    })?;
    ensure!(response.contains("missing: lines") && count(&response) == 1, "{response}");
    let response = tampered(&cluster, |lines| {
        lines.truncate(second(lines));
    })?;
    ensure!(response.contains("missing: lines 1 to") && count(&response) == 1, "{response}");
    // Changed lines, and changed order.
    let response = tampered(&cluster, |lines| {
        let at = at(lines, "\"action\":\"rotate\"");
        lines[at] = lines[at].replace("\"role\":\"postgres\"", "\"role\":\"another\"");
    })?;
    ensure!(response.contains("its MAC is wrong"), "{response}");
    let response = tampered(&cluster, |lines| {
        let at = at(lines, "\"action\":\"rotate\"");
        let line = lines.remove(at);
        lines.insert(at + 1, line);
    })?;
    ensure!(response.contains("is out of order"), "{response}");
    // Without the state file the end is unknown, and the next run does not know what preceded it.
    cluster.stop(StopMode::Fast)?;
    fs::remove_file(cluster.data_directory().join("pagevault/audit.state"))?;
    let (code, response) = verified(&cluster, &[&log(&cluster)])?;
    ensure!(
        code == 2 && response.contains("file audit.state is missing or damaged"),
        "{code}: {response}"
    );
    cluster.start_server()?;
    let (code, response) = verified(&cluster, &[&log(&cluster)])?;
    ensure!(code == 2 && response.contains("has no link to an earlier run"), "{code}: {response}");
    cluster.finish()
}

#[test]
fn the_trail_is_found_in_every_format_of_the_log() -> Result<()> {
    let settings = Settings::default()
        .conf("logging_collector = on")
        .conf("log_directory = 'logs'")
        .conf("log_filename = 'server'")
        .conf("log_destination = 'stderr, csvlog, jsonlog'");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    // Lines from before the start of the log collector are repeated as soon as a worker runs.
    cluster.eventually_that("the trail in the logs", || {
        for name in ["server", "server.csv", "server.json"] {
            let path = cluster.data_directory().join("logs").join(name);
            let (code, response) = verified(&cluster, &[&path])?;
            ensure!(
                code == 0 && !response.contains("are not in these files"),
                "{name}: {code}: {response}"
            );
        }
        Ok(())
    })?;
    cluster.finish()
}

#[test]
fn a_line_pending_at_a_crash_is_written_afterwards() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("");
    for whole_server in [false, true] {
        let mut client = cluster.client()?;
        cluster.stop_at("audit.noted")?;
        let rotating = std::thread::spawn(move || {
            run_sql(&mut client, "SELECT pagevault.rotate_cluster_master_key()")
        });
        let pid = cluster.stopped_at("audit.noted")?;
        let lines = cluster.log().matches(MARK).count();
        if whole_server {
            cluster.kill()?;
        } else {
            rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
        }
        cluster.resume();
        ensure!(rotating.join().is_ok_and(|done| done.is_err()), "it was not stopped");
        if whole_server {
            cluster.start_server()?;
        }
        cluster.eventually_that("the pending line", || {
            ensure!(cluster.log().matches(MARK).count() > lines, "nothing was written");
            Ok(())
        })?;
        cluster.eventually("SELECT loaded FROM pagevault.status", "t")?;
        cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
        ensure_whole(&cluster)?;
    }
    cluster.finish()
}

#[test]
fn a_standby_continues_the_trail_of_its_copy() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let standby = standby_of(&cluster, &[])?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    wait_for(&standby, &cluster)?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    ensure_whole(&cluster)?;
    let response = ensure_whole(&standby)?;
    ensure!(response.contains("earlier lines are not in these files"), "{response}");
    // Both logs together: the standby has diverged from the primary, and nothing is missing.
    let (code, response) = verified(&standby, &[&log(&cluster), &log(&standby)])?;
    ensure!(code == 0 && response.contains("one of them is from a copy"), "{code}: {response}");
    standby.finish()?;
    cluster.finish()
}
