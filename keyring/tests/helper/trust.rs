//! Trust: because of key files, credentials files and configuration that others may have written,
//! no program runs, no file is sent anywhere, and no key is returned that was not wrapped.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;
use pagevault_cipher::Secret32;
use pagevault_keystore::log::Log;
use pagevault_keystore::storage::FileStorage;
use pagevault_keystore::{
    CheckValue, DataKeyVersion, DatabaseKey, KeyVersion, Record, RelFile, Scope, Wrapping,
    master_context,
};
use serde_json::{Value, json};

use crate::bench::{Bench, CONTEXT, chmod, command, failure, reply, run, stderr, wrap_action};
use crate::programs::install;
use std::io::Write;

const ID: [u8; 16] = [7; 16];

/// A program that leaves a mark when it runs.
fn trap(bench: &Bench) -> (PathBuf, PathBuf) {
    let (program, mark) = (bench.path("keys/trap"), bench.path("keys/sprung"));
    install(&program, &format!("#!/bin/sh\ntouch '{}'\n", mark.display()));
    (program, mark)
}

/// A keystore with one data key, wrapped by a database key that a provider has wrapped.
fn keystore(bench: &Bench, kind: &str, options: &Value, wrapped: Vec<u8>, check: CheckValue) {
    let data_key = Record::DataKey {
        file: RelFile { tablespace: 1663, database: 0, relation: 16384 },
        version: DataKeyVersion::FIRST,
        cipher: 1,
        scope: Scope::CLUSTER,
        key_version: KeyVersion::FIRST,
        wrapped: vec![1; 92],
        created: 1,
    };
    keystore_with(bench, kind, options, wrapped, check, &[data_key]);
}

fn keystore_with(
    bench: &Bench,
    kind: &str,
    options: &Value,
    wrapped: Vec<u8>,
    check: CheckValue,
    more: &[Record],
) {
    let records = [
        Record::Provider {
            name: "theirs".into(),
            kind: kind.into(),
            options: options.to_string(),
            programs: true,
        },
        Record::DatabaseKey {
            scope: Scope::CLUSTER,
            version: KeyVersion::FIRST,
            key: DatabaseKey::new(check, Wrapping::new(("theirs", "main"), 1, wrapped, 1)),
        },
    ];
    let storage = FileStorage::new(&bench.path("data/pagevault")).unwrap();
    Log::create(&storage, ID, Scope::CLUSTER, &[&records[..], more].concat()).unwrap();
}

fn keystore_of_commands(bench: &Bench, program: &Path) {
    let options = json!({"wrap": [program], "unwrap": [program]});
    // The format of a provider of kind "command": format, version, length, text, nonce and so on.
    let mut wrapped = vec![1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, b'x'];
    wrapped.extend([0; 60]);
    keystore(bench, "command", &options, wrapped, CheckValue::from_bytes([0; 16]));
}

/// The commands that use providers named in a keystore.
fn askers(bench: &Bench) -> Vec<Vec<String>> {
    let data = bench.path("data").display().to_string();
    let recipient = "age1lggyhqrw2nlhcxprm67z43rta597azn8gknawjehu9d9dl0jq3yqqvfafg";
    let output = bench.path("keys/bundle").display().to_string();
    [
        vec!["verify", &data],
        vec!["escrow", "export", &data, "--recipient", recipient, "--output", &output],
    ]
    .map(|line| line.into_iter().map(str::to_owned).collect())
    .to_vec()
}

#[track_caller]
fn refused(line: &[String], more: &[&str], message: &str) {
    let line: Vec<&str> = line.iter().map(String::as_str).chain(more.iter().copied()).collect();
    let output = run(&line);
    assert_eq!(output.status.code(), Some(1), "{line:?}");
    let said = stderr(&output);
    assert!(said.contains(message), "{line:?}: {said}");
}

