//! Notes of what a cluster has reached, and the comparison of a data directory with them.

use pagevault_cipher::Lsn;
use pagevault_keystore::anchor::{
    Identity, MAX_NOTE, Note, NoteError, Position, Verdict, compare, decode_accepted,
    decode_unchecked, encode_accepted, encode_unchecked, parse_lsn, position_of_label,
};
use proptest::prelude::*;

/// Written by hand from the description of the format.
const GOLDEN: &str = concat!(
    r#"{"version":1,"keystore":"00112233445566778899aabbccddeeff","system":"#,
    r#""18446744073709551615","timeline":3,"checkpoint":"1A/2F000028","generation":17,"#,
    r#""time":"2026-11-24T02:16:00.000000Z","accepted":"restored, ticket \"4711\""}"#
);

/// The same with the number of the data directory.
const GOLDEN_2: &str = concat!(
    r#"{"version":2,"keystore":"00112233445566778899aabbccddeeff","system":"#,
    r#""18446744073709551615","timeline":3,"checkpoint":"1A/2F000028","generation":17,"#,
    r#""time":"2026-11-24T02:16:00.000000Z","accepted":"restored, ticket \"4711\"","#,
    r#""directory":"ffeeddccbbaa99887766554433221100"}"#
);

fn note(timeline: u32, lsn: u64) -> Note {
    Note {
        keystore: [7; 16],
        system: 42,
        reached: Position { timeline, lsn: Lsn(lsn) },
        generation: 1,
        time: "2026-11-24T02:16:00.000000Z".to_owned(),
        accepted: None,
        directory: None,
    }
}

const US: Identity = Identity { keystore: Some([7; 16]), system: 42 };

#[test]
fn the_golden_note_is_read_and_written() {
    let read = Note::decode(GOLDEN.as_bytes()).unwrap();
    let expected = Note {
        keystore: std::array::from_fn(|i| u8::try_from(i * 0x11).unwrap()),
        system: u64::MAX,
        reached: Position { timeline: 3, lsn: Lsn(0x1A_2F00_0028) },
        generation: 17,
        time: "2026-11-24T02:16:00.000000Z".to_owned(),
        accepted: Some("restored, ticket \"4711\"".to_owned()),
        directory: None,
    };
    assert_eq!((&read, read.encode().as_str()), (&expected, GOLDEN));
    let number = std::array::from_fn(|i| u8::try_from(0xff - i * 0x11).unwrap());
    let numbered = Note { directory: Some(number), ..expected.clone() };
    assert_eq!(
        (Note::decode(GOLDEN_2.as_bytes()), numbered.encode().as_str()),
        (Ok(numbered), GOLDEN_2)
    );
    let plain = Note { accepted: None, ..expected };
    assert!(!plain.encode().contains("accepted"));
    assert_eq!(Note::decode(plain.encode().as_bytes()), Ok(plain));
}

#[test]
fn what_is_not_a_note_is_refused() {
    let changed = |from: &str, to: &str| {
        assert!(GOLDEN.contains(from));
        Note::decode(GOLDEN.replace(from, to).as_bytes()).unwrap_err()
    };
    let version = changed("\"version\":1", "\"version\":3,\"more\":0");
    assert_eq!(version, NoteError::Version(3));
    for (from, to) in [("\"generation\":17,", ""), ("{", "{\"more\":0,"), (":3,", ":-3,")] {
        assert_eq!(changed(from, to), NoteError::Malformed, "{to}");
    }
    for (from, to, field) in [
        ("eeff\"", "ee\"", "keystore"),
        ("0011", "001G", "keystore"),
        ("0011", "+011", "keystore"),
        ("18446744073709551615", "18446744073709551616", "system"),
        ("18446744073709551615", "+1", "system"),
        ("18446744073709551615", "", "system"),
        ("\"timeline\":3", "\"timeline\":0", "timeline"),
        ("1A/2F000028", "1A/12F000028", "checkpoint"),
        ("1A/2F000028", "1A", "checkpoint"),
        ("1A/2F000028", "+A/2F", "checkpoint"),
        ("1A/2F000028", "/2F", "checkpoint"),
        ("2026-", "2026\\n", "time"),
        ("restored", "\\u0000", "accepted"),
        ("restored, ticket \\\"4711\\\"", " ", "accepted"),
    ] {
        assert_eq!(changed(from, to), NoteError::Field(field), "{to}");
    }
    assert_eq!(changed("\"version\":1", "\"version\":2"), NoteError::Field("directory"));
    for (from, to) in [
        ("\"version\":2", "\"version\":1"),
        ("ffee", "ffe"),
        ("ffee", "FFEE"),
        ("\"accepted\":\"restored, ticket \\\"4711\\\"\",", ""),
    ] {
        assert!(GOLDEN_2.contains(from));
        let error = Note::decode(GOLDEN_2.replace(from, to).as_bytes()).unwrap_err();
        assert_eq!(error, NoteError::Field("directory"), "{to}");
    }
    for text in ["", "{}", "null", "17", "[]", "<html>", "\u{0}"] {
        assert_eq!(Note::decode(text.as_bytes()), Err(NoteError::Malformed), "{text}");
    }
    let long = GOLDEN.replace("restored", &"x".repeat(MAX_NOTE));
    assert_eq!(Note::decode(long.as_bytes()), Err(NoteError::Malformed));
}

