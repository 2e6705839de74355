//! How the `command` provider runs programs, and that none of their processes remains.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use nix::sys::prctl;
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, geteuid, mkfifo};
use serde_json::{Value, json};

use crate::bench::{CONTEXT, chmod, command, failure, reply, start, wrap_action};
use crate::programs::{PLAIN, Programs, all_gone_soon, install};

/// A program that records its process, its parent (the middle process) and a child that outlives
/// it, and then hangs.
const HANGING: &str = "\
trap '' TERM INT HUP
sleep 1000 &
printf '%s\\n' $$ $PPID $! > \"$1\"
wait
sleep 1000
";

/// A helper whose program hangs, and the processes below it.
fn hanging(programs: &Programs) -> (Child, Vec<String>) {
    let operation = programs.operation(wrap_action(&[1; 32]));
    let request = programs.bench.request(60_000, vec![operation]);
    let child = start(request.to_string().as_bytes());
    let processes = programs.wait_for_note(3);
    (child, processes)
}

#[test]
fn a_hanging_program_is_killed_in_time_with_its_children() {
    let programs = Programs::new(HANGING);
    let other = Programs::new(PLAIN);
    let operations =
        vec![programs.operation(wrap_action(&[1; 32])), other.operation(wrap_action(&[1; 32]))];
    let begin = Instant::now();
    let request = programs.bench.request(3000, operations).to_string();
    let output = start(request.as_bytes()).wait_with_output().unwrap();
    let elapsed = begin.elapsed();
    all_gone_soon(&programs.wait_for_note(3));
    let reply = reply(&output);
    let late = programs.failed(&reply["results"][0], "deadline");
    let path = programs.path();
    assert_eq!(late.message, format!("program \"{}\" did not end in time", path.display()));
    assert_eq!(reply["results"][0]["failed"]["retry"], true);
    assert!(reply["results"][1].get("wrapped").is_some(), "{reply}");
    assert!((2000..20_000).contains(&elapsed.as_millis()), "{elapsed:?}");
}

#[test]
fn nothing_is_left_when_the_helper_is_terminated_or_killed() {
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGKILL] {
        let programs = Programs::new(HANGING);
        let (mut child, processes) = hanging(&programs);
        kill(Pid::from_raw(child.id() as i32), signal).unwrap();
        child.wait().unwrap();
        all_gone_soon(&processes);
    }
}

/// The postmaster may be process 1 of a container, and take anything else for a crashed session.
#[test]
fn what_a_helper_leaves_to_process_1_ends_with_status_1() {
    // As process 1 does, this process inherits what is left.
    prctl::set_child_subreaper(true).unwrap();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGKILL] {
        let programs = Programs::new(HANGING);
        let (mut child, processes) = hanging(&programs);
        kill(Pid::from_raw(child.id() as i32), signal).unwrap();
        child.wait().unwrap();
        let process = |number: usize| Pid::from_raw(processes[number].parse().unwrap());
        let (program, middle, background) = (process(0), process(1), process(2));
        assert_eq!(waitpid(middle, None), Ok(WaitStatus::Exited(middle, 1)));
        for other in [program, background] {
            let inherited = waitpid(other, Some(WaitPidFlag::WNOHANG));
            assert_eq!(inherited, Err(nix::Error::ECHILD), "{signal}");
        }
    }
}

/// Nor where the program cannot be started, when nobody reads that any more.
#[test]
fn a_supervisor_without_a_reader_ends_with_status_1() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    for program in ["/nonexistent", "/"] {
        let ended = command(&["run", "--", program])
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(writer.try_clone().unwrap())
            .stderr(writer.try_clone().unwrap())
            .status()
            .unwrap();
        assert_eq!(ended.code(), Some(1), "{program}: {ended}");
    }
}

#[test]
fn nothing_is_left_when_nobody_reads_the_reply_any_more() {
    let programs = Programs::new(HANGING);
    let (mut child, processes) = hanging(&programs);
    drop(child.stdout.take());
    child.wait().unwrap();
    all_gone_soon(&processes);
}

#[test]
fn background_processes_neither_delay_nor_remain() {
    let programs = Programs::new(&format!("sleep 1000 &\necho $! > \"$1\"\n{PLAIN}"));
    let begin = Instant::now();
    programs.wrap(&[1; 32]);
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    all_gone_soon(&programs.wait_for_note(1));
}

#[test]
fn a_program_that_closes_its_output_is_still_waited_for() {
    let programs = Programs::new(&format!("{PLAIN}exec >&- 2>&-\nsleep 0.3\nexit 12"));
    programs.refused("denied");
}

