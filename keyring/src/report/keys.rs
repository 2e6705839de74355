//! The sections of a report about keys and their providers.

use serde_json::Value;

use super::html::{Html, time};
use super::plots::{self, Row};
use crate::server::{list, text};

const DAY: f64 = 86_400.0;

pub(super) fn section(html: &mut Html, report: &Value) {
    html.section(
        "Keys",
        "A master key stays with a key provider, outside the server. It wraps database keys, and these wrap one data key for each file. Rotation replaces a key by a new one.",
    );
    ages(html, report);
    html.element("h3", "Database keys, and the master keys that wrap them");
    let rows: Vec<_> = list(&report["cluster"]["database_keys"])
        .iter()
        .map(|key| {
            vec![
                owner(key),
                key["version"].to_string(),
                time(text(&key["wrapped_at"])),
                text(&key["provider"]).to_owned(),
                text(&key["master_key"]).to_owned(),
                key["master_key_version"].to_string(),
                text(&key["state"]).to_owned(),
            ]
        })
        .collect();
    let heads =
        ["key of", "version", "wrapped at (UTC)", "provider", "master key", "its version", "state"];
    html.table(&heads, &rows, "There is no key.");
    html.paragraph("Each rotation of a database key has made a version; each rotation of a master key, a new time.");
    former(html, report);
    groups(html, report);
}

/// Whose a key is, as people say it.
fn owner(key: &Value) -> String {
    match text(&key["scope"]) {
        "database" => format!("database \"{}\"", text(&key["database"])),
        "key group" => format!("key group \"{}\"", text(&key["key_group"])),
        _ => "cluster".to_owned(),
    }
}

/// An age in seconds with its limit, if there is one.
struct Age {
    name: String,
    seconds: f64,
    limit: Option<f64>,
}

/// Keys of the cluster, and the oldest data key of each database.
fn ages_of(report: &Value) -> Vec<Age> {
    let mut ages: Vec<Age> = Vec::new();
    for database in list(&report["databases"]) {
        let mut oldest: Option<Age> = None;
        for key in list(&database["key_ages"]) {
            let seconds = key["age_seconds"].as_f64().unwrap_or(0.0).max(0.0);
            let limit = key["rotate_after_seconds"].as_f64().filter(|limit| *limit > 0.0);
            let kind = text(&key["kind"]);
            if kind == "data" {
                let name = format!("oldest data key, {}", text(&database["name"]));
                if oldest.as_ref().is_none_or(|age| age.seconds < seconds) {
                    oldest = Some(Age { name, seconds, limit });
                }
                continue;
            }
            let name = match kind {
                "wal" => "WAL key".to_owned(),
                kind => format!("{kind} key, {}", owner(key)),
            };
            // All databases list these.
            if !ages.iter().any(|age| age.name == name) {
                ages.push(Age { name, seconds, limit });
            }
        }
        ages.extend(oldest);
    }
    ages
}

fn ages(html: &mut Html, report: &Value) {
    /// Where all limits are, so that keys which are overdue go beyond.
    const LIMIT: f64 = 0.75;
    let rows: Vec<_> = ages_of(report)
        .into_iter()
        .map(|age| {
            let part = age.limit.map_or(0.0, |limit| LIMIT * age.seconds / limit);
            let number = match age.limit {
                Some(limit) => format!("{} of {}", days(age.seconds), days(limit)),
                None => format!("{}, no limit", days(age.seconds)),
            };
            Row {
                name: age.name,
                parts: vec![(if part >= LIMIT { "due" } else { "young" }, part)],
                mark: age.limit.map(|_| LIMIT),
                number,
            }
        })
        .collect();
    if rows.is_empty() {
        return html.element_of("empty", "p", "There are no keys in use.");
    }
    html.raw(&plots::bars("Ages of keys, and the ages at which they are rotated", &rows));
    html.raw(&plots::legend(&[
        ("young", "age, as a part of its limit"),
        ("due", "age, when it is due for rotation"),
        ("limit", "limit: the age at which the server rotates it"),
    ]));
}

fn days(seconds: f64) -> String {
    let days = (seconds / DAY).floor();
    format!("{days} d")
}

fn former(html: &mut Html, report: &Value) {
    let mut rows: Vec<Vec<String>> = Vec::new();
    for database in list(&report["databases"]) {
        for keys in list(&database["former_keys"]) {
            let whose = match text(&keys["kind"]) {
                "data" => format!("files of \"{}\"", text(&database["name"])),
                _ => owner(keys),
            };
            let row = vec![
                text(&keys["kind"]).to_owned(),
                whose,
                keys["keys"].to_string(),
                keys["needed_for"].as_str().unwrap_or("nothing: it will be forgotten").to_owned(),
            ];
            if !rows.contains(&row) {
                rows.push(row);
            }
        }
    }
    let heads = ["kind", "of", "keys", "still needed for"];
    html.details("Keys that were replaced, and are still there", &heads, &rows);
}

fn groups(html: &mut Html, report: &Value) {
    let groups = list(&report["cluster"]["key_groups"]);
    if groups.is_empty() {
        return;
    }
    html.element("h3", "Key groups");
    html.paragraph("Relations of a group are under a key of their own, whose master key another party may hold.");
    let rows: Vec<_> = groups
        .iter()
        .map(|group| {
            let databases: Vec<_> = list(&group["databases"]).iter().map(text).collect();
            vec![
                text(&group["key_group"]).to_owned(),
                text(&group["state"]).to_owned(),
                time(text(&group["created_at"])),
                databases.join(", "),
                group["relation_files"].to_string(),
            ]
        })
        .collect();
    html.table(&["group", "state", "created (UTC)", "databases", "files"], &rows, "");
}

pub(super) fn providers(html: &mut Html, report: &Value) {
    html.section(
        "Key providers",
        "Services or devices that hold master keys. The server asks them at its start, and from time to time whether they would still answer.",
    );
    let rows: Vec<_> = list(&report["cluster"]["providers"])
        .iter()
        .map(|provider| {
            let health = match (&provider["reachable"], provider["consecutive_failures"].as_u64()) {
                (Value::Null, _) => "not asked yet",
                (Value::Bool(false), _) => "unreachable",
                (_, Some(1..)) => "refuses",
                _ => "answers",
            };
            let keys = provider["master_key_versions"].as_object();
            let keys: Vec<_> = keys
                .into_iter()
                .flatten()
                .map(|(name, version)| format!("{name} (version {version})"))
                .collect();
            vec![
                text(&provider["provider"]).to_owned(),
                text(&provider["kind"]).to_owned(),
                if provider["in_use"] == true { "yes" } else { "no" }.to_owned(),
                health.to_owned(),
                time(text(&provider["last_success_at"])),
                text(&provider["last_error"]).to_owned(),
                keys.join(", "),
            ]
        })
        .collect();
    let heads =
        ["provider", "kind", "in use", "health", "last success (UTC)", "last error", "master keys"];
    html.table(&heads, &rows, "There is no provider.");
}
