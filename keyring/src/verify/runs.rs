//! WAL without a gap, and which needs it meets.

use pagevault_cipher::Lsn;

use super::headers::{LONG_HEADER, PAGE, SHORT_HEADER, plus};
use super::manifest::Range;
use super::segments::Histories;

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

    /// Whether it is WAL of a range's timeline up to the end of the range: of a later timeline only
    /// if that began after it. Recovery reads no other (`XLogFileReadAnyTLI`, xlogrecovery.c).
    pub(super) fn serves(&self, range: &Range, histories: &Histories) -> bool {
        let last = Lsn(range.end.0.saturating_sub(1));
        self.timeline == range.timeline
            || histories.owner(self.timeline, last) == Some(range.timeline)
    }
}

#[cfg(test)]
mod tests {
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
    fn the_end_of_the_address_space_is_no_special_place() {
        let run = Run { timeline: 1, first: Lsn(0x100), reached: Lsn(u64::MAX - 8191) };
        assert!(!run.follows(Lsn(0)) && run.follows(Lsn(u64::MAX - 8191 + 24)));
        assert!(!run.includes(Lsn(u64::MAX)) && run.includes(Lsn(u64::MAX - 8191)));
    }
}
