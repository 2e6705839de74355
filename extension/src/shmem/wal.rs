//! What all processes share about WAL keys: the switches, and what this server has written.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};

use pagevault_cipher::{KeyVersion, Lsn};
use pagevault_keystore::wal::{Full, Switch, Switches, WalPhase, stretch_at};

use super::text::Text;
use crate::pg::mapping::{Region, shared_struct};
use crate::pg::{compat, processes, wal};

/// What all processes share about WAL keys.
pub(crate) struct Wal {
    pub(crate) switches: Switches<'static>,
    memory: Region<Memory>,
}

shared_struct! {
    /// See the functions of [`Wal`].
    pub(crate) struct Memory {
        has_keys: AtomicBool,
        has_written: AtomicBool,
        /// The page that keeps its key: version (0 for none) plus one (0: there is no such page),
        /// plaintext, address.
        kept: AtomicU32,
        is_kept_plaintext: AtomicBool,
        kept_address: AtomicU64,
        /// Of the switches that were known when this server began to write WAL, one more than there
        /// were (0: it has not begun), and where WAL ended then.
        former: AtomicU32,
        former_end: AtomicU64,
        /// Whether the newest switch is in force and not recorded: neither keystore nor WAL have
        /// it.
        is_unrecorded: AtomicBool,
        /// The number of the process that switches, plus one.
        worker: AtomicU32,
        problem: Text<764>,
        switches: [AtomicU32; Switches::WORDS],
    }
}

impl Wal {
    /// What is in this memory, zero at first.
    pub(crate) fn new(memory: Region<Memory>) -> Wal {
        Wal { switches: Switches::new(&memory.head.switches), memory }
    }

    /// Forgets everything, before the keystore is read again.
    pub(crate) fn reset(&self) -> std::io::Result<()> {
        self.memory.clear()
    }

    /// There is a WAL key. A page may be sealed with it, even if no switch says so.
    pub(crate) fn set_has_keys(&self) {
        self.memory.head.has_keys.store(true, Release);
    }

    /// Whether there is any WAL key.
    #[inline]
    pub(crate) fn has_keys(&self) -> bool {
        self.memory.head.has_keys.load(Relaxed)
    }

    /// What [`Wal::in_force`] depends on: the same as long as no switch is added and none left out.
    #[inline]
    pub(crate) fn stamp(&self) -> [u32; 2] {
        [self.switches.count(), self.memory.head.former.load(Acquire)]
    }

    /// Whether a page was written since the server started.
    #[inline]
    pub(crate) fn has_written(&self) -> bool {
        self.memory.head.has_written.load(Relaxed)
    }

    /// The first page, at `address`, is about to be written. If it holds records already, under a
    /// key that is not the switches', it must keep that: a torn write would mix the two.
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

    /// This server writes WAL from `end` on. What is known of switches behind it belongs to WAL
    /// that was lost, in a crash or by recovery to a point before it, and does not apply to what is
    /// written from now on. Called under WALWriteLock; only the first call counts.
    pub(crate) fn begin(&self, end: Lsn) {
        if self.memory.head.former.load(Relaxed) == 0 {
            self.memory.head.former_end.store(end.0, Relaxed);
            self.memory.head.former.store(self.switches.count() + 1, Release);
        }
    }

    /// All switches that apply to WAL as it is.
    pub(crate) fn in_force(&self) -> impl Iterator<Item = Switch> + Clone {
        let former = self.memory.head.former.load(Acquire).saturating_sub(1) as usize;
        let end = Lsn(self.memory.head.former_end.load(Relaxed));
        let all = self.switches.iter().enumerate();
        all.filter(move |(at, switch)| *at >= former || switch.start <= end)
            .map(|(_, switch)| switch)
    }

    /// How the last page of WAL is written that this server has.
    pub(crate) fn written(&self) -> WalPhase {
        stretch_at(self.in_force(), wal::reached()).phase
    }

    /// How WAL is written from the last switch on that applies.
    pub(crate) fn heading(&self) -> WalPhase {
        stretch_at(self.in_force(), Lsn::MAX).phase
    }

    /// Whether a switch that does not apply to WAL as it is was decided after all that do. The next
    /// start would follow it, and servers that have heard of it do.
    pub(crate) fn is_led_astray(&self) -> bool {
        self.switches.newest() > self.in_force().max()
    }

    /// The page that keeps its key.
    pub(crate) fn kept(&self) -> Option<(Lsn, WalPhase)> {
        let memory = self.memory.head;
        let version = KeyVersion::new(memory.kept.load(Acquire).checked_sub(1)?);
        let plaintext = memory.is_kept_plaintext.load(Relaxed);
        let address = Lsn(memory.kept_address.load(Relaxed));
        Some((address, WalPhase { version, plaintext }))
    }

    /// Puts a switch in force, that is yet to be recorded. Under the keystore lock and
    /// WALWriteLock.
    pub(crate) fn put_in_force(&self, switch: Switch) -> Result<(), Full> {
        self.switches.add(switch)?;
        self.memory.head.is_unrecorded.store(true, Relaxed);
        Ok(())
    }

    /// The switch that is in force and not recorded. Under the keystore lock, as the next.
    pub(crate) fn unrecorded(&self) -> Option<Switch> {
        if self.memory.head.is_unrecorded.load(Relaxed) { self.switches.newest() } else { None }
    }

    /// The newest switch is recorded.
    pub(crate) fn set_recorded(&self) {
        self.memory.head.is_unrecorded.store(false, Relaxed);
    }

    /// This process brings WAL to what is wanted, and wants to be woken when there is something to
    /// do.
    pub(crate) fn set_worker(&self) {
        let number = compat::process_number().and_then(|number| u32::try_from(number).ok());
        self.memory.head.worker.store(number.map_or(0, |number| number + 1), Relaxed);
    }

    /// Wakes the process that brings WAL to what is wanted.
    pub(crate) fn wake_worker(&self) {
        if let Some(number) = self.memory.head.worker.load(Relaxed).checked_sub(1) {
            processes::wake(number as usize);
        }
    }

    /// Why WAL is not encrypted though it should be; empty when there is no reason. Under the
    /// keystore lock, as the next.
    pub(crate) fn problem(&self) -> String {
        self.memory.head.problem.load()
    }

    /// Remembers why WAL is not encrypted though it should be.
    pub(crate) fn set_problem(&self, text: &str) {
        self.memory.head.problem.store(text);
    }
}