#[test]
fn programs_that_key_files_name_are_not_run() {
    let bench = Bench::new();
    let (program, mark) = trap(&bench);
    keystore_of_commands(&bench, &program);
    for line in askers(&bench) {
        refused(&line, &[], "running the program of provider \"theirs\" is not allowed");
        assert!(!mark.exists(), "{line:?} ran it");
        // With the option they run.
        refused(&line, &["--allow-command"], "returned an invalid answer");
        assert!(mark.exists(), "{line:?}");
        fs::remove_file(&mark).unwrap();
    }
    // If the user describes the provider, key files are not consulted.
    let providers = bench.path("keys/providers");
    let given = json!({"theirs": {"kind": "file", "options": {"path": bench.key_file()}}});
    fs::write(&providers, given.to_string()).unwrap();
    let shown = providers.display().to_string();
    for line in askers(&bench) {
        refused(&line, &["--providers", &shown], "wrapped key cannot be unwrapped with key file");
        assert!(!mark.exists(), "{line:?} ran it");
    }
    chmod(&providers, 0o666);
    refused(&askers(&bench)[0], &["--providers", &shown], "can be changed by other users");
    chmod(&providers, 0o600);
    fs::write(&providers, "hunter2").unwrap();
    refused(&askers(&bench)[0], &["--providers", &shown], "is not a valid providers file");
}

#[test]
fn providers_have_the_time_that_the_command_gives_them() {
    let bench = Bench::new();
    let program = bench.path("keys/slow");
    install(&program, "#!/bin/sh\nexec sleep 600\n");
    keystore_of_commands(&bench, &program);
    for line in askers(&bench) {
        let given = ["--allow-command", "--timeout", "1"];
        refused(&line, &given, "Try again, or raise --timeout.");
        let line: Vec<&str> = line.iter().map(String::as_str).chain(["--timeout", "0"]).collect();
        assert_eq!(run(&line).status.code(), Some(2), "{line:?}");
    }
}

#[test]
fn modules_that_key_files_name_are_not_loaded() {
    let bench = Bench::new();
    let module = bench.path("keys/module.so");
    fs::write(&module, "no library").unwrap();
    let options = json!({"module": module, "token": "t", "pin_file": bench.path("keys/pin")});
    let mut wrapped = vec![1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0];
    wrapped.extend([0; 60]);
    keystore(&bench, "pkcs11", &options, wrapped, CheckValue::from_bytes([0; 16]));
    for line in askers(&bench) {
        refused(&line, &[], "running the program of provider \"theirs\" is not allowed");
        refused(&line, &["--allow-credentials"], "is not allowed");
        let named = "using the credentials of provider \"theirs\" is not allowed";
        refused(&line, &["--allow-command"], named);
        let both = ["--allow-command", "--allow-credentials"];
        refused(&line, &both, "cannot be loaded");
    }
}

/// A server at a port of this machine that never answers, and the number of its connections.
fn listener() -> (u16, std::sync::Arc<std::sync::atomic::AtomicUsize>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let count = std::sync::Arc::<std::sync::atomic::AtomicUsize>::default();
    let counted = std::sync::Arc::clone(&count);
    std::thread::spawn(move || {
        for _ in listener.incoming() {
            counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        }
    });
    (port, count)
}

