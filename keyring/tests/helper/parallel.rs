//! Requests with many providers: they are asked side by side, and one that hangs holds up no other.
//!
//! No test measures time. Providers answer when another one, later in the request, was seen to be
//! asked. If they were asked one after the other, it would never be.

use std::fs;
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::bench::{
    Bench, CONTEXT, chmod, failure, plaintext, reply, rotate_action, serve_text, start,
    unwrap_action, wrap_action,
};
use crate::programs::{PLAIN, Programs, READ};

/// An operation with the provider `name`, whose program gets this name as its second argument.
fn operation(programs: &Programs, name: &str, key: &str) -> Value {
    let program = json!([programs.path(), programs.note(), name]);
    let options = json!({"wrap": program, "unwrap": program});
    let mut operation = programs.operation_with(options, key, CONTEXT, wrap_action(&[7; 32]));
    operation["provider"]["name"] = json!(name);
    operation
}

fn is_wrapped(outcome: &Value) -> bool {
    outcome["wrapped"]["key_version"] == 1
}

/// Writes its name, and answers when the [`Gate`] is open.
const AT_GATE: &str = "echo \"$2\" >> \"$1\"; flock -s \"$1.gate\" true";

/// Closed until it is dropped.
struct Gate {
    _lock: fs::File,
}

impl Gate {
    fn new(programs: &Programs) -> Gate {
        let lock = fs::File::create(programs.note().with_extension("gate")).unwrap();
        lock.lock().unwrap();
        Gate { _lock: lock }
    }
}

/// Starts a request of `operations`, and closes its input.
fn ask(programs: &Programs, operations: Vec<Value>) -> Child {
    start(programs.bench.request(120_000, operations).to_string().as_bytes())
}

/// The outcomes of a request.
fn answers(child: Child) -> Vec<Value> {
    let reply = reply(&child.wait_with_output().unwrap());
    reply["results"].as_array().unwrap().clone()
}

