//! A server in recovery: `keys/load.rs`, `keys/redo.rs`, and what pages do meanwhile.

use pagevault_keystore::Record;
use pagevault_keystore::log::{Log, LogError, Settle, Trust, unsettled};
use pagevault_keystore::state::State;

use super::Bounds;
use super::interim::Interim;
use super::order::Order;
use super::server::{Buffer, Memory, Mode, Recovery, Server, Stop, Words};
use super::wal::{KeyChange, SCOPE, WalRecord, address};

impl Server {
    /// Reads the keystore into fresh memory, and is about to replay WAL from the redo pointer on.
    /// `locked`: the provider of the key group does not answer.
    pub fn open_keystore(&mut self, order: Order, locked: bool) {
        let trust = match order {
            Order::UnsettledBelieved => Trust::All,
            _ => Trust::Settled { redo: address(self.redo) },
        };
        let opened = self.files.with(|storage| {
            let Some((mut log, contents)) = Log::open(storage, SCOPE, trust)? else {
                return Ok::<_, LogError>(None);
            };
            let Ok(state) = State::from_records(contents.records) else { return Ok(None) };
            // Also because the kernel may show what the disk does not have.
            let records = state.records(SCOPE);
            log.compact(&records)?;
            Ok(Some((log.position(), records)))
        });
        let Ok(found) = opened else { return self.stop(Stop::KeyFile) };
        let (position, records) = found.unzip();
        let mut directory = Words::empty();
        directory.apply(&records.unwrap_or_default());
        let recovery =
            Recovery { replayed: self.redo, consistent: false, checkpoint: None, noted: None };
        self.memory = Some(Memory {
            position,
            logged: 0,
            directory,
            buffer: Buffer::Empty,
            sync_requested: false,
            locked,
            interim: Interim::None,
            mode: Mode::Recovery(recovery),
        });
        self.note_marks();
    }

    fn set_recovery(&mut self, change: impl FnOnce(&mut Recovery)) {
        if let Some(Memory { mode: Mode::Recovery(recovery), .. }) = &mut self.memory {
            change(recovery);
        }
    }

    fn set_buffer(&mut self, buffer: Buffer) {
        if let Some(memory) = &mut self.memory {
            memory.buffer = buffer;
        }
    }

    /// Replays the record at an index.
    pub fn replay(&mut self, record: WalRecord, index: usize, bounds: &Bounds) {
        match record {
            WalRecord::Keys(change) => self.replay_keys(change, index, bounds),
            WalRecord::Row { row, image } => self.replay_row(row, image, index + 1, bounds.order),
            WalRecord::Checkpoint { redo } => {
                // Not while a key is missing (`hooks/restart_points.rs`).
                if !self.misses_key() {
                    self.set_recovery(|recovery| recovery.checkpoint = Some((redo, index + 1)));
                }
            }
        }
        self.set_recovery(|recovery| recovery.replayed = index + 1);
    }

    /// `keys/redo.rs`, `replay`.
    fn replay_keys(&mut self, change: KeyChange, index: usize, bounds: &Bounds) {
        let order = bounds.order;
        if let KeyChange::Destroyed { .. } = change {
            // `destruction::before_redo`
            self.flush(index + 1, order);
            self.set_buffer(Buffer::Empty);
            self.destroy_interim_pages(order);
        }
        if let KeyChange::Proven { .. } = change
            && self.recovery().is_some_and(|recovery| recovery.consistent)
        {
            // `page/proven.rs`
            self.write_page(order);
        }
        self.take_in_replayed(change, index, bounds);
        if let KeyChange::Made { in_use: false, .. } = change {
            self.create_file();
        }
        // `placeholders::replayed`
        let Some(memory) = &mut self.memory else { return };
        if memory.buffer == Buffer::Placeholder && !self.page_key_is_unknown() {
            self.set_buffer(Buffer::Empty);
        }
    }

    fn take_in_replayed(&mut self, change: KeyChange, index: usize, bounds: &Bounds) {
        let order = bounds.order;
        let Some(memory) = &self.memory else { return };
        let mut records = change.records();
        if records.iter().all(|record| !memory.directory.would_change(record)) {
            return;
        }
        let known = memory.directory.known().clone();
        let is_of_destroyed = |record: &Record| match record {
            Record::DataKey { version, .. } => Some(*version) <= known.destroyed,
            _ => false,
        };
        records.retain(|record| !is_of_destroyed(record));
        if records.is_empty() {
            return;
        }
        let is_another = match change {
            KeyChange::Made { key, .. } => known.key(key.version).is_some_and(|one| one != key),
            KeyChange::Decrypted { .. }
            | KeyChange::Proven { .. }
            | KeyChange::Destroyed { .. } => false,
        };
        if is_another || !memory.directory.accepts(&records) {
            return self.stop(Stop::Contradiction);
        }
        // `stage` asks for a sync first of all; no checkpoint ends meanwhile.
        if let Some(memory) = &mut self.memory {
            memory.sync_requested = true;
        }
        self.stage(&records, index);
        if let Some(memory) = &mut self.memory {
            memory.logged = index + 1;
        }
        let settle = match order {
            Order::RedoSettlesLater => Settle::AtCheckpoint,
            _ => Settle::in_redo(&records),
        };
        if settle == Settle::Now {
            self.settle_now(bounds.fsync, order);
        }
        self.take_in(&records);
        if let KeyChange::Destroyed { .. } = change {
            self.compact(order);
        }
    }

