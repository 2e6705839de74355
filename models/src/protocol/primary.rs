//! An open server: changes of rows and of keys, checkpoints, and a start after a crash.

use pagevault_keystore::DataKeyVersion;
use pagevault_keystore::log::Settle;

use super::Bounds;
use super::interim::Start;
use super::order::Order;
use super::server::{Buffer, Checkpointer, Mark, Memory, Mode, Page, Server, Writer};
use super::wal::{Key, KeyChange, WalRecord, told};

impl Server {
    fn writer(&self) -> Writer {
        match &self.memory {
            Some(Memory { mode: Mode::Open { writer, .. }, .. }) => *writer,
            _ => Writer::Idle,
        }
    }

    fn set_writer(&mut self, next: Writer) {
        if let Some(Memory { mode: Mode::Open { writer, .. }, .. }) = &mut self.memory {
            *writer = next;
        }
    }

    fn set_checkpointer(&mut self, next: Checkpointer) {
        if let Some(Memory { mode: Mode::Open { checkpointer, .. }, .. }) = &mut self.memory {
            *checkpointer = next;
        }
    }

    /// The step of the checkpoint under way.
    pub fn checkpointer(&self) -> Checkpointer {
        match &self.memory {
            Some(Memory { mode: Mode::Open { checkpointer, .. }, .. }) => *checkpointer,
            _ => Checkpointer::Idle,
        }
    }

    /// Whether nobody holds the keystore lock.
    pub fn keystore_is_free(&self) -> bool {
        self.writer() == Writer::Idle
    }

    /// Whether the file exists and can be read, as WAL tells.
    pub fn file_lives(&self, bounds: &Bounds) -> bool {
        told(&self.wal, bounds.in_use).lives
    }

    /// Whether sessions and the checkpointer may use the file: it is there, and is not about to be
    /// destroyed.
    pub fn file_is_used(&self, bounds: &Bounds) -> bool {
        let is_made = matches!(
            self.change_under_way(),
            Some(KeyChange::Destroyed { .. } | KeyChange::Made { in_use: false, .. })
        );
        !is_made && self.file_lives(bounds)
    }

    /// A transaction changes the page; its record is inserted.
    pub fn change_row(&mut self, row: u8) {
        let redo = self.checkpointer().redo().unwrap_or(self.redo);
        let lsn = match self.memory.as_ref().map(|memory| memory.buffer) {
            Some(Buffer::Page { lsn, .. }) => Some(lsn),
            _ => self.page.map(|page| page.lsn),
        };
        self.read_page();
        // A page that is new, or was not changed since the redo pointer, is logged as a whole.
        let image = lsn.is_none_or(|lsn| lsn <= redo);
        self.wal.push(WalRecord::Row { row, image });
        let lsn = self.wal.len();
        if let Some(memory) = &mut self.memory {
            memory.buffer = Buffer::Page { row, lsn, dirty: true };
        }
    }

    /// The change of keys that is being made.
    pub fn change_under_way(&self) -> Option<KeyChange> {
        match self.writer() {
            Writer::Idle => None,
            Writer::Locked(change)
            | Writer::Staged(change)
            | Writer::Logged(change)
            | Writer::Flushed(change)
            | Writer::Synced(change)
            | Writer::Safe(change) => Some(change),
        }
    }

    /// Begins a change of keys: takes the lock, asks for a sync.
    pub fn begin_keys(&mut self, change: KeyChange, order: Order) {
        self.set_writer(Writer::Locked(change));
        if let KeyChange::Destroyed { .. } = change {
            // Nobody uses the file, and none of its pages stays in shared buffers.
            self.write_page(order);
            if let Some(memory) = &mut self.memory {
                memory.buffer = Buffer::Empty;
            }
        }
        if order != Order::SyncRequestedLast {
            self.request_sync();
        }
    }

    /// The next key of the file.
    pub fn new_key(&self, identity: u8, bounds: &Bounds) -> KeyChange {
        let in_use = self.file_lives(bounds);
        let version = self.known().next.unwrap_or(DataKeyVersion::LAST);
        KeyChange::Made { key: Key { version, identity }, in_use }
    }

    /// What a rekey job can prove by the page on disk: it is encrypted under the present version,
    /// and WAL has an image of it after the record that had put that into use. Each change of the
    /// model's page has one.
    pub fn proof(&self, order: Order) -> Option<KeyChange> {
        let (known, page) = (self.known(), self.page?);
        let is_interim = page.seal.is_some_and(|seal| seal.interim);
        let version = known.current.filter(|version| known.floor < Some(*version))?;
        let is_made = |record: &WalRecord| match record {
            WalRecord::Keys(KeyChange::Made { key, .. }) => key.version == version,
            _ => false,
        };
        let used_from = self.wal.iter().position(is_made)? + 1;
        let is_later = page.lsn > used_from || order == Order::ProofByDiskOnly;
        (page.key() == known.key(version) && page.seal.is_some() && !is_interim && is_later)
            .then_some(KeyChange::Proven { version })
    }

