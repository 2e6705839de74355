//! Single pages of WAL segments: decrypting pages that were read, and completing pages that are
//! written from any byte on. Used by the server and, through `preload/`, by PostgreSQL's own
//! programs.

use pagevault_cipher::wal::{self, Mark};
use pagevault_cipher::{KeyVersion, Lsn, PageKey};

use crate::wal::WalPhase;

/// The WAL keys, and the addresses at which they are used.
pub trait WalKeys {
    /// Why a key is not available.
    type Error;

    /// The state of the page at an address.
    fn phase_at(&self, address: Lsn) -> WalPhase;

    /// Runs `f` with the expanded key of a version.
    ///
    /// # Errors
    /// If there is no such key, or it is not available now.
    fn with_key<R>(
        &self,
        version: KeyVersion,
        f: impl FnOnce(&PageKey) -> R,
    ) -> Result<R, Self::Error>;

    /// Decrypts a page under the key of a version, be it the right one or not.
    ///
    /// # Errors
    /// Those of [`WalKeys::with_key`].
    fn open(&self, page: &mut [u8], version: KeyVersion) -> Result<(), Self::Error> {
        self.with_key(version, |key| wal::open(page, key))
    }

    /// Encrypts pages of `page_size` bytes under the key of a version. Returns the number of pages
    /// that were not empty.
    ///
    /// # Errors
    /// Those of [`WalKeys::with_key`].
    fn seal(
        &self,
        pages: &mut [u8],
        page_size: usize,
        version: KeyVersion,
    ) -> Result<u64, Self::Error> {
        let mark = Mark::of_version(version);
        self.with_key(version, |key| {
            let pages = pages.chunks_exact_mut(page_size);
            pages.map(|page| u64::from(wal::seal(page, key, mark))).sum()
        })
    }

    /// Whether there is a key of this version.
    fn has_key(&self, version: KeyVersion) -> bool {
        self.with_key(version, |_| ()).is_ok()
    }

    /// The key versions that a mark in the page at `address` can denote, the most likely first.
    fn versions_of(&self, mark: Mark, address: Lsn) -> [Option<KeyVersion>; 2] {
        let mut versions = mark.versions_near(self.phase_at(address).version);
        if let [Some(nearest), Some(other)] = versions
            && !self.has_key(nearest)
            && self.has_key(other)
        {
            versions.swap(0, 1);
        }
        versions
    }
}

/// Why a page cannot be decrypted or encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault<E> {
    /// Address of the page.
    pub address: Lsn,
    /// Version of the key.
    pub version: KeyVersion,
    /// What is wrong with the key.
    pub cause: Cause<E>,
}

/// What is wrong with a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause<E> {
    /// It is not available.
    Key(E),
    /// The page is not encrypted with it. There are several keys of one version if a failover or a
    /// restore has lost a rotation: each history of WAL has its own. A program that encrypts with a
    /// copy of the keystore of another history uses the other one.
    OtherKey,
}

/// Decrypts a page that was read. `belongs` says whether a timeline and an address belong at this
/// place.
///
/// A page that does not belong there is left over from an earlier use of the segment. Its mark is
/// removed; the reader of WAL refuses it, because of its address, its timeline, or its contents
/// where a record should continue.
///
/// # Errors
/// If the key is not available; the page is unchanged then. If it is another key; a page with
/// random bytes must not be taken for the end of WAL.
pub fn open<K: WalKeys>(
    keys: &K,
    page: &mut [u8],
    belongs: impl FnOnce(u32, Lsn) -> bool,
) -> Result<(), Fault<K::Error>> {
    let Some(mark) = wal::mark_of(page) else { return Ok(()) };
    let address = wal::address_of(page).unwrap_or(Lsn::INVALID);
    if !belongs(wal::timeline_of(page).unwrap_or(0), address) {
        wal::clear_mark(page);
        return Ok(());
    }
    open_marked(keys, page, mark, address).map(drop)
}

