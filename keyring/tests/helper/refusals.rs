//! What the `file` provider refuses: error classes and messages.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::stat::Mode;
use nix::unistd::{geteuid, mkfifo};
use serde_json::{Value, json};

use crate::bench::{
    Bench, CONTEXT, Failure, chmod, failure, plaintext, rotate_action, unwrap_action, wrap_action,
};

/// The failure of all three operations that use the file, which must be the same.
#[track_caller]
fn refused(bench: &Bench, path: &Path, class: &str) -> Failure {
    let wrapped = json!("AQAAAAAAAAABAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA");
    let actions = [wrap_action(&[1; 32]), unwrap_action(&wrapped), rotate_action()];
    let operations = actions.map(|action| bench.operation_on(path, "main", CONTEXT, action));
    let outcomes = bench.serve(operations.to_vec());
    let mut failures: Vec<Failure> =
        outcomes.iter().map(|outcome| failure(outcome, class)).collect();
    let first = failures.remove(0);
    for other in &failures {
        assert_eq!(other.message, first.message);
    }
    Failure {
        message: first
            .message
            .strip_prefix("master key \"main\" of provider \"disk\": ")
            .unwrap()
            .to_owned(),
        ..first
    }
}

/// The outcome of `check_options`, and so of `add_provider`.
fn check_options(bench: &Bench, options: Value) -> Value {
    let mut operation = bench.operation(json!("check_options"));
    operation["provider"]["options"] = options;
    bench.one(operation)
}

#[test]
fn options_are_read_strictly() {
    let bench = Bench::empty();
    let prefix = "provider \"disk\": ";
    for (options, message, hint) in [
        (
            json!({}),
            "option \"path\" is missing for a provider of kind \"file\"",
            "Specify it as {\"path\": \"/absolute/path\"}.",
        ),
        (json!({"path": 7}), "option \"path\" must be a string", ""),
        (
            json!({"path": "/k", "pathh": "/k"}),
            "unknown option \"pathh\" for a provider of kind \"file\"",
            "Known options: path.",
        ),
        (
            json!({"path": "keys"}),
            "option \"path\": path \"keys\" is not absolute",
            "Specify an absolute path: the server and the helper may run in different directories.",
        ),
        (json!({"path": "/"}), "option \"path\": path \"/\" does not contain a file name", ""),
        (
            json!({"path": "/keys/"}),
            "option \"path\": path \"/keys/\" does not contain a file name",
            "",
        ),
        (
            json!({"path": "/etc/../keys"}),
            "option \"path\": path \"/etc/../keys\" contains \"..\"",
            "Specify the path without \"..\".",
        ),
    ] {
        let failure = failure(&check_options(&bench, options), "bad_options");
        assert_eq!(failure.message, format!("{prefix}{message}"));
        assert_eq!(failure.hint, hint);
    }
    for path in ["/a\0b", "/a\nb", &format!("/{}", "a".repeat(5000))] {
        let failure = failure(&check_options(&bench, json!({"path": path})), "bad_options");
        assert!(failure.message.contains("control character"), "{failure:?}");
    }
}

#[test]
fn a_missing_file_is_accepted_in_options() {
    let bench = Bench::empty();
    for name in ["keys/later", "later/keys"] {
        assert_eq!(check_options(&bench, json!({"path": bench.path(name)})), "options_ok");
    }
}

#[test]
fn a_file_inside_the_data_directory_is_refused() {
    let bench = Bench::empty();
    let data = bench.path("data");
    fs::create_dir(bench.path("space")).unwrap();
    fs::create_dir(bench.path("wal")).unwrap();
    fs::create_dir(bench.path("data/base")).unwrap();
    symlink(bench.path("space"), bench.path("data/pg_tblspc/16384")).unwrap();
    symlink(bench.path("wal"), bench.path("data/pg_wal")).unwrap();
    symlink(&data, bench.path("keys/link")).unwrap();
    for (name, what, root) in [
        ("data/keys", "data directory", "data"),
        ("data/base/keys", "data directory", "data"),
        ("keys/link/keys", "data directory", "data"),
        ("keys/link/base/keys", "data directory", "data"),
        ("wal/keys", "WAL directory", "wal"),
        ("space/keys", "tablespace", "space"),
    ] {
        let path = bench.path(name);
        // With and without a file there.
        let early = failure(&check_options(&bench, json!({"path": path})), "insecure");
        fs::write(&path, "").unwrap();
        let refused = refused(&bench, &path, "insecure");
        let real = path.parent().unwrap().canonicalize().unwrap().join("keys");
        assert_eq!(
            refused.message,
            format!("key file \"{}\" is inside the {what}", real.display())
        );
        let root = bench.path(root);
        assert_eq!(
            refused.detail,
            format!(
                "Every copy and backup of {what} \"{}\" would contain the key.",
                root.display()
            )
        );
        assert_eq!(early.message, format!("provider \"disk\": {}", refused.message));
        fs::remove_file(&path).unwrap();
    }
    // For a directory that does not exist yet, the path decides.
    let later = check_options(&bench, json!({"path": bench.path("data/later/keys")}));
    failure(&later, "insecure");
}

