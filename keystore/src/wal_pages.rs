//! Pages of WAL segments, one by one: opening what was read, completing what is written from any
//! byte on. The server and PostgreSQL's own programs (`preload/`) do the same to them.

use pagevault_cipher::PageKey;
use pagevault_cipher::wal::{self, Mark};

use crate::wal::WalPhase;

/// Who knows how WAL is written, and has the keys.
pub trait WalKeys {
    /// Why a key is not to be had.
    type Error;

    /// How the page at an address is written.
    fn phase_at(&self, address: u64) -> WalPhase;

    /// Runs `f` with the expanded key of a generation.
    ///
    /// # Errors
    /// When there is no such key, or it cannot be used now.
    fn with_key<R>(&self, generation: u32, f: impl FnOnce(&PageKey) -> R)
    -> Result<R, Self::Error>;

    /// Opens a page under the key of a generation.
    ///
    /// # Errors
    /// As [`WalKeys::with_key`].
    fn open(&self, page: &mut [u8], generation: u32) -> Result<(), Self::Error> {
        self.with_key(generation, |key| wal::open(page, key))
    }

    /// Seals pages of `page_size` bytes under the key of a generation; returns how many were not
    /// empty.
    ///
    /// # Errors
    /// As [`WalKeys::with_key`].
    fn seal(
        &self,
        pages: &mut [u8],
        page_size: usize,
        generation: u32,
    ) -> Result<u64, Self::Error> {
        let mark = Mark::of_generation(generation);
        self.with_key(generation, |key| {
            let pages = pages.chunks_exact_mut(page_size);
            pages.map(|page| u64::from(wal::seal(page, key, mark))).sum()
        })
    }

    /// The generation that a mark means in the page at `address`.
    fn generation_of(&self, mark: Mark, address: u64) -> u32 {
        mark.generation_near(self.phase_at(address).generation)
    }
}

/// Why a page cannot be opened or sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault<E> {
    /// Of the page.
    pub address: u64,
    /// Of the key.
    pub generation: u32,
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
    belongs: impl FnOnce(u32, u64) -> bool,
) -> Result<(), Fault<K::Error>> {
    let Some(mark) = wal::mark_of(page) else { return Ok(()) };
    let address = wal::address_of(page).unwrap_or(0);
    if !belongs(wal::timeline_of(page).unwrap_or(0), address) {
        wal::clear_mark(page);
        return Ok(());
    }
    let generation = keys.generation_of(mark, address);
    keys.open(page, generation).map_err(|cause| Fault { address, generation, cause })
}

/// Seals pages that follow one another, the first at `address`, with one key.
///
/// # Errors
/// When the key is not to be had; the pages are as they were.
pub fn seal<K: WalKeys>(
    keys: &K,
    pages: &mut [u8],
    page_size: usize,
    generation: u32,
    address: u64,
) -> Result<(), Fault<K::Error>> {
    match keys.seal(pages, page_size, generation) {
        Ok(_) => Ok(()),
        Err(cause) => Err(Fault { address, generation, cause }),
    }
}

/// How a page on disk is written; `None` if it is not the page of this address, or `is_left_over`
/// says of its timeline that a parent left it there.
pub fn phase_of<K: WalKeys>(
    keys: &K,
    page: &[u8],
    address: u64,
    is_left_over: impl FnOnce(u32) -> bool,
) -> Option<WalPhase> {
    if wal::address_of(page) != Some(address) || wal::timeline_of(page).is_some_and(is_left_over) {
        return None;
    }
    Some(match wal::mark_of(page) {
        None => WalPhase { generation: 0, plaintext: true },
        Some(mark) => WalPhase { generation: keys.generation_of(mark, address), plaintext: false },
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
    address: u64,
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
        Some(Some(generation)) => {
            match keys.open(page, generation) {
                Ok(()) => {}
                // Nothing of it is needed.
                Err(_) if is_all => phase = switched,
                Err(cause) => return Err(Fault { address, generation, cause }),
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
        Some(generation) => seal(keys, page, size, generation, address),
        None => Ok(()),
    }
}
