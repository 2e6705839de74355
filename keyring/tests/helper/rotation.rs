//! Rotation loses no key: not by a crash, a concurrent writer, or a full disk.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::bench::{
    Bench, plaintext, rest, rotate_action, start, stdout, unwrap_action, wrap_action,
};

/// The name of an unfinished key file.
const UNFINISHED: &str = "keys/.main.json.0123456789Ab.pagevault-new";

fn rotate(bench: &Bench) -> u64 {
    let outcome = bench.one(bench.operation(rotate_action()));
    outcome["rotated"]["key_version"].as_u64().unwrap_or_else(|| panic!("{outcome}"))
}

#[test]
fn all_versions_unwrap_and_the_newest_wraps() {
    let bench = Bench::new();
    let mut wrapped = vec![bench.wrap(&[1; 32])];
    for version in 2..=6 {
        assert_eq!(rotate(&bench), version);
        wrapped.push(bench.wrap(&[version as u8; 32]));
    }
    for (index, wrapped) in wrapped.iter().enumerate() {
        let outcome = bench.unwrap(wrapped);
        assert_eq!(outcome["unwrapped"]["key_version"], index as u64 + 1);
        assert_eq!(plaintext(&outcome), [index as u8 + 1; 32]);
    }
}

#[test]
fn the_new_file_is_private_and_alone() {
    let bench = Bench::new();
    rotate(&bench);
    let metadata = fs::metadata(bench.key_file()).unwrap();
    assert_eq!((metadata.permissions().mode() & 0o7777, metadata.nlink()), (0o600, 1));
    assert_eq!(fs::read_dir(bench.path("keys")).unwrap().count(), 1);
}

#[test]
fn other_keys_of_the_file_are_left_alone() {
    let bench = Bench::new();
    let wrapped = bench.wrap(&[1; 32]);
    bench.create(&bench.key_file(), "other");
    let operation = bench.operation_on(&bench.key_file(), "other", "", rotate_action());
    assert_eq!(bench.one(operation), json!({"rotated": {"key_version": 2}}));
    assert_eq!(plaintext(&bench.unwrap(&wrapped)), [1; 32]);
    assert_eq!(rotate(&bench), 2);
}

#[test]
fn concurrent_rotations_lose_nothing() {
    const WRITERS: u64 = 6;
    const ROUNDS: u64 = 5;
    let bench = Bench::new();
    let versions: BTreeSet<u64> = thread::scope(|scope| {
        let writer = || (0..ROUNDS).map(|_| rotate(&bench)).collect::<Vec<_>>();
        let writers: Vec<_> = (0..WRITERS).map(|_| scope.spawn(writer)).collect();
        // A reader sees complete files only.
        for _ in 0..20 {
            let outcome = bench.one(bench.operation(wrap_action(&[1; 32])));
            assert!(outcome.get("wrapped").is_some(), "{outcome}");
        }
        writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect()
    });
    assert_eq!(versions, (2..=WRITERS * ROUNDS + 1).collect());
}

