//! Deadlines, cancellation, and that the process leaves nothing behind.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};
use serde_json::json;

use crate::bench::{
    Bench, CONTEXT, chmod, command, failure, reply, rotate_action, serve_text, start, stderr,
    wrap_action,
};

/// A rotation that hangs, because this process holds the lock that it needs.
fn hanging(bench: &Bench, deadline_ms: u64) -> (File, Child) {
    let lock = File::open(bench.key_file()).unwrap();
    lock.lock().unwrap();
    let request = bench.request(deadline_ms, vec![bench.operation(rotate_action())]);
    let child = start(request.to_string().as_bytes());
    thread::sleep(Duration::from_millis(300));
    (lock, child)
}

#[track_caller]
fn ends_soon(child: &mut Child) -> std::process::ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        assert!(start.elapsed() < Duration::from_secs(10), "the helper goes on");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_provider_that_hangs_is_reported_in_time_and_delays_no_other() {
    let bench = Bench::new();
    let other = bench.path("keys/other");
    bench.create(&other, "main");
    let lock = File::open(bench.key_file()).unwrap();
    lock.lock().unwrap();
    let operations = vec![
        bench.operation(wrap_action(&[1; 32])),
        bench.operation(rotate_action()),
        bench.operation(wrap_action(&[1; 32])),
        bench.operation_on(&other, "main", CONTEXT, rotate_action()),
    ];
    let start = Instant::now();
    let output = serve_text(bench.request(1000, operations).to_string().as_bytes());
    let elapsed = start.elapsed();
    let reply = reply(&output);
    let results = &reply["results"];
    assert_eq!(results[0]["wrapped"]["key_version"], 1);
    let late = failure(&results[1], "deadline");
    assert_eq!(late.message, "master key \"main\" of provider \"disk\": no answer within 1000 ms");
    assert_eq!(results[1]["failed"]["retry"], true);
    failure(&results[2], "deadline");
    assert_eq!(results[3], json!({"rotated": {"key_version": 2}}));
    assert!((900..10_000).contains(&elapsed.as_millis()), "{elapsed:?}");
}

#[test]
fn deadlines_at_the_ends_of_their_range_do_no_harm() {
    let bench = Bench::new();
    for deadline in [0, 1, u64::MAX] {
        let request = bench.request(deadline, vec![bench.operation(wrap_action(&[1; 32]))]);
        let reply = reply(&serve_text(request.to_string().as_bytes()));
        let outcome = &reply["results"][0];
        if deadline == u64::MAX {
            assert_eq!(outcome["wrapped"]["key_version"], 1, "{outcome}");
        } else if outcome.get("wrapped").is_none() {
            failure(outcome, "deadline");
        }
    }
}

#[test]
fn signals_end_it_at_once() {
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let bench = Bench::new();
        let (_lock, mut child) = hanging(&bench, 60_000);
        kill(Pid::from_raw(child.id() as i32), signal).unwrap();
        let status = ends_soon(&mut child);
        assert_eq!(status.code(), Some(1), "{status:?}");
    }
}

#[test]
fn signals_that_the_parent_ignores_end_it_too() {
    let bench = Bench::new();
    let lock = File::open(bench.key_file()).unwrap();
    lock.lock().unwrap();
    let request = bench.request(60_000, vec![bench.operation(rotate_action())]).to_string();
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut child = Command::new("sh")
            .args(["-c", "trap '' TERM INT; exec \"$0\" serve"])
            .arg(env!("CARGO_BIN_EXE_pagevault-keyring"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.as_mut().unwrap().write_all(request.as_bytes()).unwrap();
        thread::sleep(Duration::from_millis(300));
        kill(Pid::from_raw(child.id() as i32), signal).unwrap();
        ends_soon(&mut child);
    }
}

#[test]
fn signals_end_it_while_it_waits_for_its_request() {
    let mut child = command(&["serve"]).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"{\"version\":").unwrap();
    thread::sleep(Duration::from_millis(200));
    assert!(child.try_wait().unwrap().is_none());
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    ends_soon(&mut child);
}

#[test]
fn it_ends_when_nobody_reads_the_reply_any_more() {
    let bench = Bench::new();
    let (_lock, mut child) = hanging(&bench, 60_000);
    drop(child.stdout.take());
    assert!(!ends_soon(&mut child).success());
}

#[test]
fn input_closed_without_a_request_is_a_failure_without_a_reply() {
    let output = serve_text(b"");
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    assert_eq!(stderr(&output), "pagevault-keyring: standard input was closed without a request\n");
}