    fn page_key_is_unknown(&self) -> bool {
        let known = self.known();
        self.page.and_then(|page| page.key()).is_some_and(|key| known.is_unknown(key))
    }

    fn replay_row(&mut self, row: u8, image: bool, lsn: usize, order: Order) {
        let Some(memory) = &self.memory else { return };
        let known = memory.directory.known().clone();
        let is_destroyed = known.current.is_some() && known.current <= known.destroyed;
        if is_destroyed {
            // The page is blank, and says that it was changed later.
            return self.set_buffer(Buffer::Empty);
        }
        let changed = Buffer::Page { row, lsn, dirty: true };
        if image {
            return self.set_buffer(changed);
        }
        match memory.buffer {
            Buffer::Placeholder => {}
            Buffer::Page { lsn: has, .. } if has >= lsn => {}
            Buffer::Page { .. } => self.set_buffer(changed),
            Buffer::Empty => {
                let Some(page) = self.page else { return self.stop(Stop::MissingKey) };
                if self.page_key_is_unknown() {
                    let consistent = self.recovery().is_some_and(|recovery| recovery.consistent);
                    if consistent || order == Order::NoPlaceholders {
                        return self.stop(Stop::MissingKey);
                    }
                    return self.set_buffer(Buffer::Placeholder);
                }
                let is_destroyed =
                    page.key().is_some_and(|key| Some(key.version) <= known.destroyed);
                let is_own = page.seal.is_some_and(|seal| !seal.interim);
                if memory.locked && is_own && !is_destroyed {
                    // `locked::check_pages_of_redo`
                    let noted = self.recovery().and_then(|recovery| recovery.noted);
                    let came_late = noted == page.key().map(|key| key.version);
                    return self.stop(Stop::LockedKey { came_late });
                }
                self.read_page();
                if page.lsn < lsn && !is_destroyed {
                    self.set_buffer(changed);
                }
            }
        }
    }

    /// Whether a page cannot be read, or was not written, for want of its key.
    fn misses_key(&self) -> bool {
        let Some(Memory { buffer, .. }) = &self.memory else { return false };
        let noted = self.recovery().and_then(|recovery| recovery.noted);
        let known = self.known();
        let over = matches!(buffer, Buffer::Page { dirty: true, .. });
        *buffer == Buffer::Placeholder
            || noted.is_some_and(|version| known.may_come(version))
            || over && self.page_key_is_unknown()
    }

    /// All WAL is replayed that makes the data directory consistent: `placeholders::require_none`.
    pub fn require_no_missing_key(&mut self, bounds: &Bounds) {
        if self.misses_key() {
            return self.stop(Stop::MissingKey);
        }
        if self.has_put_aside() {
            self.settle_now(bounds.fsync, bounds.order);
            let _ = self.files.with(|storage| unsettled::forget(storage, SCOPE));
        }
        if self.known().floor.is_some() {
            // `page/proven.rs`
            self.write_page(bounds.order);
        }
        self.drop_locked_pages(bounds.order);
        self.set_recovery(|recovery| recovery.consistent = true);
    }

    /// Whether a start has cut off batches and kept them.
    pub fn has_put_aside(&self) -> bool {
        self.files.bytes(&unsettled::name(SCOPE)).is_some()
    }

    /// Admits queries as soon as that may be.
    pub fn check_consistency(&mut self, bounds: &Bounds) {
        let reached = self
            .recovery()
            .is_some_and(|recovery| !recovery.consistent && recovery.replayed >= self.minimum);
        if reached {
            self.require_no_missing_key(bounds);
        }
    }

    /// `CreateRestartPoint`, if there is a checkpoint record to use.
    pub fn restart_point(&mut self, bounds: &Bounds) {
        let order = bounds.order;
        let checkpoint = self.recovery().and_then(|recovery| recovery.checkpoint);
        let Some((redo, end)) = checkpoint else { return };
        self.write_page(order);
        let Some(memory) = &mut self.memory else { return };
        let requested = std::mem::take(&mut memory.sync_requested);
        if requested && bounds.fsync && order != Order::RestartPointSettlesNothing {
            self.settle_now(bounds.fsync, order);
        }
        self.redo = self.redo.max(redo);
        self.minimum = self.minimum.max(end);
        self.set_recovery(|recovery| recovery.checkpoint = None);
    }
}
