//! The processes of a server, and their disk traffic, from `/proc`.

use rustix::process::Pid;

/// One process, from `/proc/PID/stat`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    name: String,
    parent: i32,
    /// Clock ticks of the process itself: utime and stime.
    pub(crate) own: u64,
    /// Those of its children that have ended and been waited for: cutime and cstime.
    pub(crate) of_children: u64,
}

/// Parses a line of `/proc/PID/stat` (proc_pid_stat(5)); the name may contain blanks and
/// parentheses.
fn parse_stat(line: &str) -> Option<Stat> {
    let (head, tail) = line.rsplit_once(')')?;
    let name = head.split_once('(')?.1.to_owned();
    let fields: Vec<&str> = tail.split_ascii_whitespace().collect();
    let ticks = |field: usize| -> Option<u64> { fields.get(field - 3)?.parse().ok() };
    Some(Stat {
        name,
        parent: fields.get(1)?.parse().ok()?,
        own: ticks(14)? + ticks(15)?,
        of_children: ticks(16)? + ticks(17)?,
    })
}

pub(crate) fn stat(pid: i32) -> Option<Stat> {
    parse_stat(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The postmaster of a local backend.
pub(crate) fn postmaster_of(backend: i32) -> Option<Pid> {
    let backend = stat(backend)?;
    let postgres = |name: &str| name == "postgres" || name == "postmaster";
    let parent = stat(backend.parent)?;
    (postgres(&backend.name) && postgres(&parent.name)).then(|| Pid::from_raw(backend.parent))?
}

pub(crate) fn ticks_to_seconds(ticks: u64) -> f64 {
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

/// The postmaster, its children, their children and so on; parents before children.
pub(crate) fn family(postmaster: i32) -> Vec<i32> {
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
    members
}

fn io(pid: i32) -> Option<[f64; 2]> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/io")).ok()?;
    let field = |name: &str| {
        text.lines().find_map(|line| line.strip_prefix(name))?.trim().parse::<f64>().ok()
    };
    Some([field("read_bytes:")?, field("write_bytes:")?])
}

/// Bytes read from and written to block devices by the processes of a server that live; `None`
/// without permission to read them.
pub(crate) fn traffic(postmaster: Pid) -> Option<[f64; 2]> {
    let members = family(postmaster.as_raw_nonzero().get());
    members.into_iter().filter(|pid| stat(*pid).is_some()).try_fold([0.0, 0.0], |sum, pid| {
        // Those of a zombie process are not readable.
        io(pid).map(|one| [sum[0] + one[0], sum[1] + one[1]])
    })
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
        assert_eq!((stat.own, stat.of_children), (110, 1500));
    }
}
