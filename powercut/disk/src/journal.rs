//! The journal: one record for each operation, in the order in which they had happened for the
//! processes that made them. A record's place is its offset in the journal.
//!
//! ```text
//!   bytes  0-3   length of the record
//!          4     kind
//!          5     server: several may share a journal
//!          6-7   length of the path
//!          8-15  first number (inode)
//!         16-23  second number (offset, length or place)
//!         24-    path, then the rest: bytes written, or a second path
//! ```

/// Bytes before the path.
pub const HEADER: usize = 24;

/// What kind of operation a record is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// A file or directory was opened: from now on its inode stands for it.
    Open = 1,
    /// Bytes were written at an offset.
    Write,
    /// A file got another length.
    Length,
    /// A file became at least as long.
    Reserve,
    /// `fsync` or `fdatasync`, which began at a place of the journal.
    Sync,
    /// A name became another one.
    Rename,
    /// A file got another name.
    Link,
    /// A name of a file was removed.
    Unlink,
    /// A directory was made.
    MakeDirectory,
    /// A directory was removed.
    RemoveDirectory,
    /// A symbolic link was made, to the second path.
    Symlink,
    /// What a client has to say.
    Mark,
}

const KINDS: [Kind; 12] = [
    Kind::Open,
    Kind::Write,
    Kind::Length,
    Kind::Reserve,
    Kind::Sync,
    Kind::Rename,
    Kind::Link,
    Kind::Unlink,
    Kind::MakeDirectory,
    Kind::RemoveDirectory,
    Kind::Symlink,
    Kind::Mark,
];

/// One record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record<'j> {
    /// Its offset in the journal.
    pub place: u64,
    /// What was done.
    pub kind: Kind,
    /// Which server did it.
    pub server: u8,
    /// The inode that it was done to, where that matters.
    pub inode: u64,
    /// Offset of a write, length, or the place at which a sync began.
    pub number: u64,
    /// Below the data directory, without a leading slash.
    pub path: &'j [u8],
    /// Bytes written, the second path, or what is marked.
    pub rest: &'j [u8],
}

/// The first bytes of a record, which its path and the rest follow. `None` where one is too long.
#[must_use]
pub fn header(
    kind: Kind,
    server: u8,
    inode: u64,
    number: u64,
    path: usize,
    rest: usize,
) -> Option<[u8; HEADER]> {
    let length = u32::try_from(HEADER.checked_add(path)?.checked_add(rest)?).ok()?;
    let mut header = [0; HEADER];
    header[..4].copy_from_slice(&length.to_le_bytes());
    header[4] = kind as u8;
    header[5] = server;
    header[6..8].copy_from_slice(&u16::try_from(path).ok()?.to_le_bytes());
    header[8..16].copy_from_slice(&inode.to_le_bytes());
    header[16..24].copy_from_slice(&number.to_le_bytes());
    Some(header)
}

/// The records of a journal, up to one that is not complete.
pub fn records(journal: &[u8]) -> impl Iterator<Item = Record<'_>> {
    let mut place = 0;
    std::iter::from_fn(move || {
        let (record, length) = decode(journal.get(place..)?, place as u64)?;
        place += length;
        Some(record)
    })
}

fn decode(bytes: &[u8], place: u64) -> Option<(Record<'_>, usize)> {
    let header: &[u8; HEADER] = bytes.first_chunk()?;
    let number = |at: usize| header[at..at + 8].iter().rev().fold(0, |n, b| n << 8 | u64::from(*b));
    let length = (number(0) & 0xffff_ffff) as usize;
    let path = HEADER + (number(0) >> 48) as usize;
    let record = Record {
        place,
        kind: *KINDS.iter().find(|kind| **kind as u8 == header[4])?,
        server: header[5],
        inode: number(8),
        number: number(16),
        path: bytes.get(HEADER..path)?,
        rest: bytes.get(path..length)?,
    };
    Some((record, length))
}
