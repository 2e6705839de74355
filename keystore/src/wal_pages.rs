//! Pages of WAL segments, one by one: opening what was read, completing what is written from any
//! byte on. The server and PostgreSQL's own programs (`preload/`) do the same to them.

use pagevault_cipher::wal::{self, Mark};
use pagevault_cipher::{KeyVersion, Lsn, PageKey};

use crate::wal::WalPhase;

/// Who knows how WAL is written, and has the keys.
pub trait WalKeys {
    /// Why a key is not to be had.
    type Error;

    /// How the page at an address is written.
    fn phase_at(&self, address: Lsn) -> WalPhase;

    /// Runs `f` with the expanded key of a version.
    ///
    /// # Errors
    /// When there is no such key, or it cannot be used now.
    fn with_key<R>(
        &self,
        version: KeyVersion,
        f: impl FnOnce(&PageKey) -> R,
    ) -> Result<R, Self::Error>;

    /// Opens a page under the key of a version.
    ///
    /// # Errors
    /// As [`WalKeys::with_key`].
    fn open(&self, page: &mut [u8], version: KeyVersion) -> Result<(), Self::Error> {
        self.with_key(version, |key| wal::open(page, key))
    }

    /// Seals pages of `page_size` bytes under the key of a version; returns how many were not
    /// empty.
    ///
    /// # Errors
    /// As [`WalKeys::with_key`].
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

    /// The version that a mark means in the page at `address`.
    fn version_of(&self, mark: Mark, address: Lsn) -> KeyVersion {
        mark.version_near(self.phase_at(address).version)
    }
}

/// Why a page cannot be opened or sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault<E> {
    /// Of the page.
    pub address: Lsn,
    /// Of the key.
    pub version: KeyVersion,
    /// What is wrong with the key.
    pub cause: E,
}

/// Opens a page that was read from where `belongs` says which timeline and address belong.
///
/// A page that does not is left from an earlier use of the segment: it loses its mark, and is
/// refused by who reads WAL, by its address, by its timeline, or by what is in it where a record
/// should go on.
///
/// # Errors
/// When the key is not to be had; the page is as it was.
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
    let version = keys.version_of(mark, address);
    keys.open(page, version).map_err(|cause| Fault { address, version, cause })
}

/// Seals pages that follow one another, the first at `address`, with one key.
///
/// # Errors
/// When the key is not to be had; the pages are as they were.
pub fn seal<K: WalKeys>(
    keys: &K,
    pages: &mut [u8],
    page_size: usize,
    version: KeyVersion,
    address: Lsn,
) -> Result<(), Fault<K::Error>> {
    match keys.seal(pages, page_size, version) {
        Ok(_) => Ok(()),
        Err(cause) => Err(Fault { address, version, cause }),
    }
}

/// How a page on disk is written; `None` if it is not the page of this address, or `is_left_over`
/// says of its timeline that a parent left it there.
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
        Some(mark) => WalPhase::under(keys.version_of(mark, address)),
    })
}

/// Puts `bytes` into the page at `address` from `offset` on, where they have room, and seals it.
/// The page is as it was on disk, zero where there was nothing; one that is there already keeps its
/// key. What is not known of it is zero. `is_left_over` is as for [`phase_of`].
///
/// # Errors
/// When a key is not to be had.
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
    match on_disk.map(WalPhase::sealed) {
        Some(Some(version)) => {
            match keys.open(page, version) {
                Ok(()) => {}
                // Nothing of it is needed.
                Err(_) if is_all => phase = switched,
                Err(cause) => return Err(Fault { address, version, cause }),
            }
        }
        Some(None) => {}
        // Of a header that came in parts the first is there, in clear.
        None if offset < wal::HEADER_SIZE => {
            wal::clear_mark(page);
            page.iter_mut().skip(offset).for_each(|byte| *byte = 0);
        }
        None => page.fill(0),
    }
    page.iter_mut().skip(offset).zip(bytes).for_each(|(to, from)| *to = *from);
    match phase.sealed() {
        Some(version) => seal(keys, page, size, version, address),
        None => Ok(()),
    }
}
