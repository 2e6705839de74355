//! Master keys, database keys and data keys.

use std::collections::BTreeMap;

use serde_json::Value;

use super::Severity::{Critical, Notice, Warning};
use super::{Finding, count};
use crate::quoting::literal;
use crate::server::{list, text};

const DAY: i64 = 86_400;
/// A key that is due may wait for the window of rotations.
const OVERDUE: i64 = 7 * DAY;
/// A master key that nothing rotates is old after this time.
const OLD: i64 = 365 * DAY;

/// A database key: scope, database, key group.
type Owner<'a> = (&'a str, &'a str, &'a str);

fn owner(row: &Value) -> Owner<'_> {
    (text(&row["scope"]), text(&row["database"]), text(&row["key_group"]))
}

/// Whose a key is, in words.
fn name((scope, database, group): Owner<'_>) -> String {
    match scope {
        "database" => format!("database \"{database}\""),
        "key group" => format!("key group \"{group}\""),
        _ => "the cluster".to_owned(),
    }
}

/// Functions for the key of a database work in that database.
fn where_it_is(finding: Finding, owner: Owner<'_>) -> Finding {
    match owner.0 {
        "database" => finding.in_database(owner.1),
        _ => finding,
    }
}

/// The call of the function that does something with a key of this owner, such as `rotate` and
/// `master_key`; its arguments follow the name of a key group.
fn call(action: &str, (scope, _, group): Owner<'_>, what: &str, arguments: &[&str]) -> String {
    let kind = match scope {
        "database" => "database",
        "key group" => "key_group",
        _ => "cluster",
    };
    let group = literal(group);
    let group = (scope == "key group").then_some(group.as_str());
    let arguments: Vec<_> = group.into_iter().chain(arguments.iter().copied()).collect();
    format!("SELECT pagevault.{action}_{kind}_{what}({})", arguments.join(", "))
}

pub(super) fn master_key(found: &Value, findings: &mut Vec<Finding>) {
    if found["cluster"]["status"]["state"] != "no_master_key" {
        return;
    }
    findings.push(
        Finding::new(Critical, "no-master-key", "no master key is set")
            .why("Nothing can be encrypted.")
            .cure("SELECT pagevault.set_cluster_master_key('PROVIDER', 'KEY'), after pagevault.add_provider(); or pagevault-keyring init"),
    );
}

/// Keys that one master key alone unwraps, and keys that no bundle contains.
pub(super) fn spare(found: &Value, findings: &mut Vec<Finding>) {
    let status = &found["cluster"]["status"];
    let mut wrappings: BTreeMap<Owner<'_>, BTreeMap<i64, usize>> = BTreeMap::new();
    for key in list(&found["cluster"]["database_keys"]) {
        let version = key["version"].as_i64().unwrap_or(0);
        *wrappings.entry(owner(key)).or_default().entry(version).or_default() += 1;
    }
    let in_escrow = !status["last_escrow_at"].is_null();
    for (owner, versions) in wrappings {
        let alone = versions.last_key_value().is_some_and(|(_, masters)| *masters == 1);
        // Whoever holds the key of a group decides on its data.
        let of_group = owner.0 == "key group";
        if !alone || of_group || in_escrow {
            continue;
        }
        let add = call("add", owner, "master_key", &["'PROVIDER'", "'KEY'"]);
        let finding = Finding::new(
            Warning,
            "one-master-key",
            format!(
                "only one master key unwraps the key of {}, and it is not in escrow",
                name(owner)
            ),
        )
        .why("If the provider loses that key, the data is lost.")
        .cure(format!("{add}; or pagevault-keyring escrow export"));
        findings.push(where_it_is(finding, owner));
    }
    let missing = status["database_keys_not_in_escrow"].as_u64().unwrap_or(0);
    if in_escrow && missing > 0 {
        let keys = count(missing as usize, "database key");
        findings.push(
            Finding::new(
                Warning,
                "escrow-outdated",
                format!("the newest escrow bundle lacks {keys}"),
            )
            .why("Data under these keys is lost with the provider.")
            .cure("pagevault-keyring escrow export"),
        );
    }
    let left: Vec<_> = list(&status["one_master_key_left"]).iter().map(text).collect();
    if !left.is_empty() {
        findings.push(
            Finding::new(
                Warning,
                "one-master-key-left",
                format!("of several master keys only one answers: {}", left.join(", ")),
            )
            .why("After a restart without it, nothing can be read.")
            .cure("repair the providers in pagevault.providers that have failed"),
        );
    }
}