    fn request_sync(&mut self) {
        if let Some(memory) = &mut self.memory {
            memory.sync_requested = true;
        }
    }

    /// When a change of keys is settled: `append` or `append_durably`.
    fn settle_of(change: KeyChange, order: Order) -> Settle {
        match change {
            KeyChange::Made { in_use: true, .. } if order == Order::NextKeyNotDurable => {
                Settle::AtCheckpoint
            }
            KeyChange::Destroyed { .. } if order == Order::TombstoneNotDurable => {
                Settle::AtCheckpoint
            }
            KeyChange::Made { in_use: true, .. }
            | KeyChange::Decrypted { .. }
            | KeyChange::Destroyed { .. } => Settle::Now,
            KeyChange::Made { in_use: false, .. } | KeyChange::Proven { .. } => {
                Settle::of(&change.records())
            }
        }
    }

    /// The next step of the change of keys under way (`append_as`). True when it is reported.
    ///
    /// Where the primary does not crash any more nobody can tell the last steps from one.
    pub fn step_keys(&mut self, may_crash: bool, bounds: &Bounds) -> bool {
        let is_last = matches!(self.writer(), Writer::Logged(_)) && !may_crash;
        loop {
            if self.step_keys_once(bounds) {
                return true;
            }
            if !is_last || self.memory.is_none() {
                return false;
            }
        }
    }

    fn step_keys_once(&mut self, bounds: &Bounds) -> bool {
        let order = bounds.order;
        match self.writer() {
            Writer::Idle => return false,
            Writer::Locked(change) => {
                let without_wal = order == Order::TombstoneNotInWal
                    && matches!(change, KeyChange::Destroyed { .. });
                if order == Order::FileBeforeWal || without_wal {
                    self.append_counting(&change.records());
                } else if !Self::leaves_no_tombstone(change, order) {
                    self.stage(&change.records(), self.wal.len());
                }
                if order == Order::UsedBeforeWal {
                    self.take_in(&change.records());
                }
                let next = if without_wal { Writer::Safe(change) } else { Writer::Staged(change) };
                self.set_writer(next);
            }
            Writer::Staged(change) => {
                if !Self::leaves_no_tombstone(change, order) {
                    self.wal.push(WalRecord::Keys(change));
                }
                let end = self.wal.len();
                if let Some(memory) = &mut self.memory {
                    memory.logged = end;
                }
                if let KeyChange::Made { in_use: false, .. } = change {
                    self.create_file();
                }
                self.set_writer(Writer::Logged(change));
            }
            Writer::Logged(change) => match Self::settle_of(change, order) {
                Settle::AtCheckpoint => self.use_keys(change, order),
                Settle::Now => {
                    if order != Order::MarkBeforeWal {
                        self.flush(self.wal.len(), order);
                    }
                    self.set_writer(Writer::Flushed(change));
                }
            },
            Writer::Flushed(change) => {
                self.sync_log(bounds.fsync, order);
                self.set_writer(Writer::Synced(change));
            }
            Writer::Synced(change) => {
                self.mark_settled(None);
                self.set_writer(Writer::Safe(change));
            }
            Writer::Safe(change) => {
                self.sync_mark(bounds.fsync);
                self.use_keys(change, order);
            }
        }
        self.writer() == Writer::Idle
    }

    fn leaves_no_tombstone(change: KeyChange, order: Order) -> bool {
        order == Order::NoTombstone && matches!(change, KeyChange::Destroyed { .. })
    }

    /// The last step: others use the keys, and the lock is free.
    fn use_keys(&mut self, change: KeyChange, order: Order) {
        if order == Order::SyncRequestedLast {
            self.request_sync();
        }
        match change {
            KeyChange::Made { .. } | KeyChange::Decrypted { .. } | KeyChange::Proven { .. } => {
                self.take_in(&change.records());
            }
            KeyChange::Destroyed { through, .. } => {
                if order == Order::NoTombstone {
                    self.remove_keys(through);
                } else {
                    self.take_in(&change.records());
                }
                self.destroy_interim_pages(order);
                if !matches!(order, Order::TombstoneNotDurable | Order::NoTombstone) {
                    self.compact(order);
                }
            }
        }
        self.set_writer(Writer::Idle);
    }

    /// The file is new: what had its number before is gone.
    pub fn create_file(&mut self) {
        (self.page, self.map) = (None, None);
        if let Some(memory) = &mut self.memory {
            memory.buffer = Buffer::Empty;
        }
    }

