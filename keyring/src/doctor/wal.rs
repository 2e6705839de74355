//! WAL, where it goes, the audit trail, and the anchor.

use serde_json::Value;

use super::Finding;
use super::Severity::{Notice, Warning};
use super::anything_encrypted;
use crate::server::{list, text};

const ENCRYPT: &str = "ALTER SYSTEM SET pagevault.wal_encryption = on; SELECT pg_reload_conf()";

pub(super) fn plaintext(found: &Value, findings: &mut Vec<Finding>) {
    let status = &found["cluster"]["status"];
    if status["wal_encrypted"] != false || !anything_encrypted(found) {
        return;
    }
    findings.push(
        Finding::new(Warning, "wal-plaintext", "WAL is written in plaintext")
            .why("It contains the rows of encrypted relations.")
            .cure(ENCRYPT),
    );
    let server = &found["server"];
    let archives = text(&server["settings"]["archive_mode"]);
    if !matches!(archives, "off" | "") {
        findings.push(
            Finding::new(Warning, "wal-archived-plaintext", format!("archive_mode is {archives}, and the archive gets WAL in plaintext"))
                .why("What is in the archive stays there, also when WAL is encrypted later.")
                .cure(format!("{ENCRYPT}; then make a new base backup, and delete the WAL before it from the archive")),
        );
    }
    let slots: Vec<_> = list(&server["slots"]).iter().map(text).collect();
    if !slots.is_empty() {
        findings.push(
            Finding::new(
                Notice,
                "wal-kept-plaintext",
                format!("replication slots keep WAL in plaintext: {}", slots.join(", ")),
            )
            .why("A slot whose client is away keeps it for long.")
            .cure(format!(
                "{ENCRYPT}; drop slots that nobody uses: SELECT pg_drop_replication_slot('NAME')"
            )),
        );
    }
}

/// A standby that lags writes what follows a switch in its own way.
pub(super) fn archived_twice(found: &Value, findings: &mut Vec<Finding>) {
    let is_encrypted = found["cluster"]["status"]["wal_encrypted"] == true;
    if !is_encrypted || text(&found["server"]["settings"]["archive_mode"]) != "always" {
        return;
    }
    findings.push(
        Finding::new(Notice, "archive-always", "archive_mode is always, and WAL is encrypted")
            .why("A standby that lagged at a change of the WAL key has some pages under another key than its primary. If both archive to one place, a command that compares what is there already fails from then on.")
            .cure("give each server an archive of its own, or set archive_mode = on"),
    );
}

pub(super) fn failures(found: &Value, findings: &mut Vec<Finding>) {
    let status = &found["cluster"]["status"];
    for (check, column, what, cure) in [
        (
            "wal-not-as-wanted",
            "wal_error",
            "WAL is not written as pagevault.wal_encryption says",
            "repair what the error names; the server tries again by itself",
        ),
        (
            "audit-trail",
            "audit_error",
            "the audit trail could not be written to its destination",
            "repair what the error names, or change pagevault.audit_destination",
        ),
    ] {
        let error = text(&status[column]);
        if !error.is_empty() {
            findings.push(Finding::new(Warning, check, what).why(error).cure(cure));
        }
    }
}

pub(super) fn anchor(found: &Value, findings: &mut Vec<Finding>) {
    // Null for those who may not see it.
    if found["cluster"]["settings"]["pagevault.anchor"] == "" && anything_encrypted(found) {
        findings.push(
            Finding::new(Notice, "no-anchor", "the cluster has no anchor")
                .why("An older copy of the data directory in place of the current one is not noticed.")
                .cure("ALTER SYSTEM SET pagevault.anchor = '/etc/pagevault/anchor.json' (docs/anchor.md)"),
        );
    }
}
