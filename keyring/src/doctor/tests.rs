use serde_json::{Value, json};

use super::{Severity, examine};

/// A server in which there is nothing to find.
fn sound() -> Value {
    json!({
        "server": {
            "is_local": true, "up_seconds": 900, "revalidate_seconds": 300, "slots": [],
            "installed_version": "1.0.0",
            "at_next_start": {"shared_preload_libraries": "pagevault"},
            "settings": {
                "shared_preload_libraries": "pagevault", "max_worker_processes": "16",
                "max_parallel_workers": "8", "pagevault.rekey_workers": "2",
                "data_checksums": "on", "full_page_writes": "on", "archive_mode": "off",
                "data_directory": "/srv/it's",
            },
        },
        "cluster": {
            "status": {
                "version": "1.0.0", "state": "unlocked", "locked_database_keys": 0,
                "data_keys": 80, "max_data_keys": 100, "wal_encrypted": true,
                "last_escrow_at": null, "database_keys_not_in_escrow": 1,
                "last_revalidation_seconds_ago": 100, "one_master_key_left": [],
                "wal_error": null, "audit_error": null,
            },
            "settings": {
                "pagevault.temp_encryption": "auto", "pagevault.data_catalog_encryption": "on",
                "pagevault.anchor": "/etc/a", "pagevault.rekey_workers": "2",
            },
            "providers": [{"provider": "it's", "in_use": true, "reachable": true,
                "consecutive_failures": 0}],
            "database_keys": [
                {"scope": "cluster", "version": 1, "state": "unlocked"},
                {"scope": "cluster", "version": 2, "state": "unlocked"},
                {"scope": "cluster", "version": 2, "state": "unlocked"},
                {"scope": "key group", "key_group": "acme", "version": 1, "state": "unlocked"},
            ],
        },
        "databases": [
            {"name": "app", "extension_version": "1.0.0", "drift": [], "rekey_jobs": [],
             "relations": [{"encrypted": true}], "key_ages": [
                {"kind": "master", "scope": "cluster", "age_seconds": 1000},
                {"kind": "data", "age_seconds": 86_400, "rotate_after_seconds": 86_000}]},
            {"name": "other", "extension_version": null, "labels": 0},
        ],
        "host": {
            "version": "1.0.0", "memory": {"locked_kb": 64, "core_dumps": false},
            "key_files": [{"path": "/etc/keys", "mode": 0o600, "in_data_directory": false}],
        },
    })
}

/// The names of what is found after these changes.
fn found(changes: &[(&str, Value)]) -> Vec<&'static str> {
    let mut document = sound();
    for (place, value) in changes {
        let (parent, name) = place.rsplit_once('/').unwrap();
        document.pointer_mut(parent).unwrap()[name] = value.clone();
    }
    let findings = examine(&document);
    assert!(findings.iter().all(|finding| !finding.cure.is_empty()), "{findings:?}");
    assert!(findings.is_sorted_by(|a, b| a.severity >= b.severity), "{findings:?}");
    findings.iter().map(|finding| finding.check).collect()
}

#[test]
fn in_a_sound_server_nothing_is_found() {
    assert!(found(&[]).is_empty());
    assert!(found(&[("/server/is_local", json!(false)), ("/host/memory", Value::Null)]).is_empty());
}

