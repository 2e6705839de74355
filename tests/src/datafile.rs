//! Relation files on disk, read without code of pagevault or PostgreSQL.
//!
//! Assertions about pages on disk must not depend on the code that writes them, so this is an
//! independent implementation of the page format of ARCHITECTURE.md.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

/// Bytes in a page.
pub const PAGE_SIZE: usize = 8192;

/// State of a page on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageState {
    /// All bytes zero: a page that PostgreSQL allocated and has not yet used.
    Zero,
    /// A page as PostgreSQL writes it.
    Plaintext,
    /// A sealed page and its key version.
    Sealed(u16),
}

impl PageState {
    /// The state of a page: the key version is in the 13 bits of `pd_flags` (bytes 10-11, little
    /// endian) that PostgreSQL never sets.
    #[must_use]
    pub fn of(page: &[u8]) -> PageState {
        match u16::from_le_bytes([page[10], page[11]]) >> 3 {
            0 if page.iter().all(|byte| *byte == 0) => PageState::Zero,
            0 => PageState::Plaintext,
            version => PageState::Sealed(version),
        }
    }
}

/// The content of a file or directory; `None` if it no longer exists. A running server removes
/// files between the listing of a directory and the reading of a file, for example a cache file
/// that it writes under a temporary name.
///
/// # Errors
/// Every other failure.
pub fn if_exists<T, E: Into<anyhow::Error>>(read: Result<T, E>) -> Result<Option<T>> {
    match read.map_err(Into::into) {
        Ok(found) => Ok(Some(found)),
        Err(error) => match error.downcast_ref::<std::io::Error>() {
            Some(cause) if cause.kind() == std::io::ErrorKind::NotFound => Ok(None),
            _ => Err(error),
        },
    }
}

/// One file of a relation: one fork, one segment.
#[derive(Clone, Debug)]
pub struct DataFile {
    /// Its path.
    pub path: PathBuf,
}

impl DataFile {
    /// All files of the relation whose first file is `main` (from `pg_relation_filepath`).
    ///
    /// # Errors
    /// When the directory cannot be read, or the first file does not exist.
    pub fn find(main: &Path) -> Result<Vec<DataFile>> {
        let directory = main.parent().context("a path with a directory")?;
        let stem = main.file_name().and_then(|name| name.to_str()).context("a file name")?;
        let mut files = Vec::new();
        for entry in std::fs::read_dir(directory)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let ours = name
                .strip_prefix(stem)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '_']));
            if ours {
                files.push(DataFile { path });
            }
        }
        ensure!(files.iter().any(|file| file.path == main), "{} is missing", main.display());
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(files)
    }

    /// The whole file.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn bytes(&self) -> Result<Vec<u8>> {
        std::fs::read(&self.path).with_context(|| format!("read {}", self.path.display()))
    }

    /// The state of every page.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn states(&self) -> Result<Vec<PageState>> {
        Ok(self.bytes()?.chunks_exact(PAGE_SIZE).map(PageState::of).collect())
    }

    /// Whether the file contains `text`, in UTF-8 or UTF-16 of either byte order.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn contains_text(&self, text: &str) -> Result<bool> {
        let bytes = self.bytes()?;
        let wide = |to_bytes: fn(u16) -> [u8; 2]| -> Vec<u8> {
            text.encode_utf16().flat_map(to_bytes).collect()
        };
        let spellings = [text.as_bytes().to_vec(), wide(u16::to_le_bytes), wide(u16::to_be_bytes)];
        Ok(spellings.iter().any(|spelling| holds(&bytes, spelling)))
    }

    /// Reads one page.
    ///
    /// # Errors
    /// When the file has no such page.
    pub fn read_page(&self, block: u32) -> Result<Vec<u8>> {
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(u64::from(block) * PAGE_SIZE as u64))?;
        let mut page = vec![0; PAGE_SIZE];
        file.read_exact(&mut page)?;
        Ok(page)
    }

    /// Writes one page directly to the file; the server must be down.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_page(&self, block: u32, page: &[u8]) -> Result<()> {
        ensure!(page.len() == PAGE_SIZE, "a page has {PAGE_SIZE} bytes");
        let mut file = File::options().write(true).open(&self.path)?;
        file.seek(SeekFrom::Start(u64::from(block) * PAGE_SIZE as u64))?;
        file.write_all(page).with_context(|| format!("write {}", self.path.display()))
    }

    /// Flips one bit of one byte of a page; the server must be down.
    ///
    /// # Errors
    /// When the file has no such page.
    pub fn flip_bit(&self, block: u32, offset: usize, bit: u8) -> Result<()> {
        let mut page = self.read_page(block)?;
        page[offset] ^= 1 << bit;
        self.write_page(block, &page)
    }
}

