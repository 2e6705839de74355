//! What is encrypted, and what is not although it should be.

use serde_json::Value;

use super::Severity::{Critical, Notice, Warning};
use super::{Finding, anything_encrypted, are, is_loaded};
use crate::server::{list, runs_without_library, text};

/// Differences that a finding names; of others it has the number.
const NAMED: usize = 3;

pub(super) fn unreachable(found: &Value, findings: &mut Vec<Finding>) {
    for database in list(&found["databases"]) {
        let error = text(&database["error"]);
        if !error.is_empty() {
            findings.push(
                Finding::new(Warning, "database-not-seen", "the database could not be looked at")
                    .in_database(text(&database["name"]))
                    .why(error.replace('\n', " "))
                    .cure(if runs_without_library(found) {
                        "load pagevault: without it, what is encrypted cannot be read"
                    } else if database["refused"] == true {
                        "connect as a superuser, or as a member of pagevault_admin and pg_monitor"
                    } else {
                        "see the error, and docs/troubleshooting.md"
                    }),
            );
        }
        let owner = text(&database["extension_owner"]);
        if !owner.is_empty() {
            let what = format!("\"{owner}\" can replace objects of the extension");
            findings.push(
                Finding::new(Critical, "extension-not-trusted", what)
                    .in_database(text(&database["name"]))
                    .why("The role owns some, and is not a superuser. Superusers run them. Nothing in this database was looked at.")
                    .cure("check them, then REASSIGN OWNED BY, or ALTER ROLE ... SUPERUSER"),
            );
        }
    }
}

pub(super) fn drift(found: &Value, findings: &mut Vec<Finding>) {
    for database in list(&found["databases"]) {
        let rows = list(&database["drift"]);
        if rows.is_empty() {
            continue;
        }
        let mut names: Vec<_> = rows.iter().map(|row| text(&row["relation"])).collect();
        names.truncate(NAMED);
        let more = if rows.len() > names.len() { ", ..." } else { "" };
        let mut fixes: Vec<_> = rows.iter().map(|row| text(&row["fix"])).collect();
        fixes.dedup();
        let more_fixes = fixes.len() > NAMED;
        fixes.truncate(NAMED);
        let rest = if more_fixes { "; and so on: SELECT fix FROM pagevault.drift" } else { "" };
        findings.push(
            Finding::new(
                Warning,
                "drift",
                format!(
                    "{} not as labels and settings require: {}{more}",
                    are(rows.len(), "relation"),
                    names.join(", ")
                ),
            )
            .in_database(text(&database["name"]))
            .why("Most often a relation that is older than the label.")
            .cure(format!("{}{rest}", fixes.join("; "))),
        );
    }
}

pub(super) fn settings(found: &Value, findings: &mut Vec<Finding>) {
    let settings = &found["cluster"]["settings"];
    if settings["pagevault.temp_encryption"] == "off" {
        findings.push(
            Finding::new(Warning, "temporary-plaintext", "temporary files are in plaintext")
                .why("Sorts and hashes of large queries, and temporary tables, contain rows of encrypted relations.")
                .cure("ALTER SYSTEM RESET pagevault.temp_encryption; SELECT pg_reload_conf()"),
        );
    }
    if settings["pagevault.data_catalog_encryption"] == "off" {
        findings.push(
            Finding::new(Warning, "statistics-plaintext", "statistics and large objects are in plaintext")
                .why("pg_statistic has sampled values of encrypted columns.")
                .cure("ALTER SYSTEM RESET pagevault.data_catalog_encryption; SELECT pg_reload_conf(); SELECT pagevault.encrypt_catalogs() in each database"),
        );
    }
}

pub(super) fn jobs(found: &Value, findings: &mut Vec<Finding>) {
    let mut waiting = 0;
    for database in list(&found["databases"]) {
        for job in list(&database["rekey_jobs"]) {
            let (state, number) = (text(&job["state"]), &job["job"]);
            let replaces = |later: &Value| {
                later["relation"] == job["relation"] && later["job"].as_i64() > number.as_i64()
            };
            if !job["relation"].is_null() && list(&database["rekey_jobs"]).iter().any(replaces) {
                continue;
            }
            let severity = match state {
                "failed" => Warning,
                "paused" | "cancelled" => Notice,
                "waiting" => {
                    waiting += 1;
                    continue;
                }
                _ => continue,
            };
            let relation = job["relation"].as_str().unwrap_or("a relation that is gone");
            let error = text(&job["error"]);
            let why = match error {
                "" => "Some of its pages are rewritten, others not.",
                error => error,
            };
            findings.push(
                Finding::new(
                    severity,
                    "job-unfinished",
                    format!("job {number} ({} {relation}) is {state}", text(&job["kind"])),
                )
                .in_database(text(&database["name"]))
                .why(why)
                .cure(format!("SELECT pagevault.resume_rekey({number})")),
            );
        }
    }
    if waiting > 0 && found["cluster"]["settings"]["pagevault.rekey_workers"] == "0" {
        findings.push(
            Finding::new(
                Warning,
                "no-rekey-workers",
                format!("{} waiting, and pagevault.rekey_workers is 0", are(waiting, "job")),
            )
            .cure("ALTER SYSTEM RESET pagevault.rekey_workers; SELECT pg_reload_conf()"),
        );
    }
}

/// A cluster that is ready, but encrypts nothing.
pub(super) fn nothing(found: &Value, findings: &mut Vec<Finding>) {
    let has_key = found["cluster"]["status"]["state"] == "unlocked";
    let by_default = found["cluster"]["settings"]["pagevault.default_encryption"] == "on";
    if is_loaded(found) && has_key && !by_default && !anything_encrypted(found) {
        findings.push(
            Finding::new(Notice, "nothing-encrypted", "no relation is encrypted")
                .why("A master key alone encrypts temporary data only.")
                .cure("SELECT pagevault.encrypt('TABLE'); or, for all relations to come: ALTER SYSTEM SET pagevault.default_encryption = on; SELECT pg_reload_conf()"),
        );
    }
}