#[test]
fn a_name_that_only_begins_like_the_data_directory_is_outside() {
    let bench = Bench::empty();
    fs::create_dir(bench.path("data-keys")).unwrap();
    chmod(&bench.path("data-keys"), 0o700);
    let path = bench.path("data-keys/file");
    bench.create(&path, "main");
    let outcome = bench.one(bench.operation_on(&path, "main", CONTEXT, wrap_action(&[1; 32])));
    assert_eq!(outcome["wrapped"]["key_version"], 1, "{outcome}");
}

#[test]
fn the_data_directory_of_another_server_is_refused_too() {
    let bench = Bench::new();
    fs::write(bench.path("keys/PG_VERSION"), "17\n").unwrap();
    let refused = refused(&bench, &bench.key_file(), "insecure");
    assert!(refused.message.ends_with("is inside the data directory"), "{refused:?}");
}

#[test]
fn a_request_without_a_data_directory_is_refused() {
    let bench = Bench::new();
    for directory in ["", "data", "/no/such/directory"] {
        let mut request = bench.request(1000, vec![bench.operation(wrap_action(&[1; 32]))]);
        request["data_directory"] = json!(directory);
        let output = crate::bench::serve_text(request.to_string().as_bytes());
        let failure = failure(&crate::bench::reply(&output)["results"][0], "bad_request");
        assert!(failure.message.contains("could not find data directory"), "{failure:?}");
    }
}

#[test]
fn a_missing_file_is_named_with_a_hint() {
    let bench = Bench::empty();
    let path = bench.key_file();
    let shown = path.display();
    let refused = refused(&bench, &path, "unreachable");
    assert_eq!(refused.message, format!("key file \"{shown}\" does not exist"));
    // A new file would not have the keys in use.
    assert!(refused.hint.contains("restore the key file from its copy"), "{refused:?}");
    assert!(refused.hint.contains("Do not create a new one"), "{refused:?}");
}

#[test]
fn a_missing_directory_is_named() {
    let bench = Bench::empty();
    let refused = refused(&bench, &bench.path("no/keys"), "unreachable");
    let directory = bench.path("no");
    let directory = directory.display();
    assert_eq!(refused.message, format!("could not find directory \"{directory}\""));
    assert!(refused.hint.contains("mount what it is on"), "{refused:?}");
}

#[test]
fn a_file_open_to_others_is_refused() {
    let bench = Bench::new();
    let path = bench.key_file();
    for mode in [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o666] {
        chmod(&path, mode);
        let refused = refused(&bench, &path, "insecure");
        let shown = path.display();
        assert_eq!(refused.message, format!("key file \"{shown}\" is accessible to other users"));
        assert_eq!(refused.detail, format!("Its mode is {mode:04o}; it must be 0600 or less."));
        assert!(refused.hint.starts_with(&format!("Run: chmod 0600 \"{shown}\".")));
        failure(&check_options(&bench, json!({"path": path})), "insecure");
    }
    chmod(&path, 0o400);
    assert_eq!(bench.one(bench.operation(wrap_action(&[1; 32])))["wrapped"]["key_version"], 1);
}

#[test]
fn a_file_of_another_user_is_refused() {
    let bench = Bench::new();
    let mut path = bench.key_file();
    if geteuid().is_root() {
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
    } else {
        path = "/etc/passwd".into(); // of root, in directories of root
    }
    let refused = refused(&bench, &path, "insecure");
    let shown = path.display();
    assert_eq!(refused.message, format!("key file \"{shown}\" belongs to another user"));
    assert!(
        refused.detail.contains(&format!("the current user ID is {}", geteuid())),
        "{refused:?}"
    );
}

