//! The page: summary, findings, changes, and the order of all sections.

use serde_json::Value;

use super::compare::changes;
use super::data::{self, Share};
use super::html::{Html, percent, size, time};
use super::{keys, trail};
use crate::server::{list, plain, text};

const STYLE: &str = include_str!("style.css");

pub(super) fn make(report: &Value, earlier: Option<&Value>) -> String {
    let mut html = Html::new();
    // Even if a name were markup, no browser would load or run anything.
    html.raw("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    html.raw("<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n");
    html.raw("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n");
    html.element("title", &format!("Encryption report, {}", time(text(&report["made_at"]))));
    html.raw(&format!("<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n"));
    header(&mut html, report);
    summary(&mut html, report);
    findings(&mut html, report);
    if let Some(earlier) = earlier {
        compared(&mut html, earlier, report);
    }
    data::section(&mut html, report);
    elsewhere(&mut html, report);
    keys::section(&mut html, report);
    keys::providers(&mut html, report);
    jobs(&mut html, report);
    trail::section(&mut html, &report["audit"]);
    software(&mut html, report);
    settings(&mut html, report);
    html.raw("</main>\n</body>\n</html>\n");
    html.into_text()
}

fn header(html: &mut Html, report: &Value) {
    let server = &report["server"];
    html.raw("<header>\n");
    html.element("h1", "Encryption report");
    let role = if server["in_recovery"] == true { "standby" } else { "primary" };
    html.paragraph(&format!(
        "PostgreSQL {}, {role}, cluster {}. Made at {} UTC, by role \"{}\". Started at {} UTC.",
        text(&server["version"]),
        text(&server["cluster_id"]),
        time(text(&report["made_at"])),
        text(&server["role"]),
        time(text(&server["started_at"])),
    ));
    html.raw("</header>\n");
}

fn summary(html: &mut Html, report: &Value) {
    let share = Share::of_all(report);
    let class = |part, whole| match part {
        0 if whole > 0 => "bad",
        part if part == whole => "good",
        _ => "fair",
    };
    let count = |severity: &str| {
        list(&report["findings"]).iter().filter(|found| found["severity"] == severity).count()
    };
    let (critical, warnings) = (count("critical"), count("warning"));
    html.raw("<ul class=\"tiles\">\n");
    if share.bytes > 0 {
        let of = size(share.bytes);
        html.tile(
            class(share.encrypted, share.bytes),
            &percent(share.encrypted, share.bytes),
            &format!("of {of} that were looked at are encrypted{}", unseen(report)),
        );
        html.tile(
            class(share.proven, share.bytes),
            &percent(share.proven, share.bytes),
            "are proven to have no page in plaintext",
        );
        html.tile(
            class(share.authenticated, share.bytes),
            &percent(share.authenticated, share.bytes),
            "are protected against changes on disk",
        );
    }
    let wal = report["cluster"]["status"]["wal_encrypted"] == true;
    let (class, state) = if wal { ("good", "encrypted") } else { ("bad", "plaintext") };
    html.tile(class, state, "is the log of changes (WAL)");
    let class = match (critical, warnings) {
        (0, 0) => "good",
        (0, _) => "fair",
        _ => "bad",
    };
    html.tile(class, &critical.to_string(), &format!("critical findings, {warnings} warnings"));
    html.raw("</ul>\n");
}

/// What the shares of the summary do not cover.
fn unseen(report: &Value) -> String {
    match data::not_looked_at(report).count() {
        0 => String::new(),
        1 => "; 1 database was not looked at".to_owned(),
        number => format!("; {number} databases were not looked at"),
    }
}

fn findings(html: &mut Html, report: &Value) {
    html.section("What is missing or risky", "");
    let findings = list(&report["findings"]);
    if findings.is_empty() {
        return html.element_of("verdict good", "p", "Nothing was found.");
    }
    html.raw("<ul class=\"findings\">\n");
    for finding in findings {
        let class = match text(&finding["severity"]) {
            "critical" => "bad",
            "warning" => "fair",
            _ => "note",
        };
        html.raw(&format!("<li class=\"{class}\">"));
        html.element_of("severity", "span", text(&finding["severity"]));
        let what = match text(&finding["database"]) {
            "" => text(&finding["what"]).to_owned(),
            database => format!("database \"{database}\": {}", text(&finding["what"])),
        };
        html.element("b", &what);
        if !text(&finding["why"]).is_empty() {
            html.paragraph(text(&finding["why"]));
        }
        html.element_of("cure", "p", text(&finding["cure"]));
        html.raw("</li>\n");
    }
    html.raw("</ul>\n");
}

fn compared(html: &mut Html, earlier: &Value, report: &Value) {
    let since = time(text(&earlier["made_at"]));
    html.section("What has changed", &format!("Since the report of {since} UTC."));
    if earlier["server"]["cluster_id"] != report["server"]["cluster_id"] {
        html.element_of("verdict bad", "p", "The earlier report is of another cluster.");
    }
    let rows: Vec<_> = changes(earlier, report)
        .into_iter()
        .map(|change| vec![change.subject.to_owned(), change.name, change.what])
        .collect();
    html.table(&["subject", "name", "change"], &rows, "Nothing has changed but sizes and ages.");
}

/// Where data of relations is besides their files.
fn elsewhere(html: &mut Html, report: &Value) {
    html.section(
        "Where else data is",
        "Rows of tables are also in other files of the server, which are encrypted by settings of their own.",
    );
    let status = &report["cluster"]["status"];
    let settings = &report["cluster"]["settings"];
    let has_key = status["state"] != "no_master_key" && !status.is_null();
    let state = |encrypted: bool| if encrypted { "encrypted" } else { "plaintext" }.to_owned();
    let wal = status["wal_encrypted"] == true;
    let archive = text(&report["server"]["settings"]["archive_mode"]);
    let slots = list(&report["server"]["slots"]).len();
    let rows = [
        (
            "log of changes (WAL)",
            state(wal),
            "needed for recovery and standbys; contains all rows that were written",
        ),
        (
            "archive of the WAL",
            if matches!(archive, "off" | "") { "none".to_owned() } else { state(wal) },
            "as it was written: what was archived in plaintext stays so",
        ),
        (
            "temporary files",
            state(has_key && settings["pagevault.temp_encryption"] != "off"),
            "sorts and hashes of large queries, temporary tables",
        ),
        (
            "statistics and large objects",
            state(has_key && settings["pagevault.data_catalog_encryption"] != "off"),
            "in databases in which anything is encrypted",
        ),
        (
            "shared catalogs",
            state(settings["pagevault.shared_catalog_encryption"] == "on"),
            "names of databases and roles, hashes of passwords",
        ),
    ];
    let mut rows: Vec<_> = rows
        .into_iter()
        .map(|(what, state, why)| vec![what.to_owned(), state, why.to_owned()])
        .collect();
    if slots > 0 {
        rows.push(vec![
            "WAL kept for replication slots".to_owned(),
            state(wal),
            format!("{slots} slots; as it was written"),
        ]);
    }
    html.table(&["data", "state", ""], &rows, "");
}

fn jobs(html: &mut Html, report: &Value) {
    let rows: Vec<_> = list(&report["databases"])
        .iter()
        .flat_map(|database| {
            list(&database["rekey_jobs"]).iter().map(move |job| {
                vec![
                    text(&database["name"]).to_owned(),
                    job["relation"].as_str().unwrap_or("gone").to_owned(),
                    text(&job["kind"]).to_owned(),
                    text(&job["state"]).to_owned(),
                    text(&job["requested_by"]).to_owned(),
                    time(text(&job["requested_at"])),
                    time(text(&job["finished_at"])),
                ]
            })
        })
        .collect();
    html.section(
        "Jobs",
        "A job encrypts or decrypts existing data, or gives it a new data key, while it is in use.",
    );
    let heads = [
        "database",
        "relation",
        "kind",
        "state",
        "requested by",
        "requested at (UTC)",
        "finished at (UTC)",
    ];
    html.table(&heads, &rows, "The server knows of no job.");
}

fn software(html: &mut Html, report: &Value) {
    html.section(
        "Software",
        "Compare the checksums with those of the packages that should be installed.",
    );
    let status = &report["cluster"]["status"];
    let known = |value: &Value| if value.is_null() { "unknown".to_owned() } else { plain(value) };
    let module = match text(&status["cryptographic_module"]) {
        "" => "none that is validated (FIPS 140)".to_owned(),
        name => format!("{name}, certificate {}", known(&status["fips_certificate"])),
    };
    let mode = match status["fips_mode"].as_bool() {
        None => "not applicable",
        Some(true) => "on",
        Some(false) => "off",
    };
    let mut rows = vec![
        ("PostgreSQL", known(&report["server"]["version"])),
        ("pagevault, loaded", known(&status["version"])),
        ("pagevault, installed", known(&report["server"]["installed_version"])),
        ("SHA-256 of the library", known(&report["installed"]["library"])),
        ("SHA-256 of the helper that the server runs", known(&report["installed"]["helper"])),
        ("pagevault-keyring that made this report", known(&report["program"]["version"])),
        ("SHA-256 of it", known(&report["program"]["sha256"])),
        ("cryptographic module", module),
        ("FIPS mode", mode.to_owned()),
    ];
    if !report["server"]["settings"]["data_checksums"].is_null() {
        rows.push(("data checksums", known(&report["server"]["settings"]["data_checksums"])));
    }
    let rows: Vec<_> = rows.into_iter().map(|(what, value)| vec![what.to_owned(), value]).collect();
    html.table(&["", ""], &rows, "");
}

fn settings(html: &mut Html, report: &Value) {
    html.section("Settings", "");
    let rows: Vec<_> = report["cluster"]["settings"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(name, value)| vec![name.clone(), text(value).to_owned()])
        .collect();
    html.details("All settings of pagevault", &["setting", "value"], &rows);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Every text of a report is hostile, and appears in the page.
    #[test]
    fn nothing_in_a_report_is_markup() {
        let evil = "<img src=x onerror=alert(1)>\"'&";
        let report = json!({
            "made_at": evil,
            "server": {"version": evil, "cluster_id": evil, "role": evil, "slots": [evil],
                "settings": {"archive_mode": evil, "data_checksums": evil}},
            "cluster": {
                "status": {"version": evil, "cryptographic_module": evil},
                "settings": {evil: evil},
                "providers": [{"provider": evil, "kind": evil, "last_error": evil,
                    "master_key_versions": {evil: 1}}],
                "database_keys": [{"scope": "database", "database": evil, "provider": evil}],
                "key_groups": [{"key_group": evil, "databases": [evil]}],
            },
            "databases": [
                {"name": evil, "pages": [{"state": evil, "pages": 1}],
                 "relations": [{"relation": evil, "kind": evil, "bytes": 1, "encrypted": true,
                     "cipher": evil, "key_group": evil},
                     {"relation": "t", "bytes": 1, "encrypted": false}],
                 "drift": [{"relation": "t", "reason": evil, "fix": evil}],
                 "rekey_jobs": [{"relation": evil, "kind": evil}],
                 "key_ages": [{"kind": evil, "age_seconds": 1e300}],
                 "former_keys": [{"kind": evil, "needed_for": evil}]},
                {"name": evil, "error": evil},
            ],
            "findings": [{"severity": evil, "database": evil, "what": evil, "cure": evil}],
            "audit": {"verdict": evil, "counts": [{"action": evil}], "newest": [{"role": evil}]},
            "program": {"version": evil},
        });
        let page = make(&report, Some(&json!({"made_at": evil, "databases": [{"name": evil}]})));
        assert!(!page.contains("<img") && !page.contains("onerror=alert(1)>"), "{page}");
        assert!(page.matches("&lt;img").count() > 50);
        assert!(page.ends_with("</html>\n"));
        assert!(page.contains("are encrypted; 1 database was not looked at"), "{page}");
        assert_eq!(page.matches("<table>").count(), page.matches("</table>").count());
    }

    #[test]
    fn a_report_of_nothing_is_a_page() {
        let page = make(&json!({}), None);
        assert!(page.contains("Nothing was found") && page.ends_with("</html>\n"));
        assert!(!page.contains("NaN") && !page.contains("null"), "{page}");
    }
}
