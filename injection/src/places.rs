//! Places where calls are made, and what may happen to a call there.

use std::collections::BTreeMap;
use std::fmt;

use crate::injector::{Fault, Injection};

use Fault::{Fails, FailsFromThere, Jumps, Short};

/// Calls of one name that come after the same call of a process of this kind: most likely, they are
/// made by the same line of the program, and in the same state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The name of the calls: function, path, process.
    pub call: String,
    /// The call before.
    pub after: String,
    /// Which of the calls of that name.
    pub numbers: Vec<u32>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:6} {}, after {}", self.numbers.len(), self.call, self.after)
    }
}

/// Of its calls there is no list.
const CLOCK: &str = "clock";

/// Processes that are not the server's.
const OTHERS: &[&str] = &["pg_ctl", "sh", "initdb", "injection", "logger"];

/// The places of calls, which are given in their order. `clock`: when the clock is set.
pub(crate) fn of(calls: &[String], clock: [u32; 2]) -> Vec<Place> {
    let mut last: BTreeMap<&str, &str> = BTreeMap::new();
    let mut counted: BTreeMap<&str, u32> = BTreeMap::new();
    let mut places: BTreeMap<(&str, &str), Vec<u32>> = BTreeMap::new();
    for call in calls {
        let (what, process) = call.rsplit_once(' ').unwrap_or((call, ""));
        if OTHERS.contains(&process) {
            continue;
        }
        let number = counted.entry(call).or_default();
        *number += 1;
        let after = last.insert(process, what).unwrap_or("the start");
        places.entry((call, after)).or_default().push(*number);
    }
    let clock = Place { call: CLOCK.to_owned(), after: "any".to_owned(), numbers: clock.to_vec() };
    let place = |((call, after), numbers): ((&str, &str), Vec<u32>)| Place {
        call: call.to_owned(),
        after: after.to_owned(),
        numbers,
    };
    places.into_iter().map(place).chain([clock]).collect()
}

impl Place {
    /// What is to be injected: into the first call, the last, and as many between as make `each`.
    #[must_use]
    pub fn injections(&self, each: u32) -> Vec<Injection> {
        let (each, last) = (each.max(1) as usize, self.numbers.len() - 1);
        let chosen: Vec<u32> = match each {
            1 => vec![self.numbers[0]],
            _ if last < each => self.numbers.clone(),
            _ => (0..each).map(|i| self.numbers[i * last / (each - 1)]).collect(),
        };
        let faults = faults(self.call.split(' ').next().unwrap_or_default());
        let of = |number| {
            let call = || self.call.clone();
            faults.iter().map(move |fault| Injection { call: call(), number, fault: *fault })
        };
        chosen.into_iter().flat_map(of).collect()
    }
}

/// What a function may do.
fn faults(function: &str) -> &'static [Fault] {
    use libc::{
        E2BIG, EACCES, EAGAIN, ECHILD, EINTR, EINVAL, EIO, EMFILE, ENOENT, ENOMEM, ENOSPC, EPERM,
        EROFS,
    };
    match function {
        "open" => &[Fails(EMFILE), Fails(EACCES), Fails(EIO), Fails(EINTR), FailsFromThere(EMFILE)],
        "opendir" => &[Fails(EMFILE), Fails(EIO)],
        "stat" => &[Fails(EIO), Fails(EACCES)],
        "readdir" | "fstat" | "lseek" | "close" => &[Fails(EIO)],
        "read" => &[Fails(EIO), Fails(EINTR), Short],
        "write" => &[Fails(EIO), Fails(ENOSPC), Fails(EINTR), Short, FailsFromThere(ENOSPC)],
        "fsync" => &[Fails(EIO), Fails(ENOSPC), Fails(EINTR), FailsFromThere(EIO)],
        "ftruncate" | "truncate" => &[Fails(EIO), Fails(ENOSPC), FailsFromThere(EIO)],
        "fallocate" => &[Fails(ENOSPC), Fails(EIO)],
        "rename" | "unlink" | "mkdir" | "rmdir" | "link" => {
            &[Fails(EIO), Fails(ENOSPC), Fails(EROFS), FailsFromThere(EROFS)]
        }
        "fchmod" => &[Fails(EIO), Fails(EPERM)],
        "mmap" | "memfd_create" => &[Fails(ENOMEM)],
        "madvise" => &[Fails(EINVAL), Fails(ENOMEM)],
        "mlock" => &[Fails(ENOMEM), Fails(EPERM)],
        "fork" => &[Fails(EAGAIN), Fails(ENOMEM), FailsFromThere(EAGAIN)],
        "execvp" | "execve" => &[Fails(ENOENT), Fails(EACCES), Fails(E2BIG)],
        "pipe" | "socket" => &[Fails(EMFILE), FailsFromThere(EMFILE)],
        "poll" => &[Fails(EINTR), Fails(ENOMEM)],
        "waitpid" => &[Fails(EINTR), Fails(ECHILD)],
        "prctl" => &[Fails(EINVAL)],
        "getrandom" => &[Fails(EINTR), Fails(EIO)],
        CLOCK => &[Jumps(3600), Jumps(-3600), Jumps(315_360_000), Jumps(-315_360_000)],
        _ => &[],
    }
}
