//! The key of each WAL page.
//!
//! Called in critical sections: no lock, no allocation, no error. Everything necessary is in shared
//! memory: the switches ([`Wal`]) and the data keys (the directory). The expanded key is in the
//! cache of this process.

use pagevault_cipher::wal::{self, Mark};
use pagevault_cipher::{KeyVersion, Lsn, PageKey};
use pagevault_keystore::Scope;
use pagevault_keystore::record::MAX_WRAPPED_DATA_KEY;
use pagevault_keystore::wal::{Stretch, WalPhase, key_place, stretch_at as stretch_of};
use pagevault_keystore::wal_pages::WalKeys;

use super::cache;
use super::key_error::KeyError;
use crate::keys::store::directory;
use crate::pg::compat::{SHARED_BACKEND, SmgrFile};
use crate::pg::process::ProcessLocal;
use crate::shmem;
use crate::shmem::counters::StatsKind;
use crate::shmem::wal::Wal;
use crate::stats::{self, Timing};

/// The shared state, if any WAL key exists: the only test in servers that have never encrypted WAL.
#[inline]
pub(crate) fn active() -> Option<&'static Wal> {
    shmem::get().map(|shared| &shared.wal).filter(|wal| wal.has_keys())
}

/// The last result of [`stretch_at`], valid as long as the stamp of the switches is the same.
static LAST: ProcessLocal<([u32; 2], Stretch)> = ProcessLocal::new((
    [0; 2],
    Stretch { from: Lsn(0), to: Lsn(0), phase: WalPhase { version: None, plaintext: false } },
));

/// How the page at `address` is written, and the range of addresses with the same answer.
#[inline]
pub(crate) fn stretch_at(wal: &Wal, address: Lsn) -> Stretch {
    let stamp = wal.stamp();
    LAST.with(|(known, stretch)| {
        if *known != stamp || address < stretch.from || address >= stretch.to {
            *stretch = stretch_of(wal.in_force(), address);
            *known = stamp;
        }
        *stretch
    })
}

/// How XLogWrite writes the page at `address`, and the range of addresses with the same answer.
pub(crate) fn written_at(wal: &Wal, address: Lsn, page_size: u64) -> Stretch {
    let mut stretch = stretch_at(wal, address);
    if let Some((kept, phase)) = wal.kept() {
        if kept == address {
            return Stretch { from: kept, to: kept + page_size, phase };
        }
        if kept > address {
            stretch.to = stretch.to.min(kept);
        }
    }
    stretch
}

/// The switches and keys of this server, for [`wal_pages`](pagevault_keystore::wal_pages).
pub(crate) struct ServerKeys;

impl WalKeys for ServerKeys {
    type Error = KeyError;

    #[inline]
    fn phase_at(&self, address: Lsn) -> WalPhase {
        shmem::get().map_or(WalPhase::default(), |shared| stretch_at(&shared.wal, address).phase)
    }

    #[inline]
    fn with_key<R>(
        &self,
        version: KeyVersion,
        f: impl FnOnce(&PageKey) -> R,
    ) -> Result<R, KeyError> {
        with_key(version, f)
    }

    fn open(&self, page: &mut [u8], version: KeyVersion) -> Result<(), KeyError> {
        let opened = with_key(version, |key| {
            let work = Timing::begin();
            wal::open(page, key);
            work.opened(StatsKind::Wal, 1, page.len() as u64);
        });
        opened.inspect_err(|_| stats::count_failure(StatsKind::Wal))
    }

    fn seal(
        &self,
        pages: &mut [u8],
        page_size: usize,
        version: KeyVersion,
    ) -> Result<u64, KeyError> {
        let mark = Mark::of_version(version);
        with_key(version, |key| {
            let work = Timing::begin();
            let pages = pages.chunks_exact_mut(page_size);
            let sealed = pages.map(|page| u64::from(wal::seal(page, key, mark))).sum();
            work.sealed(StatsKind::Wal, sealed, sealed * page_size as u64);
            sealed
        })
    }
}

/// Calls `f` with the expanded key of a version.
#[inline]
fn with_key<R>(version: KeyVersion, f: impl FnOnce(&PageKey) -> R) -> Result<R, KeyError> {
    let (file, data_key_version) = key_place(version);
    cache::with_page_key(SmgrFile { file, backend: SHARED_BACKEND }, data_key_version, f)
}

/// The database key that wraps the key of a version: (scope, version).
pub(crate) fn wrapped_by(version: KeyVersion) -> Option<(Scope, KeyVersion)> {
    let (file, data_key_version) = key_place(version);
    let found = directory::data_key(file, data_key_version, &mut [0; MAX_WRAPPED_DATA_KEY])?;
    Some((found.scope, found.key_version))
}