#[test]
fn a_directory_open_to_others_is_refused_at_every_level() {
    let bench = Bench::empty();
    fs::create_dir(bench.path("keys/inner")).unwrap();
    let path = bench.path("keys/inner/file");
    bench.create(&path, "main");
    for (name, mode) in [("keys/inner", 0o770), ("keys/inner", 0o702), ("keys", 0o777)] {
        let directory = bench.path(name);
        chmod(&directory, mode);
        let refused = refused(&bench, &path, "insecure");
        let shown = directory.display();
        assert_eq!(refused.message, format!("directory \"{shown}\" is not safe for a key file"));
        assert_eq!(
            refused.detail,
            format!(
                "Its mode is {mode:04o}: users other than its owner could replace the key file."
            )
        );
        assert_eq!(refused.hint, format!("Run: chmod go-w \"{shown}\""));
        chmod(&directory, 0o700);
    }
    chmod(&bench.path("keys"), 0o1777);
    let outcome = bench.one(bench.operation_on(&path, "main", CONTEXT, wrap_action(&[1; 32])));
    assert_eq!(outcome["wrapped"]["key_version"], 1);
}

#[test]
fn only_a_regular_file_is_opened_and_nothing_hangs() {
    let bench = Bench::new();
    let (fifo, socket) = (bench.path("keys/fifo"), bench.path("keys/socket"));
    mkfifo(&fifo, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    fs::create_dir(bench.path("keys/directory")).unwrap();
    let start = Instant::now();
    for path in [fifo, bench.path("keys/directory"), socket] {
        let refused = refused(&bench, &path, "insecure");
        let expected = format!("key file \"{}\" is not a regular file", path.display());
        assert_eq!(refused.message, expected);
    }
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_symbolic_link_is_not_followed() {
    let bench = Bench::new();
    let link = bench.path("keys/link");
    symlink(bench.key_file(), &link).unwrap();
    let refused = refused(&bench, &link, "insecure");
    assert_eq!(refused.message, format!("key file \"{}\" is a symbolic link", link.display()));
    assert_eq!(refused.hint, "Give the path of the file itself.");
}

#[test]
fn a_second_hard_link_is_refused() {
    let bench = Bench::new();
    fs::hard_link(bench.key_file(), bench.path("data/copy")).unwrap();
    let refused = refused(&bench, &bench.key_file(), "insecure");
    let expected = format!("key file \"{}\" has 2 hard links", bench.key_file().display());
    assert_eq!(refused.message, expected);
}

#[test]
fn other_files_are_refused_as_key_files() {
    let bench = Bench::new();
    let path = bench.key_file();
    let good = fs::read_to_string(&path).unwrap();
    let flipped = good.replacen("\"created\": 1", "\"created\": 2", 1);
    assert_ne!(good, flipped);
    for (text, message, detail) in [
        ("", "is empty", "It was created but never written, or it was truncated."),
        ("{}", "cannot be read as a key file", ""),
        ("-----BEGIN PRIVATE KEY-----", "cannot be read as a key file", ""),
        (&good[..good.len() / 2], "cannot be read as a key file", ""),
        (&flipped, "is damaged", "Its checksum does not match its content."),
        (
            "{\"pagevault_key_file\": 2, \"new\": 1}",
            "has an unknown format version",
            "Its format version is 2; this program reads version 1.",
        ),
        (&" ".repeat((1 << 20) + 1), "is too large", "A key file has at most 1048576 bytes."),
    ] {
        fs::write(&path, text).unwrap();
        let wrap = bench.operation(wrap_action(&[1; 32]));
        let failed = failure(&bench.one(wrap), "unreachable");
        let shown = path.display();
        let ending = format!("key file \"{shown}\" {message}");
        assert!(failed.message.ends_with(&ending), "{failed:?}");
        assert!(detail.is_empty() || failed.detail == detail, "{failed:?}");
        assert!(!failed.hint.is_empty());
        // A rotation must not replace a file that it cannot read.
        let class = if text.is_empty() { "key_missing" } else { "unreachable" };
        failure(&bench.one(bench.operation(rotate_action())), class);
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
    }
}

#[test]
fn every_flipped_bit_of_a_key_file_is_noticed() {
    let bench = Bench::new();
    let path = bench.key_file();
    let wrapped = bench.wrap(&[9; 32]);
    let good = fs::read(&path).unwrap();
    for at in (0..good.len()).step_by(7) {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        fs::write(&path, &bad).unwrap();
        let outcome = bench.unwrap(&wrapped);
        // White space between the values may turn into other white space.
        if outcome.get("unwrapped").is_some() {
            assert!(good[at].is_ascii_whitespace(), "byte {at}");
            assert_eq!(plaintext(&outcome), [9; 32]);
        } else {
            failure(&outcome, "unreachable");
        }
    }
}

#[test]
fn an_unknown_key_is_reported_with_the_existing_ones() {
    let bench = Bench::new();
    bench.create(&bench.key_file(), "second");
    let operation = bench.operation_on(&bench.key_file(), "mian", CONTEXT, rotate_action());
    let failed = failure(&bench.one(operation), "key_missing");
    let shown = bench.key_file();
    let shown = shown.display();
    assert_eq!(
        failed.message,
        format!(
            "master key \"mian\" of provider \"disk\": key file \"{shown}\" has no key \"mian\""
        )
    );
    assert_eq!(failed.detail, "It contains \"main\", \"second\".");
    assert!(failed.hint.contains("newest copy") && !failed.hint.contains("create"), "{failed:?}");
}

#[test]
fn a_wrapped_key_opens_in_its_context_only() {
    let bench = Bench::new();
    let path = bench.key_file();
    bench.create(&path, "other");
    let wrapped = bench.wrap(&[5; 32]);
    for (key, context) in [("main", "pagevault/1/1"), ("main", ""), ("other", CONTEXT)] {
        let operation = bench.operation_on(&path, key, context, unwrap_action(&wrapped));
        failure(&bench.one(operation), "wrong_ciphertext");
    }
    // The boundary between key and context is authenticated, too.
    bench.create(&path, "mainp");
    let operation = bench.operation_on(&path, "mainp", &CONTEXT[1..], unwrap_action(&wrapped));
    failure(&bench.one(operation), "wrong_ciphertext");
    assert_eq!(plaintext(&bench.unwrap(&wrapped)), [5; 32]);
}

#[test]
fn another_file_with_the_same_key_name_is_reported() {
    let bench = Bench::new();
    let wrapped = bench.wrap(&[5; 32]);
    fs::remove_file(bench.key_file()).unwrap();
    bench.create(&bench.key_file(), "main");
    let failed = failure(&bench.unwrap(&wrapped), "wrong_ciphertext");
    let shown = bench.key_file();
    assert!(
        failed.message.ends_with(&format!(
            "wrapped key cannot be unwrapped with key file \"{}\"",
            shown.display()
        )),
        "{failed:?}"
    );
    assert_eq!(
        failed.detail,
        "It was wrapped by another key of the same name or for another database, or it is damaged."
    );
    assert_eq!(failed.hint, "Use the key file that wrapped it, or an intact copy of it.");
}

#[test]
fn every_changed_byte_of_a_wrapped_key_is_refused() {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;

    let bench = Bench::new();
    let wrapped = bench.wrap(&[5; 32]);
    let good = STANDARD.decode(wrapped.as_str().unwrap()).unwrap();
    let mut bad: Vec<Vec<u8>> = (0..good.len()).map(|length| good[..length].to_vec()).collect();
    for at in 0..good.len() {
        let mut changed = good.clone();
        changed[at] ^= 0x80;
        bad.push(changed);
    }
    bad.push([good.as_slice(), &[0]].concat());
    let operations = bad
        .iter()
        .map(|bad| bench.operation(unwrap_action(&json!(STANDARD.encode(bad)))))
        .collect();
    for outcome in bench.serve(operations) {
        failure(&outcome, "wrong_ciphertext");
    }
}

#[test]
fn a_missing_version_is_reported() {
    let bench = Bench::new();
    let copy = fs::read(bench.key_file()).unwrap();
    bench.one(bench.operation(rotate_action()));
    let wrapped = bench.wrap(&[5; 32]);
    fs::write(bench.key_file(), copy).unwrap();
    let failed = failure(&bench.unwrap(&wrapped), "wrong_ciphertext");
    assert_eq!(
        failed.detail,
        "It was wrapped by version 2 of the key, which this file does not contain."
    );
}
