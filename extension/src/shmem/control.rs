//! Flags and counters, the keystore's identity, positions of the key logs, the last unlock failure.
//!
//! All but flags and counters are accessed under the keystore lock.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::*};

use pagevault_keystore::log::Position;
use pagevault_keystore::{KeyGroup, Lsn, Scope};

use super::text::{Text, load_bytes, store_bytes};
use crate::pg::mapping::{Region, shared_struct};

/// Shared state of the keystore.
#[derive(Clone, Copy)]
pub(crate) struct Control {
    memory: Region<Memory, LogEnd>,
}

shared_struct! {
    /// See the functions of [`Control`].
    pub(crate) struct Memory {
        is_anything_sealed: AtomicBool,
        /// [`NO_INTERIM`], [`MARKED`] or [`UNMARKED`].
        interim: AtomicU32,
        destructions: AtomicU32,
        label_changes: AtomicU32,
        calls_seen: AtomicU32,
        /// [`NO_IMAGES`], or where WAL began to have an image of each page that is changed.
        images_from: AtomicU64,
        /// Like `images_from`, where it is not known whether a setting has taken effect; 0: it is.
        images_undoubted_from: AtomicU64,
        clean_start: AtomicU64,
        was_consistent: AtomicBool,
        was_standby: AtomicBool,
        has_given_up_pages: AtomicBool,
        closed: AtomicU32,
        most_data_keys: AtomicU32,
        /// The number of the key group that is being shredded, or 0; by whom.
        shredded_group: AtomicU32,
        shredding_process: AtomicU32,
        shredding_pid: AtomicU32,
        /// The number of the process that starts rekey workers, plus one.
        launcher: AtomicU32,
        has_id: AtomicBool,
        id: [AtomicU8; 16],
        logged: AtomicU64,
        unlock_failure: Text<980>,
    }
}

shared_struct! {
    /// Position of a key log, like [`Position`].
    pub(crate) struct LogEnd {
        /// Plus one, so that zero is a free entry. Written last.
        scope: AtomicU32,
        generation: AtomicU32,
        end: AtomicU64,
        settled: AtomicU64,
        logged: AtomicU64,
    }
}

const NO_IMAGES: u64 = u64::MAX;

/// No page is under an interim key; only those of marked files may be; others may be as well.
const NO_INTERIM: u32 = 0;
const MARKED: u32 = 1;
const UNMARKED: u32 = 2;

/// Minimum number of log entries.
const LOGS_LEAST: usize = 8192;
/// Number of free entries at server start, at least.
const LOGS_GROWTH: usize = 1024;
/// Entries of these that are reserved for recovery.
const LOGS_RESERVED: usize = 256;

/// Number of entries that [`Control`] needs if there are this many logs.
pub(crate) fn entries_needed(logs: usize) -> usize {
    LOGS_LEAST.max(logs + LOGS_GROWTH)
}

/// No free entry for another log.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooManyLogs;

impl Control {
    /// State in this memory, which is zero at first.
    pub(crate) fn new(memory: Region<Memory, LogEnd>) -> Control {
        Control { memory }
    }

    /// Clears everything, before the keystore is read again.
    pub(crate) fn reset(&self) -> std::io::Result<()> {
        self.memory.clear()
    }

    #[inline]
    pub(super) fn sealed(&self) -> bool {
        self.memory.head.is_anything_sealed.load(Relaxed)
    }

    /// Sets the flag. It is never cleared while the server runs.
    pub(crate) fn set_sealed(&self) {
        self.memory.head.is_anything_sealed.store(true, Release);
    }

    /// Whether there may be pages under interim keys.
    #[inline]
    pub(crate) fn any_interim(&self) -> bool {
        self.memory.head.interim.load(Relaxed) != NO_INTERIM
    }

    /// Whether there may be such pages in files that are not marked.
    pub(crate) fn any_unmarked_interim(&self) -> bool {
        self.memory.head.interim.load(Relaxed) == UNMARKED
    }

    /// There are marks, or all files that may have such pages have been marked (`all`).
    pub(crate) fn interim_is_marked(&self, all: bool) {
        self.change_interim(if all { UNMARKED } else { NO_INTERIM }, MARKED);
    }

    /// Such a page was read.
    pub(crate) fn interim_was_read(&self) {
        self.change_interim(NO_INTERIM, UNMARKED);
    }

    /// There are no marks any more. True if there were.
    pub(crate) fn interim_is_gone(&self) -> bool {
        self.change_interim(MARKED, NO_INTERIM)
    }

    /// If it is another state, it stays.
    fn change_interim(&self, from: u32, to: u32) -> bool {
        self.memory.head.interim.compare_exchange(from, to, AcqRel, Relaxed).is_ok()
    }