/// Decrypts a page with this mark, and returns the version of its key. On error the page is
/// unchanged, or has random bytes.
fn open_marked<K: WalKeys>(
    keys: &K,
    page: &mut [u8],
    mark: Mark,
    address: Lsn,
) -> Result<KeyVersion, Fault<K::Error>> {
    let [nearest, other] = keys.versions_of(mark, address);
    let version = nearest.unwrap_or(KeyVersion::FIRST);
    let Err(cause) = open_under(keys, page, version) else { return Ok(version) };
    if let (Cause::OtherKey, Some(other)) = (&cause, other)
        && keys.has_key(other)
    {
        // Encrypted again, the page is as it was.
        let as_it_was = keys.seal(page, page.len(), version).is_ok();
        if as_it_was && open_under(keys, page, other).is_ok() {
            return Ok(other);
        }
    }
    Err(Fault { address, version, cause })
}

fn open_under<K: WalKeys>(
    keys: &K,
    page: &mut [u8],
    version: KeyVersion,
) -> Result<(), Cause<K::Error>> {
    keys.open(page, version).map_err(Cause::Key)?;
    if wal::is_opened(page) { Ok(()) } else { Err(Cause::OtherKey) }
}

/// Encrypts consecutive pages, the first at `address`, with one key.
///
/// # Errors
/// If the key is not available; the pages are unchanged.
pub fn seal<K: WalKeys>(
    keys: &K,
    pages: &mut [u8],
    page_size: usize,
    version: KeyVersion,
    address: Lsn,
) -> Result<(), Fault<K::Error>> {
    match keys.seal(pages, page_size, version) {
        Ok(_) => Ok(()),
        Err(cause) => Err(Fault { address, version, cause: Cause::Key(cause) }),
    }
}

/// The state of a page on disk. `None` if it does not have this address, or if `is_left_over` says
/// that a parent timeline left it there.
pub fn phase_of<K: WalKeys>(
    keys: &K,
    page: &[u8],
    address: Lsn,
    is_left_over: impl FnOnce(u32) -> bool,
) -> Option<WalPhase> {
    if wal::address_of(page) != Some(address) || wal::timeline_of(page).is_some_and(is_left_over) {
        return None;
    }
    Some(match wal::mark_of(page) {
        None => WalPhase { version: None, plaintext: true },
        Some(mark) => {
            let [version, _] = keys.versions_of(mark, address);
            WalPhase::under(version.unwrap_or(KeyVersion::FIRST))
        }
    })
}

/// Copies `bytes` into the page from `offset` on, and encrypts it. `page` holds what is on disk,
/// zeros where there was nothing; a page on disk keeps its key. Unknown bytes become zero. `bytes`
/// must fit. `is_left_over`: see [`phase_of`].
///
/// # Errors
/// If a key is not available.
pub fn complete<K: WalKeys>(
    keys: &K,
    page: &mut [u8],
    address: Lsn,
    is_left_over: impl FnOnce(u32) -> bool,
    offset: usize,
    bytes: &[u8],
) -> Result<(), Fault<K::Error>> {
    let switched = keys.phase_at(address);
    let size = page.len();
    let is_all = bytes.len() == size;
    let on_disk = phase_of(keys, page, address, is_left_over);
    let mut phase = on_disk.unwrap_or(switched);
    match on_disk.map(|_| wal::mark_of(page)) {
        Some(Some(mark)) => match open_marked(keys, page, mark, address) {
            Ok(version) => phase = WalPhase::under(version),
            // Nothing of the old page is needed.
            Err(_) if is_all => phase = switched,
            Err(fault) => return Err(fault),
        },
        Some(None) => {}
        // If a header arrives in parts, the first part is there, in plaintext.
        None if offset < wal::HEADER_SIZE => {
            wal::clear_mark(page);
            page.get_mut(offset..).unwrap_or_default().fill(0);
        }
        None => page.fill(0),
    }
    let to = page.get_mut(offset..).unwrap_or_default();
    let count = to.len().min(bytes.len());
    to[..count].copy_from_slice(&bytes[..count]);
    match phase.sealed() {
        Some(version) => seal(keys, page, size, version, address),
        None => Ok(()),
    }
}