/// Waits until the programs have written what `is_there` expects. That takes a second, or less; if
/// it never comes, the request would be over by then.
#[track_caller]
fn wait_until(programs: &Programs, is_there: impl Fn(&str) -> bool) {
    let start = Instant::now();
    while !is_there(&fs::read_to_string(programs.note()).unwrap_or_default()) {
        assert!(start.elapsed() < Duration::from_secs(100), "noted: {}", programs.noted());
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn programs_that_hang_hold_up_no_other() {
    // More than are asked at a time, if they are not slow.
    let programs = Programs::new(&format!("{AT_GATE}\n{PLAIN}"));
    let gate = Gate::new(&programs);
    let mut operations: Vec<Value> =
        (0..90).map(|i| operation(&programs, &format!("p{i}"), "main")).collect();
    operations.push(operation(&programs, "last", "main"));
    let child = ask(&programs, operations);
    wait_until(&programs, |noted| noted.contains("last\n"));
    drop(gate);
    assert!(answers(child).iter().all(is_wrapped));
}

#[test]
fn the_number_of_programs_is_bounded_and_nobody_else_waits_for_them() {
    let programs = Programs::new(&format!("{AT_GATE}\n{PLAIN}"));
    let gate = Gate::new(&programs);
    let silent = Silent::new();
    let mut operations: Vec<Value> =
        (0..140).map(|i| operation(&programs, &format!("p{i}"), "main")).collect();
    // It is asked though twelve programs before it wait.
    operations.push(silent.operation(&programs, "silent"));
    let child = ask(&programs, operations);
    wait_until(&programs, |noted| noted.lines().count() >= 128);
    // Its connection is closed, and another one refused.
    let connection = silent.listener.accept().unwrap();
    drop((silent, connection));
    thread::sleep(Duration::from_millis(500));
    assert_eq!(programs.noted().lines().count(), 128);
    drop(gate);
    let outcomes = answers(child);
    assert!(outcomes[..140].iter().all(is_wrapped));
    failure(&outcomes[140], "unreachable");
    assert_eq!(programs.noted().lines().count(), 140);
}

#[test]
fn who_was_not_asked_before_the_deadline_is_told_so() {
    // Rotations that hang, because this process holds the lock that they need.
    let bench = Bench::new();
    let lock = fs::File::open(bench.key_file()).unwrap();
    lock.lock().unwrap();
    let operations = (0..80)
        .map(|i| {
            let mut operation = bench.operation(rotate_action());
            operation["provider"]["name"] = json!(format!("p{i}"));
            operation
        })
        .collect();
    // Too short for one of them to count as slow.
    let reply = reply(&serve_text(bench.request(80, operations).to_string().as_bytes()));
    let last = &reply["results"][79];
    let failed = failure(last, "deadline");
    assert_eq!(failed.message, "master key \"main\" of provider \"p79\": no answer within 80 ms");
    assert!(failed.detail.starts_with("It was not asked"), "{failed:?}");
    assert_eq!(last["failed"]["retry"], true);
}

/// A key server that does not answer.
struct Silent {
    listener: TcpListener,
}

impl Silent {
    fn new() -> Silent {
        Silent { listener: TcpListener::bind("127.0.0.1:0").unwrap() }
    }

    /// An operation with the provider `name` at this server, tried once.
    fn operation(&self, programs: &Programs, name: &str) -> Value {
        let token = programs.bench.path("keys/token");
        fs::write(&token, "s.token").unwrap();
        chmod(&token, 0o600);
        let address = format!("http://{}", self.listener.local_addr().unwrap());
        let options = json!({"address": address, "insecure_loopback_http": true,
                             "auth": {"token_file": token}});
        let provider = json!({"name": name, "kind": "vault", "options": options});
        json!({"provider": provider, "key": "main", "context": CONTEXT, "once": true,
               "action": wrap_action(&[1; 32])})
    }
}

#[test]
fn servers_that_swallow_requests_hold_up_no_other() {
    let programs = Programs::new(&format!("echo \"$2\" >> \"$1\"\n{PLAIN}"));
    let silent = Silent::new();
    let mut operations: Vec<Value> =
        (0..200).map(|i| silent.operation(&programs, &format!("v{i}"))).collect();
    operations.push(operation(&programs, "last", "main"));
    let child = ask(&programs, operations);
    // They are accepted, and not answered, until the last provider was asked.
    let connections: Vec<TcpStream> =
        (0..200).map(|_| silent.listener.accept().unwrap().0).collect();
    wait_until(&programs, |noted| noted == "last\n");
    // Their connections are closed, and others refused.
    drop((silent, connections));
    let outcomes = answers(child);
    assert!(is_wrapped(&outcomes[200]), "{}", outcomes[200]);
    for outcome in &outcomes[..200] {
        failure(outcome, "unreachable");
    }
}

#[test]
fn answers_and_the_operations_of_a_provider_are_in_order() {
    // Each program of p0 waits for the others, so that p0 ends last.
    let programs = Programs::with(&format!(
        "{READ}
         [ \"$2\" != p0 ] || until [ \"$(grep -c 'p[1-9] k4' \"$1\")\" = 9 ]; do sleep 0.02; done
         echo \"$2 $key\" >> \"$1\"
         case $operation in wrap) echo \"wrapped $2-$key\" ;; esac"
    ));
    let names: Vec<(String, String)> =
        (0..5).flat_map(|key| (0..10).map(move |p| (format!("p{p}"), format!("k{key}")))).collect();
    let operations = names.iter().map(|(name, key)| operation(&programs, name, key)).collect();
    let outcomes = programs.bench.serve(operations);
    for ((name, key), outcome) in names.iter().zip(&outcomes) {
        let wrapped = outcome["wrapped"]["wrapped"].as_str().unwrap();
        let wrapped = plain_part(wrapped);
        assert!(wrapped.contains(&format!("{name}-{key}")), "{wrapped}");
    }
    let noted = programs.noted();
    for provider in (0..10).map(|p| format!("p{p}")) {
        let keys: Vec<&str> = noted
            .lines()
            .filter_map(|line| line.strip_prefix(provider.as_str())?.strip_prefix(' '))
            .collect();
        assert_eq!(keys, ["k0", "k1", "k2", "k3", "k4"], "{provider}");
    }
    assert!(noted.ends_with("p0 k4\n"), "{noted}");
}

/// The readable part of a wrapped key.
fn plain_part(wrapped: &str) -> String {
    use base64::Engine;
    let bytes = base64::engine::general_purpose::STANDARD.decode(wrapped).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn a_thousand_providers_are_answered_in_order() {
    let bench = Bench::new();
    let wrapped = bench.wrap(&[9; 32]);
    let operations = (0..1000)
        .map(|i| {
            let key = if i % 7 == 3 { "missing" } else { "main" };
            let action = if i % 2 == 0 { unwrap_action(&wrapped) } else { wrap_action(&[1; 32]) };
            let mut operation = bench.operation_on(&bench.key_file(), key, CONTEXT, action);
            operation["provider"]["name"] = json!(format!("p{i}"));
            operation
        })
        .collect();
    for (i, outcome) in bench.serve(operations).iter().enumerate() {
        if i % 7 == 3 {
            let failed = failure(outcome, "key_missing");
            assert!(failed.message.contains(&format!("provider \"p{i}\"")), "{failed:?}");
        } else if i % 2 == 0 {
            assert_eq!(plaintext(outcome), [9; 32]);
        } else {
            assert!(is_wrapped(outcome), "{outcome}");
        }
    }
}

#[test]
fn few_open_files_are_enough_for_many_providers() {
    use std::process::{Command, Stdio};

    let programs = Programs::new(PLAIN);
    let operations: Vec<Value> =
        (0..60).map(|i| operation(&programs, &format!("p{i}"), "main")).collect();
    let request = programs.bench.request(60_000, operations).to_string();
    let file = programs.bench.path("request");
    fs::write(&file, request).unwrap();
    let mut child = Command::new("sh")
        .args(["-c", "ulimit -n 100; exec \"$0\" serve < \"$1\""])
        .arg(env!("CARGO_BIN_EXE_pagevault-keyring"))
        .arg(file)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(child.wait().unwrap().success());
    let reply: Value = serde_json::from_str(&text).unwrap();
    assert!(reply["results"].as_array().unwrap().iter().all(is_wrapped), "{reply}");
}
