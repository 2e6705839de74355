//! State of a page on disk, and the target of a rewrite.

use std::ops::Range;

use pagevault_cipher::{DataKeyVersion, Lsn, PAGE_SIZE, Page, page};
use pagevault_keystore::RelFile;

/// State of one page on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PageState {
    /// All zeros: allocated, never written.
    Empty,
    /// Readable without a key.
    Plaintext,
    /// Encrypted under the data key of this version.
    Sealed(DataKeyVersion),
}

impl PageState {
    /// The state and LSN of a page on disk that another process may be writing. `read` fills the
    /// buffer with the beginning of the page as it is at that moment.
    ///
    /// Mostly only the header is read. If that is zero, the rest decides, which needs a second
    /// read. When that is made the page may have got its header.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn read<E>(mut read: impl FnMut(&mut [u8]) -> Result<(), E>) -> Result<(Self, Lsn), E> {
        let mut header = [0; page::HEADER_SIZE];
        read(&mut header)?;
        if let Some(found) = Self::of_header(&header) {
            return Ok(found);
        }
        let mut whole: Page = [0; PAGE_SIZE];
        // Pages are written from their beginning. So if the second read has overlapped the first
        // write, and has only the end of the page, the third has its header.
        for _ in 0..2 {
            read(&mut whole)?;
            if page::is_zero(&whole) {
                return Ok((Self::Empty, Lsn::INVALID));
            }
            if let Some(found) = Self::of_header(&whole[..page::HEADER_SIZE]) {
                return Ok(found);
            }
        }
        Ok((Self::Plaintext, Lsn::INVALID))
    }

    /// `None` if the header is zero.
    fn of_header(header: &[u8]) -> Option<(Self, Lsn)> {
        let lsn = page::lsn_of(header);
        match page::version_of(header) {
            Some(version) => Some((Self::Sealed(version), lsn)),
            None if header.iter().all(|byte| *byte == 0) => None,
            None => Some((Self::Plaintext, lsn)),
        }
    }
}

/// The state that all pages of a file are to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// The file.
    pub file: RelFile,
    /// Encrypted under the data key of this version; `None`: plaintext.
    pub version: Option<DataKeyVersion>,
}

impl Target {
    /// True if a page on disk is in the target state, or empty.
    #[must_use]
    pub fn is_met_by(&self, page: PageState) -> bool {
        match page {
            PageState::Empty => true,
            PageState::Plaintext => self.version.is_none(),
            PageState::Sealed(version) => self.version == Some(version),
        }
    }
}

/// The forks of a relation, with PostgreSQL's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Fork {
    /// The data.
    Main = 0,
    /// The free space map.
    FreeSpace = 1,
    /// The visibility map.
    Visibility = 2,
    /// Copied over the main fork of an unlogged relation after a crash.
    Init = 3,
}

impl Fork {
    /// All forks, in the order in which they are processed.
    pub const ALL: [Self; 4] = [Self::Main, Self::FreeSpace, Self::Visibility, Self::Init];

    fn after(self) -> Option<Self> {
        Self::ALL.into_iter().find(|fork| *fork > self)
    }
}

/// A position in a file: a fork, and a block or a segment in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The fork.
    pub fork: Fork,
    /// Number of the block or segment.
    pub first: u32,
}

impl Place {
    /// The beginning of a file.
    pub const START: Self = Self { fork: Fork::Main, first: 0 };

    /// The range of `count` blocks from this position.
    #[must_use]
    pub fn blocks(self, count: u32) -> Range<u32> {
        self.first..self.first.saturating_add(count)
    }

    /// The next position: `count` further if the fork has `more`, else the beginning of the next
    /// fork; `None` at the end of the file.
    #[must_use]
    pub fn next(self, count: u32, more: bool) -> Option<Self> {
        if more {
            return Some(Self { first: self.first.saturating_add(count), ..self });
        }
        self.fork.after().map(|fork| Self { fork, first: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ZERO: Page = [0; PAGE_SIZE];

    /// A page that was written under version 1.
    fn sealed() -> Page {
        let mut page = [7; PAGE_SIZE];
        page[..8].copy_from_slice(&[0, 0, 0, 0, 42, 0, 0, 0]);
        page[10..12].copy_from_slice(&(1_u16 << 3).to_le_bytes());
        page
    }

    /// The page as a read sees it that overlaps its first write.
    fn torn() -> Page {
        let mut page = sealed();
        page[..PAGE_SIZE / 2].fill(0);
        page
    }

    /// A page that was written in plaintext: only `pd_lower` matters here.
    fn plaintext() -> Page {
        let mut page = ZERO;
        page[12] = 24;
        page
    }

    /// What is found if the reads find these pages, one after the other.
    fn found(pages: &[Page]) -> (PageState, Lsn) {
        let mut pages = pages.iter();
        let found: Result<_, ()> = PageState::read(|into| {
            into.copy_from_slice(&pages.next().ok_or(())?[..into.len()]);
            Ok(())
        });
        assert!(pages.next().is_none(), "pages were not read");
        found.unwrap()
    }

    #[test]
    fn a_page_is_read_no_more_often_than_needed() {
        let state = PageState::Sealed(DataKeyVersion::FIRST);
        assert_eq!(found(&[sealed()]), (state, page::lsn_of(&sealed())));
        assert_eq!(found(&[plaintext()]).0, PageState::Plaintext);
        assert_eq!(found(&[ZERO, ZERO]), (PageState::Empty, Lsn::INVALID));
    }

    #[test]
    fn a_page_that_is_written_between_two_reads_is_what_was_written() {
        let state = (PageState::Sealed(DataKeyVersion::FIRST), page::lsn_of(&sealed()));
        assert_eq!(found(&[ZERO, sealed()]), state);
        assert_eq!(found(&[ZERO, torn(), sealed()]), state);
        assert_eq!(found(&[ZERO, plaintext()]).0, PageState::Plaintext);
    }

    #[test]
    fn a_page_without_a_header_is_no_empty_one() {
        assert_eq!(found(&[torn(), torn(), torn()]).0, PageState::Plaintext);
    }
}
