//! What all processes share about WAL keys: the switches, and what this server has written.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::*};

use pagevault_keystore::wal::{Full, Switch, Switches, WalPhase, stretch_at};

use super::words::{load_text, load_u64, store_text, store_u64};
use crate::pg::{compat, processes, wal};

/// What all processes share about WAL keys.
pub(crate) struct Wal {
    pub(crate) switches: Switches<'static>,
    words: &'static [AtomicU32],
}

/// Whether there is any WAL key.
const HAS_KEYS: usize = 0;
/// Whether a page of WAL was written since the server started.
const WRITTEN: usize = 1;
/// The page that keeps its key: generation plus one (0: there is none), plaintext, address.
const KEPT: usize = 2;
const KEPT_PLAINTEXT: usize = 3;
const KEPT_ADDRESS: Range<usize> = 4..6;
/// Of the switches that were known when this server began to write WAL, one more than there were
/// (0: it has not begun), and where WAL ended then.
const FORMER: usize = 6;
const FORMER_END: Range<usize> = 7..9;
/// Whether the newest switch is in force and not recorded: neither keystore nor WAL have it.
const UNRECORDED: usize = 9;
/// The number of the process that switches, plus one.
const WORKER: usize = 10;
const PROBLEM: Range<usize> = 11..203;

/// Words of memory that [`Wal`] needs.
pub(crate) const WORDS: usize = PROBLEM.end + Switches::WORDS;

impl Wal {
    /// The table in `words`, zero at first.
    pub(crate) fn new(words: &'static [AtomicU32]) -> Wal {
        assert!(words.len() >= WORDS);
        let (words, switches) = words.split_at(PROBLEM.end);
        Wal { switches: Switches::new(switches), words }
    }

    /// Forgets everything, before the keystore is read again.
    pub(crate) fn reset(&self) {
        self.words.iter().for_each(|word| word.store(0, Relaxed));
        self.switches.reset();
    }

    /// There is a WAL key. A page may be sealed with it, even if no switch says so.
    pub(crate) fn set_has_keys(&self) {
        self.words[HAS_KEYS].store(1, Release);
    }

    /// Whether there is any WAL key.
    #[inline]
    pub(crate) fn has_keys(&self) -> bool {
        self.words[HAS_KEYS].load(Relaxed) != 0
    }

    /// What [`Wal::in_force`] depends on: the same as long as no switch is added and none left out.
    #[inline]
    pub(crate) fn version(&self) -> [u32; 2] {
        [self.switches.count(), self.words[FORMER].load(Acquire)]
    }

    /// Whether a page was written since the server started.
    #[inline]
    pub(crate) fn has_written(&self) -> bool {
        self.words[WRITTEN].load(Relaxed) != 0
    }

    /// The first page, at `address`, is about to be written. If it holds records already, under a
    /// key that is not the switches', it must keep that: a torn write would mix the two.
    ///
    /// Such a page is the last one of WAL that was received in plaintext or copied from elsewhere,
    /// or that was sealed after a switch whose record was lost in a crash. Called under
    /// WALWriteLock.
    pub(crate) fn first_write(&self, address: u64, kept: Option<WalPhase>) {
        self.begin(address);
        if let Some(phase) = kept {
            store_u64(&self.words[KEPT_ADDRESS], address);
            self.words[KEPT_PLAINTEXT].store(u32::from(phase.plaintext), Relaxed);
            self.words[KEPT].store(phase.generation.saturating_add(1), Release);
        }
        self.words[WRITTEN].store(1, Release);
    }

    /// This server writes WAL from `end` on. What is known of switches behind it belongs to WAL
    /// that was lost, in a crash or by recovery to a point before it, and does not apply to what is
    /// written from now on. Called under WALWriteLock; only the first call counts.
    pub(crate) fn begin(&self, end: u64) {
        if self.words[FORMER].load(Relaxed) == 0 {
            store_u64(&self.words[FORMER_END], end);
            self.words[FORMER].store(self.switches.count() + 1, Release);
        }
    }

    /// All switches that apply to WAL as it is.
    pub(crate) fn in_force(&self) -> impl Iterator<Item = Switch> + Clone {
        let former = self.words[FORMER].load(Acquire).saturating_sub(1) as usize;
        let end = load_u64(&self.words[FORMER_END]);
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
        stretch_at(self.in_force(), u64::MAX).phase
    }

    /// Whether a switch that does not apply to WAL as it is was decided after all that do. The next
    /// start would follow it, and servers that have heard of it do.
    pub(crate) fn is_led_astray(&self) -> bool {
        self.switches.newest() > self.in_force().max()
    }

    /// The page that keeps its key.
    pub(crate) fn kept(&self) -> Option<(u64, WalPhase)> {
        let generation = self.words[KEPT].load(Acquire).checked_sub(1)?;
        let plaintext = self.words[KEPT_PLAINTEXT].load(Relaxed) != 0;
        Some((load_u64(&self.words[KEPT_ADDRESS]), WalPhase { generation, plaintext }))
    }

    /// Puts a switch in force, that is yet to be recorded. Under the keystore lock and
    /// WALWriteLock.
    pub(crate) fn put_in_force(&self, switch: Switch) -> Result<(), Full> {
        self.switches.add(switch)?;
        self.words[UNRECORDED].store(1, Relaxed);
        Ok(())
    }

    /// The switch that is in force and not recorded. Under the keystore lock, as the next.
    pub(crate) fn unrecorded(&self) -> Option<Switch> {
        if self.words[UNRECORDED].load(Relaxed) == 0 {
            return None;
        }
        self.switches.newest()
    }

    /// The newest switch is recorded.
    pub(crate) fn set_recorded(&self) {
        self.words[UNRECORDED].store(0, Relaxed);
    }

    /// This process brings WAL to what is wanted, and wants to be woken when there is something to
    /// do.
    pub(crate) fn set_worker(&self) {
        let number = compat::process_number().and_then(|number| u32::try_from(number).ok());
        self.words[WORKER].store(number.map_or(0, |number| number + 1), Relaxed);
    }

    /// Wakes the process that brings WAL to what is wanted.
    pub(crate) fn wake_worker(&self) {
        if let Some(number) = self.words[WORKER].load(Relaxed).checked_sub(1) {
            processes::wake(number as usize);
        }
    }

    /// Why WAL is not encrypted though it should be; empty when there is no reason. Under the
    /// keystore lock, as the next.
    pub(crate) fn problem(&self) -> String {
        load_text(&self.words[PROBLEM])
    }

    /// Remembers why WAL is not encrypted though it should be.
    pub(crate) fn set_problem(&self, text: &str) {
        store_text(&self.words[PROBLEM], text);
    }
}
