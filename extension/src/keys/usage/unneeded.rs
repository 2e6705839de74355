//! Keys that nothing needs, and what needs the others: keys of files that are gone; older versions
//! of database keys, of the WAL key, and of the data keys of files in use.
//!
//! That a file is gone the primary says in a record ([`super::forgetting`]). All else each server
//! sees in its own memory, on its own disk and in its own WAL: a database key wraps data keys; a
//! WAL key has WAL under it, at addresses that this server replays at its next start, or in a page
//! in `pg_wal`; a data key has pages under it, unless the file's floor says that no server has any
//! (`File::floor`). A key that was not needed for `pagevault.keep_former_keys` (a WAL key:
//! `pagevault.keep_former_wal_keys`) is forgotten if the
//! last checkpoint or restart point began after that was noted, so that no start replays what came
//! before. What replays WAL from before, a base backup or a server that was rewound, is that much
//! older. In recovery nothing is noted before the data directory is consistent: until then the
//! keystore may be of a later time than what is replayed, which may need what the keystore has
//! replaced.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Instant;

use pagevault_keystore::directory::FileInfo;
use pagevault_keystore::wal::{before_all, is_key_place, version_at};
use pagevault_keystore::{DataKeyVersion, KeyVersion, Lsn, RelFile, Scope};

use super::wal_on_disk::{self, OnDisk};
use crate::keys::store::former::Candidates;
use crate::keys::store::{database_keys, former};
use crate::pg::guc::forgetting::Keep;
use crate::pg::report::Result;
use crate::pg::{process, wal};
use crate::shmem;
use crate::shmem::wal::Wal;

/// A key that a later one has replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Replaced {
    Database(Scope, KeyVersion),
    Wal(KeyVersion),
    Data(RelFile, DataKeyVersion),
}

/// Why a key is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Need {
    /// It wraps data keys.
    DataKeys,
    /// This server replays WAL from this address on, or has it.
    Wal(Lsn),
    /// Others may have WAL under it: archives, WAL receivers, backups. No server knows.
    WalElsewhere,
    /// Pages may be under it.
    Pages,
}

/// What is not needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Key {
    /// The keys of a file that is gone, as is recorded, with their last version: with another one,
    /// the number is in use again.
    Gone(RelFile, DataKeyVersion),
    Replaced(Replaced),
}

/// Since when a key is not needed.
struct Noted {
    since: Instant,
    /// End of WAL then, or later.
    wal_end: Lsn,
}

/// What the worker remembers.
#[derive(Default)]
pub(super) struct Unneeded {
    noted: HashMap<Key, Noted>,
}

impl Unneeded {
    /// Notes which keys are not needed. `redo`: from where this server replays WAL.
    pub(super) fn look(&mut self, redo: Lsn, keep: Keep) -> Result<()> {
        if process::in_recovery() && !shmem::required()?.control.was_consistent() {
            return Ok(());
        }
        let gone = former::missing()?.into_iter().map(|(file, last)| Key::Gone(file, last));
        let mut found: HashSet<_> = gone.collect();
        each(redo, keep, |key, need| {
            if need.is_none() {
                found.insert(Key::Replaced(key));
            }
        })?;
        let wal_end = if process::in_recovery() { wal::replayed() } else { wal::end() };
        let since = Instant::now();
        self.noted.retain(|key, _| found.contains(key));
        for key in found {
            self.noted.entry(key).or_insert(Noted { since, wal_end });
        }
        Ok(())
    }