    #[inline]
    pub(super) fn destructions(&self) -> u32 {
        self.memory.head.destructions.load(Acquire)
    }

    /// Makes every process drop its expanded keys before it uses one again.
    pub(crate) fn count_destruction(&self) {
        // Never 0 again, which means that no key was destroyed.
        let next = self.destructions().wrapping_add(1).max(1);
        self.memory.head.destructions.store(next, Release);
    }

    /// Notes that recovery has reached consistency, or has ended.
    pub(crate) fn set_consistent(&self) {
        self.memory.head.was_consistent.store(true, Release);
    }

    /// In recovery: whether the data directory was consistent once. Before that, the keystore may
    /// be of a later time than what was replayed.
    pub(crate) fn was_consistent(&self) -> bool {
        self.memory.head.was_consistent.load(Acquire)
    }

    /// The key group that is being shredded, with the number and the PID of the process that does
    /// it. Under the keystore lock, like the two following.
    pub(crate) fn shredded_group(&self) -> Option<(KeyGroup, usize, u32)> {
        let memory = self.memory.head;
        let group = KeyGroup::new(memory.shredded_group.load(Relaxed))?;
        let process = memory.shredding_process.load(Relaxed) as usize;
        Some((group, process, memory.shredding_pid.load(Relaxed)))
    }

    pub(crate) fn shredding_begins(&self, group: KeyGroup, process: usize, pid: u32) {
        let memory = self.memory.head;
        memory.shredding_process.store(process as u32, Relaxed);
        memory.shredding_pid.store(pid, Relaxed);
        memory.shredded_group.store(group.number(), Relaxed);
    }

    pub(crate) fn shredding_ends(&self) {
        self.memory.head.shredded_group.store(0, Relaxed);
    }

    /// Which of our functions the server has called since its start, as bits.
    #[inline]
    pub(crate) fn calls_seen(&self) -> u32 {
        self.memory.head.calls_seen.load(Relaxed)
    }

    /// Adds bits to the calls seen. The word changes about ten times in all, so reading it often is
    /// cheap.
    #[cold]
    pub(crate) fn add_calls_seen(&self, bits: u32) {
        self.memory.head.calls_seen.fetch_or(bits, Relaxed);
    }

    /// Notes at which checkpoint the server starts after a clean shutdown; [`Lsn::INVALID`] if it
    /// replays WAL. `pg_upgrade` makes one with `full_page_writes` off.
    pub(crate) fn starts_clean_at(&self, redo: Lsn) {
        self.memory.head.clean_start.store(redo.0, Relaxed);
    }

    /// Notes that pages are changed without an image in WAL.
    pub(crate) fn images_are_off(&self) {
        self.memory.head.images_from.store(NO_IMAGES, Relaxed);
    }

    /// Notes that from `end` on, pages are not changed without an image in WAL any more.
    pub(crate) fn images_are_on(&self, end: Lsn) {
        let from = &self.memory.head.images_from;
        let _ = from.compare_exchange(NO_IMAGES, end.0, Relaxed, Relaxed);
    }

    /// Notes that pages may be changed without an image in WAL, until a checkpoint says otherwise.
    pub(crate) fn images_are_doubtful(&self) {
        self.memory.head.images_undoubted_from.store(NO_IMAGES, Relaxed);
    }

    /// A checkpoint from `end` on, the end of WAL, removes the doubt if its record says that images
    /// are made.
    pub(crate) fn images_are_told_from(&self, end: Lsn) {
        let undoubted = &self.memory.head.images_undoubted_from;
        let _ = undoubted.compare_exchange(NO_IMAGES, end.0, Relaxed, Relaxed);
    }

    /// Whether WAL, which ends at `end`, has an image of each page that was changed since the last
    /// checkpoint, with this redo pointer. `said`: its record says that images were made then.
    pub(crate) fn has_images_from(&self, redo: Lsn, said: bool, end: Lsn) -> bool {
        self.images_are_told_from(end);
        let memory = self.memory.head;
        let undoubted = memory.images_undoubted_from.load(Relaxed);
        // Nothing was changed since that one but by this server.
        let started_there = memory.clean_start.load(Relaxed) == redo.0;
        (said || started_there) && memory.images_from.load(Relaxed) <= redo.0 && undoubted <= redo.0
    }

    /// The database that redo has closed, or 0.
    pub(crate) fn closed(&self) -> u32 {
        self.memory.head.closed.load(Relaxed)
    }

    /// Sets this database.
    pub(crate) fn close(&self, database: u32) {
        self.memory.head.closed.store(database, Relaxed);
    }

    /// How many data keys there may be for new ones to be made.
    pub(crate) fn most_data_keys(&self) -> u32 {
        self.memory.head.most_data_keys.load(Relaxed)
    }

