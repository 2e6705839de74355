//! `pagevault-keyring audit verify`: what was forged, changed or taken away is found.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::standby::{standby_of, wait_for};
use pagevault_tests::{Cluster, Settings, StopMode};

use super::MARK;

/// Exit status and words of `audit verify` of these files.
fn verified(cluster: &Cluster, files: &[&Path]) -> Result<(i32, String)> {
    let mut command = cluster.program("pagevault-keyring");
    command.args(["audit", "verify"]).args(files).arg("-D").arg(cluster.data_directory());
    let output = command.output()?;
    let said = [output.stdout, output.stderr].concat();
    let code = output.status.code().context("killed")?;
    Ok((code, String::from_utf8_lossy(&said).into_owned()))
}

fn log(cluster: &Cluster) -> PathBuf {
    cluster.directory().join("log")
}

/// The trail in the server's log is whole.
fn ensure_whole(cluster: &Cluster) -> Result<String> {
    let (code, said) = verified(cluster, &[&log(cluster)])?;
    ensure!(code == 0 && said.contains("Nothing is missing, changed or forged."), "{code}: {said}");
    Ok(said)
}

/// What verify says of a copy of the log that was changed.
fn tampered(cluster: &Cluster, change: impl FnOnce(&mut Vec<String>)) -> Result<String> {
    let mut lines: Vec<String> = cluster.log().lines().map(str::to_owned).collect();
    change(&mut lines);
    let path = cluster.directory().join("tampered");
    fs::write(&path, lines.join("\n"))?;
    cluster.installation().give(&path)?;
    let (code, said) = verified(cluster, &[&path])?;
    ensure!(code == 2, "{code}: {said}");
    Ok(said)
}

fn at(lines: &[String], what: &str) -> usize {
    lines.iter().position(|line| line.contains(MARK) && line.contains(what)).unwrap_or(usize::MAX)
}

fn count(said: &str) -> usize {
    let count = said.split_once("Problems found: ").map(|(_, rest)| rest);
    count.and_then(|rest| rest.split_once('.')?.0.parse().ok()).unwrap_or(0)
}

#[test]
fn a_trail_stays_whole_over_rotations_restarts_and_crashes() -> Result<()> {
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
    let said = ensure_whole(&cluster)?;
    ensure!(said.contains("; runs: 4"), "{said}");
    // What is written while the cluster is locked is proven by what comes after.
    keys.take_away()?;
    cluster.append_conf("pagevault.unlock_timeout = 0")?;
    cluster.restart()?;
    cluster.error("SELECT pagevault.unlock()")?;
    keys.bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    ensure_whole(&cluster)?;
    // The log of before, and the one of now.
    let older = cluster.directory().join("older");
    fs::rename(log(&cluster), &older)?;
    cluster.restart()?;
    let (code, said) = verified(&cluster, &[&log(&cluster), &older])?;
    ensure!(code == 0 && said.contains("; runs: 6"), "{code}: {said}");
    let (code, said) = verified(&cluster, &[&log(&cluster)])?;
    ensure!(code == 0 && said.contains("earlier lines are not in these files"), "{code}: {said}");
    cluster.finish()
}

#[test]
fn what_any_role_writes_into_the_log_is_not_taken_for_the_trail() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("CREATE ROLE nobody LOGIN")?;
    let mut client = cluster.client()?;
    // Only the message, not the statement that raises it.
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
        let (code, said) = verified(&cluster, &[&log(&cluster)])?;
        ensure!(code == 2 && said.contains("forged or changed"), "{code}: {said}");
        ensure!(count(&said) == findings, "{said}");
    }
    // A line that is there is no other one when somebody repeats it.
    let repeat =
        format!("DO $$ BEGIN RAISE LOG '%', $forged$pagevault audit: {genuine}$forged$; END $$");
    run_sql(&mut client, &format!("SET ROLE nobody; {repeat}; RESET ROLE"))?;
    ensure!(count(&verified(&cluster, &[&log(&cluster)])?.1) == 3, "a repeated line counts");
    drop(client);
    cluster.finish()
}