#[test]
fn each_check_finds_its_own() {
    let year = 366 * 86_400;
    let settings = "/server/settings";
    let status = "/cluster/status";
    let app = "/databases/0";
    let cases: &[(String, Value, &[&str])] = &[
        (format!("{settings}/max_worker_processes"), json!("8"), &["few-workers"]),
        (format!("{settings}/data_checksums"), json!("off"), &["checksums-off"]),
        (format!("{settings}/full_page_writes"), json!("off"), &["full-page-writes-off"]),
        (
            "/server/at_next_start/shared_preload_libraries".into(),
            json!("a, \"b\""),
            &["library-removed"],
        ),
        (format!("{settings}/shared_preload_libraries"), json!(""), &["library-not-loaded"]),
        ("/server/installed_version".into(), json!("1.1.0"), &["library-outdated"]),
        ("/host/version".into(), json!("0.9.0"), &["program-differs"]),
        (format!("{app}/extension_version"), json!("0.9.0"), &["extension-outdated"]),
        ("/databases/1/labels".into(), json!(2), &["extension-missing"]),
        ("/databases/1/reached".into(), json!(1), &["extension-missing"]),
        (
            "/cluster/encrypted_databases".into(),
            json!([{"database": "app", "encrypted_files": 7}, {"database": "other", "encrypted_files": 1}]),
            &["extension-missing"],
        ),
        ("/databases/1/error".into(), json!("denied"), &["database-not-seen"]),
        (format!("{status}/state"), json!("no_master_key"), &["no-master-key"]),
        (format!("{status}/locked_database_keys"), json!(1), &["keys-locked"]),
        (format!("{status}/data_keys"), json!(81), &["data-keys-run-out"]),
        (format!("{status}/one_master_key_left"), json!(["cluster"]), &["one-master-key-left"]),
        (format!("{status}/last_escrow_at"), json!("2026"), &["escrow-outdated"]),
        (format!("{status}/last_revalidation_seconds_ago"), json!(9999), &["revalidation-overdue"]),
        ("/server/revalidate_seconds".into(), json!(0), &["providers-not-asked"]),
        (format!("{status}/wal_error"), json!("no"), &["wal-not-as-wanted"]),
        (format!("{status}/audit_error"), json!("no"), &["audit-trail"]),
        (format!("{status}/wal_encrypted"), json!(false), &["wal-plaintext"]),
        ("/cluster/database_keys/1/version".into(), json!(3), &["one-master-key"]),
        ("/cluster/database_keys/2/state".into(), json!("revoked"), &["key-revoked"]),
        (
            "/cluster/settings/pagevault.temp_encryption".into(),
            json!("off"),
            &["temporary-plaintext"],
        ),
        (
            "/cluster/settings/pagevault.data_catalog_encryption".into(),
            json!("off"),
            &["statistics-plaintext"],
        ),
        ("/server/settings/archive_mode".into(), json!("always"), &["archive-always"]),
        ("/cluster/settings/pagevault.anchor".into(), json!(""), &["no-anchor"]),
        (format!("{app}/relations"), json!([]), &["nothing-encrypted"]),
        (format!("{app}/drift"), json!([{"relation": "t", "fix": "f"}]), &["drift"]),
        (format!("{app}/rekey_jobs"), json!([{"job": 1, "state": "failed"}]), &["job-unfinished"]),
        (format!("{app}/rekey_jobs"), json!([{"job": 1, "state": "done"}]), &[]),
        (
            format!("{app}/rekey_jobs"),
            json!([{"job": 1, "relation": "t", "state": "cancelled"}, {"job": 2, "relation": "t", "state": "done"}]),
            &[],
        ),
        (format!("{app}/key_ages/0/age_seconds"), json!(year), &["master-key-old"]),
        (format!("{app}/key_ages/1/age_seconds"), json!(year), &["key-overdue"]),
        ("/cluster/providers/0/consecutive_failures".into(), json!(1), &["provider-refuses"]),
        ("/host/memory/locked_kb".into(), json!(0), &["memory-not-locked"]),
        ("/host/memory/core_dumps".into(), json!(true), &["core-dumps"]),
        ("/host/key_files/0/mode".into(), json!(0o640), &["key-file-open"]),
        (
            "/host/key_files/0/in_data_directory".into(),
            json!(true),
            &["key-file-in-data-directory"],
        ),
    ];
    let page = include_str!("../../../docs/doctor.md");
    for (place, value, expected) in cases {
        assert!(expected.iter().all(|check| page.contains(&format!("`{check}`"))), "{expected:?}");
        assert_eq!(found(&[(place, value.clone())]), *expected, "{place} {value}");
    }
}

#[test]
fn plaintext_wal_is_found_where_it_goes() {
    let plaintext = ("/cluster/status/wal_encrypted", json!(false));
    let archive = ("/server/settings/archive_mode", json!("on"));
    let slots = ("/server/slots", json!(["standby"]));
    assert_eq!(
        found(&[plaintext, archive.clone(), slots.clone()]),
        ["wal-plaintext", "wal-archived-plaintext", "wal-kept-plaintext"]
    );
    assert!(found(&[archive, slots]).is_empty());
}

