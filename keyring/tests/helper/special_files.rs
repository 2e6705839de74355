//! Data directories of other users that contain endless or blocking files: nothing of them is read.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use age::secrecy::ExposeSecret;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use pagevault_keystore::log::{Log, file_name, unsettled};
use pagevault_keystore::storage::FileStorage;
use pagevault_keystore::{Record, Scope};

use crate::bench::{Bench, chmod, command, stderr, stdout};
use crate::programs::install;

const HISTORY: &str = "pg_wal/00000002.history";
const SEGMENT: &str = "pg_wal/000000020000000000000001";

/// A data directory with a keystore without keys, and a program in place of pg_controldata.
/// What initdb makes (`subdirs`, initdb.c).
const DIRECTORIES: [&str; 21] = [
    "base",
    "base/5",
    "global",
    "pg_commit_ts",
    "pg_dynshmem",
    "pg_logical",
    "pg_logical/mappings",
    "pg_logical/snapshots",
    "pg_multixact",
    "pg_multixact/members",
    "pg_multixact/offsets",
    "pg_notify",
    "pg_replslot",
    "pg_serial",
    "pg_snapshots",
    "pg_stat",
    "pg_subtrans",
    "pg_tblspc",
    "pg_twophase",
    "pg_wal",
    "pg_xact",
];

fn data_directory() -> Bench {
    let bench = Bench::empty();
    for directory in DIRECTORIES {
        fs::create_dir_all(bench.path("data").join(directory)).unwrap();
    }
    fs::write(bench.path("data/PG_VERSION"), "15\n").unwrap();
    fs::write(bench.path("data/global/pg_control"), "").unwrap();
    // WAL is elsewhere.
    fs::write(bench.path("data/recovery.signal"), "").unwrap();
    fs::write(bench.path("data/base/5/16384"), [0; 8192]).unwrap();
    fs::write(bench.path("data").join(SEGMENT), [0; 8192]).unwrap();
    let storage = FileStorage::new(&bench.path("data/pagevault")).unwrap();
    Log::create(&storage, [7; 16], Scope::CLUSTER, &[]).unwrap();
    control_program(&bench, "");
    bench
}

/// The program in place of pg_controldata, which runs `first` before.
fn control_program(bench: &Bench, first: &str) {
    let told = "Database cluster state: shut down\nDatabase block size: 8192\n\
        Blocks per segment of large relation: 131072\nWAL block size: 8192\nBytes per WAL segment: 16777216\n\
        Data page checksum version: 0\nLatest checkpoint location: 0/3000028\n\
        Latest checkpoint's REDO location: 0/3000028\nLatest checkpoint's TimeLineID: 2\n\
        Minimum recovery ending location: 0/0\nMin recovery ending loc's timeline: 0\n\
        Database system identifier: 1\n";
    // It reads the control file, as PostgreSQL's program does.
    let program =
        format!("#!/bin/sh\n{first}\ncat \"$1/global/pg_control\" && cat <<END\n{told}END\n");
    install(&bench.path("keys/pg_controldata"), &program);
}

/// A server that is started while `restore-unsettled` looks at the data directory reads the key
/// files before they are changed, and makes no more keys.
#[test]
fn nothing_is_restored_beside_a_server_that_was_started_meanwhile() {
    let bench = data_directory();
    let (data, lock) = (bench.path("data"), bench.path("data/postmaster.pid"));
    let elsewhere = bench.path("elsewhere");
    let storage = FileStorage::new(&elsewhere).unwrap();
    let scope = Scope::CLUSTER;
    let provider = Record::Provider {
        name: "local".into(),
        kind: "file".into(),
        options: "{}".into(),
        programs: false,
    };
    Log::create(&storage, [7; 16], scope, &[provider]).unwrap();
    let beside = data.join("pagevault").join(unsettled::name(scope));
    fs::rename(elsewhere.join(file_name(scope)), &beside).unwrap();
    let keys = data.join("pagevault").join(file_name(scope));
    let before = fs::read(&keys).unwrap();
    control_program(&bench, "touch \"$1/postmaster.pid\"");
    let output = ends(&bench, "restore-unsettled", &data);
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    assert!(stderr(&output).contains("a server is running"), "{}", stderr(&output));
    assert!(fs::read(&keys).unwrap() == before && beside.exists(), "something was changed");
    fs::remove_file(lock).unwrap();
    control_program(&bench, "");
    let output = ends(&bench, "restore-unsettled", &data);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(fs::read(&keys).unwrap() != before && !beside.exists(), "nothing was restored");
}

/// The output of the program, which has to end by itself and to use little memory.
#[track_caller]
fn ends(bench: &Bench, subject: &str, path: &Path) -> Output {
    line_ends(bench, &[subject, path.to_str().unwrap()])
}