    /// Whether the checkpoint can take its next step now, or begin.
    pub fn may_step_checkpoint(&self, order: Order) -> bool {
        match self.checkpointer() {
            Checkpointer::Begun(_) => {
                let holds_slots = matches!(self.writer(), Writer::Staged(_));
                !holds_slots || order == Order::CheckpointPassesStaged
            }
            Checkpointer::Settling(_) | Checkpointer::Synced(..) => self.keystore_is_free(),
            _ => true,
        }
    }

    /// The next step of a checkpoint (`CreateCheckPoint`, `CheckPointGuts`, `settle`). True when it
    /// is done. As with keys, the steps of settling are one where the primary does not crash any
    /// more.
    pub fn step_checkpoint(&mut self, may_crash: bool, bounds: &Bounds) -> bool {
        loop {
            if self.step_checkpoint_once(bounds) {
                return true;
            }
            let settles =
                matches!(self.checkpointer(), Checkpointer::Settling(_) | Checkpointer::Synced(..));
            let goes_on = settles && !may_crash && self.may_step_checkpoint(bounds.order);
            if !goes_on || self.memory.is_none() {
                return false;
            }
        }
    }

    fn step_checkpoint_once(&mut self, bounds: &Bounds) -> bool {
        let order = bounds.order;
        let next = match self.checkpointer() {
            Checkpointer::Idle => Checkpointer::Begun(self.wal.len()),
            Checkpointer::Begun(redo) => Checkpointer::PastSlots(redo),
            Checkpointer::PastSlots(redo) => {
                self.write_page(order);
                let Some(memory) = &mut self.memory else { return false };
                let settles = bounds.fsync && order != Order::CheckpointSettlesNothing;
                if settles && std::mem::take(&mut memory.sync_requested) {
                    Checkpointer::Settling(redo)
                } else {
                    Checkpointer::Settled(redo, Mark::None)
                }
            }
            Checkpointer::Settling(redo) => {
                let Some(memory) = &self.memory else { return false };
                let logged = memory.logged;
                match memory.position.filter(|position| !position.is_settled()) {
                    None => Checkpointer::Settled(redo, Mark::None),
                    Some(before) => {
                        if order != Order::MarkBeforeWal {
                            self.flush(logged, order);
                        }
                        self.sync_log(bounds.fsync, order);
                        Checkpointer::Synced(redo, before)
                    }
                }
            }
            Checkpointer::Synced(redo, before) => {
                self.mark_settled(Some(before));
                Checkpointer::Settled(redo, Mark::Added)
            }
            Checkpointer::Settled(redo, mark) => {
                if mark == Mark::Added {
                    self.sync_mark(bounds.fsync);
                }
                self.wal.push(WalRecord::Checkpoint { redo });
                self.flush(self.wal.len(), order);
                self.redo = redo;
                self.set_checkpointer(Checkpointer::Idle);
                return true;
            }
        };
        self.set_checkpointer(next);
        false
    }

    /// A server that was initialised, and has a file in plaintext if it is `in_use`.
    pub fn new(bounds: &Bounds) -> Self {
        let page = bounds.in_use.then_some(Page { row: 0, lsn: 0, seal: None });
        let mut server = Self { page, ..Self::default() };
        server.open_keystore(bounds.order, false);
        server.begin_service();
        server
    }

    /// Recovery is over, or there is none.
    pub fn begin_service(&mut self) {
        if let Some(memory) = &mut self.memory {
            let (writer, checkpointer) = (Writer::Idle, Checkpointer::Idle);
            memory.mode = Mode::Open { writer, checkpointer };
        }
    }

    /// Start after a crash: replays all of its WAL, makes the checkpoint that ends recovery, and is
    /// open.
    pub fn recover(&mut self, start: Start, bounds: &Bounds) {
        self.redo_all(start.is_locked(), bounds);
        if start == Start::LockedAndKilled && self.memory.is_some() {
            self.memory = None;
            self.redo_all(false, bounds);
        }
        if self.memory.is_none() {
            return;
        }
        self.begin_service();
        while self.memory.is_some() && !self.step_checkpoint(false, bounds) {}
    }

    fn redo_all(&mut self, locked: bool, bounds: &Bounds) {
        // What WAL does not tell of is an orphan: PostgreSQL gives its number to nobody.
        if !bounds.in_use
            && !self.file_lives(bounds)
            && super::wal::keys_made(&self.wal).count() == 0
        {
            self.create_file();
        }
        self.open_keystore(bounds.order, locked);
        for index in self.redo..self.wal.len() {
            let record = self.wal[index];
            self.replay(record, index, bounds);
        }
        self.require_no_missing_key(bounds);
        self.after_redo(bounds.order);
    }
}