/// Timelines of a small world: (parent, where it forked off). Timeline 1 begins at 0.
struct World(Vec<(u32, u64)>);

/// Addresses are below this.
const END: u64 = 5;

impl World {
    fn fork(&self, timeline: u32) -> Option<(u32, u64)> {
        let index = usize::try_from(timeline).unwrap().checked_sub(2)?;
        self.0.get(index).copied()
    }

    /// Whether a server at `here` has the record that begins at `place`: by walking back, record by
    /// record, without the rule under test.
    fn has(&self, here: Position, place: Position) -> bool {
        let (mut timeline, mut lsn) = (here.timeline, here.lsn.0);
        loop {
            while let Some((parent, fork)) = self.fork(timeline).filter(|(_, fork)| lsn < *fork) {
                assert!(lsn < fork);
                timeline = parent;
            }
            if (timeline, lsn) == (place.timeline, place.lsn.0) {
                return true;
            }
            let Some(before) = lsn.checked_sub(1) else { return false };
            lsn = before;
        }
    }

    /// As `writeTimeLineHistory` (timeline.c) writes it.
    fn history(&self, timeline: u32) -> String {
        let Some((parent, fork)) = self.fork(timeline) else { return String::new() };
        format!("{}{parent}\t0/{fork:X}\tno recovery target\n\n", self.history(parent))
    }

    /// Where records of a timeline can be.
    fn places(&self, timeline: u32) -> impl Iterator<Item = Position> {
        let begin = self.fork(timeline).map_or(0, |(_, fork)| fork);
        (begin..END).map(move |lsn| Position { timeline, lsn: Lsn(lsn) })
    }
}

/// Every world of up to four timelines, every note, every data directory.
#[test]
fn a_directory_contains_a_note_exactly_if_its_record_is_in_its_past() {
    let mut seen = [0_u32; 4];
    let mut worlds = vec![World(Vec::new())];
    for _ in 0..3 {
        let mut larger = Vec::new();
        for world in &worlds {
            for parent in 1..=u32::try_from(world.0.len()).unwrap() + 1 {
                let begin = world.fork(parent).map_or(0, |(_, fork)| fork);
                // A timeline may fork off where its parent has begun.
                for fork in begin..END {
                    larger.push(World([&world.0[..], &[(parent, fork)]].concat()));
                }
            }
        }
        for world in &larger {
            let timelines = 1..=u32::try_from(world.0.len()).unwrap() + 1;
            for there in timelines.clone().flat_map(|timeline| world.places(timeline)) {
                for here in timelines.clone().flat_map(|timeline| world.places(timeline)) {
                    let note = note(there.timeline, there.lsn.0);
                    let history = world.history(here.timeline);
                    let verdict = compare(&note, &US, here, history.as_bytes());
                    assert_eq!(
                        verdict.contains_the_note(),
                        world.has(here, there),
                        "{here} {there} {history:?}: {verdict:?}"
                    );
                    assert_eq!(verdict == Verdict::Same, here == there, "{here} {there}");
                    if here.timeline == there.timeline {
                        assert_eq!(verdict == Verdict::Older, here.lsn < there.lsn);
                    }
                    seen[verdict as usize] += 1;
                }
            }
        }
        worlds = larger;
    }
    assert!(seen.iter().all(|count| *count > 0), "{seen:?}");
}

#[test]
fn notes_of_other_clusters_are_told_apart() {
    let here = Position { timeline: 1, lsn: Lsn(10) };
    let of = |identity| compare(&note(1, 5), &identity, here, b"");
    assert_eq!(of(US), Verdict::Newer);
    for other in [
        Identity { keystore: Some([8; 16]), ..US },
        Identity { keystore: None, ..US },
        Identity { system: 43, ..US },
    ] {
        assert_eq!(of(other), Verdict::OtherCluster);
    }
}

