//! Programs of the operator for tests of the `command` provider.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

use serde_json::{Value, json};

use crate::bench::{Bench, CONTEXT, Failure, failure, wrap_action};

/// Shell code that reads a request into `$operation`, `$key`, `$key_version` and `$data`.
pub(crate) const READ: &str = "\
while read -r name value; do
    case $name in
        operation) operation=$value ;;
        key) key=$value ;;
        key_version) key_version=$value ;;
        plaintext | wrapped) data=$value ;;
    esac
done
";

/// Returns keys unwrapped, as they are. Its key has version 1.
pub(crate) const PLAIN: &str = "\
case $operation in
    wrap) echo \"wrapped $data\" ;;
    unwrap) echo \"plaintext $data\" ;;
esac
";

/// A bench with one program, which the provider uses for all operations.
pub(crate) struct Programs {
    pub(crate) bench: Bench,
}

impl Programs {
    /// The program is `body`, run after its request was read.
    pub(crate) fn new(body: &str) -> Programs {
        Programs::with(&format!("{READ}{body}"))
    }

    /// The program is `script`.
    pub(crate) fn with(script: &str) -> Programs {
        let programs = Programs { bench: Bench::empty() };
        install(&programs.path(), &format!("#!/bin/sh\n{script}"));
        programs
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.bench.path("keys/program")
    }

    /// A file that the program may write or read: its first argument.
    pub(crate) fn note(&self) -> PathBuf {
        self.bench.path("note")
    }

    pub(crate) fn noted(&self) -> String {
        fs::read_to_string(self.note()).unwrap()
    }

    pub(crate) fn options(&self) -> Value {
        let program = json!([self.path(), self.note()]);
        json!({"wrap": program, "unwrap": program})
    }

    pub(crate) fn operation(&self, action: Value) -> Value {
        self.operation_with(self.options(), "main", CONTEXT, action)
    }

    pub(crate) fn operation_with(
        &self,
        options: Value,
        key: &str,
        context: &str,
        action: Value,
    ) -> Value {
        let provider =
            json!({"name": "ours", "kind": "command", "options": options, "programs": true});
        json!({"provider": provider, "key": key, "context": context, "action": action})
    }

    pub(crate) fn one(&self, action: Value) -> Value {
        self.bench.one(self.operation(action))
    }

    /// A wrapped key in the form that operations take.
    pub(crate) fn wrap(&self, plaintext: &[u8]) -> Value {
        let outcome = self.one(wrap_action(plaintext));
        assert!(outcome.get("wrapped").is_some(), "{outcome}");
        outcome["wrapped"]["wrapped"].clone()
    }

    /// The failure of wrapping.
    #[track_caller]
    pub(crate) fn refused(&self, class: &str) -> Failure {
        self.failed(&self.one(wrap_action(&[1; 32])), class)
    }

    /// The failure in an outcome, which must have all parts; without the common prefix of messages.
    #[track_caller]
    pub(crate) fn failed(&self, outcome: &Value, class: &str) -> Failure {
        let failed = failure(outcome, class);
        for text in [&failed.message, &failed.detail, &failed.hint] {
            assert!(!text.is_empty() && !text.chars().any(char::is_control), "{failed:?}");
        }
        let message = failed.message.strip_prefix("master key \"main\" of provider \"ours\": ");
        let message = message.unwrap_or(&failed.message).to_owned();
        Failure { message, ..failed }
    }

    /// Waits until the program has written `lines` lines to its note.
    pub(crate) fn wait_for_note(&self, lines: usize) -> Vec<String> {
        let start = Instant::now();
        loop {
            let text = fs::read_to_string(self.note()).unwrap_or_default();
            if text.ends_with('\n') && text.lines().count() >= lines {
                return text.lines().map(str::to_owned).collect();
            }
            assert!(start.elapsed() < Duration::from_secs(10), "noted only {text:?}");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Writes a program, by another process: a thread of this one that starts a process at that moment
/// would pass on the open file, and a file that is open for writing cannot be run.
pub(crate) fn install(path: &Path, text: &str) {
    let mut shell = Command::new("sh")
        .args(["-c", "cat > \"$0\" && chmod 755 \"$0\""])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    shell.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(shell.wait().unwrap().success());
}

/// Whether the process has ended; a zombie counts as ended.
pub(crate) fn is_gone(process: &str) -> bool {
    let Ok(status) = fs::read_to_string(format!("/proc/{process}/status")) else { return true };
    status.lines().any(|line| line.starts_with("State:\tZ") || line.starts_with("State:\tX"))
}

#[track_caller]
pub(crate) fn all_gone_soon(processes: &[String]) {
    let start = Instant::now();
    while !processes.iter().all(|process| is_gone(process)) {
        assert!(start.elapsed() < Duration::from_secs(10), "{processes:?} go on");
        thread::sleep(Duration::from_millis(5));
    }
}