#[test]
fn credentials_that_key_files_name_are_not_sent() {
    let bench = Bench::new();
    let (port, connections) = listener();
    let connections = || connections.swap(0, std::sync::atomic::Ordering::SeqCst);
    let token = bench.path("keys/token");
    fs::write(&token, "hvs.ours").unwrap();
    chmod(&token, 0o600);
    let credentials = bench.path("keys/credentials");
    fs::write(&credentials, "[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
        .unwrap();
    chmod(&credentials, 0o600);
    let address = format!("http://127.0.0.1:{port}");
    let vault =
        json!({"address": address, "insecure_loopback_http": true, "auth": {"token_file": token}});
    let aws = json!({"region": "eu-central-1", "endpoint": address, "insecure_loopback_http": true,
        "credentials_file": credentials});
    for (kind, options, wrapped) in
        [("vault", &vault, &b"\x01vault:v1:AAAA"[..]), ("aws_kms", &aws, &[1; 80])]
    {
        let _ = fs::remove_dir_all(bench.path("data/pagevault"));
        keystore(&bench, kind, options, wrapped.to_vec(), CheckValue::from_bytes([0; 16]));
        for line in askers(&bench) {
            refused(&line, &[], "using the credentials of provider \"theirs\" is not allowed");
            refused(&line, &["--allow-command"], "Nothing was read or sent");
            assert_eq!(connections(), 0, "{kind} {line:?}");
            let line: Vec<&str> = line.iter().map(String::as_str).collect();
            let allowed = run(&[&line[..], &["--allow-credentials"]].concat());
            assert!(!stderr(&allowed).contains("using the credentials"), "{}", stderr(&allowed));
        }
        // If the user describes the provider, key files are not consulted.
        let providers = bench.path("keys/providers");
        let given = json!({"theirs": {"kind": "file", "options": {"path": bench.key_file()}}});
        fs::write(&providers, given.to_string()).unwrap();
        let shown = providers.display().to_string();
        refused(
            &askers(&bench)[0],
            &["--providers", &shown],
            "wrapped key cannot be unwrapped with key file",
        );
    }
}

#[test]
fn key_files_that_others_may_have_written_are_not_trusted() {
    let bench = Bench::new();
    let (program, mark) = trap(&bench);
    keystore_of_commands(&bench, &program);
    let believed = || {
        let data = bench.path("data").display().to_string();
        let output = run(&["verify", &data, "--allow-command"]);
        assert_eq!(output.status.code(), Some(1));
        let ran = mark.exists();
        let _ = fs::remove_file(&mark);
        let usable = stderr(&output).contains("returned an invalid answer");
        assert_eq!(ran, usable, "{}", stderr(&output));
        ran
    };
    assert!(believed());
    for name in ["data", "data/pagevault", "data/pagevault/cluster.keys", ""] {
        let path = bench.path(name);
        let mode = if path.is_dir() { 0o700 } else { 0o600 };
        for (open, why) in [(0o777, "anybody"), (0o770, "a group")] {
            chmod(&path, open);
            assert!(!believed(), "{why} may write {name:?}");
        }
        // In a sticky directory others can create names, but not replace those of root and this
        // user. In the data directory itself others must not create any.
        chmod(&path, 0o1777);
        assert_eq!(believed(), name.is_empty(), "{name:?} is sticky");
        chmod(&path, mode);
        if geteuid().is_root() {
            chown(&path, Some(65534), None).unwrap();
            assert!(!believed(), "{name:?} belongs to somebody else");
            chown(&path, Some(0), None).unwrap();
        }
        assert!(believed(), "{name:?}");
    }
    // Through a link that another user can change.
    let open = bench.path("open");
    fs::create_dir(&open).unwrap();
    chmod(&open, 0o777);
    std::os::unix::fs::symlink(bench.path("data"), open.join("data")).unwrap();
    let line = ["verify".to_owned(), open.join("data").display().to_string()];
    refused(&line, &["--allow-command"], "is not safe for a keystore");
}

#[test]
fn a_wrong_database_key_is_refused() {
    let bench = Bench::new();
    let context = master_context(&ID, Scope::CLUSTER);
    let wrap = |key: [u8; 32]| {
        use base64::Engine;
        let operation = bench.operation_on(&bench.key_file(), "main", &context, wrap_action(&key));
        let wrapped = bench.one(operation)["wrapped"]["wrapped"].as_str().unwrap().to_owned();
        base64::engine::general_purpose::STANDARD.decode(wrapped).unwrap()
    };
    let check = |key| {
        CheckValue::of(&Secret32::from_bytes(&[key; 32]), &ID, Scope::CLUSTER, KeyVersion::FIRST)
    };
    let options = json!({"path": bench.key_file()});
    // The provider unwraps it, but it is not the recorded one.
    keystore(&bench, "file", &options, wrap([5; 32]), check(6));
    for line in askers(&bench) {
        refused(&line, &[], "wrong key for version 1 of the database key of the cluster");
        refused(&line, &[], "provider \"theirs\"");
    }
    fs::remove_dir_all(bench.path("data/pagevault")).unwrap();
    keystore(&bench, "file", &options, wrap([5; 32]), check(5));
    // The right key is tried on the data keys.
    refused(&askers(&bench)[1], &[], "does not unwrap a data key");
}

#[test]
fn a_bundle_with_a_wrong_key_is_refused() {
    use age::secrecy::ExposeSecret;
    use base64::Engine;
    let bench = Bench::new();
    let operation = bench.operation_on(
        &bench.key_file(),
        "main",
        &master_context(&ID, Scope::CLUSTER),
        wrap_action(&[5; 32]),
    );
    let wrapped = bench.one(operation)["wrapped"]["wrapped"].as_str().unwrap().to_owned();
    let wrapped = base64::engine::general_purpose::STANDARD.decode(wrapped).unwrap();
    let options = json!({"path": bench.key_file()});
    let data = bench.path("data").display().to_string();
    // It wraps no data key, which would reveal that it is wrong.
    let record = |check: u8| {
        let _ = fs::remove_dir_all(bench.path("data/pagevault"));
        let check = CheckValue::of(
            &Secret32::from_bytes(&[check; 32]),
            &ID,
            Scope::CLUSTER,
            KeyVersion::FIRST,
        );
        keystore_with(&bench, "file", &options, wrapped.clone(), check, &[]);
    };
    record(5);
    let identity = age::x25519::Identity::generate();
    let (file, bundle) = (bench.path("keys/identity"), bench.path("keys/bundle"));
    fs::write(&file, identity.to_string().expose_secret()).unwrap();
    chmod(&file, 0o600);
    let (file, bundle) = (file.display().to_string(), bundle.display().to_string());
    let recipient = identity.to_public().to_string();
    let made = run(&["escrow", "export", &data, "--recipient", &recipient, "--output", &bundle]);
    assert!(made.status.success(), "{}", stderr(&made));
    let check = ["escrow", "check", &bundle, "--identity", &file, "--data-directory", &data];
    assert!(run(&check).status.success());
    let given = options.to_string();
    let restore = [
        "escrow",
        "restore",
        &bundle,
        "--identity",
        &file,
        "--data-directory",
        &data,
        "--provider-kind",
        "file",
        "--options",
        &given,
        "--key",
        "main",
    ];
    record(6);
    for line in [&check[..], &restore] {
        let line: Vec<String> = line.iter().map(|word| (*word).to_owned()).collect();
        refused(&line, &[], "wrong key for version 1 of the database key of the cluster");
    }
    assert!(!bench.path("data/pagevault/restored").exists());
    record(5);
    let restored = run(&restore);
    assert!(restored.status.success(), "{}", stderr(&restored));
}

/// An operation of the server with a provider of kind `aws_kms`.
fn aws(bench: &Bench, options: &Value, programs: bool, environment: &[(&str, &Path)]) -> Value {
    let provider =
        json!({"name": "aws", "kind": "aws_kms", "options": options, "programs": programs});
    let operation = json!({"provider": provider, "key": "alias/x", "context": CONTEXT,
        "action": wrap_action(&[1; 32])});
    let mut command = command(&["serve"]);
    for variable in ["AWS_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"] {
        command.env_remove(variable);
    }
    command.env("AWS_EC2_METADATA_DISABLED", "true").env("HOME", "/nonexistent");
    command.envs(environment.iter().copied());
    let mut child = command.spawn().unwrap();
    let request = bench.request(3000, vec![operation]).to_string();
    child.stdin.take().unwrap().write_all(request.as_bytes()).unwrap();
    reply(&child.wait_with_output().unwrap())["results"][0].clone()
}

#[test]
fn programs_in_aws_profiles_run_only_with_permission() {
    let bench = Bench::new();
    let (program, mark) = trap(&bench);
    let file = bench.path("keys/credentials");
    let home = bench.path("keys/home");
    fs::create_dir_all(home.join(".aws")).unwrap();
    let options = json!({"region": "eu-central-1", "endpoint": "http://127.0.0.1:9",
        "insecure_loopback_http": true});
    let mut named = options.clone();
    named["credentials_file"] = json!(file);
    let none: &[(&str, &Path)] = &[];
    for (path, options, environment) in [
        (file.clone(), &named, none),
        (home.join(".aws/config"), &options, &[("HOME", home.as_path())]),
        (home.join(".aws/credentials"), &options, &[("HOME", home.as_path())]),
        (file.clone(), &options, &[("AWS_CONFIG_FILE", file.as_path())]),
        (file.clone(), &options, &[("AWS_SHARED_CREDENTIALS_FILE", file.as_path())]),
    ] {
        let text = format!("[default]\n Credential_Process = {}\n", program.display());
        fs::write(&path, text.replace("\n C", "\nC")).unwrap();
        chmod(&path, 0o600);
        let failed = failure(&aws(&bench, options, false, environment), "insecure");
        assert!(failed.message.contains("runs a program"), "{failed:?}");
        assert!(!failed.detail.is_empty() && !failed.hint.is_empty(), "{failed:?}");
        assert!(!mark.exists(), "{} ran it", path.display());
        failure(&aws(&bench, options, true, environment), "unauthenticated");
        assert!(mark.exists(), "{}", path.display());
        fs::remove_file(&mark).unwrap();

        // Its content would be sent to a server.
        fs::write(&path, "[default]\nrole_arn = r\nweb_identity_token_file = /etc/shadow\n")
            .unwrap();
        let failed = failure(&aws(&bench, options, false, environment), "insecure");
        assert!(failed.message.contains("refers to another file"), "{failed:?}");
        fs::remove_file(&path).unwrap();
    }
}

#[test]
fn files_in_options_belong_to_root_or_this_user() {
    let bench = Bench::new();
    let file = bench.path("keys/credentials");
    fs::write(&file, "[default]\naws_access_key_id = a\naws_secret_access_key = b\n").unwrap();
    let options = json!({"region": "eu-central-1", "endpoint": "http://127.0.0.1:9",
        "insecure_loopback_http": true, "credentials_file": file});
    let class = || aws(&bench, &options, true, &[])["failed"]["class"].clone();
    chmod(&file, 0o600);
    assert_eq!(class(), "unreachable", "nobody listens, that is all");
    chmod(&file, 0o644);
    assert_eq!(class(), "insecure");
    chmod(&file, 0o600);
    chmod(&bench.path("keys"), 0o777);
    assert_eq!(class(), "insecure");
    chmod(&bench.path("keys"), 0o700);
    if geteuid().is_root() {
        chown(&file, Some(65534), None).unwrap();
        assert_eq!(class(), "insecure");
        chown(&file, Some(0), None).unwrap();
    }
    // Users of the database may have written files in a data directory.
    fs::write(bench.path("keys/PG_VERSION"), "17\n").unwrap();
    assert_eq!(class(), "insecure");
}

#[test]
fn a_provider_without_permission_runs_no_programs() {
    let bench = Bench::new();
    let (program, mark) = trap(&bench);
    let options = json!({"wrap": [program], "unwrap": [program]});
    for permission in [json!({}), json!({"programs": false})] {
        let mut provider = json!({"name": "ours", "kind": "command", "options": options});
        provider.as_object_mut().unwrap().extend(permission.as_object().unwrap().clone());
        let operation = json!({"provider": provider, "key": "main", "context": CONTEXT,
            "action": wrap_action(&[1; 32])});
        let failed = failure(&bench.one(operation), "insecure");
        assert!(failed.message.ends_with("provider is not allowed to run programs"), "{failed:?}");
        assert!(!mark.exists());
    }
}