/// [`ends`] for a whole command line.
#[track_caller]
fn line_ends(bench: &Bench, line: &[&str]) -> Output {
    let mut command = command(line);
    let search = std::env::var("PATH").unwrap();
    command.env("PATH", format!("{}:{search}", bench.path("keys").display()));
    let mut child = command.stdin(Stdio::null()).spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > until {
            child.kill().unwrap();
            panic!("{line:?} does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

#[track_caller]
fn refused(bench: &Bench, subject: &str, path: &Path, culprit: &Path) {
    let output = ends(bench, subject, path);
    assert_eq!(output.status.code(), Some(1), "{subject}: {}", stdout(&output));
    let message = format!("could not read \"{}\": it is not a regular file", culprit.display());
    assert!(stderr(&output).contains(&message), "{subject}: {}", stderr(&output));
}

/// Puts special files in the place of `path`, one after the other, and calls `look` for each.
fn each(path: &Path, look: impl Fn()) {
    let before = fs::read(path).ok();
    let _ = fs::remove_file(path);
    mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    look();
    fs::remove_file(path).unwrap();
    for target in ["/dev/zero", "/dev/null"] {
        symlink(target, path).unwrap();
        look();
        fs::remove_file(path).unwrap();
    }
    if let Some(before) = before {
        fs::write(path, before).unwrap();
        chmod(path, 0o600);
    }
}

#[test]
fn verify_reads_regular_files_only() {
    let bench = data_directory();
    let data = bench.path("data");
    let well = |state: &str| {
        let output = ends(&bench, "verify", &data);
        assert!(output.status.success(), "{state}: {}{}", stdout(&output), stderr(&output));
    };
    well("before");
    let files = [
        "base/5/999999",
        "base/5/999999_fsm",
        "backup_label",
        "global/pg_control",
        HISTORY,
        SEGMENT,
    ];
    for name in files {
        let path = data.join(name);
        each(&path, || refused(&bench, "verify", &data, &path));
    }
    well("after");
    // Links to regular files and directories are followed.
    fs::rename(data.join("pg_wal"), bench.path("wal")).unwrap();
    symlink(bench.path("wal"), data.join("pg_wal")).unwrap();
    well("with WAL elsewhere");
    // It is unknown whether a damaged file is needed if the map or the state of transactions is not
    // a regular file.
    fs::write(data.join("base/5/16385"), [1; 8192]).unwrap();
    for name in ["base/5/pg_filenode.map", "pg_xact/0000"] {
        each(&data.join(name), || {
            let output = ends(&bench, "verify", &data);
            let said = stdout(&output);
            assert!(said.contains("damaged      base/5/16385 block 0: "), "{said}");
        });
    }
}

#[test]
fn verify_does_not_read_files_that_are_too_large() {
    let bench = data_directory();
    let path = bench.path("data/base/5/16384");
    // A sparse file, which takes no space.
    fs::File::create(&path).unwrap().set_len((1 << 30) + 8192).unwrap();
    let output = ends(&bench, "verify", &bench.path("data"));
    let said = stdout(&output);
    assert!(said.contains("damaged      base/5/16384 is larger than a segment"), "{said}");
    assert!(said.contains("0 empty"), "{said}");
}

#[test]
fn key_files_are_regular_files() {
    let bench = data_directory();
    let path = bench.path("data/pagevault/7.keys");
    each(&path, || {
        refused(&bench, "inspect", &bench.path("data"), &path);
        // Links are not followed there; the owner is checked first.
        assert_eq!(ends(&bench, "verify", &bench.path("data")).status.code(), Some(1));
    });
}

#[test]
fn inspect_reads_regular_files_only() {
    let bench = data_directory();
    for name in ["7.keys", "16385", "16385_vm", "000000010000000000000001"] {
        let path = bench.path("keys").join(name);
        each(&path, || refused(&bench, "inspect", &path, &path));
    }
}

#[test]
fn programs_and_bundles_are_regular_files() {
    let bench = data_directory();
    let identity = bench.path("keys/identity");
    let made = age::x25519::Identity::generate();
    fs::write(&identity, made.to_string().expose_secret()).unwrap();
    chmod(&identity, 0o600);
    let (bundle, program) = (bench.path("keys/bundle"), bench.path("keys/pg_waldump"));
    let shown = |path: &Path| path.to_str().unwrap().to_owned();
    let data = shown(&bench.path("data"));
    let check = [
        "escrow",
        "check",
        &shown(&bundle),
        "--identity",
        &shown(&identity),
        "--data-directory",
        &data,
    ];
    let exec = ["exec", "--keystore", &data, "--", &shown(&program), "x"];
    for (path, line) in [(&bundle, &check[..]), (&program, &exec[..])] {
        each(path, || {
            let output = line_ends(&bench, line);
            assert_eq!(output.status.code(), Some(1), "{line:?}: {}", stdout(&output));
            // A program is known by its name behind all links.
            let other = fs::canonicalize(path).unwrap() != *path && path == &program;
            let message = if other { "is not supported" } else { "is not a regular file" };
            assert!(stderr(&output).contains(message), "{line:?}: {}", stderr(&output));
        });
    }
}
