//! State of a page on disk, and the target of a rewrite.

use std::ops::Range;

use pagevault_cipher::DataKeyVersion;
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