    /// Keys that were not needed for this time, and the server does not replay WAL from before it
    /// noted that: it does from `redo` on. Nor does it decode such WAL, as it may from `slots` on:
    /// decoding asks what is known of files. By log.
    pub(super) fn due(
        &self,
        keep: Keep,
        redo: Lsn,
        slots: Option<Lsn>,
    ) -> BTreeMap<Scope, Candidates> {
        let mut due: BTreeMap<_, Candidates> = BTreeMap::new();
        for (key, Noted { since, wal_end }) in &self.noted {
            let keep = match key {
                Key::Replaced(Replaced::Wal(_)) => keep.wal,
                _ => keep.others,
            };
            let from = match key {
                Key::Gone(..) | Key::Replaced(Replaced::Data(..)) => {
                    slots.map_or(redo, |slots| slots.min(redo))
                }
                Key::Replaced(_) => redo,
            };
            if keep.is_none_or(|keep| since.elapsed() < keep) || *wal_end > from {
                continue;
            }
            let home = match key {
                Key::Gone(file, _) | Key::Replaced(Replaced::Data(file, _)) => file.scope(),
                Key::Replaced(_) => Scope::CLUSTER,
            };
            let Candidates { files, replaced } = due.entry(home).or_default();
            replaced.gone = replaced.gone.max(*wal_end);
            match *key {
                Key::Gone(file, last) => {
                    files.insert(file, last);
                }
                Key::Replaced(Replaced::Database(scope, version)) => {
                    replaced.database_keys.insert((scope, version));
                }
                // All before it are not needed either.
                Key::Replaced(Replaced::Wal(version)) => {
                    replaced.wal_keys = replaced.wal_keys.max(Some(version));
                }
                Key::Replaced(Replaced::Data(file, version)) => {
                    replaced.data_keys.insert((file, version));
                }
            }
        }
        due
    }
}

/// Calls `take` with each key that was replaced, and why it is needed. Takes time proportional to
/// the number of keys.
pub(crate) fn each(
    redo: Lsn,
    keep: Keep,
    mut take: impl FnMut(Replaced, Option<Need>),
) -> Result<()> {
    let shared = shmem::required()?;
    let directory = &shared.directory;
    let wrapping = database_keys::wrapping()?;
    let newest = shared.secrets.newest_of_each();
    for (scope, version, _) in shared.secrets.list() {
        if newest.get(&scope) > Some(&version) {
            let need = wrapping.contains(&(scope, version)).then_some(Need::DataKeys);
            take(Replaced::Database(scope, version), need);
        }
    }
    let in_use = shared.wal.switches.newest().and_then(|newest| newest.phase.version);
    // Segments are read only if a key was replaced that may be forgotten.
    let reads_wal = keep.wal.is_some() && in_use > Some(KeyVersion::FIRST);
    let wal_needs = reads_wal.then(|| needs_of_wal(&shared.wal, redo));
    for info in directory.files()? {
        let FileInfo { slot, file, phase, .. } = info?;
        // It may be forgotten meanwhile.
        let Ok(floor) = directory.floor(slot) else { continue };
        for key in directory.keys(slot)? {
            let version = key?.version;
            if !is_key_place(file) {
                if phase.plaintext || phase.version > Some(version) {
                    let need = (floor <= Some(version)).then_some(Need::Pages);
                    take(Replaced::Data(file, version), need);
                }
            } else if let Some(version) = version_at(file, version)
                && in_use > Some(version)
            {
                let need = match wal_needs {
                    Some((oldest, through)) => {
                        (through < Some(version)).then_some(Need::Wal(oldest))
                    }
                    None => Some(Need::WalElsewhere),
                };
                take(Replaced::Wal(version), need);
            }
        }
    }
    Ok(())
}

/// The oldest address of WAL that this server has or replays, and the version up to which the WAL
/// keys are not needed.
fn needs_of_wal(wal: &Wal, redo: Lsn) -> (Lsn, Option<KeyVersion>) {
    // If the segments cannot be read, all keys are needed.
    let on_disk = wal_on_disk::look(wal.switches.iter());
    let on_disk =
        on_disk.unwrap_or(OnDisk { oldest: Lsn::INVALID, lowest: Some(KeyVersion::FIRST) });
    // A WAL receiver begins at the begin of a segment (`RequestXLogStreaming`, walreceiverfuncs.c).
    let received_from = Lsn(redo.0 - redo.offset_in(process::wal_segment_size()));
    let oldest = on_disk.oldest.min(received_from);
    // The page at the end of WAL may keep an older key than the switches say.
    let kept = wal.kept().and_then(|(_, phase)| phase.version);
    let lowest = kept.into_iter().chain(on_disk.lowest).min();
    let through = before_all(wal.switches.iter(), oldest);
    (oldest, through.min(lowest.map_or(through, |lowest| KeyVersion::new(lowest.get() - 1))))
}
