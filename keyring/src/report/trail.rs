//! The audit trail in a report: who did what. Any role can write lines into a log that look like
//! those of the trail; so the report says whether they were verified.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::html::{Html, time};
use crate::access::Access;
use crate::audit::{self, Cluster};
use crate::failure::Failure;
use crate::server::{list, text};

/// Lines of operations that a report has; the newest.
const LINES: usize = 500;

/// Reads the trail from logs, and verifies it: with the keys of a data directory, if it is given.
///
/// # Errors
/// Those of [`audit::verify`].
pub(crate) fn read(
    files: &[PathBuf],
    data_directory: Option<&Path>,
    access: Access,
) -> Result<Value, Failure> {
    let cluster = data_directory.map(|data_directory| Cluster { data_directory, access });
    let mut verdict = Vec::new();
    let (well, accepted) = audit::accepted(files, cluster, &mut verdict)?;
    // In their order; a log that is given twice has every line twice.
    let mut lines = BTreeMap::new();
    audit::each_candidate(files, |candidate| {
        if let Some(place) = accepted.place(candidate)
            && let Ok(line) = serde_json::from_str::<Value>(candidate)
            && line["role"].is_string()
            && line["outcome"] != "attempted"
        {
            lines.insert(place, line);
        }
    })?;
    let mut lines: Vec<_> = lines.into_values().collect();
    let mut counts: BTreeMap<(String, String, String), u64> = BTreeMap::new();
    for line in &lines {
        let part = |name: &str| text(&line[name]).to_owned();
        *counts.entry((part("action"), part("role"), part("outcome"))).or_default() += 1;
    }
    let counts: Vec<_> = counts
        .into_iter()
        .map(|((action, role, outcome), lines)| {
            json!({"action": action, "role": role, "outcome": outcome, "lines": lines})
        })
        .collect();
    let first = lines.len().saturating_sub(LINES);
    Ok(json!({
        "verdict": String::from_utf8_lossy(&verdict),
        "nothing_wrong": well,
        "macs_verified": data_directory.is_some(),
        "counts": counts,
        "newest": lines.split_off(first),
    }))
}

pub(super) fn section(html: &mut Html, trail: &Value) {
    html.section(
        "Who did what",
        "Every operation that changes what is protected, or who can read it, is recorded before and after it.",
    );
    if trail.is_null() {
        return html.element_of(
            "empty",
            "p",
            "This report was made without the audit trail (option --audit).",
        );
    }
    let (class, words) = match (trail["nothing_wrong"] == true, trail["macs_verified"] == true) {
        (false, _) => ("bad", "Lines are missing, changed or forged. What follows may be wrong."),
        (true, true) => ("good", "The trail was verified: no line is missing, changed or forged."),
        (true, false) => (
            "fair",
            "The links between lines are whole. Whether the server wrote them was not verified (option -D).",
        ),
    };
    html.element_of(&format!("verdict {class}"), "p", words);
    html.lines(text(&trail["verdict"]));
    let cells = |row: &Value, names: &[&str]| -> Vec<String> {
        names.iter().map(|name| text(&row[*name]).to_owned()).collect()
    };
    let counts: Vec<_> = list(&trail["counts"])
        .iter()
        .map(|row| {
            let mut cells = cells(row, &["action", "role", "outcome"]);
            cells.push(row["lines"].to_string());
            cells
        })
        .collect();
    let heads = ["operation", "role", "outcome", "times"];
    html.table(&heads, &counts, "No operation of a role is in these files.");
    let newest: Vec<_> = list(&trail["newest"])
        .iter()
        .rev()
        .map(|line| {
            let mut row = vec![time(text(&line["time"]))];
            row.extend(cells(line, &["role", "database", "action", "object", "outcome"]));
            row
        })
        .collect();
    let heads = ["time (UTC)", "role", "database", "operation", "object", "outcome"];
    html.details("The newest operations", &heads, &newest);
}
