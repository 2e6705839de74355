//! The timeline of a WAL page.
//!
//! Where a timeline forks, its parent may have continued. The parent's WAL behind the fork may be
//! in a segment that the child uses again: `RemoveNonParentXlogFiles` (xlog.c) renames such
//! segments, often to the same number. So a page may have the right address and still be left over.
//! PostgreSQL detects it by `xlp_tli`: timelines never go backwards
//! (`XLogReaderValidatePageHeader`, xlogreader.c), because a child has a greater number than its
//! parent.
//!
//! That check compares a page with the one before it. Here pages are handled one by one, so a page
//! is compared with the timeline in its segment's name, and with the address at which that timeline
//! began, from its history file. Before that address a segment holds pages of parents
//! (`XLogFileCopy`, xlog.c), and so does the page in which the timeline began.

use pagevault_cipher::Lsn;

use crate::wal_segments::hexadecimal;

/// Bytes that are read of a history file: its end, which contains the newest fork. Lines have about
/// 100 bytes.
pub const HISTORY_TAIL: usize = 4096;

/// The name of the history file of a timeline (`TLHistoryFileName`, xlog_internal.h).
#[must_use]
pub fn history_name(timeline: u32) -> [u8; 16] {
    let mut name = *b".........history";
    for (digit, shift) in name.iter_mut().zip((0..8).rev()) {
        *digit = b"0123456789ABCDEF"[(timeline >> (4 * shift) & 15) as usize];
    }
    name
}

/// The lines with content of a history file, as `readTimeLineHistory` (timeline.c) reads it.
fn lines(history: &[u8]) -> impl DoubleEndedIterator<Item = &[u8]> {
    let lines = history.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_start);
    lines.filter(|line| !matches!(line.first(), None | Some(b'#')))
}

/// The address at which a timeline began: the end of its parent in the last line of its history
/// file. `None` if there is none. The end of the file suffices.
#[must_use]
pub fn begin_of(history: &[u8]) -> Option<Lsn> {
    fork(lines(history).next_back()?).map(|(_, end)| end)
}

/// The timeline of an address in the history of `timeline`: the newest that began no later
/// (`tliOfPointInHistory`, timeline.c). A timeline may end before its parent does, after recovery
/// to an earlier point.
#[must_use]
pub fn owner_of(history: &[u8], timeline: u32, address: Lsn) -> u32 {
    let mut owner = timeline;
    for (parent, end) in forks(history).rev() {
        if address >= end {
            break;
        }
        owner = parent;
    }
    owner
}

/// The lines of a history file: earlier timelines, and where they ended.
pub fn forks(history: &[u8]) -> impl DoubleEndedIterator<Item = (u32, Lsn)> {
    lines(history).filter_map(fork)
}

/// Parses a line of a history file: a timeline, and where it ended.
fn fork(line: &[u8]) -> Option<(u32, Lsn)> {
    let digits = line.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let timeline = std::str::from_utf8(line.get(..digits)?).ok()?.parse().ok()?;
    let position = line.get(digits..)?.trim_ascii_start();
    let slash = position.iter().position(|byte| *byte == b'/')?;
    let (high, low) = (position.get(..slash)?, position.get(slash + 1..)?);
    let end = low.iter().position(|byte| !byte.is_ascii_hexdigit()).unwrap_or(low.len());
    let end = u64::from(word(high)?) << 32 | u64::from(word(low.get(..end)?)?);
    Some((timeline, Lsn(end)))
}

fn word(digits: &[u8]) -> Option<u32> {
    if digits.is_empty() || digits.len() > 8 { None } else { hexadecimal(digits) }
}

/// Whether a page of `timeline` at its address was left there by a parent of the segment's timeline
/// `of_segment`. `begin` returns the address at which that began. If it is unknown, the page counts
/// as valid: PostgreSQL compares it with the page before it, and to mistake a valid page for the
/// end of WAL would lose transactions.
pub fn is_left_over(
    timeline: u32,
    address: Lsn,
    of_segment: u32,
    begin: impl FnOnce() -> Option<Lsn>,
) -> bool {
    timeline < of_segment && begin().is_some_and(|begin| address >= begin)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_beginning_of_a_timeline_is_read_from_its_history_file() {
        let first = "1\t0/3000090\tno recovery target specified\n";
        for (text, begin) in [
            (first.to_owned(), Some(Lsn(0x300_0090))),
            (
                format!("{first}\n2\tA/0F0000C8\tat restore point \"a/b\"\n"),
                Some(Lsn(0xA_0F00_00C8)),
            ),
            (format!("{first}\n\n# 3 0/1 nothing\n  \n"), Some(Lsn(0x300_0090))),
            (format!("# by hand\n   {first}"), Some(Lsn(0x300_0090))),
            ("2\tFFFFFFFF/FFFFFFFF\n".to_owned(), Some(Lsn(u64::MAX))),
            ("2 1/2".to_owned(), Some(Lsn(0x1_0000_0002))),
            (String::new(), None),
            ("# nothing\n".to_owned(), None),
            ("2\t0300/\n".to_owned(), None),
            ("2\t/300\n".to_owned(), None),
            ("2\t123456789/1\n".to_owned(), None),
            ("2\n".to_owned(), None),
            ("\t0/1\n".to_owned(), None),
            ("no\t0/1\n".to_owned(), None),
        ] {
            assert_eq!(begin_of(text.as_bytes()), begin, "{text:?}");
        }
    }

    #[test]
    fn an_address_belongs_to_the_first_timeline_that_did_not_end_before_it() {
        let history = b"1\t0/3000\tfirst\n2\t0/5000\tsecond\n";
        let owners =
            [0, 0x2FFF, 0x3000, 0x4FFF, 0x5000, u64::MAX].map(|at| owner_of(history, 4, Lsn(at)));
        assert_eq!(owners, [1, 1, 2, 2, 4, 4]);
        assert_eq!(owner_of(b"", 1, Lsn(0x3000)), 1);
        let history = b"1\t0/5000\tx\n2\t0/4000\tx\n";
        let owners = [0x3FFF, 0x4000, 0x4FFF, 0x5000].map(|at| owner_of(history, 3, Lsn(at)));
        assert_eq!(owners, [1, 3, 3, 3]);
    }

    #[test]
    fn a_history_file_is_named_after_its_timeline() {
        assert_eq!(&history_name(2), b"00000002.history");
        assert_eq!(&history_name(0x89AB_CDEF), b"89ABCDEF.history");
    }

    #[test]
    fn pages_behind_the_end_of_their_timeline_are_left_over() {
        let begin = || Some(Lsn(0x8000));
        assert!(is_left_over(1, Lsn(0x8000), 2, begin) && is_left_over(1, Lsn(u64::MAX), 2, begin));
        assert!(!is_left_over(1, Lsn(0x6000), 2, begin));
        assert!(!is_left_over(2, Lsn(0x8000), 2, || unreachable!()));
        assert!(!is_left_over(3, Lsn(0x8000), 2, || unreachable!()));
        assert!(!is_left_over(1, Lsn(0x8000), 2, || None));
    }
}