#[test]
fn no_secret_is_in_arguments_or_environment() {
    let secret = "S3CRET-S3CRET-S3CRET-S3CRET-S3CR";
    let programs = Programs::new(HANGING);
    let operation = programs.operation(wrap_action(secret.as_bytes()));
    let request = programs.bench.request(60_000, vec![operation]);
    let mut child = start(request.to_string().as_bytes());
    let mut processes = programs.wait_for_note(3);
    processes.push(child.id().to_string());
    let plaintext = request["operations"][0]["action"]["wrap"]["plaintext"].as_str().unwrap();
    let program = programs.path();
    let mut looked = 0;
    for process in &processes {
        for file in ["cmdline", "environ"] {
            // Only root can read these files of a process that is not dumpable.
            let Ok(text) = fs::read(format!("/proc/{process}/{file}")) else { continue };
            let text = String::from_utf8_lossy(&text);
            looked += 1;
            for hidden in [secret, plaintext, "plaintext", CONTEXT] {
                assert!(!text.contains(hidden), "{hidden} is in {file}: {text}");
            }
        }
    }
    assert!(looked >= if geteuid().is_root() { 8 } else { 4 }, "looked at {looked}");
    let middle = fs::read_to_string(format!("/proc/{}/cmdline", processes[1])).unwrap();
    let note = programs.note();
    let arguments: Vec<&str> = middle.trim_end_matches('\0').split('\0').collect();
    let (program, note) = (program.to_str().unwrap(), note.to_str().unwrap());
    assert_eq!(arguments, ["pagevault-keyring", "run", "--", program, note]);
    child.kill().unwrap();
    child.wait().unwrap();
    all_gone_soon(&processes);
}

#[test]
fn programs_run_in_a_clean_place() {
    let programs = Programs::new(&format!(
        "{{ grep -E '^(SigBlk|NoNewPrivs|CapEff):' /proc/self/status; pwd; umask; ulimit -c; ulimit -n
           }} > \"$1\"\n{PLAIN}"
    ));
    programs.wrap(&[1; 32]);
    let noted = programs.noted();
    let mut lines = noted.lines();
    if !geteuid().is_root() {
        assert!(noted.contains("CapEff:\t0000000000000000"), "{noted}");
    }
    assert!(noted.contains("SigBlk:\t0000000000000000"), "{noted}");
    assert!(noted.contains("NoNewPrivs:\t1"), "{noted}");
    assert_eq!(lines.by_ref().skip(3).collect::<Vec<_>>(), ["/", "0077", "0", "1024"]);
}