/// Kills rotations with SIGKILL at times spread over their duration. The file must always be
/// readable, with every version that was ever reported.
#[test]
fn a_killed_rotation_leaves_the_old_file_or_the_new_one() {
    const ROUNDS: u32 = 80;
    let bench = Bench::new();
    let mut wrapped: Vec<(u64, Value)> = vec![(1, bench.wrap(&[7; 32]))];
    let (mut killed, mut finished) = (0, 0);
    let request = bench.request(10_000, vec![bench.operation(rotate_action())]).to_string();
    let whole = (2..=4).map(|version| {
        let start = Instant::now();
        assert_eq!(rotate(&bench), version);
        wrapped.push((version, bench.wrap(&[7; 32])));
        start.elapsed()
    });
    let whole = whole.max().unwrap();
    for round in 0..ROUNDS {
        let mut child = start(request.as_bytes());
        thread::sleep(whole * (round % 40) / 30);
        child.kill().unwrap();
        child.wait().unwrap();
        let told = rest(child.stdout.take().unwrap());
        let told = match serde_json::from_str::<Value>(&told) {
            Ok(reply) => {
                finished += 1;
                reply["results"][0]["rotated"]["key_version"].as_u64().unwrap()
            }
            Err(_) => {
                killed += 1;
                0
            }
        };

        let mut operations = vec![bench.operation(wrap_action(&[1; 32]))];
        operations
            .extend(wrapped.iter().map(|(_, wrapped)| bench.operation(unwrap_action(wrapped))));
        let mut outcomes = bench.serve(operations).into_iter();
        let newest = outcomes.next().unwrap()["wrapped"]["key_version"].as_u64().unwrap();
        let last = wrapped.last().unwrap().0;
        assert!(newest == last || newest == last + 1, "{newest} after {last}");
        assert!(newest >= told, "{newest} in the file, {told} was told");
        for (outcome, (version, _)) in outcomes.zip(&wrapped) {
            assert_eq!(outcome["unwrapped"]["key_version"], *version);
            assert_eq!(plaintext(&outcome), [7; 32]);
        }
        if newest > last {
            wrapped.push((newest, bench.wrap(&[7; 32])));
        }
    }
    eprintln!("{killed} rotations killed, {finished} finished, {} versions", wrapped.len());
    assert!(killed > 0, "no rotation was killed in time");
    assert!(finished > 0, "every rotation was killed");
    // Leftovers do not prevent the next rotation.
    assert_eq!(rotate(&bench), wrapped.last().unwrap().0 + 1);
    assert_eq!(fs::read_dir(bench.path("keys")).unwrap().count(), 1);
}

#[test]
fn leftovers_of_an_interrupted_rotation_are_removed() {
    let bench = Bench::new();
    fs::write(bench.path(UNFINISHED), "half a file").unwrap();
    assert_eq!(rotate(&bench), 2);
    assert_eq!(fs::read_dir(bench.path("keys")).unwrap().count(), 1);
}

/// It has the only copy of a master key.
#[test]
fn a_key_file_beside_is_not_removed() {
    let bench = Bench::new();
    let beside = bench.path("keys/.main.json.new");
    bench.create(&beside, "other");
    let before = fs::read(&beside).unwrap();
    assert_eq!(rotate(&bench), 2);
    assert_eq!(fs::read(&beside).unwrap(), before);
}

/// A rotation in the file `main.json` would remove it.
#[test]
fn the_name_of_an_unfinished_key_file_is_refused() {
    let bench = Bench::new();
    fs::rename(bench.key_file(), bench.path(UNFINISHED)).unwrap();
    let wrap = bench.operation_on(&bench.path(UNFINISHED), "main", "", wrap_action(&[1; 32]));
    let outcome = bench.one(wrap);
    assert_eq!(outcome["failed"]["class"], "bad_options", "{outcome}");
    let message = outcome["failed"]["message"].as_str().unwrap();
    assert!(message.ends_with("has a reserved file name"), "{outcome}");
}

#[test]
fn a_rotation_that_cannot_write_changes_nothing() {
    let bench = Bench::new();
    let before = fs::read(bench.key_file()).unwrap();
    // A directory in the place of the new file stops even root.
    fs::create_dir(bench.path(UNFINISHED)).unwrap();
    let outcome = bench.one(bench.operation(rotate_action()));
    let message = outcome["failed"]["message"].as_str().unwrap();
    assert!(message.contains("could not write key file"), "{outcome}");
    assert_eq!(fs::read(bench.key_file()).unwrap(), before);
}

#[test]
fn a_writer_that_waited_for_a_replaced_file_starts_again() {
    let bench = Bench::new();
    let old = File::open(bench.key_file()).unwrap();
    old.lock().unwrap();
    let request = bench.request(10_000, vec![bench.operation(rotate_action())]).to_string();
    let child = start(request.as_bytes());
    thread::sleep(Duration::from_millis(300));
    // Another writer replaces the file while the rotation waits for the lock on the old one.
    let copy = bench.path("keys/copy");
    bench.create(&copy, "main");
    let copied = bench.operation_on(&copy, "main", "", rotate_action());
    assert_eq!(bench.one(copied)["rotated"]["key_version"], 2);
    fs::rename(&copy, bench.key_file()).unwrap();
    drop(old);
    let output = child.wait_with_output().unwrap();
    assert!(stdout(&output).contains("\"rotated\":{\"key_version\":3}"), "{}", stdout(&output));
}
