//! Tests with manipulated trails.

use pagevault_keystore::audit::{Place, next_line};

use super::*;

const KEYSTORE: &[u8; 16] = b"0123456789abcdef";

fn key(version: KeyVersion) -> AuditKey {
    AuditKey::derive(&[version.get() as u8; 32], KEYSTORE, version)
}

fn keys() -> BTreeMap<KeyVersion, AuditKey> {
    [1, 2].into_iter().filter_map(KeyVersion::new).map(|version| (version, key(version))).collect()
}

/// Lines of a run, each given by the version of the key of its MAC, or 0 for none.
fn run(number: u8, previous: Option<&Place>, versions: &[u32]) -> (Vec<String>, Place) {
    let mut place = Place::before([number; 16]);
    let line = |version: &u32| {
        let facts = format!("\"action\":\"{}\"", place.seq);
        let key = KeyVersion::new(*version).map(key);
        next_line(&mut place, previous, u64::from(number), &facts, key.as_ref())
    };
    let lines = versions.iter().map(line).collect();
    (lines, place)
}

/// Two runs; the server is locked at the beginning of the second.
fn trail() -> Vec<String> {
    let (mut lines, end) = run(1, None, &[0, 0, 1, 1, 2]);
    lines.extend(run(2, Some(&end), &[0, 0, 2, 2]).0);
    lines
}

fn verdict_with(lines: &[String], last: Option<(&str, bool)>) -> Verdict {
    let keys = keys();
    let mut chain = Chain::new(Some(&keys));
    for (number, line) in (1..).zip(lines) {
        chain.add((0, number), std::slice::from_ref(line)).unwrap();
    }
    let last = last.map(|(text, written)| (Line::parse(text).unwrap(), written));
    chain.conclude(last.as_ref().map(|(line, written)| (line, *written)))
}

fn verdict(lines: &[String]) -> Verdict {
    verdict_with(lines, None)
}

fn missing(run: u8, from: u64, to: u64) -> Finding {
    Finding::Missing { run: [run; 16], from, to }
}

#[test]
fn an_untouched_trail_is_proven_wholly() {
    let verdict = verdict_with(&trail(), Some((&trail()[8], true)));
    assert_eq!(verdict.findings, []);
    assert_eq!(verdict.notes, []);
    assert_eq!((verdict.runs, verdict.with_mac, verdict.without_mac), (2, 5, 4));
}

#[test]
fn a_missing_line_is_found() {
    let unproven = Finding::Forged((0, 1), "there is no proof that the server wrote it");
    for (at, expected) in [(1, unproven), (3, missing(1, 4, 4)), (6, missing(2, 1, 2))] {
        let mut lines = trail();
        lines.remove(at);
        let findings = verdict(&lines).findings;
        assert!(findings.contains(&expected), "{at}: {findings:?}");
    }
    // The end of a run, which is recorded in the next one.
    let mut lines = trail();
    lines.drain(3..5);
    assert!(verdict(&lines).findings.contains(&missing(1, 4, 5)));
    // The end of the trail, which is recorded only in the state file.
    let lines = trail();
    assert_eq!(verdict(&lines[..7]).findings.len(), 2, "lines without proof");
    let findings = verdict_with(&lines[..8], Some((&lines[8], true))).findings;
    assert_eq!(findings, [missing(2, 4, 4)]);
    let verdict = verdict_with(&lines[..8], Some((&lines[8], false)));
    assert_eq!(verdict.findings, []);
    assert_eq!(verdict.notes, [Note::Unwritten { run: [2; 16], seq: 4 }]);
    // The whole last run.
    let findings = verdict_with(&lines[..5], Some((&lines[8], true))).findings;
    assert_eq!(findings, [missing(2, 1, 4)]);
}

#[test]
fn a_missing_run_is_found() {
    let (mut lines, first) = run(1, None, &[1, 1]);
    let (_, second) = run(2, Some(&first), &[1, 1, 1]);
    lines.extend(run(3, Some(&second), &[1, 1]).0);
    let gone = Finding::NoRunBefore { run: [3; 16], before: [2; 16], seq: 3 };
    assert_eq!(verdict(&lines).findings, [gone]);
    lines.extend(run(4, None, &[1]).0);
    assert!(verdict(&lines).findings.contains(&Finding::Unconnected { run: [4; 16] }));
}