#[test]
fn without_pagevault_only_that_is_found() {
    let settings = ("/server/settings/shared_preload_libraries", json!("auto_explain"));
    let next = ("/server/at_next_start", Value::Null);
    let changes = [
        settings,
        next,
        ("/cluster", Value::Null),
        ("/databases", json!([{"name": "app", "extension_version": null, "labels": 0}])),
    ];
    let mut document = sound();
    for (place, value) in changes {
        *document.pointer_mut(place).unwrap() = value;
    }
    let findings = examine(&document);
    let checks: Vec<_> = findings.iter().map(|finding| finding.check).collect();
    assert_eq!(checks, ["library-not-loaded", "extension-missing"]);
    assert_eq!(findings[0].severity, Severity::Critical);
    assert!(
        findings[0].cure.contains("shared_preload_libraries = 'auto_explain', 'pagevault';"),
        "{}",
        findings[0].cure
    );
    let of_nothing: Vec<_> = examine(&json!({})).iter().map(|finding| finding.check).collect();
    assert_eq!(of_nothing, ["extension-missing"]);
}

/// An unreachable provider is worse than one that refuses.
#[test]
fn an_outage_is_critical() {
    let mut document = sound();
    document["cluster"]["providers"][0]["consecutive_failures"] = json!(2);
    document["cluster"]["providers"][0]["reachable"] = json!(false);
    let findings = examine(&document);
    assert_eq!(
        (findings[0].severity, findings[0].check),
        (Severity::Critical, "provider-unreachable")
    );
    assert!(findings[0].cure.contains("check_provider('it''s')"), "{}", findings[0].cure);
}

/// If another master key answers, a restart does no harm.
#[test]
fn an_outage_of_one_of_several_is_a_warning() {
    let mut document = sound();
    let row = |provider, version| {
        let (scope, state) = ("cluster", "unlocked");
        json!({"scope": scope, "version": version, "state": state, "provider": provider})
    };
    document["cluster"]["database_keys"] =
        json!([row("local", 1), row("two", 1), row("local", 2), row("two", 2)]);
    document["cluster"]["providers"] = json!([
        {"provider": "local", "in_use": true, "reachable": false, "consecutive_failures": 1},
        {"provider": "two", "in_use": true, "reachable": true, "consecutive_failures": 0},
    ]);
    let severity = |document: &Value| {
        let findings = examine(document);
        let outage = findings.iter().find(|found| found.check == "provider-unreachable").cloned();
        outage.map(|outage| (outage.severity, outage.why.contains("would stay locked")))
    };
    assert_eq!(severity(&document), Some((Severity::Warning, false)));
    document["cluster"]["providers"][1]["reachable"] = Value::Null;
    assert_eq!(severity(&document), Some((Severity::Critical, true)));
    document["cluster"]["providers"][1]["reachable"] = json!(true);
    document["cluster"]["database_keys"] = json!([row("local", 1), row("local", 2), row("two", 2)]);
    assert_eq!(severity(&document), Some((Severity::Critical, true)));
}

/// Without the library nobody knows what a database that cannot be read has.
#[test]
fn a_database_that_cannot_be_read_for_want_of_the_library() {
    let document = json!({
        "server": {"settings": {"shared_preload_libraries": ""}},
        "cluster": null,
        "databases": [{"name": "app", "error": "ERROR:  invalid page"}],
    });
    let findings = examine(&document);
    let checks: Vec<_> = findings.iter().map(|finding| finding.check).collect();
    assert_eq!(checks, ["library-not-loaded", "database-not-seen"]);
    assert!(!findings[1].cure.contains("superuser"), "{findings:?}");
}

/// A cure names the function for the owner of the key.
#[test]
fn cures_are_for_the_owner_of_the_key() {
    let year = 366 * 86_400;
    for (scope, rotate) in [
        ("cluster", "SELECT pagevault.rotate_cluster_master_key();"),
        ("database", "SELECT pagevault.rotate_database_master_key();"),
        ("key group", "SELECT pagevault.rotate_key_group_master_key('it''s');"),
    ] {
        let mut document = sound();
        document["databases"][0]["key_ages"][0] =
            json!({"kind": "master", "scope": scope, "key_group": "it's", "age_seconds": year});
        let findings = examine(&document);
        assert!(findings[0].cure.starts_with(rotate), "{}", findings[0].cure);
    }
}
