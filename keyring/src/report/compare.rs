//! What has changed between two reports. The earlier one is a file: it may contain anything.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::server::{list, plain, text};

/// One difference.
#[derive(Debug, PartialEq)]
pub(super) struct Change {
    pub(super) subject: &'static str,
    pub(super) name: String,
    pub(super) what: String,
}

/// Facts of a report by name: each a text.
type Facts = BTreeMap<(&'static str, String), BTreeMap<String, String>>;

/// The differences, by subject and name.
pub(super) fn changes(old: &Value, new: &Value) -> Vec<Change> {
    let (old, new) = (facts(old), facts(new));
    let mut changes = Vec::new();
    for (key, before) in &old {
        match new.get(key) {
            None => changes.push(change(key, "gone".to_owned())),
            Some(after) => {
                let differs =
                    after.iter().filter(|(field, value)| before.get(*field) != Some(value));
                changes.extend(differs.map(|(field, value)| {
                    let was = before.get(field).map_or("", String::as_str);
                    change(
                        key,
                        format!("{field}: {} \u{2192} {}", or_nothing(was), or_nothing(value)),
                    )
                }));
            }
        }
    }
    let added = new.keys().filter(|key| !old.contains_key(*key));
    changes.extend(added.map(|key| change(key, "new".to_owned())));
    changes.sort_by(|a, b| (a.subject, &a.name).cmp(&(b.subject, &b.name)));
    changes
}

fn change((subject, name): &(&'static str, String), what: String) -> Change {
    Change { subject, name: name.clone(), what }
}

fn or_nothing(text: &str) -> &str {
    if text.is_empty() { "nothing" } else { text }
}

fn facts(report: &Value) -> Facts {
    let mut facts = Facts::new();
    let mut add = |subject, name: String, row: &Value, fields: &[&str]| {
        let fields = fields.iter().map(|field| ((*field).to_owned(), plain(&row[*field])));
        facts.insert((subject, name), fields.collect());
    };
    for database in list(&report["databases"]) {
        let name = text(&database["name"]);
        add("database", name.to_owned(), database, &["extension_version"]);
        for row in list(&database["relations"]) {
            let fields =
                ["encrypted", "cipher", "label", "sealed_only", "authenticated", "key_group"];
            add("relation", format!("{name}: {}", text(&row["relation"])), row, &fields);
        }
    }
    let cluster = &report["cluster"];
    for row in list(&cluster["providers"]) {
        add("provider", text(&row["provider"]).to_owned(), row, &["kind", "in_use", "reachable"]);
    }
    for row in list(&cluster["database_keys"]) {
        let names = ["scope", "database", "key_group", "provider", "master_key"];
        let mut name: Vec<_> = names.iter().map(|name| text(&row[*name])).collect();
        name.retain(|part| !part.is_empty());
        let name = format!("{}, version {}", name.join(" "), plain(&row["version"]));
        add("database key", name, row, &["master_key_version", "state", "wrapped_at"]);
    }
    for row in list(&cluster["key_groups"]) {
        add("key group", text(&row["key_group"]).to_owned(), row, &["state", "key_version"]);
    }
    for (name, value) in cluster["settings"].as_object().into_iter().flatten() {
        facts.insert(("setting", name.clone()), one("value", value));
    }
    let status =
        ["state", "wal_encrypted", "cryptographic_module", "fips_certificate", "fips_mode"];
    for name in status {
        facts.insert(
            ("state of the cluster", name.to_owned()),
            one("value", &cluster["status"][name]),
        );
    }
    for (name, value) in [
        ("version of PostgreSQL", &report["server"]["version"]),
        ("version of pagevault", &cluster["status"]["version"]),
        ("version of pagevault-keyring", &report["program"]["version"]),
        ("SHA-256 of the library", &report["installed"]["library"]),
        ("SHA-256 of the helper", &report["installed"]["helper"]),
        ("cluster", &report["server"]["cluster_id"]),
    ] {
        facts.insert(("software", name.to_owned()), one("value", value));
    }
    for row in list(&report["findings"]) {
        let name = format!("{} {}", text(&row["database"]), text(&row["what"]));
        facts.insert(("finding", name.trim().to_owned()), BTreeMap::new());
    }
    facts
}

fn one(name: &str, value: &Value) -> BTreeMap<String, String> {
    BTreeMap::from([(name.to_owned(), plain(value))])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report(relations: &Value, settings: &Value) -> Value {
        json!({
            "cluster": {"settings": settings, "status": {"wal_encrypted": false}},
            "databases": [{"name": "app", "relations": relations}],
        })
    }

    #[test]
    fn differences_are_named_and_nothing_else() {
        let old = report(
            &json!([{"relation": "a", "encrypted": false, "bytes": 1}, {"relation": "b"}]),
            &json!({"pagevault.cipher": "auto"}),
        );
        assert!(changes(&old, &old).is_empty());
        let mut new = report(
            &json!([{"relation": "a", "encrypted": true, "bytes": 2}, {"relation": "c"}]),
            &json!({"pagevault.cipher": "aes-128-xts"}),
        );
        new["installed"] = json!({"library": "5e"});
        let shown: Vec<_> = changes(&old, &new)
            .into_iter()
            .map(|change| format!("{} {}: {}", change.subject, change.name, change.what))
            .collect();
        assert_eq!(
            shown,
            [
                "relation app: a: encrypted: false \u{2192} true",
                "relation app: b: gone",
                "relation app: c: new",
                "setting pagevault.cipher: value: auto \u{2192} aes-128-xts",
                "software SHA-256 of the library: value: nothing \u{2192} 5e",
            ]
        );
        assert!(!changes(&json!([1]), &new).is_empty());
    }
}
