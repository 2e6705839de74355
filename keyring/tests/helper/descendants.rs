//! No descendant of a program remains, in whatever process group or session it is.

use std::process::Child;
use std::thread;
use std::time::Duration;

use nix::sys::prctl;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

use crate::bench::{reply, start, wrap_action};
use crate::programs::{PLAIN, Programs, all_gone_soon};

/// Starts processes in a process group (`timeout`), in a session, and in a session below that; and
/// records them, the program and the middle process.
const ELSEWHERE: &str = "\
trap '' TERM INT HUP
timeout 1000 sh -c 'echo $$ >> \"$0\"; exec sleep 1000' \"$1\" &
setsid sh -c 'setsid sleep 1000 & echo \"$$
$!\" >> \"$0\"; wait' \"$1\" &
echo \"$$
$PPID\" >> \"$1\"
until [ \"$(wc -l < \"$1\")\" -ge 5 ]; do sleep 0.01; done
";

fn hanging() -> Programs {
    Programs::new(&format!("{ELSEWHERE}wait\n"))
}

/// A helper whose program hangs, and the processes below it.
fn asked(programs: &Programs, deadline_ms: u64) -> (Child, Vec<String>) {
    let operation = programs.operation(wrap_action(&[1; 32]));
    let request = programs.bench.request(deadline_ms, vec![operation]);
    (start(request.to_string().as_bytes()), programs.wait_for_note(5))
}

/// The middle process, by the name of its command.
fn middle(processes: &[String]) -> Pid {
    let is_middle = |process: &&String| {
        let line = std::fs::read_to_string(format!("/proc/{process}/cmdline"));
        line.is_ok_and(|line| line.starts_with("pagevault-keyring\0run\0"))
    };
    Pid::from_raw(processes.iter().find(is_middle).unwrap().parse().unwrap())
}

#[test]
fn all_are_killed_at_the_deadline() {
    let programs = hanging();
    let (child, processes) = asked(&programs, 3000);
    let reply = reply(&child.wait_with_output().unwrap());
    programs.failed(&reply["results"][0], "deadline");
    all_gone_soon(&processes);
}

#[test]
fn all_are_killed_when_the_program_has_ended() {
    let programs = Programs::new(&format!("{ELSEWHERE}{PLAIN}"));
    programs.wrap(&[1; 32]);
    all_gone_soon(&programs.wait_for_note(5));
}

/// As process 1 does, this process inherits what is left: nothing but the middle process.
#[test]
fn all_are_killed_with_the_helper_and_none_comes_to_process_1() {
    prctl::set_child_subreaper(true).unwrap();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGKILL] {
        let programs = hanging();
        let (mut child, processes) = asked(&programs, 60_000);
        let middle = middle(&processes);
        kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();
        child.wait().unwrap();
        all_gone_soon(&processes);
        for process in processes {
            let process = Pid::from_raw(process.parse().unwrap());
            if process != middle {
                let inherited = waitpid(process, Some(WaitPidFlag::WNOHANG));
                assert_eq!(inherited, Err(nix::Error::ECHILD), "{signal}");
            }
        }
    }
}

#[test]
fn all_are_killed_with_the_process_that_supervises_them() {
    for signal in
        [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGKILL]
    {
        let programs = hanging();
        let (child, processes) = asked(&programs, 60_000);
        kill(middle(&processes), signal).unwrap();
        let reply = reply(&child.wait_with_output().unwrap());
        assert!(reply["results"][0].get("failed").is_some(), "{reply}");
        all_gone_soon(&processes);
    }
}

/// Another program that runs at this time is not taken for what was left.
#[test]
fn the_end_of_one_supervisor_concerns_no_other_program() {
    let programs = hanging();
    let other = Programs::new(&format!("echo $$ >> \"$1\"\nsleep 2\n{PLAIN}"));
    let operations =
        vec![programs.operation(wrap_action(&[1; 32])), other.operation(wrap_action(&[1; 32]))];
    let request = programs.bench.request(60_000, operations);
    let child = start(request.to_string().as_bytes());
    let processes = programs.wait_for_note(5);
    other.wait_for_note(1);
    thread::sleep(Duration::from_millis(100));
    kill(middle(&processes), Signal::SIGKILL).unwrap();
    let reply = reply(&child.wait_with_output().unwrap());
    assert!(reply["results"][1].get("wrapped").is_some(), "{reply}");
    all_gone_soon(&processes);
}
