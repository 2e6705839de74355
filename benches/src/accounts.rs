//! Processor time of a server's processes, as exactly as this machine tells.
//!
//! A control group of its own (cgroup v2) has the time of all processes that were ever in it, in
//! microseconds, and the processor's count of instructions where it can be read. Otherwise the
//! scheduler has the time of each living process in nanoseconds; that of ended ones is known in
//! clock ticks.

use std::cell::RefCell;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use perf_event::events::{Event, Hardware};
use perf_event::{Builder, Counter};
use rustix::process::Pid;

use crate::processes::{family, stat, ticks_to_seconds};

/// Where processor time was read, for the report.
const GROUP: &str = "a control group (microseconds)";
const SCHEDULER: &str = "the scheduler (nanoseconds; of processes that have ended, clock ticks)";

/// The processes of one server.
pub(crate) struct Account {
    group: Option<Group>,
}

/// What they have used since some moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Spent {
    pub(crate) cpu_seconds: f64,
    /// In the server and in the kernel; `None` where the processor's counters cannot be read.
    pub(crate) instructions: Option<f64>,
}

impl Account {
    /// For a server that this program has started.
    pub(crate) fn open() -> Account {
        Account { group: Group::create() }
    }

    /// For a server of somebody else, whose processes stay in the control group where they are.
    pub(crate) fn of_another() -> Account {
        Account { group: None }
    }

    pub(crate) fn source(&self) -> &'static str {
        if self.group.is_some() { GROUP } else { SCHEDULER }
    }

    /// Used by the server until now. Between two calls for one running postmaster the difference
    /// counts.
    pub(crate) fn spent(&self, postmaster: Pid) -> Option<Spent> {
        let postmaster = postmaster.as_raw_nonzero().get();
        match &self.group {
            Some(group) => {
                group.adopt(postmaster);
                group.spent()
            }
            None => {
                scheduled(postmaster).map(|cpu_seconds| Spent { cpu_seconds, instructions: None })
            }
        }
    }
}

/// Seconds that a server's processes have used since it was started.
pub(crate) fn since_start(postmaster: Pid) -> Option<f64> {
    scheduled(postmaster.as_raw_nonzero().get())
}

/// A control group below the one of this program. It is removed when it is dropped, if no process
/// is left in it.
struct Group {
    path: PathBuf,
    /// One for each processor; none if the kernel gives none.
    instructions: RefCell<Vec<Counter>>,
}

impl Group {
    /// `None` without cgroup v2, or without permission.
    fn create() -> Option<Group> {
        let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
        let own = fs::read_to_string("/proc/self/cgroup").ok()?;
        let parent = own_group(&mounts, &own)?;
        let directory =
            tempfile::Builder::new().prefix("pagevault-bench-").tempdir_in(parent).ok()?;
        let path = directory.keep();
        let instructions = counters(&path, Hardware::INSTRUCTIONS).unwrap_or_default();
        let group = Group { path, instructions: RefCell::new(instructions) };
        group.spent().map(|_| group)
    }

    /// Takes in the processes that are not in it. Their children are born in it.
    fn adopt(&self, postmaster: i32) {
        let members = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        let inside: Vec<i32> = members.lines().filter_map(|line| line.parse().ok()).collect();
        // Parents come first, so no child is born outside after it was looked for.
        for pid in family(postmaster).into_iter().filter(|pid| !inside.contains(pid)) {
            // The process may have ended.
            let _ = fs::write(self.path.join("cgroup.procs"), pid.to_string());
        }
    }

