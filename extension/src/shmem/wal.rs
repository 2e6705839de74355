//! Shared state of WAL encryption: the switches, and what this server has written.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};

use pagevault_cipher::{KeyVersion, Lsn};
use pagevault_keystore::wal::{Full, Switch, Switches, WalPhase, stretch_at};

use super::text::Text;
use crate::pg::mapping::{Region, shared_struct};
use crate::pg::{compat, processes, wal};

/// Shared state of WAL encryption.
pub(crate) struct Wal {
    pub(crate) switches: Switches<'static>,
    memory: Region<Memory>,
}

shared_struct! {
    /// See the functions of [`Wal`].
    pub(crate) struct Memory {
        has_keys: AtomicBool,
        has_written: AtomicBool,
        /// The page that keeps its key: version (0 if none) plus one (0: there is no such page),
        /// whether plaintext, address.
        kept: AtomicU32,
        is_kept_plaintext: AtomicBool,
        kept_address: AtomicU64,
        /// State when this server began to write WAL: the number of switches known then, plus one
        /// (0: it has not begun), and the end of WAL.
        former: AtomicU32,
        former_end: AtomicU64,
        /// Whether the newest switch is in force but in neither keystore nor WAL yet.
        is_unrecorded: AtomicBool,
        /// The number of the process that performs switches, plus one.
        worker: AtomicU32,
        problem: Text<764>,
        switches: [AtomicU32; Switches::WORDS],
    }
}

impl Wal {
    /// State in this memory, which is zero at first.
    pub(crate) fn new(memory: Region<Memory>) -> Wal {
        Wal { switches: Switches::new(&memory.head.switches), memory }
    }

    /// Forgets everything, before the keystore is read again.
    pub(crate) fn reset(&self) -> std::io::Result<()> {
        self.memory.clear()
    }

    /// Notes that a WAL key exists. A page may be sealed under it, even if no switch says so.
    pub(crate) fn set_has_keys(&self) {
        self.memory.head.has_keys.store(true, Release);
    }

    /// Whether there is any WAL key.
    #[inline]
    pub(crate) fn has_keys(&self) -> bool {
        self.memory.head.has_keys.load(Relaxed)
    }

    /// Changes whenever a switch is added or excluded: a cache of [`Wal::in_force`] is valid as
    /// long as the stamp is the same.
    #[inline]
    pub(crate) fn stamp(&self) -> [u32; 2] {
        [self.switches.count(), self.memory.head.former.load(Acquire)]
    }

    /// Whether a page was written since the server started.
    #[inline]
    pub(crate) fn has_written(&self) -> bool {
        self.memory.head.has_written.load(Relaxed)
    }

    /// Called before the first page, at `address`, is written. If that page already has records
    /// under a key other than the switches', it must keep that key (`kept`), because a torn write
    /// would mix the two.
    ///
    /// Such a page is the last one of WAL that was received in plaintext or copied from elsewhere,
    /// or that was sealed after a switch whose record was lost in a crash. Called under
    /// WALWriteLock.
    pub(crate) fn first_write(&self, address: Lsn, kept: Option<WalPhase>) {
        self.begin(address);
        if let Some(phase) = kept {
            let memory = self.memory.head;
            memory.kept_address.store(address.0, Relaxed);
            memory.is_kept_plaintext.store(phase.plaintext, Relaxed);
            let version = KeyVersion::get_or_zero(phase.version);
            memory.kept.store(version.saturating_add(1), Release);
        }
        self.memory.head.has_written.store(true, Release);
    }

    /// This server begins to write WAL at `end`. Known switches after that belong to WAL that was
    /// lost, in a crash or by recovery to an earlier point, and do not apply to new WAL. Called
    /// under WALWriteLock; only the first call has an effect.
    pub(crate) fn begin(&self, end: Lsn) {
        if self.memory.head.former.load(Relaxed) == 0 {
            self.memory.head.former_end.store(end.0, Relaxed);
            self.memory.head.former.store(self.switches.count() + 1, Release);
        }
    }

    /// All switches that apply to this server's WAL.
    pub(crate) fn in_force(&self) -> impl Iterator<Item = Switch> + Clone {
        let former = self.memory.head.former.load(Acquire).saturating_sub(1) as usize;
        let end = Lsn(self.memory.head.former_end.load(Relaxed));
        let all = self.switches.iter().enumerate();
        all.filter(move |(at, switch)| *at >= former || switch.start <= end)
            .map(|(_, switch)| switch)
    }

    /// How the last page of this server's WAL is written.
    pub(crate) fn written(&self) -> WalPhase {
        stretch_at(self.in_force(), wal::reached()).phase
    }

    /// How WAL is written after the last switch that applies.
    pub(crate) fn latest_phase(&self) -> WalPhase {
        stretch_at(self.in_force(), Lsn::MAX).phase
    }

    /// Whether the newest switch belongs to lost WAL, and so does not apply. The next start would
    /// follow it, and so do standbys that have replayed it.
    pub(crate) fn has_lost_switch(&self) -> bool {
        self.switches.newest() > self.in_force().max()
    }

    /// The page that keeps its key, see [`Wal::first_write`].
    pub(crate) fn kept(&self) -> Option<(Lsn, WalPhase)> {
        let memory = self.memory.head;
        let version = KeyVersion::new(memory.kept.load(Acquire).checked_sub(1)?);
        let plaintext = memory.is_kept_plaintext.load(Relaxed);
        let address = Lsn(memory.kept_address.load(Relaxed));
        Some((address, WalPhase { version, plaintext }))
    }

    /// Puts a switch in force before it is recorded. Under the keystore lock and WALWriteLock.
    pub(crate) fn put_in_force(&self, switch: Switch) -> Result<(), Full> {
        self.switches.add(switch)?;
        self.memory.head.is_unrecorded.store(true, Relaxed);
        Ok(())
    }

    /// The switch that is in force but not recorded. Under the keystore lock, like
    /// [`Wal::set_recorded`].
    pub(crate) fn unrecorded(&self) -> Option<Switch> {
        if self.memory.head.is_unrecorded.load(Relaxed) { self.switches.newest() } else { None }
    }

    /// Notes that the newest switch is recorded.
    pub(crate) fn set_recorded(&self) {
        self.memory.head.is_unrecorded.store(false, Relaxed);
    }

    /// Registers this process as the one that switches WAL encryption, and is woken when there is
    /// work.
    pub(crate) fn set_worker(&self) {
        let number = compat::process_number().and_then(|number| u32::try_from(number).ok());
        self.memory.head.worker.store(number.map_or(0, |number| number + 1), Relaxed);
    }

    /// Wakes the process that switches WAL encryption.
    pub(crate) fn wake_worker(&self) {
        if let Some(number) = self.memory.head.worker.load(Relaxed).checked_sub(1) {
            processes::wake(number as usize);
        }
    }

    /// Why WAL is not encrypted although it should be; empty if it is. Under the keystore lock,
    /// like [`Wal::set_problem`].
    pub(crate) fn problem(&self) -> String {
        self.memory.head.problem.load()
    }

    /// Stores why WAL is not encrypted although it should be.
    pub(crate) fn set_problem(&self, text: &str) {
        self.memory.head.problem.store(text);
    }
}
