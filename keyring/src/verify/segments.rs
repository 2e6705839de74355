//! WAL segments of a directory and of an archive, and the history files beside them.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use pagevault_cipher::Lsn;
use pagevault_keystore::wal_segments::{Name, parse_name};
use pagevault_keystore::wal_timelines::{forks, history_name};

use super::manifest::Range;
use crate::failure::{Failure, unreadable};
use crate::regular::read_if_there;

/// Maximum size of a history file in bytes, and of all of them; they have a line of some 100 bytes
/// for each earlier timeline.
const MAX_HISTORY: u64 = 1 << 20;
const MAX_HISTORIES: usize = 16 << 20;

/// A file in `pg_wal`, or in an archive.
#[derive(Clone)]
pub(super) struct Segment {
    pub(super) path: PathBuf,
    pub(super) name: Name,
}

/// All segments in a directory, by timeline and address.
pub(super) fn segments(directory: &Path) -> Result<Vec<Segment>, Failure> {
    let entries = std::fs::read_dir(directory).map_err(|error| unreadable(directory, &error))?;
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|error| unreadable(directory, &error))?;
        let name = entry.file_name().into_string().unwrap_or_default();
        if let Some(name) = parse_name(name.as_bytes()) {
            found.push(Segment { path: entry.path(), name });
        }
    }
    found.sort_by_key(|segment| (segment.name.timeline, segment.name.number));
    Ok(found)
}

/// Segments of an archive that have addresses of these ranges.
pub(super) fn archived(
    archive: &Path,
    ranges: &[Range],
    size: u64,
) -> Result<Vec<Segment>, Failure> {
    let mut archived = self::segments(archive)?;
    archived.retain(|segment| ranges.iter().any(|range| overlaps(segment, range, size)));
    Ok(archived)
}

/// Of these, segments of a range's timeline, or of one that continues it. An archive may have WAL
/// of other timelines that began earlier, such as that of a server that was restored to try it.
pub(super) fn serving(
    archived: Vec<Segment>,
    ranges: &[Range],
    size: u64,
    histories: &Histories,
) -> Vec<Segment> {
    let serves = |segment: &Segment, range: &Range| {
        let last = Lsn(range.end.0.saturating_sub(1));
        overlaps(segment, range, size)
            && histories.continues(segment.name.timeline, range.timeline, last)
    };
    let is_needed = |segment: &Segment| ranges.iter().any(|range| serves(segment, range));
    archived.into_iter().filter(is_needed).collect()
}

fn overlaps(segment: &Segment, range: &Range, size: u64) -> bool {
    let Lsn(start) = segment.name.start(size);
    start < range.end.0 && range.start.0 < start.saturating_add(size)
}

/// All of them, by timeline and address; of two of the same name the first.
pub(super) fn merged(segments: &[Segment], others: &[Segment]) -> Vec<Segment> {
    let mut all = [segments, others].concat();
    let name = |segment: &Segment| (segment.name.timeline, segment.name.number);
    all.sort_by_key(name);
    all.dedup_by_key(|segment| name(segment));
    all
}

/// What a history file says.
#[derive(Default)]
struct History {
    parents: BTreeSet<u32>,
    /// The owners of addresses: where the addresses of each end, in this order. An address is of
    /// the newest timeline that began no later (`tliOfPointInHistory`, timeline.c), so a timeline
    /// that ends before its parent does has none.
    owners: Vec<(Lsn, u32)>,
}

impl History {
    fn parse(text: &[u8]) -> History {
        let mut history = History::default();
        for (parent, end) in forks(text) {
            history.parents.insert(parent);
            let mut owner = parent;
            while let Some((_, before)) = history.owners.pop_if(|(last, _)| *last >= end) {
                owner = before;
            }
            history.owners.push((end, owner));
        }
        history
    }
}

/// The history files of timelines. The first timeline has none.
#[derive(Default)]
pub(super) struct Histories(BTreeMap<u32, History>);

