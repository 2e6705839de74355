//! The sections of a report about data: what is encrypted, what is not, and why.

use std::collections::BTreeMap;

use serde_json::Value;

use super::html::{Html, percent, size};
use super::plots::{self, Row};
use crate::server::{list, text};

/// Bytes and relations of a database or of all.
#[derive(Clone, Copy, Default)]
pub(super) struct Share {
    pub(super) relations: u64,
    pub(super) encrypted_relations: u64,
    pub(super) bytes: u64,
    pub(super) encrypted: u64,
    /// Of the encrypted: in files that are known to have no page in plaintext.
    pub(super) proven: u64,
    /// Of these: in files whose pages have a tag.
    pub(super) authenticated: u64,
}

impl Share {
    pub(super) fn of(database: &Value) -> Self {
        let mut share = Self::default();
        for relation in list(&database["relations"]) {
            let bytes = relation["bytes"].as_u64().unwrap_or(0);
            let when = |condition: bool| if condition { bytes } else { 0 };
            let encrypted = relation["encrypted"] == true;
            share.relations += 1;
            share.encrypted_relations += u64::from(encrypted);
            share.bytes += bytes;
            share.encrypted += when(encrypted);
            share.proven += when(encrypted && relation["sealed_only"] == true);
            share.authenticated += when(encrypted && relation["authenticated"] == true);
        }
        share
    }

    pub(super) fn of_all(report: &Value) -> Self {
        list(&report["databases"]).iter().map(Self::of).fold(Self::default(), |sum, one| Self {
            relations: sum.relations + one.relations,
            encrypted_relations: sum.encrypted_relations + one.encrypted_relations,
            bytes: sum.bytes + one.bytes,
            encrypted: sum.encrypted + one.encrypted,
            proven: sum.proven + one.proven,
            authenticated: sum.authenticated + one.authenticated,
        })
    }
}

pub(super) fn section(html: &mut Html, report: &Value) {
    html.section(
        "What is encrypted",
        "Tables, and what belongs to them, are stored in files of pages of 8 kB. A file is proven if the server knows that none of its pages is in plaintext, and refuses any. Its pages are authenticated if each has a tag, so that one that was changed or moved on disk is refused, too.",
    );
    let mut seen: Vec<_> = list(&report["databases"])
        .iter()
        .filter(|database| !list(&database["relations"]).is_empty())
        .map(|database| (database, Share::of(database)))
        .collect();
    seen.sort_by_key(|(_, share)| std::cmp::Reverse(share.bytes));
    let rows: Vec<_> = seen.iter().map(|(database, share)| bar(database, share)).collect();
    if !rows.is_empty() {
        html.raw(&plots::bars("Share of bytes that are encrypted, by database", &rows));
        html.raw(&plots::legend(&[
            ("authenticated", "encrypted, every page has a tag"),
            ("proven", "encrypted, no page is in plaintext"),
            ("encrypted", "encrypted from now on; older pages are not proven"),
            ("plaintext", "plaintext"),
        ]));
    }
    let rows: Vec<_> = seen.iter().map(|(database, share)| sums(database, share)).collect();
    let heads =
        ["database", "relations", "encrypted ones", "size", "encrypted", "proven", "authenticated"];
    html.table(&heads, &rows, "No database with the extension pagevault was seen.");
    for (database, _) in &seen {
        pages(html, database);
    }
    html.element("h3", "Encrypted");
    by_cipher(html, &seen);
    for (database, share) in &seen {
        let name = text(&database["name"]);
        let summary = format!("Database \"{name}\": {} encrypted", share.encrypted_relations);
        html.details(&summary, &RELATION, &encrypted(database));
    }
    html.element("h3", "Not encrypted, and why");
    let unencrypted = seen.iter().filter(|(_, share)| share.relations > share.encrypted_relations);
    let mut any = false;
    for (database, share) in unencrypted {
        any = true;
        let name = text(&database["name"]);
        let number = share.relations - share.encrypted_relations;
        let summary = format!("Database \"{name}\": {number} in plaintext");
        html.details(&summary, &["relation", "kind", "size", "why"], &plaintext(database));
    }
    if !any {
        html.element_of("empty", "p", "Every relation that was seen is encrypted.");
    }
    drift(html, &seen);
    unseen(html, report);
}

fn bar(database: &Value, share: &Share) -> Row {
    let part = |bytes: u64| bytes as f64 / share.bytes.max(1) as f64;
    Row {
        name: text(&database["name"]).to_owned(),
        parts: vec![
            ("authenticated", part(share.authenticated)),
            ("proven", part(share.proven - share.authenticated)),
            ("encrypted", part(share.encrypted - share.proven)),
            ("plaintext", part(share.bytes - share.encrypted)),
        ],
        mark: None,
        number: format!("{} of {}", percent(share.encrypted, share.bytes), size(share.bytes)),
    }
}

fn sums(database: &Value, share: &Share) -> Vec<String> {
    vec![
        text(&database["name"]).to_owned(),
        share.relations.to_string(),
        share.encrypted_relations.to_string(),
        size(share.bytes),
        percent(share.encrypted, share.bytes),
        percent(share.proven, share.bytes),
        percent(share.authenticated, share.bytes),
    ]
}