/// Times are the numbers of runs.
#[test]
fn a_clock_that_was_set_back_is_no_gap() {
    let (mut lines, first) = run(9, None, &[1, 1]);
    let (second, end) = run(2, Some(&first), &[1, 1]);
    lines.extend(second);
    lines.extend(run(5, Some(&end), &[1]).0);
    let whole = verdict(&lines);
    assert_eq!((whole.findings, whole.notes), (vec![], vec![]));
    // Without its beginning.
    let rest = verdict(&lines[1..]);
    assert_eq!(rest.findings, []);
    assert_eq!(rest.notes, [Note::Begins { run: [9; 16], seq: 2 }]);
    // Another gap is still one.
    lines.drain(2..4);
    assert_eq!(verdict(&lines).findings.len(), 1);
}

#[test]
fn changed_and_invented_lines_are_found() {
    for at in 0..trail().len() {
        let mut lines = trail();
        lines[at] = lines[at].replace("\"action\":\"", "\"action\":\"un");
        let findings = verdict(&lines).findings;
        let number = at as u64 + 1;
        let here = |found: &Finding| matches!(found, Finding::Forged((0, n), _) if *n == number);
        assert!(findings.iter().any(here), "{at}: {findings:?}");
    }
    let mut invented = Place::before([9; 16]);
    let strange = AuditKey::derive(&[9; 32], KEYSTORE, KeyVersion::new(1).unwrap());
    let unknown = AuditKey::derive(&[9; 32], KEYSTORE, KeyVersion::new(7).unwrap());
    let (_, end) = run(1, None, &[0, 0, 1, 1, 2]);
    let mut behind = end;
    for (line, why) in [
        ("{}".to_owned(), "it does not have the format of an audit line"),
        (next_line(&mut invented, None, 7, "", None), "there is no proof that the server wrote it"),
        (next_line(&mut invented, None, 7, "", Some(&strange)), "its MAC is wrong"),
        (
            next_line(&mut invented, None, 7, "", Some(&unknown)),
            "it refers to a MAC key that the cluster does not have",
        ),
        (next_line(&mut behind, None, 7, "", None), "there is no proof that the server wrote it"),
        (
            next_line(&mut Place { seq: 3, ..end }, None, 7, "", None),
            "another line has the same number",
        ),
    ] {
        let mut lines = trail();
        lines.insert(5, line);
        assert_eq!(verdict(&lines).findings, [Finding::Forged((0, 6), why)]);
    }
}

#[test]
fn swapped_lines_are_found() {
    let mut lines = trail();
    lines.swap(2, 3);
    let expected = Finding::Reordered { spot: (0, 4), run: [1; 16], seq: 3 };
    assert_eq!(verdict(&lines).findings, [expected]);
}

#[test]
fn the_same_line_twice_is_one() {
    let mut lines = trail();
    lines.insert(5, lines[4].clone());
    lines.extend(trail());
    let verdict = verdict(&lines);
    assert_eq!(verdict.findings, []);
    assert_eq!(verdict.with_mac + verdict.without_mac, 9);
}

#[test]
fn files_may_begin_anywhere() {
    let lines = trail();
    let verdict = verdict(&lines[2..]);
    assert_eq!(verdict.findings, []);
    assert_eq!(verdict.notes, [Note::Begins { run: [1; 16], seq: 3 }]);
    let verdict = self::verdict(&lines[5..]);
    assert_eq!(verdict.findings, []);
    assert_eq!(verdict.notes, [Note::Begins { run: [2; 16], seq: 1 }]);
}

#[test]
fn a_restored_copy_continues_where_the_backup_was_made() {
    let (mut lines, _) = run(1, None, &[1, 1, 1, 1]);
    let (_, backup) = run(1, None, &[1, 1]);
    lines.extend(run(2, Some(&backup), &[1, 1]).0);
    let verdict = verdict(&lines);
    assert_eq!(verdict.findings, []);
    assert_eq!(verdict.notes, [Note::Branches { run: [2; 16], before: [1; 16], seq: 2, last: 4 }]);
}

/// Any role can log these with one statement.
#[test]
fn a_flood_of_forged_lines_is_counted() {
    let keys = keys();
    let mut chain = Chain::new(Some(&keys));
    for (number, line) in (1..).zip(trail()) {
        chain.add((0, number), &[line]).unwrap();
    }
    for number in 0..=MAX_LINES as u64 {
        chain.add((0, 100 + number), &[]).unwrap();
    }
    let verdict = chain.conclude(None);
    assert_eq!(verdict.findings.len() as u64 + verdict.more_forged, MAX_LINES as u64 + 1);
    assert_eq!((verdict.runs, verdict.with_mac, verdict.without_mac), (2, 5, 4));
}