#[test]
fn what_is_taken_away_is_missed() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    cluster.restart()?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    ensure_whole(&cluster)?;
    // One line.
    let said = tampered(&cluster, |lines| {
        lines.remove(at(lines, "\"action\":\"rotate\""));
    })?;
    ensure!(said.contains("missing: line ") && count(&said) == 1, "{said}");
    // The end.
    let said = tampered(&cluster, |lines| {
        let keep = lines.iter().rposition(|line| line.contains("\"action\":\"rotate\""));
        lines.truncate(keep.unwrap_or(0));
    })?;
    ensure!(said.contains("missing: line") && count(&said) == 1, "{said}");
    // The end of the first run, and a run.
    let second = |lines: &[String]| {
        lines.iter().rposition(|line| line.contains("\"action\":\"start\"")).unwrap_or(0)
    };
    let said = tampered(&cluster, |lines| {
        let end = second(lines);
        lines.drain(at(lines, "\"action\":\"rotate\"")..end);
    })?;
    ensure!(said.contains("missing: lines") && count(&said) == 1, "{said}");
    let said = tampered(&cluster, |lines| {
        lines.truncate(second(lines));
    })?;
    ensure!(said.contains("missing: lines 1 to") && count(&said) == 1, "{said}");
    // Changed, and in another order.
    let said = tampered(&cluster, |lines| {
        let at = at(lines, "\"action\":\"rotate\"");
        lines[at] = lines[at].replace("\"role\":\"postgres\"", "\"role\":\"another\"");
    })?;
    ensure!(said.contains("its MAC is wrong"), "{said}");
    let said = tampered(&cluster, |lines| {
        let at = at(lines, "\"action\":\"rotate\"");
        let line = lines.remove(at);
        lines.insert(at + 1, line);
    })?;
    ensure!(said.contains("is out of order"), "{said}");
    // Without its state, nothing is known of the end, and the next run does not know what was
    // before.
    cluster.stop(StopMode::Fast)?;
    fs::remove_file(cluster.data_directory().join("pagevault/audit.state"))?;
    let (code, said) = verified(&cluster, &[&log(&cluster)])?;
    ensure!(code == 2 && said.contains("file audit.state is missing or damaged"), "{code}: {said}");
    cluster.start_server()?;
    let (code, said) = verified(&cluster, &[&log(&cluster)])?;
    ensure!(code == 2 && said.contains("has no link to an earlier run"), "{code}: {said}");
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
    // The collector is told of what was written before it ran as soon as a worker runs.
    cluster.eventually_that("the trail in the logs", || {
        for name in ["server", "server.csv", "server.json"] {
            let path = cluster.data_directory().join("logs").join(name);
            let (code, said) = verified(&cluster, &[&path])?;
            ensure!(
                code == 0 && !said.contains("are not in these files"),
                "{name}: {code}: {said}"
            );
        }
        Ok(())
    })?;
    cluster.finish()
}

#[test]
fn a_line_that_was_about_to_be_written_is_written_after_a_crash() -> Result<()> {
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
        cluster.go_on();
        ensure!(rotating.join().is_ok_and(|done| done.is_err()), "it was not stopped");
        if whole_server {
            cluster.start_server()?;
        }
        cluster.eventually("SELECT loaded FROM pagevault.status", "t")?;
        ensure!(cluster.log().matches(MARK).count() > lines, "nothing was written");
        cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
        ensure_whole(&cluster)?;
    }
    cluster.finish()
}

#[test]
fn a_standby_goes_on_where_its_copy_was_made() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let standby = standby_of(&cluster, &[])?;
    cluster.sql("SELECT pagevault.rotate_database_key()")?;
    wait_for(&standby, &cluster)?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    ensure_whole(&cluster)?;
    let said = ensure_whole(&standby)?;
    ensure!(said.contains("earlier lines are not in these files"), "{said}");
    // Both together: the standby has parted from the primary, and nothing is missing.
    let (code, said) = verified(&standby, &[&log(&cluster), &log(&standby)])?;
    ensure!(code == 0 && said.contains("one of them is from a copy"), "{code}: {said}");
    standby.finish()?;
    cluster.finish()
}