/// Whether `bytes` contains `wanted`.
#[must_use]
pub fn holds(bytes: &[u8], wanted: &[u8]) -> bool {
    after(bytes, wanted).is_some()
}

/// Whether `bytes` contains `name`, a hyphen and a digit, as in rows that are named and numbered. A
/// short name alone may occur by chance: a hundred megabytes of ciphertext contain four given bytes
/// with a probability of one in forty.
#[must_use]
pub fn holds_numbered(bytes: &[u8], name: &str) -> bool {
    let wanted = format!("{name}-");
    let mut rest = bytes;
    while let Some(after) = after(rest, wanted.as_bytes()) {
        if after.first().is_some_and(u8::is_ascii_digit) {
            return true;
        }
        rest = after;
    }
    false
}

/// The bytes after the first occurrence of `wanted`.
fn after<'a>(bytes: &'a [u8], wanted: &[u8]) -> Option<&'a [u8]> {
    let at = memchr::memmem::find(bytes, wanted)?;
    Some(&bytes[at + wanted.len()..])
}

/// Fails unless every page of these files is sealed or zero, and at least one is sealed.
///
/// # Errors
/// Names the first page that is neither.
pub fn assert_sealed(files: &[DataFile]) -> Result<()> {
    let mut sealed = 0;
    for file in files {
        for (block, state) in file.states()?.into_iter().enumerate() {
            match state {
                PageState::Sealed(_) => sealed += 1,
                PageState::Zero => {}
                PageState::Plaintext => {
                    bail!("block {block} of {} is not sealed", file.path.display())
                }
            }
        }
    }
    ensure!(sealed > 0, "no page at all in {files:?}");
    Ok(())
}

/// Fails unless no page of these files is sealed and at least one is not zero.
///
/// # Errors
/// Names the first page that is sealed.
pub fn assert_plain(files: &[DataFile]) -> Result<()> {
    let mut plain = 0;
    for file in files {
        for (block, state) in file.states()?.into_iter().enumerate() {
            match state {
                PageState::Plaintext => plain += 1,
                PageState::Zero => {}
                PageState::Sealed(version) => {
                    bail!("block {block} of {}: version {version}", file.path.display())
                }
            }
        }
    }
    ensure!(plain > 0, "no page at all in {files:?}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{DataFile, PAGE_SIZE, PageState, holds, holds_numbered, if_exists};

    #[test]
    fn finds_bytes_anywhere() {
        assert!(holds(b"aab", b"ab"));
        assert!(holds(b"ab", b"ab"));
        assert!(!holds(b"aa", b"ab"));
        assert!(!holds(b"", b"a"));
        assert!(holds_numbered(b"finch finch- finch-7", "finch"));
        assert!(!holds_numbered(b"finch finch-x finch-", "finch"));
    }

    #[test]
    fn only_missing_files_are_skipped() {
        let directory = tempfile::tempdir().unwrap();
        let gone = DataFile { path: directory.path().join("gone") };
        assert_eq!(if_exists(gone.contains_text("a")).unwrap(), None);
        let unreadable = DataFile { path: directory.path().to_owned() };
        assert!(if_exists(unreadable.contains_text("a")).is_err());
    }

    #[test]
    fn distinguishes_page_states() {
        let mut page = vec![0; PAGE_SIZE];
        assert_eq!(PageState::of(&page), PageState::Zero);
        page[10] = 0b111;
        assert_eq!(PageState::of(&page), PageState::Plaintext);
        page[10] = 0b1101;
        assert_eq!(PageState::of(&page), PageState::Sealed(1));
        page[11] = 0xff;
        assert_eq!(PageState::of(&page), PageState::Sealed(8161));
    }
}