#[test]
fn many_lines_with_the_same_number_hide_nothing() {
    let mut lines = trail();
    let (_, end) = run(1, None, &[0]);
    for n in 0..40 {
        let mut place = Place { link: [n; 32], ..end };
        lines.insert(0, next_line(&mut place, None, 7, "", None));
    }
    let verdict = verdict(&lines);
    assert_eq!(verdict.findings.len(), 40, "{:?}", verdict.findings);
    assert_eq!(verdict.with_mac + verdict.without_mac, 9);
}

/// The first database key is forgotten. What was written under it is proven by later lines only.
#[test]
fn lines_under_a_forgotten_key_are_proven_by_later_ones() {
    let mut keys = keys();
    keys.remove(&KeyVersion::FIRST);
    let verdict_of = |lines: &[(u64, &str)]| {
        let mut chain = Chain::new(Some(&keys));
        for (number, line) in lines {
            let candidates: Vec<_> = line.split('\n').map(str::to_owned).collect();
            chain.add((0, *number), &candidates).unwrap();
        }
        chain.conclude(None)
    };
    let lines = trail();
    let numbered = || (1..).zip(lines.iter().map(String::as_str)).collect::<Vec<_>>();
    let verdict = verdict_of(&numbered());
    assert_eq!((verdict.findings, verdict.notes), (vec![], vec![]));
    assert_eq!((verdict.with_mac, verdict.without_mac), (3, 6));
    // Changed, and with a MAC that nobody can verify any more.
    let changed = lines[3].replacen("\"action\":\"", "\"action\":\"x", 1);
    let mut with_changed = numbered();
    with_changed[3].1 = &changed;
    let forged = |line| Finding::Forged((0, line), "there is no proof that the server wrote it");
    let findings = verdict_of(&with_changed).findings;
    assert!(findings.contains(&Finding::Torn { run: [1; 16], seq: 4 }), "{findings:?}");
    assert!(findings.contains(&forged(4)), "{findings:?}");
    // Nothing later proves it.
    assert_eq!(verdict_of(&numbered()[..4]).findings, [1, 2, 3, 4].map(forged));
    // A line that somebody has put before it, into the log's prefix, does not hide it.
    let two = format!("{changed}\n{}", lines[3]);
    let mut with_two = numbered();
    with_two[3].1 = &two;
    let verdict = verdict_of(&with_two);
    assert_eq!((verdict.with_mac, verdict.without_mac), (3, 6));
    assert!(!verdict.findings.iter().any(|finding| matches!(finding, Finding::Torn { .. })));
    // A key that is not older than all others is not a forgotten one.
    let mut place = Place::before([9; 16]);
    let unknown = next_line(&mut place, None, 1, "\"a\":1", KeyVersion::new(3).map(key).as_ref());
    let findings = verdict_of(&[(1, &unknown)]).findings;
    let why = "it refers to a MAC key that the cluster does not have";
    assert_eq!(findings, [Finding::Forged((0, 1), why)]);
}

/// A line that proves itself, and in it a text like a line: the server quotes names of objects.
#[test]
fn only_proven_lines_are_accepted_in_their_order() {
    // Numbers of runs and times are against the order.
    let (mut lines, first) = run(9, None, &[1, 1]);
    let (second, end) = run(2, Some(&first), &[0, 1]);
    lines.extend(second);
    lines.extend(run(5, Some(&end), &[1]).0);
    let forged = r#"{"role":"dba","action":"shred"}"#.to_owned();
    let (unproven, _) = run(7, None, &[0]);
    let keys = keys();
    let mut chain = Chain::new(Some(&keys));
    for (number, line) in (1..).zip(lines.iter().rev().chain(&unproven)) {
        chain.add((0, number), &[line.clone(), forged.clone()]).unwrap();
    }
    let accepted = chain.conclude(None).accepted;
    let places: Vec<_> = lines.iter().map(|line| accepted.place(line)).collect();
    let expected = [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)];
    assert_eq!(places, expected.map(Some));
    assert_eq!(accepted.place(&forged), None);
    assert_eq!(accepted.place(&unproven[0]), None);
}

#[test]
fn unproven_runs_that_follow_one_another_have_an_order() {
    let (one, end) = run(1, None, &[1]);
    let (two, end) = run(2, Some(&end), &[1]);
    let (again, _) = run(1, Some(&end), &[1]);
    let mut chain = Chain::new(None);
    for (number, line) in (1..).zip([&again[0], &two[0]]) {
        chain.add((0, number), std::slice::from_ref(line)).unwrap();
    }
    let accepted = chain.conclude(None).accepted;
    assert!(accepted.place(&again[0]).is_some() && accepted.place(&two[0]).is_some());
    assert_eq!(accepted.place(&one[0]), None);
}