impl Histories {
    /// Those of the timelines of `segments`, and of one more, from `pg_wal` or else the archive.
    pub(super) fn read<'a>(
        segments: impl IntoIterator<Item = &'a Segment>,
        more: u32,
        directories: &[&Path],
    ) -> Result<Histories, Failure> {
        let timelines = segments.into_iter().map(|segment| segment.name.timeline).chain([more]);
        let mut found = BTreeMap::new();
        let mut bytes = 0;
        for timeline in timelines.collect::<BTreeSet<_>>() {
            for directory in directories {
                let path = directory.join(OsStr::from_bytes(&history_name(timeline)));
                let failed = |error| unreadable(&path, &error);
                let Some(text) = read_if_there(&path, MAX_HISTORY).map_err(failed)? else {
                    continue;
                };
                bytes += text.len();
                if bytes > MAX_HISTORIES {
                    let what = format!("the history files have more than {MAX_HISTORIES} bytes");
                    return Err(failed(io::Error::other(what)));
                }
                found.insert(timeline, History::parse(&text));
                break;
            }
        }
        Ok(Histories(found))
    }

    /// The timeline that an address has in the history of `timeline`; `None` without its file.
    pub(super) fn owner(&self, timeline: u32, address: Lsn) -> Option<u32> {
        let owners = &self.0.get(&timeline)?.owners;
        let owner = owners.get(owners.partition_point(|(end, _)| *end <= address));
        Some(owner.map_or(timeline, |(_, parent)| *parent))
    }

    /// Whether `timeline` is this one, or continues it from behind an address.
    pub(super) fn continues(&self, timeline: u32, parent: u32, address: Lsn) -> bool {
        timeline == parent || self.owner(timeline, address) == Some(parent)
    }

    /// Whether a page of `of` may be in a segment of `timeline` (`tliInHistory`, timeline.c).
    /// Without a history file every earlier timeline may be an ancestor.
    pub(super) fn has(&self, timeline: u32, of: u32) -> bool {
        let Some(history) = self.0.get(&timeline) else { return (1..=timeline).contains(&of) };
        of == timeline || history.parents.contains(&of)
    }

    /// Segments that continue one of a parent timeline: for each that does not follow another of
    /// its own timeline, the parent that it follows, with its address.
    pub(super) fn joints(&self, segments: &[Segment], size: u64) -> BTreeMap<(u32, Lsn), u32> {
        let mut found = BTreeMap::new();
        let mut before = None;
        for segment in segments {
            let (timeline, Lsn(start)) = (segment.name.timeline, segment.name.start(size));
            let follows = before == Some((timeline, start));
            before = start.checked_add(size).map(|end| (timeline, end));
            let last = start.checked_sub(1).filter(|_| !follows);
            let parent = last.and_then(|last| self.owner(timeline, Lsn(last)));
            // A parent has a smaller number, and was read before.
            if let Some(parent) = parent.filter(|parent| *parent < timeline) {
                found.insert((timeline, Lsn(start)), parent);
            }
        }
        found
    }

    #[cfg(test)]
    pub(super) fn of<const N: usize>(files: [(u32, &str); N]) -> Histories {
        Histories(files.map(|(timeline, text)| (timeline, History::parse(text.as_bytes()))).into())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs;

    use pagevault_keystore::wal_timelines::owner_of;

    use super::*;

    pub(in super::super) fn segment(timeline: u32, number: u32) -> Segment {
        Segment { path: PathBuf::new(), name: Name { timeline, number: (0, number) } }
    }

    #[test]
    fn a_segment_continues_that_of_the_timeline_before_it() {
        let histories = Histories::of([
            (2, "1\t0/5000500\tno reason\n"),
            (3, "1\t0/5000500\n2\t0/7000500\n"),
            (4, "1\t0/5000500\n2\t0/7000500\n"),
        ]);
        let segments = [(1, 3), (1, 4), (2, 5), (2, 6), (3, 7), (3, 9), (4, 7), (5, 8)];
        let segments = segments.map(|(timeline, number)| segment(timeline, number));
        let joints = histories.joints(&segments, 16 << 20);
        let at = |timeline, number: u64| (timeline, Lsn(number << 24));
        assert_eq!(joints, BTreeMap::from([(at(2, 5), 1), (at(3, 7), 2), (at(4, 7), 2)]));
    }

    #[test]
    fn only_ancestors_may_be_in_a_segment() {
        let histories = Histories::of([(4, "# 3\n 1\t0/5000500\n\n2\t0/7000500\n")]);
        let may = [1, 2, 3, 4, 5].map(|of| histories.has(4, of));
        assert_eq!(may, [true, true, false, true, false]);
        assert_eq!([0, 1, 2, 3].map(|of| histories.has(2, of)), [false, true, true, false]);
        assert_eq!(histories.owner(4, Lsn(0x600_0000)), Some(2));
        assert_eq!(histories.owner(2, Lsn(0x600_0000)), None);
    }

    #[test]
    fn each_address_has_the_owner_that_postgresql_finds() {
        // In any order, as nothing of PostgreSQL has it.
        let text = "1\t0/10\n2\t0/30\n3\t0/20\n4\t0/30\n5\t0/40\n1\t0/50\n";
        let histories = Histories::of([(6, text)]);
        for address in (0..0x60).map(Lsn) {
            let owner = owner_of(text.as_bytes(), 6, address);
            assert_eq!(histories.owner(6, address), Some(owner), "{address}");
        }
    }

    #[test]
    fn of_two_segments_of_the_same_name_the_first_counts() {
        let place = |place: &str, number| {
            let path = PathBuf::from(place);
            Segment { path, ..segment(1, number) }
        };
        let archive = [place("archive", 2), place("archive", 3)];
        let own = [place("own", 1), place("own", 2), place("own", 4)];
        let paths = |segments: Vec<Segment>| -> Vec<String> {
            segments.iter().map(|segment| segment.path.display().to_string()).collect()
        };
        assert_eq!(paths(merged(&archive, &own)), ["own", "archive", "archive", "own"]);
        assert_eq!(paths(merged(&own, &archive)), ["own", "own", "archive", "own"]);
    }

    #[test]
    fn history_files_are_limited() {
        let directory = tempfile::tempdir().unwrap();
        let read = |timelines: u32, size: u64| {
            let segments: Vec<_> =
                (2..2 + timelines).map(|timeline| segment(timeline, 1)).collect();
            for segment in &segments {
                let name = history_name(segment.name.timeline);
                let file = fs::File::create(directory.path().join(OsStr::from_bytes(&name)));
                file.unwrap().set_len(size).unwrap();
            }
            Histories::read(&segments, 1, &[directory.path()]).is_ok()
        };
        assert!(read(16, MAX_HISTORY) && !read(17, MAX_HISTORY) && !read(1, MAX_HISTORY + 1));
    }

    #[test]
    fn wal_of_other_timelines_is_left_in_the_archive() {
        let histories = Histories::of([(2, "1\t0/4000000\n"), (3, "1\t0/6800000\n")]);
        let serving = |range: Range| -> Vec<(u32, u32)> {
            let segments = [(1, 4), (1, 5), (1, 6), (1, 7), (2, 5), (2, 6), (3, 6), (3, 7), (4, 5)];
            let segments = segments.map(|(timeline, number)| segment(timeline, number));
            let found = self::serving(segments.into(), &[range], 16 << 20, &histories);
            found.iter().map(|Segment { name, .. }| (name.timeline, name.number.1)).collect()
        };
        let range = |timeline, start, end| Range { timeline, start: Lsn(start), end: Lsn(end) };
        let found = serving(range(1, 0x500_0028, 0x680_0000));
        assert_eq!(found, [(1, 5), (1, 6), (3, 6)], "timeline 3 continues it");
        assert_eq!(serving(range(1, 0x500_0028, 0x680_0001)), [(1, 5), (1, 6)]);
        assert_eq!(serving(range(2, 0x500_0028, 0x600_0000)), [(2, 5)]);
        assert_eq!(serving(range(1, 0x600_0028, u64::MAX)), [(1, 6), (1, 7)]);
    }
}