#[test]
fn a_reply_that_cannot_be_written_is_a_failure() {
    let bench = Bench::new();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut child = command(&["serve"]).stdout(full).spawn().unwrap();
    let request = bench.request(1000, vec![bench.operation(wrap_action(&[1; 32]))]).to_string();
    child.stdin.take().unwrap().write_all(request.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("could not write the reply"), "{}", stderr(&output));
}

#[test]
fn a_quick_reader_never_sees_a_bad_exit() {
    use std::io::Read;

    let bench = Bench::new();
    let request = bench.request(1000, vec![bench.operation(wrap_action(&[1; 32]))]).to_string();
    for _ in 0..40 {
        let mut child = start(request.as_bytes());
        let mut output = child.stdout.take().unwrap();
        let mut reply = [0; 4096];
        assert!(output.read(&mut reply).unwrap() > 0);
        drop(output);
        assert!(child.wait().unwrap().success());
    }
}

#[test]
fn it_leaves_no_core() {
    let bench = Bench::new();
    let (_lock, mut child) = hanging(&bench, 60_000);
    let limits = fs::read_to_string(format!("/proc/{}/limits", child.id())).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    let numbers: Vec<&str> = core.split_whitespace().skip(4).take(2).collect();
    assert_eq!(numbers, ["0", "0"]);
    kill(Pid::from_raw(child.id() as i32), Signal::SIGABRT).unwrap();
    let status = ends_soon(&mut child);
    assert!(!status.core_dumped());
}

/// Installs the program where other users can run it. `programs::install` says why this process
/// does not copy it.
fn copy_for_others(bench: &Bench) -> PathBuf {
    let program = bench.path("helper");
    let mut copy = Command::new("install");
    copy.args(["-m", "755", env!("CARGO_BIN_EXE_pagevault-keyring")]).arg(&program);
    assert!(copy.status().unwrap().success());
    chmod(&bench.path(""), 0o711);
    program
}

#[test]
fn others_cannot_look_into_it() {
    // Processes of root always belong to root. So as root, it is run as another user, from a place
    // that this user can reach.
    let bench = Bench::empty();
    let program = copy_for_others(&bench);
    let mut command = Command::new(program);
    command.arg("serve").stdin(Stdio::piped()).stdout(Stdio::piped());
    if geteuid().is_root() {
        command.uid(65534);
    }
    let mut child = command.spawn().unwrap();
    thread::sleep(Duration::from_millis(500));
    // Files in /proc of a process that is not dumpable belong to root.
    let environment = fs::metadata(format!("/proc/{}/environ", child.id())).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(environment.uid(), 0);
}

#[test]
fn output_may_be_a_file() {
    let bench = Bench::new();
    let path = bench.path("reply");
    let mut child =
        command(&["serve"]).stdout(Stdio::from(File::create(&path).unwrap())).spawn().unwrap();
    let request = bench.request(1000, vec![bench.operation(wrap_action(&[1; 32]))]).to_string();
    child.stdin.take().unwrap().write_all(request.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(fs::read_to_string(path).unwrap().contains("wrapped"));
}

#[test]
fn on_a_terminal_a_hint_is_printed() {
    // Both ends of a pseudo-terminal are terminals.
    let terminal = || File::options().read(true).write(true).open("/dev/ptmx").unwrap();
    let on_input = command(&["serve"]).stdin(terminal()).output().unwrap();
    let on_output = command(&["serve"]).stdin(Stdio::null()).stdout(terminal()).output().unwrap();
    for output in [on_input, on_output] {
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains("pagevault-keyring check --help"), "{}", stderr(&output));
    }
}

#[test]
fn it_keeps_no_privilege_that_its_user_does_not_have() {
    // Root gives a capability to the server's user, as a service manager may, and keeps its own.
    let bench = Bench::empty();
    let program = copy_for_others(&bench);
    let mut command = if geteuid().is_root() {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--clear-groups", "--inh-caps=+ipc_lock"]);
        command.arg("--ambient-caps=+ipc_lock").arg(program);
        command
    } else {
        Command::new(program)
    };
    let mut child =
        command.arg("serve").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    thread::sleep(Duration::from_millis(500));
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    for line in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert!(status.contains(&format!("{line}:\t0000000000000000\n")), "{status}");
    }
    assert!(status.contains("NoNewPrivs:\t1\n"), "{status}");
}