#[test]
fn without_its_history_a_later_timeline_contains_nothing() {
    let here = Position { timeline: 2, lsn: Lsn(10) };
    assert_eq!(compare(&note(1, 5), &US, here, b""), Verdict::OtherTimeline);
    assert_eq!(compare(&note(1, 5), &US, here, b"1\t0/6\tx\n"), Verdict::Newer);
    assert_eq!(compare(&note(1, 5), &US, here, b"1\t0/5\tx\n"), Verdict::OtherTimeline);
}

#[test]
fn a_label_says_where_a_backup_begins() {
    let label = "START WAL LOCATION: 0/7000028 (file 000000020000000000000007)\n\
         CHECKPOINT LOCATION: 1A/7000060\nBACKUP METHOD: streamed\nBACKUP FROM: primary\n\
         START TIME: 2026-11-24 02:16:00 UTC\nLABEL: START TIMELINE: 9\nSTART TIMELINE: 2\n";
    let position = Position { timeline: 2, lsn: Lsn(0x1A_0700_0060) };
    assert_eq!(position_of_label(label), Some(position));
    assert_eq!(position_of_label(""), None);
    // PostgreSQL does without this line, and takes the name of the segment.
    assert_eq!(position_of_label(&label.replace("START TIMELINE: 2\n", "")), Some(position));
    for (from, to) in [
        ("1A/7000060", "x"),
        ("CHECKPOINT LOCATION: ", "CHECKPOINT  LOCATION: "),
        ("CHECKPOINT LOCATION: ", "CHECKPOINT  LOCATION: 2A/7000060\nCHECKPOINT LOCATION: "),
        ("START WAL", "\nSTART WAL"),
        (")\n", ")\r\n"),
        ("60\n", "60\r\n"),
        ("START TIMELINE: 2", "START TIMELINE: 3"),
        ("000000020000000000000007", "2"),
    ] {
        assert_eq!(position_of_label(&label.replace(from, to)), None, "{from} {to}");
    }
}

proptest! {
    #[test]
    fn any_note_survives(
        keystore: [u8; 16], system: u64, timeline in 1..=u32::MAX, lsn: u64, generation: u64,
        accepted in proptest::option::of("[a-zA-Z\"\\\\ä][ -~]{0,80}"), number: Option<[u8; 16]>,
    ) {
        let reached = Position { timeline, lsn: Lsn(lsn) };
        prop_assert_eq!(parse_lsn(&reached.lsn.to_string()), Some(reached.lsn));
        let directory = number.filter(|_| accepted.is_some());
        let known = Note { keystore, system, reached, generation, ..note(1, 1) };
        let note = Note { accepted, directory, ..known };
        prop_assert_eq!(Note::decode(note.encode().as_bytes()), Ok(note));
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(bytes: Vec<u8>, text: String) {
        let _ = Note::decode(&bytes);
        let _ = position_of_label(&text);
        prop_assert_eq!(decode_accepted(&bytes), None);
    }
}

/// As documented; another program computed the checksum.
#[test]
fn an_unchecked_position_is_read_as_it_was_written_or_not_at_all() {
    let position = Position { timeline: 3, lsn: Lsn(0x1_0000_0028) };
    let text = encode_unchecked(position);
    assert_eq!(text, "pagevault unchecked 1\nreached 1/28 3\nend 46538d18\n");
    assert_eq!(decode_unchecked(text.as_bytes()), Some(position));
    for length in 0..text.len() {
        assert_eq!(decode_unchecked(&text.as_bytes()[..length]), None, "{length} bytes");
    }
    for at in 0..text.len() * 8 {
        let mut bytes = text.as_bytes().to_vec();
        bytes[at / 8] ^= 1 << (at % 8);
        assert_eq!(decode_unchecked(&bytes), None, "bit {at}");
    }
}

#[test]
fn the_number_of_a_directory_is_read_as_it_was_written_or_not_at_all() {
    let number = std::array::from_fn(|i| u8::try_from(i * 0x11).unwrap());
    let text = encode_accepted(&number);
    let lines = "pagevault accepted 1\ndirectory 00112233445566778899aabbccddeeff\n";
    assert_eq!(text, format!("{lines}end f1ae383a\n"));
    assert_eq!(decode_accepted(text.as_bytes()), Some(number));
    for length in 0..text.len() {
        assert_eq!(decode_accepted(&text.as_bytes()[..length]), None, "{length} bytes");
    }
    for at in 0..text.len() * 8 {
        let mut bytes = text.as_bytes().to_vec();
        bytes[at / 8] ^= 1 << (at % 8);
        assert_eq!(decode_accepted(&bytes), None, "bit {at}");
    }
}
