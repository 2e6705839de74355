//! WAL without a gap, and which needs it meets.

use pagevault_cipher::Lsn;

use super::headers::{LONG_HEADER, PAGE, SHORT_HEADER, plus};
use super::manifest::Range;
use super::segments::{Histories, Segment};

/// WAL without a gap.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    /// The timeline of its last segment.
    pub(super) timeline: u32,
    /// The beginning of the first record.
    pub(super) first: Lsn,
    /// The end of the last record; after a switch, that of the segment.
    pub(super) reached: Lsn,
}

impl Run {
    /// Whether a record that begins at `began` is the next one: immediately, or after the header of
    /// a page.
    pub(super) fn follows(&self, began: Lsn) -> bool {
        let Lsn(reached) = self.reached;
        let header = match reached {
            _ if !reached.is_multiple_of(PAGE as u64) => return began == self.reached,
            _ if began.bytes_since(self.reached) == LONG_HEADER as u64 => LONG_HEADER,
            _ => SHORT_HEADER,
        };
        began == plus(self.reached, header)
    }

    /// Whether it has the record at `address`; or, if a page begins there, after the page's header.
    pub(super) fn includes(&self, address: Lsn) -> bool {
        let header = if address.0.is_multiple_of(PAGE as u64) { LONG_HEADER } else { 0 };
        self.first <= plus(address, header) && address <= self.reached
    }

    /// Whether recovery begins in it, at `redo` of this timeline.
    pub(super) fn is_replayed(&self, timeline: u32, redo: Lsn, histories: &Histories) -> bool {
        self.includes(redo) && histories.continues(self.timeline, timeline, redo)
    }

    /// Whether it is WAL of a range's timeline up to the end of the range: of a later timeline only
    /// if that began after it. Recovery reads no other (`XLogFileReadAnyTLI`, xlogrecovery.c).
    pub(super) fn serves(&self, range: &Range, histories: &Histories) -> bool {
        let last = Lsn(range.end.0.saturating_sub(1));
        histories.continues(self.timeline, range.timeline, last)
    }
}

/// Where WAL from `redo` on, on this timeline or one that continues it, ends because a segment is
/// missing, and the WAL behind that. A crash leaves no such gap: a segment is created, and flushed,
/// before the next one is (`XLogWrite`, xlog.c). If no segment is missing, a server may have
/// accepted the end, and not reached what is left over of its future.
pub(super) fn gap(
    runs: &[Run],
    segments: &[Segment],
    (timeline, redo): (u32, Lsn),
    size: u64,
    histories: &Histories,
) -> Option<(Run, Run)> {
    let number = |address: Lsn| address.0 / size;
    runs.iter().find_map(|run| {
        if !run.is_replayed(timeline, redo, histories) {
            return None;
        }
        let end = number(run.reached);
        let later =
            runs.iter().filter(|other| other.timeline == run.timeline && number(other.first) > end);
        let later = later.min_by_key(|other| other.first)?;
        let between = end..number(later.first);
        let present = segments.iter().filter(|Segment { name, .. }| {
            name.timeline == run.timeline && between.contains(&number(name.start(size)))
        });
        let is_missing = (present.count() as u64) < between.end - between.start;
        is_missing.then_some((*run, *later))
    })
}

#[cfg(test)]
mod tests {
    use super::super::segments::tests::segment;
    use super::*;

    #[test]
    fn a_timeline_serves_its_ancestors_up_to_where_it_began() {
        let histories = Histories::of([(2, "1\t0/5000000\n"), (3, "1\t0/6000000\n")]);
        let serves = |of, timeline, end| {
            let run = Run { timeline: of, first: Lsn(0), reached: Lsn(u64::MAX) };
            run.serves(&Range { timeline, start: Lsn(0x400_0000), end: Lsn(end) }, &histories)
        };
        assert!(serves(1, 1, 0x900_0000) && serves(2, 1, 0x500_0000));
        assert!(!serves(2, 1, 0x500_0001), "beyond the fork");
        assert!(serves(2, 2, 0x700_0000) && !serves(3, 2, 0x700_0000), "of a sibling");
        assert!(!serves(1, 2, 0x700_0000), "of a parent");
        assert!(!serves(9, 1, 0x500_0000), "of an unknown timeline");
    }

    #[test]
    fn wal_in_a_later_segment_is_behind_a_gap() {
        let histories = Histories::of([(2, "1\t0/5000000\n"), (3, "1\t0/1000000\n")]);
        let run =
            |timeline, first, reached| Run { timeline, first: Lsn(first), reached: Lsn(reached) };
        let names =
            [(1, 1), (1, 2), (1, 4), (1, 6), (2, 1), (2, 5), (2, 7), (3, 1), (3, 2), (3, 5)];
        let mut segments: Vec<_> = names.map(|(timeline, number)| segment(timeline, number)).into();
        let found = |runs: &[Run], segments: &[Segment]| {
            let gap = gap(runs, segments, (1, Lsn(0x200_0100)), 1 << 24, &histories);
            gap.map(|(run, later)| (run.timeline, run.reached.0, later.first.0))
        };
        let before = run(1, 0x80_0000, 0x90_0000);
        let replayed = run(1, 0x180_0000, 0x300_0000);
        let next = run(1, 0x400_0028, 0x500_0000);
        let last = run(1, 0x600_0028, 0x700_0000);
        assert_eq!(found(&[before, replayed], &segments), None);
        let gap = Some((1, 0x300_0000, 0x400_0028));
        assert_eq!(found(&[before, replayed, next, last], &segments), gap);
        // As a crash may leave them: pages of the last segment.
        assert_eq!(found(&[replayed, run(1, 0x300_4018, 0x300_8000)], &segments), None);
        // Of other timelines. Only that of the redo pointer, and what continues it, is replayed.
        assert_eq!(found(&[replayed, run(2, 0x500_0028, 0x600_0000)], &segments), None);
        let (child, behind) = (run(2, 0x180_0000, 0x510_0000), run(2, 0x700_0028, 0x800_0000));
        let gap = Some((2, 0x510_0000, 0x700_0028));
        assert_eq!(found(&[replayed, child, behind], &segments), gap);
        let sibling = [run(3, 0x180_0000, 0x300_0000), run(3, 0x500_0028, 0x600_0000)];
        assert_eq!(found(&sibling, &segments), None);
        // A server has written this segment since.
        segments.push(segment(1, 3));
        assert_eq!(found(&[replayed, next], &segments), None);
    }

    #[test]
    fn the_end_of_the_address_space_is_no_special_place() {
        let run = Run { timeline: 1, first: Lsn(0x100), reached: Lsn(u64::MAX - 8191) };
        assert!(!run.follows(Lsn(0)) && run.follows(Lsn(u64::MAX - 8191 + 24)));
        assert!(!run.includes(Lsn(u64::MAX)) && run.includes(Lsn(u64::MAX - 8191)));
    }
}
