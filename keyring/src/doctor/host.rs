//! What only the machine of the server knows: key files, and how its memory is protected. Nothing
//! is looked at unless the connection is by a Unix socket, and so to this machine.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::{Value, json};

use super::Finding;
use super::Severity::{Notice, Warning};
use crate::server::{list, text};
use crate::trust::data_directory_above;

/// What this machine says about the server of the document, and this program's own version.
pub(crate) fn look(found: &Value) -> Value {
    let mut host = json!({"version": env!("CARGO_PKG_VERSION")});
    if found["server"]["is_local"] != true {
        return host;
    }
    host["key_files"] = list(&found["cluster"]["providers"])
        .iter()
        .filter(|provider| provider["kind"] == "file" && provider["in_use"] == true)
        .map(|provider| key_file(text(&provider["options"]["path"])))
        .collect();
    if let Some(checkpointer) = found["server"]["checkpointer"].as_u64() {
        host["memory"] = protection(checkpointer).unwrap_or_default();
    }
    host
}

fn key_file(path: &str) -> Value {
    let real = fs::canonicalize(path).unwrap_or_else(|_| path.into());
    let mode = fs::metadata(&real).ok().map(|file| file.permissions().mode() & 0o7777);
    json!({
        "path": path,
        "mode": mode,
        "in_data_directory": data_directory_above(&real).is_some(),
    })
}

/// The postmaster's locked memory in kB, and its limit of core dumps; `None` if it is not a process
/// of this machine (a container has numbers of its own).
fn protection(checkpointer: u64) -> Option<Value> {
    let status = |process: u64| fs::read_to_string(format!("/proc/{process}/status")).ok();
    let field = |text: &str, name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    let of_checkpointer = status(checkpointer)?;
    if !of_checkpointer.lines().next()?.contains("postgres") {
        return None;
    }
    let postmaster = field(&of_checkpointer, "PPid:")?;
    let of_postmaster = status(postmaster)?;
    if !of_postmaster.lines().next()?.contains("postgres") {
        return None;
    }
    let limits = fs::read_to_string(Path::new("/proc").join(postmaster.to_string()).join("limits"));
    let core = limits.ok().and_then(|limits| {
        let line = limits.lines().find_map(|line| line.strip_prefix("Max core file size"))?;
        Some(line.split_whitespace().next()? != "0")
    });
    // Locks are not inherited: only the postmaster, which has mapped the memory, has them.
    Some(json!({"locked_kb": field(&of_postmaster, "VmLck:"), "core_dumps": core}))
}

pub(super) fn memory(found: &Value, findings: &mut Vec<Finding>) {
    let memory = &found["host"]["memory"];
    if memory["locked_kb"] == 0 && super::is_loaded(found) {
        findings.push(
            Finding::new(Warning, "memory-not-locked", "the memory of database keys is not locked")
                .why("The operating system may write unwrapped keys to swap.")
                .cure("raise RLIMIT_MEMLOCK of the server (LimitMEMLOCK in its systemd unit) and restart it, or encrypt swap"),
        );
    }
    if memory["core_dumps"] == true {
        findings.push(
            Finding::new(Notice, "core-dumps", "the server may write core dumps")
                .why("Keys are left out of them, but the pages in shared buffers are in plaintext.")
                .cure("LimitCORE=0 in the server's systemd unit, or encrypt where core dumps go"),
        );
    }
}