#[test]
fn programs_inherit_no_open_file_of_the_helper() {
    // Pipes, sockets and similar files. Those that this process passes on are not the helper's.
    let open_in = |process: &str| -> Vec<String> {
        let entries = fs::read_dir(format!("/proc/{process}/fd")).unwrap().flatten();
        let above_errors =
            entries.filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().unwrap() > 2);
        let links = above_errors.filter_map(|entry| fs::read_link(entry.path()).ok());
        links.map(|link| link.display().to_string()).filter(|link| !link.starts_with('/')).collect()
    };
    let programs = Programs::new(HANGING);
    let (mut child, processes) = hanging(&programs);
    let ours = open_in("self");
    for open in open_in(&processes[2]) {
        assert!(ours.contains(&open), "{open}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn the_environment_is_cleared_but_for_what_programs_need() {
    let programs = Programs::new(&format!("env > \"$1\"\n{PLAIN}"));
    let request = programs.bench.request(9000, vec![programs.operation(wrap_action(&[1; 32]))]);
    let mut child = command(&["serve"])
        .envs([("AWS_SECRET_ACCESS_KEY", "x"), ("VAULT_TOKEN", "x"), ("PGPASSWORD", "x")])
        .envs([("LD_PRELOAD", ""), ("BASH_ENV", "/nowhere"), ("PYTHONPATH", "/nowhere")])
        .envs([("TZ", "UTC"), ("LC_ALL", "C"), ("HOME", "/home/of/it"), ("USER", "it")])
        .spawn()
        .unwrap();
    use std::io::Write;
    child.stdin.take().unwrap().write_all(request.to_string().as_bytes()).unwrap();
    reply(&child.wait_with_output().unwrap());
    let noted = programs.noted();
    let names: BTreeSet<&str> =
        noted.lines().filter_map(|line| Some(line.split_once('=')?.0)).collect();
    for name in &names {
        // The shell itself sets PWD, OLDPWD, _ and SHLVL; a build that measures coverage, the last.
        let known =
            ["PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "PWD", "OLDPWD", "_"];
        let others = ["SHLVL", "__LLVM_PROFILE_RT_INIT_ONCE"];
        assert!(
            known.contains(name) || others.contains(name) || name.starts_with("LC_"),
            "{name} in {noted}"
        );
    }
    for line in ["TZ=UTC", "LC_ALL=C", "HOME=/home/of/it", "USER=it"] {
        assert!(noted.lines().any(|noted| noted == line), "{line} not in {noted}");
    }
}

/// The outcome of `check_options`, and so of `add_provider`, for `options`.
fn check_options(programs: &Programs, options: Value) -> Value {
    programs.bench.one(programs.operation_with(options, "", "", json!("check_options")))
}

#[test]
fn options_are_read_strictly() {
    let programs = Programs::new(PLAIN);
    let program = json!([programs.path()]);
    for (options, message) in [
        (json!({}), "option \"wrap\" is missing for a provider of kind \"command\""),
        (
            json!({"wrap": program}),
            "option \"unwrap\" is missing for a provider of kind \"command\"",
        ),
        (
            json!({"wrap": program, "unwrap": program, "describe": program}),
            "unknown option \"describe\" for a provider of kind \"command\"",
        ),
        (
            json!({"wrap": "/bin/true", "unwrap": program}),
            "option \"wrap\" must be an array of strings: a program and its arguments",
        ),
        (
            json!({"wrap": [], "unwrap": program}),
            "option \"wrap\" must be an array of strings: a program and its arguments",
        ),
        (
            json!({"wrap": program, "unwrap": ["/a", 1]}),
            "option \"unwrap\" must be an array of strings: a program and its arguments",
        ),
        (
            json!({"wrap": ["wrap"], "unwrap": program}),
            "option \"wrap\": path \"wrap\" is not absolute",
        ),
        (
            json!({"wrap": program, "unwrap": ["/a", "b\nc"]}),
            "option \"unwrap\" contains a control character or is longer than 4095 bytes",
        ),
    ] {
        let failed = failure(&check_options(&programs, options), "bad_options");
        assert_eq!(failed.message, format!("provider \"ours\": {message}"));
    }
    assert_eq!(check_options(&programs, programs.options()), "options_ok");
}

#[test]
fn programs_that_others_could_change_are_not_run() {
    let programs = Programs::new(PLAIN);
    let path = programs.path();
    let shown = path.display();
    for mode in [0o775, 0o757, 0o777] {
        chmod(&path, mode);
        let refused = programs.refused("insecure");
        assert_eq!(refused.message, format!("program \"{shown}\" can be changed by other users"));
        assert_eq!(refused.hint, format!("Run: chmod go-w \"{shown}\""));
        failure(&check_options(&programs, programs.options()), "insecure");
    }
    chmod(&path, 0o755);
    chmod(&programs.bench.path("keys"), 0o777);
    let refused = programs.refused("insecure");
    let directory = programs.bench.path("keys");
    let expected = format!("directory \"{}\" is not safe for a program", directory.display());
    assert_eq!(refused.message, expected);
    chmod(&programs.bench.path("keys"), 0o700);
    if geteuid().is_root() {
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
        let refused = programs.refused("insecure");
        assert_eq!(refused.message, format!("program \"{shown}\" belongs to another user"));
        std::os::unix::fs::chown(&path, Some(0), None).unwrap();
    }
    programs.wrap(&[1; 32]);
}

#[test]
fn only_a_regular_executable_file_is_run() {
    let programs = Programs::new(PLAIN);
    let path = programs.path();
    let shown = path.display();
    chmod(&path, 0o644);
    let refused = programs.refused("unreachable");
    let expected = format!("program \"{shown}\" is not executable for the server's user");
    assert_eq!(refused.message, expected);

    fs::remove_file(&path).unwrap();
    let refused = programs.refused("unreachable");
    assert_eq!(refused.message, format!("program \"{shown}\" does not exist"));
    // It may be created later.
    assert_eq!(check_options(&programs, programs.options()), "options_ok");

    let real = programs.bench.path("keys/real");
    install(&real, "#!/bin/sh\n");
    symlink(&real, &path).unwrap();
    let refused = programs.refused("insecure");
    assert_eq!(refused.message, format!("program \"{shown}\" is a symbolic link"));
    fs::remove_file(&path).unwrap();

    let not_regular = format!("program \"{shown}\" is not a regular file");
    fs::create_dir(&path).unwrap();
    assert_eq!(programs.refused("insecure").message, not_regular);
    fs::remove_dir(&path).unwrap();
    mkfifo(&path, Mode::S_IRWXU).unwrap();
    assert_eq!(programs.refused("insecure").message, not_regular);
}

#[test]
fn programs_in_the_data_directory_are_not_run() {
    let programs = Programs::new(PLAIN);
    let inside = programs.bench.path("data/program");
    let options = json!({"wrap": [inside], "unwrap": [programs.path()]});
    // Also before it exists.
    for _ in 0..2 {
        let failed = failure(&check_options(&programs, options.clone()), "insecure");
        let expected = format!(
            "provider \"ours\": program \"{}\" is inside the data directory",
            inside.display()
        );
        assert_eq!(failed.message, expected);
        install(&inside, "#!/bin/sh\n");
    }
    let operation = programs.operation_with(options, "main", CONTEXT, wrap_action(&[1; 32]));
    let refused = programs.failed(&programs.bench.one(operation), "insecure");
    assert!(refused.detail.contains("could replace it"), "{refused:?}");
    let absent = json!([programs.bench.path("data/sub/program")]);
    let options = json!({"wrap": absent, "unwrap": absent});
    failure(&check_options(&programs, options), "insecure");
}
