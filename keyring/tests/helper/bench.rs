//! A key file, a data directory, and functions that run the program on them.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tempfile::TempDir;

pub(crate) const CONTEXT: &str = "pagevault/1/0";

pub(crate) struct Bench {
    root: TempDir,
}

impl Bench {
    /// A data directory and a key file with the key `main`.
    pub(crate) fn new() -> Bench {
        let bench = Bench::empty();
        bench.create(&bench.key_file(), "main");
        bench
    }

    /// The same without a key file.
    pub(crate) fn empty() -> Bench {
        let bench = Bench { root: tempfile::tempdir().unwrap() };
        for directory in ["data", "data/pg_tblspc", "keys"] {
            fs::create_dir(bench.path(directory)).unwrap();
            chmod(&bench.path(directory), 0o700);
        }
        bench
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.path().canonicalize().unwrap().join(name)
    }

    pub(crate) fn key_file(&self) -> PathBuf {
        self.path("keys/main.json")
    }

    pub(crate) fn create(&self, path: &Path, key: &str) {
        let made = run(&["file", "create", path.to_str().unwrap(), "--key", key]);
        assert!(made.status.success(), "{}", stderr(&made));
    }

    /// An operation with the key `main` of the default key file.
    pub(crate) fn operation(&self, action: Value) -> Value {
        self.operation_on(&self.key_file(), "main", CONTEXT, action)
    }

    pub(crate) fn operation_on(
        &self,
        path: &Path,
        key: &str,
        context: &str,
        action: Value,
    ) -> Value {
        let provider = json!({"name": "disk", "kind": "file", "options": {"path": path}});
        json!({"provider": provider, "key": key, "context": context, "action": action})
    }

    pub(crate) fn request(&self, deadline_ms: u64, operations: Vec<Value>) -> Value {
        json!({"version": 1, "deadline_ms": deadline_ms, "data_directory": self.path("data"),
               "operations": operations})
    }

    /// The outcomes of operations, with a deadline of ten seconds.
    pub(crate) fn serve(&self, operations: Vec<Value>) -> Vec<Value> {
        let count = operations.len();
        let reply = reply(&serve_text(self.request(60_000, operations).to_string().as_bytes()));
        let results = reply["results"].as_array().unwrap().clone();
        assert_eq!(results.len(), count, "{reply}");
        results
    }

    pub(crate) fn one(&self, operation: Value) -> Value {
        self.serve(vec![operation]).remove(0)
    }

    pub(crate) fn wrap(&self, plaintext: &[u8]) -> Value {
        let outcome = self.one(self.operation(wrap_action(plaintext)));
        outcome["wrapped"]["wrapped"].clone()
    }

    pub(crate) fn unwrap(&self, wrapped: &Value) -> Value {
        self.one(self.operation(unwrap_action(wrapped)))
    }
}

pub(crate) fn wrap_action(plaintext: &[u8]) -> Value {
    json!({"wrap": {"plaintext": STANDARD.encode(plaintext)}})
}

pub(crate) fn unwrap_action(wrapped: &Value) -> Value {
    json!({"unwrap": {"wrapped": wrapped}})
}

pub(crate) fn rotate_action() -> Value {
    json!({"rotate": {"wrapped": ""}})
}

pub(crate) fn plaintext(outcome: &Value) -> Vec<u8> {
    let text = outcome["unwrapped"]["plaintext"].as_str();
    STANDARD.decode(text.unwrap_or_else(|| panic!("{outcome}"))).unwrap()
}

/// The failure in `outcome`, which must have this class.
#[track_caller]
pub(crate) fn failure(outcome: &Value, class: &str) -> Failure {
    let failed = &outcome["failed"];
    assert_eq!(failed["class"], class, "{outcome}");
    let text = |part: &str| failed[part].as_str().unwrap_or_default().to_owned();
    Failure { message: text("message"), detail: text("detail"), hint: text("hint") }
}

#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) message: String,
    pub(crate) detail: String,
    pub(crate) hint: String,
}

pub(crate) fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagevault-keyring"));
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

pub(crate) fn run(arguments: &[&str]) -> Output {
    command(arguments).stdin(Stdio::null()).output().unwrap()
}

/// Starts `serve` with a request, and closes its input.
pub(crate) fn start(request: &[u8]) -> Child {
    let mut child = command(&["serve"]).spawn().unwrap();
    // A helper that refuses large input closes its end early.
    let _ = child.stdin.take().unwrap().write_all(request);
    child
}

pub(crate) fn serve_text(request: &[u8]) -> Output {
    start(request).wait_with_output().unwrap()
}

/// The reply: it must be the only output, with success, and nothing on standard error.
#[track_caller]
pub(crate) fn reply(output: &Output) -> Value {
    assert!(output.status.success(), "{:?} {}", output.status, stderr(output));
    assert_eq!(stderr(output), "");
    let reply: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(reply["version"], 1);
    reply
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The successful findings of a `check` report that has no others.
#[track_caller]
pub(crate) fn what_is_well(report: &str) -> Vec<&str> {
    report
        .lines()
        .take_while(|line| !line.is_empty())
        .map(|line| line.strip_prefix("ok      ").unwrap().split(':').next().unwrap())
        .collect()
}

pub(crate) fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// All remaining output of a child.
pub(crate) fn rest(mut from: impl Read) -> String {
    let mut text = String::new();
    from.read_to_string(&mut text).unwrap();
    text
}
