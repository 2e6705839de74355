//! Processor time and disk traffic of a server, from `/proc`: the postmaster, its running children,
//! and ended children, which the kernel adds to their parent.

use rustix::process::Pid;

/// Resources used by all processes of a server since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Usage {
    /// User and system time, seconds.
    pub(crate) cpu_seconds: f64,
    /// Bytes read from and written to block devices; `None` without permission to read them.
    pub(crate) io: Option<[f64; 2]>,
}

/// One process, from `/proc/PID/stat`.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    name: String,
    parent: i32,
    /// utime, stime, cutime, cstime in clock ticks.
    ticks: [u64; 4],
}

/// Parses a line of `/proc/PID/stat` (proc_pid_stat(5)); the name may contain blanks and
/// parentheses.
fn parse_stat(line: &str) -> Option<Stat> {
    let (head, tail) = line.rsplit_once(')')?;
    let name = head.split_once('(')?.1.to_owned();
    let fields: Vec<&str> = tail.split_ascii_whitespace().collect();
    let ticks = |field: usize| fields.get(field - 3)?.parse().ok();
    Some(Stat {
        name,
        parent: fields.get(1)?.parse().ok()?,
        ticks: [ticks(14)?, ticks(15)?, ticks(16)?, ticks(17)?],
    })
}

fn stat(pid: i32) -> Option<Stat> {
    parse_stat(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The postmaster of a local backend.
pub(crate) fn postmaster_of(backend: i32) -> Option<Pid> {
    let backend = stat(backend)?;
    let postgres = |name: &str| name == "postgres" || name == "postmaster";
    let parent = stat(backend.parent)?;
    (postgres(&backend.name) && postgres(&parent.name)).then(|| Pid::from_raw(backend.parent))?
}

fn family(postmaster: i32) -> Vec<i32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let processes: Vec<(i32, i32)> = entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(|pid: i32| Some((pid, stat(pid)?.parent)))
        .collect();
    let mut members = vec![postmaster];
    let mut next = 0;
    while let Some(&parent) = members.get(next) {
        members.extend(processes.iter().filter(|(_, of)| *of == parent).map(|(pid, _)| *pid));
        next += 1;
    }
    members.sort_unstable();
    members
}

fn io(pid: i32) -> Option<[f64; 2]> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/io")).ok()?;
    let field = |name: &str| {
        text.lines().find_map(|line| line.strip_prefix(name))?.trim().parse::<f64>().ok()
    };
    Some([field("read_bytes:")?, field("write_bytes:")?])
}

/// Resources used by the server so far.
pub(crate) fn usage(postmaster: Pid) -> Option<Usage> {
    let postmaster = postmaster.as_raw_nonzero().get();
    let ticks_per_second = rustix::param::clock_ticks_per_second() as f64;
    // A process that ends during the count would be missed, or counted twice (again with its
    // parent).
    for _ in 0..50 {
        let members = family(postmaster);
        let mut ticks = 0;
        let mut traffic = Some([0.0, 0.0]);
        for &pid in &members {
            let Some(stat) = stat(pid) else { continue };
            ticks += stat.ticks.iter().sum::<u64>();
            // The I/O counters of a zombie process are not readable.
            traffic = traffic.zip(io(pid)).map(|(sum, one)| [sum[0] + one[0], sum[1] + one[1]]);
        }
        if members == family(postmaster) {
            let cpu_seconds = ticks as f64 / ticks_per_second;
            return stat(postmaster).map(|_| Usage { cpu_seconds, io: traffic });
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_blanks_and_parentheses_is_parsed() {
        let line =
            "77 (postgres: a) b) S 12 77 77 0 -1 4194560 1 2 3 4 50 60 700 800 20 0 1 0 9 10";
        let stat = parse_stat(line).expect("a line of stat");
        assert_eq!(stat.name, "postgres: a) b");
        assert_eq!(stat.parent, 12);
        assert_eq!(stat.ticks, [50, 60, 700, 800]);
    }

    #[test]
    fn time_of_ended_children_counts() {
        let me = Pid::from_raw(std::process::id() as i32).expect("our process");
        let before = usage(me).expect("our usage").cpu_seconds;
        let child = std::process::Command::new("sh")
            .args(["-c", "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done"])
            .status();
        assert!(child.expect("sh").success());
        let after = usage(me).expect("our usage").cpu_seconds;
        assert!(after - before >= 0.05, "{before} {after}");
    }
}
