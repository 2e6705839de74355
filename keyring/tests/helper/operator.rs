//! The commands of an operator, and their output.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Output;

use serde_json::json;

use crate::bench::{Bench, chmod, rotate_action, run, stderr, stdout, what_is_well};

fn check(bench: &Bench, options: &str, key: &str) -> Output {
    let data = bench.path("data");
    let data = data.to_str().unwrap();
    run(&[
        "check",
        "--provider-kind",
        "file",
        "--options",
        options,
        "--key",
        key,
        "--data-directory",
        data,
    ])
}

fn options(bench: &Bench) -> String {
    json!({"path": bench.key_file()}).to_string()
}

#[test]
fn check_reports_what_works() {
    let bench = Bench::new();
    let output = check(&bench, &options(&bench), "main");
    let text = stdout(&output);
    assert!(output.status.success(), "{text}");
    assert_eq!(
        what_is_well(&text),
        [
            "the options are valid",
            "the directory exists",
            "the file is outside the data directory",
            "other users cannot replace the file",
            "other users cannot read the file",
            "the file is a key file",
            "the key exists",
            "the key wraps and unwraps",
            "wrapped keys are bound to their database",
        ]
    );
    assert!(text.ends_with("\nAll checks passed.\n"), "{text}");
}

#[test]
fn check_changes_nothing() {
    let bench = Bench::new();
    let before = fs::read(bench.key_file()).unwrap();
    check(&bench, &options(&bench), "main");
    assert_eq!(fs::read(bench.key_file()).unwrap(), before);
}

#[track_caller]
fn last_finding(output: &Output) -> String {
    let text = stdout(output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.ends_with("A check failed; the checks after it were skipped.\n"), "{text}");
    assert_eq!(text.matches("not ok  ").count(), 1, "{text}");
    let at = text.find("not ok  ").unwrap();
    text[at..].split("\n\n").next().unwrap().to_owned()
}

#[test]
fn check_reports_what_does_not_work() {
    let bench = Bench::new();
    let path = bench.key_file();
    let shown = path.display();
    let options = options(&bench);

    let found = last_finding(&check(&bench, "{", "main"));
    assert!(found.starts_with("not ok  the options are valid: options are not"), "{found}");
    let found = last_finding(&check(&bench, "{\"pfad\": 1}", "main"));
    assert!(found.ends_with("Known options: path."), "{found}");
    let found = last_finding(&check(&bench, &options, "mian"));
    assert!(found.starts_with("not ok  the key exists: key file"), "{found}");

    chmod(&path, 0o644);
    let found = last_finding(&check(&bench, &options, "main"));
    assert_eq!(
        found,
        format!(
            "not ok  other users cannot read the file: key file \"{shown}\" is accessible to other users\n        \
             Its mode is 0644; it must be 0600 or less.\n        \
             Run: chmod 0600 \"{shown}\". If other users may have read the key, rotate it."
        )
    );
    chmod(&path, 0o600);

    chmod(&bench.path("keys"), 0o777);
    let found = last_finding(&check(&bench, &options, "main"));
    assert!(found.starts_with("not ok  other users cannot replace the file: directory"), "{found}");
    chmod(&bench.path("keys"), 0o700);

    fs::write(&path, "x").unwrap();
    let found = last_finding(&check(&bench, &options, "main"));
    assert!(found.starts_with("not ok  the file is a key file: "), "{found}");

    fs::remove_file(&path).unwrap();
    let found = last_finding(&check(&bench, &options, "main"));
    assert!(found.contains("does not exist"), "{found}");

    let inside = json!({"path": bench.path("data/keys")}).to_string();
    let found = last_finding(&check(&bench, &inside, "main"));
    assert!(found.starts_with("not ok  the file is outside the data directory: "), "{found}");
}

#[test]
fn create_makes_a_private_file_and_adds_keys() {
    let bench = Bench::new();
    let path = bench.key_file();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
    bench.create(&path, "second");
    let again = run(&["file", "create", path.to_str().unwrap(), "--key", "main"]);
    assert_eq!(again.status.code(), Some(1));
    let text = stderr(&again);
    assert!(text.contains("key \"main\" already exists in key file"), "{text}");
}

#[test]
fn create_continues_where_a_crash_left_an_empty_file() {
    let bench = Bench::empty();
    fs::write(bench.key_file(), "").unwrap();
    chmod(&bench.key_file(), 0o600);
    bench.create(&bench.key_file(), "main");
    assert!(check(&bench, &options(&bench), "main").status.success());
}

#[test]
fn concurrent_creates_make_all_keys() {
    let bench = Bench::empty();
    std::thread::scope(|scope| {
        for name in ["a", "b", "c", "d", "e", "f"] {
            let bench = &bench;
            scope.spawn(move || bench.create(&bench.key_file(), name));
        }
    });
    let listed = stdout(&run(&["file", "list", bench.key_file().to_str().unwrap()]));
    assert_eq!(listed.lines().count(), 7, "{listed}");
}

#[test]
fn create_refuses_bad_places_and_names() {
    let bench = Bench::empty();
    let data = bench.path("data");
    let data = data.to_str().unwrap();
    let inside = bench.path("data/keys");
    let inside = inside.to_str().unwrap();
    let missing = bench.path("no/keys");
    let missing = missing.to_str().unwrap();
    let good = bench.key_file();
    let good = good.to_str().unwrap();
    let long = "n".repeat(256);
    for (path, key, message) in [
        ("keys", "main", "is not absolute"),
        (inside, "main", "is inside the data directory"),
        (missing, "main", "could not find directory"),
        (good, "", "invalid key name"),
        (good, "a\nb", "invalid key name"),
        (good, &long, "invalid key name"),
    ] {
        let made = run(&["file", "create", path, "--key", key, "--data-directory", data]);
        assert_eq!(made.status.code(), Some(1));
        assert!(stderr(&made).contains(message), "{}", stderr(&made));
    }
    assert!(!bench.path("data/keys").exists() && !bench.key_file().exists());
}

#[test]
fn list_shows_versions_but_no_key() {
    let bench = Bench::new();
    bench.one(bench.operation(rotate_action()));
    let output = run(&["file", "list", bench.key_file().to_str().unwrap()]);
    assert!(output.status.success());
    let listed = stdout(&output);
    let rows: Vec<Vec<&str>> =
        listed.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows.len(), 2);
    for (row, version) in rows.iter().zip(["1", "2"]) {
        assert_eq!((row[0], row[1], row.len()), ("main", version, 4));
        assert!(row[2].starts_with("20") && row[3].ends_with('Z'), "{row:?}");
    }
    let file: serde_json::Value =
        serde_json::from_slice(&fs::read(bench.key_file()).unwrap()).unwrap();
    for version in file["keys"]["main"]["versions"].as_array().unwrap() {
        assert!(!listed.contains(version["key"].as_str().unwrap()));
    }
}

#[test]
fn version_and_usage() {
    let version = run(&["--version"]);
    assert_eq!(stdout(&version), format!("pagevault-keyring {}\n", env!("CARGO_PKG_VERSION")));
    assert_eq!(run(&[]).status.code(), Some(2));
    assert_eq!(run(&["serv"]).status.code(), Some(2));
}
