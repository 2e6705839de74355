//! `audit verify` with arbitrary files: it ends, reports where lines are, and trusts nothing.

use std::fs;
use std::process::Output;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use pagevault_keystore::Scope;
use pagevault_keystore::audit::{MARK, Place, STATE, STATE_SIZE, next_line, offset, slot};
use pagevault_keystore::log::Log;
use pagevault_keystore::storage::FileStorage;

use crate::bench::{Bench, command, stderr, stdout};

fn verify(bench: &Bench, files: &[&str], with_keystore: bool) -> Output {
    let paths: Vec<String> =
        files.iter().map(|name| bench.path(name).to_string_lossy().into_owned()).collect();
    let mut command = command(&["audit", "verify"]);
    command.args(paths);
    if with_keystore {
        command.arg("-D").arg(bench.path("data"));
    }
    command.output().unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

/// A trail of a server that has no key yet.
fn bare(lines: usize) -> Vec<String> {
    let mut place = Place::before([7; 16]);
    (0..lines).map(|_| next_line(&mut place, None, 7, "\"action\":\"x\"", None)).collect()
}

/// A bench with a keystore without keys, whose state file has the last line.
fn noted(lines: &[String]) -> Bench {
    let bench = Bench::empty();
    let storage = FileStorage::new(&bench.path("data/pagevault")).unwrap();
    Log::create(&storage, [7; 16], Scope::CLUSTER, &[]).unwrap();
    let mut state = vec![0; STATE_SIZE];
    let count = lines.len() as u64;
    let bytes = slot(count, &lines[lines.len() - 1]).unwrap();
    let at = offset(count) as usize;
    state[at..at + bytes.len()].copy_from_slice(&bytes);
    state[at + 16] = 1;
    fs::write(bench.path("data/pagevault").join(STATE), state).unwrap();
    bench
}

#[test]
fn lines_of_a_server_without_a_key_are_confirmed_by_its_state_file() {
    let lines = bare(5);
    let bench = noted(&lines);
    fs::write(bench.path("log"), lines.join("\n")).unwrap();
    let output = verify(&bench, &["log"], true);
    assert_eq!(code(&output), 0, "{}{}", stdout(&output), stderr(&output));
    assert!(
        stdout(&output).contains("0 with a MAC, 5 confirmed without a MAC"),
        "{}",
        stdout(&output)
    );
    fs::write(bench.path("log"), lines[..3].join("\n")).unwrap();
    let output = verify(&bench, &["log"], true);
    assert_eq!(code(&output), 2);
    assert!(stdout(&output).contains("missing: line"), "{}", stdout(&output));
    // If the state file is damaged, the end of the trail is unknown.
    fs::write(bench.path("log"), lines.join("\n")).unwrap();
    fs::write(bench.path("data/pagevault").join(STATE), "garbage").unwrap();
    let output = verify(&bench, &["log"], true);
    assert_eq!(code(&output), 2);
    assert!(
        stdout(&output).contains("there is no proof that the server wrote it"),
        "{}",
        stdout(&output)
    );
    assert!(
        stdout(&output).contains("file audit.state is missing or damaged"),
        "{}",
        stdout(&output)
    );
}

#[test]
fn without_a_keystore_only_the_chain_is_checked() {
    let bench = Bench::empty();
    fs::write(bench.path("log"), "LOG:  nothing of ours\n").unwrap();
    let output = verify(&bench, &["log"], false);
    assert_eq!(code(&output), 0);
    assert!(stdout(&output).contains("MACs were not verified"), "{}", stdout(&output));
}

#[test]
fn files_of_any_kind_end() {
    let lines = bare(3);
    let bench = noted(&lines);
    let forged = format!("LOG:  {MARK}{{\"run\":\"x\"}}\n");
    fs::write(bench.path("many"), forged.repeat(100_000)).unwrap();
    let mut long = vec![b'x'; 40 << 20];
    long.extend_from_slice(MARK.as_bytes());
    long.extend_from_slice(b"{");
    fs::write(bench.path("long"), &long).unwrap();
    let deep = format!("{MARK}{}\n{MARK}{{\"run\":{}\n", "{".repeat(100_000), "[".repeat(100_000));
    fs::write(bench.path("deep"), deep).unwrap();
    fs::write(bench.path("bytes"), [0xff, 0, b'\n', b'{', 0x80].repeat(1000)).unwrap();
    mkfifo(&bench.path("fifo"), Mode::S_IRWXU).unwrap();
    let output = verify(&bench, &["many", "long", "deep", "bytes"], true);
    assert_eq!(code(&output), 2, "{}", stderr(&output));
    let said = stdout(&output);
    assert!(said.contains("more\n") && said.lines().count() < 120, "{said}");
    for (name, why) in [("fifo", "it is not a regular file"), ("none", "No such file")] {
        let output = verify(&bench, &[name], true);
        assert_eq!(code(&output), 1);
        assert!(stderr(&output).contains(why), "{}", stderr(&output));
    }
}