pub(super) fn states(found: &Value, findings: &mut Vec<Finding>) {
    let status = &found["cluster"]["status"];
    let locked = status["locked_database_keys"].as_u64().unwrap_or(0);
    if locked > 0 {
        let error = text(&status["unlock_error"]);
        findings.push(
            Finding::new(
                Critical,
                "keys-locked",
                format!("{} locked", count(locked as usize, "database key")),
            )
            .why(if error.is_empty() { "Relations under them cannot be read." } else { error })
            .cure("SELECT pagevault.unlock()"),
        );
    }
    let mut revoked: Vec<_> = list(&found["cluster"]["database_keys"])
        .iter()
        .filter(|key| key["state"] == "revoked")
        .map(owner)
        .collect();
    revoked.dedup();
    for owner in revoked {
        let set = call("set", owner, "master_key", &["'PROVIDER'", "'KEY'"]);
        let finding = Finding::new(
            Critical,
            "key-revoked",
            format!("the provider has revoked the master key of {}", name(owner)),
        )
        .why("After a restart its relations cannot be read.")
        .cure(format!(
            "enable the key at the provider, or move to another one while the server runs: {set}"
        ));
        findings.push(where_it_is(finding, owner));
    }
}

pub(super) fn ages(found: &Value, findings: &mut Vec<Finding>) {
    let mut seen = Vec::new();
    for database in list(&found["databases"]) {
        let mut data_keys = 0;
        for key in list(&database["key_ages"]) {
            let (kind, owner) = (text(&key["kind"]), owner(key));
            let age = key["age_seconds"].as_i64().unwrap_or(0);
            let limit = key["rotate_after_seconds"].as_i64();
            let is_overdue = limit.is_some_and(|limit| age > limit + OVERDUE);
            if kind == "data" {
                data_keys += usize::from(is_overdue);
                continue;
            }
            // All databases list those that belong to the cluster.
            if !seen.contains(&(kind, owner)) {
                seen.push((kind, owner));
                let is_old = kind == "master" && limit.is_none() && age > OLD;
                findings.extend(is_overdue.then(|| where_it_is(overdue(kind, owner), owner)));
                findings.extend(is_old.then(|| where_it_is(old(owner), owner)));
            }
        }
        if data_keys > 0 {
            let keys = count(data_keys, "data key");
            findings.push(
                Finding::new(
                    Warning,
                    "key-overdue",
                    format!("{keys} should have been rotated more than a week ago"),
                )
                .in_database(text(&database["name"]))
                .why("They are older than pagevault.rotate_data_key_after.")
                .cure(format!("SELECT pagevault.rotate_all_data_keys(); {LOOK}")),
            );
        }
    }
}

/// Why the server itself may not rotate.
const LOOK: &str = "see the server's log, pagevault.rotation_window, and failed jobs";

fn overdue(kind: &str, owner: Owner<'_>) -> Finding {
    let (whose, rotate) = match (kind, owner.0) {
        ("wal", _) => (String::new(), "SELECT pagevault.rotate_wal_key()".to_owned()),
        ("master", _) => (format!(" of {}", name(owner)), call("rotate", owner, "master_key", &[])),
        (_, "key group") => (format!(" of {}", name(owner)), call("rotate", owner, "key", &[])),
        _ => (format!(" of {}", name(owner)), "SELECT pagevault.rotate_database_key()".to_owned()),
    };
    Finding::new(
        Warning,
        "key-overdue",
        format!("the {kind} key{whose} should have been rotated more than a week ago"),
    )
    .why(format!("It is older than pagevault.rotate_{kind}_key_after."))
    .cure(format!("{rotate}; {LOOK}"))
}

fn old(owner: Owner<'_>) -> Finding {
    let rotate = call("rotate", owner, "master_key", &[]);
    let what = format!("the master key of {} is older than a year", name(owner));
    Finding::new(Notice, "master-key-old", what)
        .why("Nothing rotates it: pagevault.rotate_master_key_after is 0.")
        .cure(format!("{rotate}; or ALTER SYSTEM SET pagevault.rotate_master_key_after = '365d'; SELECT pg_reload_conf()"))
}

pub(super) fn room(found: &Value, findings: &mut Vec<Finding>) {
    let status = &found["cluster"]["status"];
    let (Some(keys), Some(most)) = (status["data_keys"].as_u64(), status["max_data_keys"].as_u64())
    else {
        return;
    };
    // More than 80 %, and more than 95 %.
    let severity = match (keys * 100).checked_div(most).unwrap_or(0) {
        0..=80 => return,
        81..=95 => Warning,
        _ => Critical,
    };
    findings.push(
        Finding::new(severity, "data-keys-run-out", format!("{keys} of {most} data keys are used"))
            .why("When none is left, encrypted relations cannot be created.")
            .cure(format!(
                "ALTER SYSTEM SET pagevault.max_data_keys = {}; then restart the server",
                most.saturating_mul(2).min(16_000_000)
            )),
    );
}