/// What reading all files has found, if they were read.
fn pages(html: &mut Html, database: &Value) {
    let states = list(&database["pages"]);
    if states.is_empty() {
        return;
    }
    let counts: Vec<_> = states
        .iter()
        .map(|state| format!("{} {}", state["pages"], text(&state["state"])))
        .collect();
    let name = text(&database["name"]);
    html.paragraph(&format!(
        "All files of database \"{name}\" were read for this report. Their pages: {}.",
        counts.join(", ")
    ));
}

fn by_cipher(html: &mut Html, seen: &[(&Value, Share)]) {
    let mut sums: BTreeMap<(&str, bool), (u64, u64)> = BTreeMap::new();
    for relation in seen.iter().flat_map(|(database, _)| list(&database["relations"])) {
        if relation["encrypted"] == true {
            let authenticated = relation["authenticated"] == true;
            let sum = sums.entry((text(&relation["cipher"]), authenticated)).or_default();
            sum.0 += 1;
            sum.1 += relation["bytes"].as_u64().unwrap_or(0);
        }
    }
    let rows: Vec<_> = sums
        .into_iter()
        .map(|((cipher, authenticated), (relations, bytes))| {
            let tag = if authenticated { "required in every page" } else { "not required" };
            vec![cipher.to_owned(), tag.to_owned(), relations.to_string(), size(bytes)]
        })
        .collect();
    html.table(&["cipher", "tag", "relations", "size"], &rows, "No relation is encrypted.");
}

const RELATION: [&str; 8] =
    ["relation", "kind", "size", "cipher", "key version", "proven", "authenticated", "key group"];

fn encrypted(database: &Value) -> Vec<Vec<String>> {
    let yes = |value: &Value| if *value == true { "yes" } else { "no" }.to_owned();
    list(&database["relations"])
        .iter()
        .filter(|relation| relation["encrypted"] == true)
        .map(|relation| {
            vec![
                text(&relation["relation"]).to_owned(),
                kind(relation).to_owned(),
                size(relation["bytes"].as_u64().unwrap_or(0)),
                text(&relation["cipher"]).to_owned(),
                relation["data_key_version"].to_string(),
                yes(&relation["sealed_only"]),
                yes(&relation["authenticated"]),
                text(&relation["key_group"]).to_owned(),
            ]
        })
        .collect()
}

fn kind(relation: &Value) -> &str {
    match text(&relation["kind"]) {
        "r" => "table",
        "i" => "index",
        "t" => "large values",
        "m" => "materialized view",
        "S" => "sequence",
        other => other,
    }
}

fn plaintext(database: &Value) -> Vec<Vec<String>> {
    let expected: BTreeMap<&str, &str> = list(&database["drift"])
        .iter()
        .map(|row| (text(&row["relation"]), text(&row["reason"])))
        .collect();
    list(&database["relations"])
        .iter()
        .filter(|relation| relation["encrypted"] != true)
        .map(|relation| {
            let name = text(&relation["relation"]);
            let why = match (expected.get(name), text(&relation["label"])) {
                (Some(reason), _) => format!("it should be encrypted, by {reason}"),
                (None, "plaintext") => "its label says plaintext".to_owned(),
                (None, _) => "no label or setting requires encryption".to_owned(),
            };
            let bytes = size(relation["bytes"].as_u64().unwrap_or(0));
            vec![name.to_owned(), kind(relation).to_owned(), bytes, why]
        })
        .collect()
}

fn drift(html: &mut Html, seen: &[(&Value, Share)]) {
    html.element("h3", "Different from what is required");
    let rows: Vec<_> = seen
        .iter()
        .flat_map(|(database, _)| list(&database["drift"]).iter().map(move |row| (database, row)))
        .map(|(database, row)| {
            let mut cells = vec![text(&database["name"]).to_owned()];
            let names = ["relation", "expected", "actual", "reason", "fix"];
            cells.extend(names.map(|name| text(&row[name]).to_owned()));
            cells
        })
        .collect();
    let heads = ["database", "relation", "required", "is", "by", "command that fixes it"];
    html.table(&heads, &rows, "Nothing: every relation is as labels and settings require.");
}

/// Databases of which the report knows nothing.
pub(super) fn not_looked_at(report: &Value) -> impl Iterator<Item = &Value> {
    list(&report["databases"]).iter().filter(|database| !database["relations"].is_array())
}

fn unseen(html: &mut Html, report: &Value) {
    let rows: Vec<_> = not_looked_at(report)
        .map(|database| {
            let why = match (text(&database["error"]), &database["labels"]) {
                ("", Value::Null) => "it admits no connections",
                ("", _) => "it has no extension pagevault",
                (error, _) => error,
            };
            let bytes = database["bytes"].as_u64().map_or(String::new(), size);
            vec![text(&database["name"]).to_owned(), bytes, why.to_owned()]
        })
        .collect();
    if !rows.is_empty() {
        html.element("h3", "Databases that were not looked at");
        html.table(&["database", "size", "why"], &rows, "");
    }
}
