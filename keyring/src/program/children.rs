//! The child processes of this process, also those that it has inherited (`PR_SET_CHILD_SUBREAPER`,
//! prctl(2)).

use std::collections::BTreeSet;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::prctl;
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

/// Time in which killed processes have ended. What is left then waits for a file system that does
/// not answer, or starts processes faster than they can be killed.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);

/// All children that are not reaped yet (proc_tid_children(5)); in passing, one that has just been
/// inherited may be missing.
pub(super) fn children() -> Vec<Pid> {
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let lists =
        threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    let numbers =
        lists.flat_map(|list| list.split_whitespace().map(str::parse).collect::<Vec<_>>());
    numbers.flatten().map(Pid::from_raw).collect()
}

/// Kills a child, and its process group if it leads one. It must not be reaped yet: until then, no
/// other process or group gets its number.
pub(super) fn kill_child(child: Pid) {
    let _ = killpg(child, Signal::SIGKILL);
    let _ = kill(child, Signal::SIGKILL);
}

/// Kills and reaps what this process has inherited: all children but `own`.
pub(super) fn end_inherited(own: &BTreeSet<Pid>) {
    if !prctl::get_child_subreaper().unwrap_or(false) {
        return;
    }
    let until = Instant::now() + PATIENCE;
    loop {
        let inherited: Vec<Pid> =
            children().into_iter().filter(|child| !own.contains(child)).collect();
        if inherited.is_empty() || Instant::now() >= until {
            return;
        }
        for child in inherited {
            kill_child(child);
            let _ = waitpid(child, Some(WaitPidFlag::WNOHANG));
        }
        thread::sleep(Duration::from_millis(1));
    }
}
