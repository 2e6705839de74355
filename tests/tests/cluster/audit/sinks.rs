//! Destinations of the trail besides the server log, and failures to write to them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use anyhow::{Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Settings};

use super::trail;

const PROBLEM: &str = "SELECT audit_error FROM pagevault.status";

fn lines(path: &Path) -> Result<Vec<serde_json::Value>> {
    fs::read_to_string(path)?.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

fn verify(cluster: &Cluster, files: &[&Path]) -> Result<String> {
    let mut command = cluster.program("pagevault-keyring");
    command.args(["audit", "verify"]).args(files).arg("-D").arg(cluster.data_directory());
    run(&mut command)
}

/// On a volume of Kubernetes, which makes all files writable for a group.
#[test]
fn a_state_file_that_a_group_can_write_is_read_on_a_volume() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    let directory = cluster.data_directory();
    for (path, mode) in [("", 0o700), ("pagevault/audit.state", 0o660)] {
        fs::set_permissions(directory.join(path), fs::Permissions::from_mode(mode))?;
    }
    let log = cluster.directory().join("log");
    let mut command = cluster.program("pagevault-keyring");
    command.args(["audit", "verify"]).arg(&log).arg("-D").arg(&directory);
    let output = run(command.arg("--allow-shared-parents"))?;
    ensure!(output.contains("Nothing is missing"), "{output}");
    ensure!(verify(&cluster, &[&log]).is_err(), "also without that");
    cluster.finish()
}

#[test]
fn the_trail_can_be_written_to_a_separate_file() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("pagevault");
    let file = cluster.directory().join("audit.jsonl");
    let name = file.display().to_string();
    cluster.set(&[("pagevault.audit_file", &name), ("pagevault.audit_destination", "file")])?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    let in_log = trail(&cluster)?.len();
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    ensure!(trail(&cluster)?.len() == in_log, "lines are in the log, too");
    ensure!(fs::metadata(&file)?.permissions().mode() & 0o777 == 0o600, "its mode");
    ensure!(lines(&file)?.len() >= 10, "{:?}", lines(&file)?);
    let log = cluster.directory().join("log");
    let output = verify(&cluster, &[&log, &file])?;
    ensure!(output.contains("Nothing is missing"), "{output}");
    // Rotated by renaming; the old file begins with half a line.
    let older = cluster.directory().join("audit.jsonl.1");
    fs::rename(&file, &older)?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    verify(&cluster, &[&log, &older, &file])?;
    fs::write(&file, format!("{}{{\"torn", fs::read_to_string(&file)?))?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    let last = fs::read_to_string(&file)?.lines().last().map(str::to_owned).unwrap_or_default();
    ensure!(last.starts_with("{\"run\":") && last.ends_with('}'), "{last}");
    // The file cannot be written: operations continue, their lines are in the log, and the status
    // reports the error.
    ensure!(cluster.text(PROBLEM)?.is_empty(), "{}", cluster.text(PROBLEM)?);
    fs::remove_file(&file)?;
    fs::create_dir(&file)?;
    let in_log = trail(&cluster)?.len();
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    ensure!(trail(&cluster)?.len() > in_log, "no line in the log");
    let problem = cluster.text(PROBLEM)?;
    ensure!(problem.contains("could not write an audit line to"), "{problem}");
    ensure!(cluster.log().contains("could not write an audit line to"), "not in the log");
    fs::remove_dir(&file)?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    ensure!(cluster.text(PROBLEM)?.is_empty(), "{}", cluster.text(PROBLEM)?);
    let error = cluster.error("ALTER SYSTEM SET pagevault.audit_destination = 'printer'")?;
    ensure!(error.sqlstate == "22023", "{error}");
    cluster.finish()
}

#[test]
fn the_trail_can_go_to_syslog() -> Result<()> {
    let (mut cluster, _keys) = Cluster::with_keys(&Settings::default())?;
    cluster.allow_log("pagevault");
    let socket = cluster.directory().join("syslog");
    let receiver = UnixDatagram::bind(&socket)?;
    receiver.set_nonblocking(true)?;
    cluster.installation().give(&socket)?;
    let name = socket.display().to_string();
    cluster.set(&[
        ("pagevault.audit_syslog_socket", &name),
        ("pagevault.audit_destination", "log, syslog"),
    ])?;
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    let mut received = String::new();
    let mut buffer = [0; 16 << 10];
    while let Ok(length) = receiver.recv(&mut buffer) {
        let message = String::from_utf8_lossy(&buffer[..length]).into_owned();
        ensure!(message.starts_with("<133>postgres["), "{message}");
        received.push_str(&message);
        received.push('\n');
    }
    ensure!(received.contains("\"action\":\"rotate_cluster_master_key\""), "{received}");
    let file = cluster.directory().join("received");
    fs::write(&file, received)?;
    cluster.installation().give(&file)?;
    verify(&cluster, &[&cluster.directory().join("log"), &file])?;
    drop(receiver);
    cluster.sql("SELECT pagevault.rotate_cluster_master_key()")?;
    let problem = cluster.text(PROBLEM)?;
    ensure!(problem.contains("could not send an audit line to"), "{problem}");
    cluster.finish()
}
