//! How pages of a file are written, and how they are to be.

use std::ops::Range;

use pagevault_cipher::DataKeyVersion;
use pagevault_keystore::RelFile;

/// What one page is on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PageState {
    /// All zero: allocated, never written.
    Empty,
    /// Readable without a key.
    Plaintext,
    /// Encrypted under the data key of this version.
    Sealed(DataKeyVersion),
}

/// How pages of a file are to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// The file.
    pub file: RelFile,
    /// Under the data key of this version; `None`: in plaintext.
    pub version: Option<DataKeyVersion>,
}

impl Target {
    /// True if a page on disk is as it is to be, or holds nothing.
    #[must_use]
    pub fn is_met_by(&self, page: PageState) -> bool {
        match page {
            PageState::Empty => true,
            PageState::Plaintext => self.version.is_none(),
            PageState::Sealed(version) => self.version == Some(version),
        }
    }
}

/// The forks of a relation, by their numbers in PostgreSQL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Fork {
    /// The rows.
    Main = 0,
    /// Free space.
    FreeSpace = 1,
    /// The visibility map.
    Visibility = 2,
    /// What an unlogged relation is after a crash.
    Init = 3,
}

impl Fork {
    /// Every fork that a relation may have, in the order in which they are gone through.
    pub const ALL: [Self; 4] = [Self::Main, Self::FreeSpace, Self::Visibility, Self::Init];

    fn after(self) -> Option<Self> {
        Self::ALL.into_iter().find(|fork| *fork > self)
    }
}

/// A part of a file: so many blocks, or segments, of one fork.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The fork.
    pub fork: Fork,
    /// The first block, or the segment.
    pub first: u32,
}

impl Place {
    /// Where a file begins.
    pub const START: Self = Self { fork: Fork::Main, first: 0 };

    /// So many from here on.
    #[must_use]
    pub fn blocks(self, count: u32) -> Range<u32> {
        self.first..self.first.saturating_add(count)
    }

    /// What comes next: `count` further on if there is `more` of the fork, or else the next fork;
    /// `None` at the end of the file.
    #[must_use]
    pub fn next(self, count: u32, more: bool) -> Option<Self> {
        if more {
            return Some(Self { first: self.first.saturating_add(count), ..self });
        }
        self.fork.after().map(|fork| Self { fork, first: 0 })
    }
}
