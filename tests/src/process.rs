//! Kills all processes of a cluster.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

/// Processes whose working directory is `data_directory`. Every PostgreSQL process changes to it,
/// so this also finds those whose postmaster has died.
#[must_use]
pub fn processes_in(data_directory: &Path) -> Vec<Pid> {
    // The kernel reports the working directory with symbolic links resolved.
    let data_directory = data_directory.canonicalize().unwrap_or_else(|_| data_directory.into());
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(Result::ok)
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let cwd = std::fs::read_link(entry.path().join("cwd")).ok()?;
            (cwd == data_directory).then(|| Pid::from_raw(pid)).flatten()
        })
        .collect()
}

/// The postmaster of `data_directory`, from its `postmaster.pid`.
#[must_use]
pub fn postmaster(data_directory: &Path) -> Option<Pid> {
    let text = std::fs::read_to_string(data_directory.join("postmaster.pid")).ok()?;
    // A single-user server writes its process id as a negative number.
    let number: i32 = text.lines().next()?.trim().parse().ok()?;
    Pid::from_raw(number.max(0))
}

/// Whether the postmaster with this process ID accepts connections, or is that of a standby which
/// will not: `postmaster.pid` says so in its eighth line (`LOCK_FILE_LINE_PM_STATUS`, pidfile.h).
#[must_use]
pub fn is_up(data_directory: &Path, postmaster: u32) -> bool {
    let Ok(text) = std::fs::read_to_string(data_directory.join("postmaster.pid")) else {
        return false;
    };
    let mut lines = text.lines().map(str::trim);
    lines.next() == Some(&*postmaster.to_string())
        && matches!(lines.nth(6), Some("ready" | "standby"))
}

/// Sends SIGKILL to the postmaster and every process of the cluster, like a power failure. Returns
/// when all have ended.
///
/// # Errors
/// When processes still exist after 10 s.
pub fn kill_all(data_directory: &Path) -> Result<()> {
    // The postmaster is stopped first, so that it does not start crash recovery, and killed last:
    // processes that lose it exit cleanly and remove their temporary files.
    if let Some(postmaster) = postmaster(data_directory) {
        let _ = kill_process(postmaster, Signal::STOP);
        for pid in processes_in(data_directory).into_iter().filter(|pid| *pid != postmaster) {
            let _ = kill_process(pid, Signal::KILL);
        }
        let _ = kill_process(postmaster, Signal::KILL);
    }
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let alive = processes_in(data_directory);
        if alive.is_empty() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "processes {alive:?} survive SIGKILL");
        for pid in alive {
            let _ = kill_process(pid, Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