    /// Sets this limit.
    pub(crate) fn set_most_data_keys(&self, most: u32) {
        self.memory.head.most_data_keys.store(most, Relaxed);
    }

    /// Whether this server was a standby since it was started.
    pub(crate) fn was_standby(&self) -> bool {
        self.memory.head.was_standby.load(Relaxed)
    }

    /// Notes that the server was a standby.
    pub(crate) fn set_was_standby(&self) {
        self.memory.head.was_standby.store(true, Relaxed);
    }

    /// Whether the start could not overwrite all pages of key groups that were given up.
    pub(crate) fn has_given_up_pages(&self) -> bool {
        self.memory.head.has_given_up_pages.load(Relaxed)
    }

    /// Sets this.
    pub(crate) fn set_has_given_up_pages(&self, has: bool) {
        self.memory.head.has_given_up_pages.store(has, Relaxed);
    }

    /// The keystore's identity, if it is set.
    pub(crate) fn keystore_id(&self) -> Option<[u8; 16]> {
        let memory = self.memory.head;
        memory.has_id.load(Acquire).then(|| load_bytes(&memory.id))
    }

    /// Sets the keystore's identity.
    pub(crate) fn set_keystore_id(&self, id: &[u8; 16]) {
        store_bytes(&self.memory.head.id, id);
        self.memory.head.has_id.store(true, Release);
    }

    fn logs(&self) -> impl Iterator<Item = &'static LogEnd> + use<> {
        self.memory.entries.iter().take_while(|entry| entry.scope.load(Acquire) != 0)
    }

    fn log(&self, scope: Scope) -> Option<&'static LogEnd> {
        self.logs().find(|entry| entry.scope.load(Relaxed) == scope.number().wrapping_add(1))
    }

    /// Whether another log may be created.
    pub(crate) fn has_room(&self) -> bool {
        self.logs().count() + LOGS_RESERVED < self.memory.entries.len()
    }

    /// Whether another log may be created in recovery.
    pub(crate) fn has_any_room(&self) -> bool {
        self.logs().count() < self.memory.entries.len()
    }

    /// The end of the last WAL record about keys. WAL must be durable up to here before a log may
    /// be marked as settled.
    pub(crate) fn logged(&self) -> Lsn {
        Lsn(self.memory.head.logged.load(Relaxed))
    }

    /// Stores the end of a WAL record about keys.
    pub(crate) fn set_logged(&self, lsn: Lsn) {
        self.memory.head.logged.store(lsn.0, Relaxed);
    }

    /// Position of the log of a scope; `None` if there is no such log.
    pub(crate) fn position(&self, scope: Scope) -> Option<Position> {
        let entry = self.log(scope)?;
        Some(Position {
            keystore_id: self.keystore_id()?,
            scope,
            generation: entry.generation.load(Relaxed),
            end: entry.end.load(Relaxed),
            settled: entry.settled.load(Relaxed),
            logged: Lsn(entry.logged.load(Relaxed)),
        })
    }

    /// Stores the position of a log.
    pub(crate) fn set_position(&self, position: &Position) -> Result<(), TooManyLogs> {
        let entry = match self.log(position.scope) {
            Some(entry) => entry,
            None => {
                let mut entries = self.memory.entries.iter();
                entries.find(|entry| entry.scope.load(Acquire) == 0).ok_or(TooManyLogs)?
            }
        };
        entry.generation.store(position.generation, Relaxed);
        entry.end.store(position.end, Relaxed);
        entry.settled.store(position.settled, Relaxed);
        entry.logged.store(position.logged.0, Relaxed);
        entry.scope.store(position.scope.number().wrapping_add(1), Release);
        Ok(())
    }

    /// The number of the process that starts rekey workers, if any.
    pub(crate) fn rekey_launcher(&self) -> Option<u32> {
        self.memory.head.launcher.load(Acquire).checked_sub(1)
    }

    /// Stores the number of the process that starts rekey workers.
    pub(crate) fn set_rekey_launcher(&self, number: Option<u32>) {
        self.memory.head.launcher.store(number.map_or(0, |number| number + 1), Release);
    }

    /// How often labels have changed since server start.
    pub(super) fn label_changes(&self) -> u32 {
        self.memory.head.label_changes.load(Acquire)
    }

    /// Counts a change of labels.
    pub(super) fn count_label_change(&self) {
        self.memory.head.label_changes.fetch_add(1, Release);
    }

    /// Why the last attempt to unlock failed; empty if it succeeded.
    pub(crate) fn unlock_failure(&self) -> String {
        self.memory.head.unlock_failure.load()
    }

    /// Stores why unlocking failed, truncated to what fits.
    pub(crate) fn set_unlock_failure(&self, text: &str) {
        self.memory.head.unlock_failure.store(text);
    }
}