    fn spent(&self) -> Option<Spent> {
        let text = fs::read_to_string(self.path.join("cpu.stat")).ok()?;
        Some(Spent {
            cpu_seconds: usage_usec(&text)? / 1e6,
            instructions: total(&mut self.instructions.borrow_mut()),
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.instructions.borrow_mut().clear();
        // A process that was killed may need a moment to leave.
        for _ in 0..20 {
            if fs::remove_dir(&self.path).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
}

/// The directory of this process's own group: from the mount of cgroup v2, and the line `0::`
/// (cgroups(7)).
fn own_group(mounts: &str, own: &str) -> Option<PathBuf> {
    let mount = mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let path = fields.next()?;
        (fields.next()? == "cgroup2").then_some(path)
    })?;
    let place = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(Path::new(mount).join(place))
}

/// The total of a `cpu.stat`, in microseconds.
fn usage_usec(text: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix("usage_usec "))?.trim().parse().ok()
}

/// Counters of an event in all processes of a group, one for each processor.
fn counters(group: &Path, event: impl Into<Event> + Clone) -> std::io::Result<Vec<Counter>> {
    let directory = File::open(group)?;
    let processors = std::thread::available_parallelism()?.get();
    (0..processors)
        .map(|processor| {
            let mut builder =
                Builder::new().observe_cgroup(&directory).one_cpu(processor).kind(event.clone());
            builder.include_kernel();
            let mut counter = builder.build()?;
            counter.enable()?;
            Ok(counter)
        })
        .collect()
}

/// The sum of all counters. They have counted a share of the time if the processor had to count other
/// things as well.
fn total(counters: &mut [Counter]) -> Option<f64> {
    let counts: Option<Vec<f64>> = counters
        .iter_mut()
        .map(|counter| {
            let read = counter.read_count_and_time().ok()?;
            match (read.count, read.time_running) {
                (0, 0) => Some(0.0),
                (_, 0) => None,
                (count, running) => Some(count as f64 * read.time_enabled as f64 / running as f64),
            }
        })
        .collect();
    counts.filter(|counts| !counts.is_empty()).map(|counts| counts.iter().sum())
}

/// Seconds of a postmaster and its descendants, living and ended.
fn scheduled(postmaster: i32) -> Option<f64> {
    // A process that ends during the count would be missed, or counted twice (again with its
    // parent).
    for _ in 0..50 {
        let members = family(postmaster);
        let seconds = members.iter().filter_map(|pid| {
            let stat = stat(*pid)?;
            let own = nanoseconds(*pid).map_or_else(|| ticks_to_seconds(stat.own), |ns| ns / 1e9);
            Some(own + ticks_to_seconds(stat.of_children))
        });
        let seconds = seconds.sum();
        if members == family(postmaster) {
            return stat(postmaster).map(|_| seconds);
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    None
}

/// Time on a processor (Documentation/scheduler/sched-stats.rst of Linux).
fn nanoseconds(pid: i32) -> Option<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/schedstat")).ok()?;
    text.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use perf_event::events::Software;

    use super::*;

    const LOOP: &str = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done";

    /// A shell that works in a child, and stays until its input ends.
    fn shell() -> std::process::Child {
        let script = format!("read line; sh -c '{LOOP}'; {LOOP}; echo done; read line");
        Command::new("sh")
            .args(["-c", &script])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("sh")
    }

    /// Has it work, and returns what the account says of that.
    fn worked(account: &Account) -> f64 {
        use std::io::{Read, Write};
        let mut child = shell();
        let pid = Pid::from_raw(i32::try_from(child.id()).expect("a pid")).expect("a pid");
        let before = account.spent(pid).expect("time before").cpu_seconds;
        let mut input = child.stdin.take().expect("its input");
        input.write_all(b"go\n").expect("told");
        let mut said = [0; 5];
        child.stdout.as_mut().expect("its output").read_exact(&mut said).expect("it has worked");
        let after = account.spent(pid).expect("time after").cpu_seconds;
        drop(input);
        child.wait().expect("ended");
        after - before
    }

    #[test]
    fn time_of_a_process_and_of_its_ended_child_counts() {
        for account in [Account::open(), Account::of_another()] {
            let seconds = worked(&account);
            assert!(seconds >= 0.05, "{}: {seconds}", account.source());
        }
    }

    #[test]
    fn a_group_counts_what_the_kernel_counts_and_leaves_nothing() {
        // Without permission there is no group, and the scheduler is asked.
        let Some(group) = Group::create() else { return };
        let path = group.path.clone();
        if let Ok(clocks) = counters(&path, Software::TASK_CLOCK) {
            *group.instructions.borrow_mut() = clocks;
        }
        let account = Account { group: Some(group) };
        assert!(worked(&account) >= 0.05);
        let spent = account.group.as_ref().and_then(Group::spent).expect("what was spent");
        if let Some(nanoseconds) = spent.instructions {
            let share = nanoseconds / 1e9 / spent.cpu_seconds;
            assert!((0.5..1.5).contains(&share), "{spent:?}");
        }
        drop(account);
        assert!(!path.exists());
    }

    #[test]
    fn a_group_is_found_where_cgroup_v2_is_mounted() {
        let mounts = "cpu /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                      cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0\n";
        let own = "1:cpu:/a\n0::/system.slice/x.service\n";
        let path = own_group(mounts, own).expect("a group");
        assert_eq!(path, Path::new("/sys/fs/cgroup/unified/system.slice/x.service"));
        assert_eq!(own_group("proc /proc proc rw 0 0\n", own), None);
        assert_eq!(usage_usec("usage_usec 15\nuser_usec 10\n"), Some(15.0));
    }
}
