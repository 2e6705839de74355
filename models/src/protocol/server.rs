//! One server: what is on its disks, and what is in its memory while it runs.

use std::sync::atomic::AtomicU32;

use pagevault_keystore::directory::{Directory, DirectoryError};
use pagevault_keystore::log::{Position, file_name};
use pagevault_keystore::record::MAX_WRAPPED_DATA_KEY;
use pagevault_keystore::{DataKeyVersion, Record};

use super::disk::{Files, Unsynced};
use super::interim::{Interim, Marks, Seal};
use super::order::Order;
use super::wal::{FILE, Key, KeyChange, SCOPE, WalRecord};

/// A server. Pages that are written are durable at once, which is the worst that can happen: the
/// kernel may write them at any moment.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Server {
    /// What it has written. A replica has its upstream's.
    pub wal: Vec<WalRecord>,
    /// So much of it is durable, and may have been sent.
    pub flushed: usize,
    /// `pg_control`: where recovery begins.
    pub redo: usize,
    /// `pg_control`: the minimum recovery point.
    pub minimum: usize,
    /// The keystore.
    pub files: Files,
    /// The file's page with an LSN.
    pub page: Option<Page>,
    /// What the file's page without LSN (free space map) is sealed under, if there is one.
    pub map: Option<Seal>,
    /// The folder of marks beside the keystore.
    pub marks: Marks,
    /// `None` while it is down.
    pub memory: Option<Memory>,
    /// It has refused to go on.
    pub stopped: Option<Stop>,
    /// It has stopped for want of a locked key that came late, and was started again.
    pub started_again: bool,
}

/// Why a server has stopped by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stop {
    /// A key file cannot be read, or a change of it has failed.
    KeyFile,
    /// WAL says something else than the keystore.
    Contradiction,
    /// WAL has not brought a key that is needed.
    MissingKey,
    /// Redo must read a page under the key of a group that is locked.
    LockedKey {
        /// When redo would have written over the page, this key was still to come: a base backup
        /// has copied the keystore before it was made, and the page later.
        came_late: bool,
    },
}

/// The page as it is on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Page {
    /// What it says.
    pub row: u8,
    /// The end of the last record about it; 0 before all.
    pub lsn: usize,
    /// What it is encrypted under; `None` for plaintext.
    pub seal: Option<Seal>,
}

impl Page {
    /// The data key that it, or its interim key, needs.
    pub fn key(&self) -> Option<Key> {
        self.seal.map(|seal| seal.key)
    }
}

/// The page as it is in shared buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Buffer {
    /// Not there.
    #[default]
    Empty,
    /// There, in plaintext.
    Page {
        /// What it says.
        row: u8,
        /// As in [`Page`].
        lsn: usize,
        /// To be written.
        dirty: bool,
    },
    /// Redo got a placeholder.
    Placeholder,
}

/// What a running server keeps in memory.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Memory {
    /// Where the key log ends, if there is one.
    pub position: Option<Position>,
    /// The end of the last record of keys.
    pub logged: usize,
    /// The directory of keys.
    pub directory: Words,
    /// The file's page.
    pub buffer: Buffer,
    /// The checkpointer was asked to settle the key log.
    pub sync_requested: bool,
    /// The key provider of the file's group has not answered yet.
    pub locked: bool,
    /// Whether there may be pages under interim keys.
    pub interim: Interim,
    /// What it does.
    pub mode: Mode,
}

/// What a running server does.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Mode {
    /// It is open for changes.
    Open {
        /// Who makes or destroys keys.
        writer: Writer,
        /// The checkpointer.
        checkpointer: Checkpointer,
    },
    /// It replays WAL.
    Recovery(Recovery),
}

/// How far recovery is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Recovery {
    /// Records replayed.
    pub replayed: usize,
    /// Queries are admitted.
    pub consistent: bool,
    /// The last checkpoint record that a restart point may use: its redo pointer and its end.
    pub checkpoint: Option<(usize, usize)>,
    /// A version whose key is not known, under which a page would have been written over.
    pub noted: Option<DataKeyVersion>,
}

/// How far a change of keys is; it holds the keystore lock, except in `Idle`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Writer {
    /// There is none.
    Idle,
    /// The lock is taken, and the checkpointer is asked to settle.
    Locked(KeyChange),
    /// The batch is in the key file. Holds `ReplicationSlotAllocationLock`.
    Staged(KeyChange),
    /// It is in WAL, and the shared position says so.
    Logged(KeyChange),
    /// WAL is flushed (only where the batch is settled at once).
    Flushed(KeyChange),
    /// The key file is synced.
    Synced(KeyChange),
    /// It may be used.
    Safe(KeyChange),
}

/// How far a checkpoint is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Checkpointer {
    /// There is none.
    Idle,
    /// The redo pointer is determined.
    Begun(usize),
    /// `CheckPointReplicationSlots` has passed.
    PastSlots(usize),
    /// Pages are written; the sync request of the key file is being handled.
    Settling(usize),
    /// WAL and key file are durable up to the position.
    Synced(usize, Position),
    /// Everything is durable, but perhaps the mark that says so.
    Settled(usize, Mark),
}

/// Whether a checkpoint has added a mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mark {
    /// It has, and syncs it.
    Added,
    /// There was nothing to settle.
    None,
}

impl Checkpointer {
    /// The redo pointer of the checkpoint under way.
    pub fn redo(self) -> Option<usize> {
        match self {
            Self::Idle => None,
            Self::Begun(redo)
            | Self::PastSlots(redo)
            | Self::Settling(redo)
            | Self::Synced(redo, _)
            | Self::Settled(redo, _) => Some(redo),
        }
    }
}

/// Room for so many keys in the directory of a model.
const CAPACITY: u32 = 4;

/// The words of a [`Directory`], and what it answers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Words {
    words: Vec<u32>,
    known: Known,
}

/// What the directory says about [`FILE`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Known {
    /// The version under which pages are written.
    pub current: Option<DataKeyVersion>,
    /// Keys through this version were destroyed.
    pub destroyed: Option<DataKeyVersion>,
    /// Its keys.
    pub keys: Vec<Key>,
    /// The version that the next key gets.
    pub next: Option<DataKeyVersion>,
    /// The file contains sealed pages only, and none under a version before this one.
    pub floor: Option<DataKeyVersion>,
}

impl Known {
    /// The key of a version.
    pub fn key(&self, version: DataKeyVersion) -> Option<Key> {
        self.keys.iter().copied().find(|key| key.version == version)
    }

    /// Whether a page under this key, or in plaintext, would be refused.
    pub fn refuses(&self, key: Option<Key>) -> bool {
        self.floor.is_some() && key.map(|key| key.version) < self.floor
    }

    /// Whether a key may still come.
    pub fn is_unknown(&self, key: Key) -> bool {
        self.may_come(key.version)
    }

    /// Whether the key of a version is neither there nor destroyed.
    pub fn may_come(&self, version: DataKeyVersion) -> bool {
        Some(version) > self.destroyed && self.key(version).is_none()
    }
}

impl Words {
    /// An empty directory.
    pub fn empty() -> Self {
        let memory = vec![0; Directory::words_needed(CAPACITY)];
        let words: Vec<AtomicU32> = memory.into_iter().map(AtomicU32::new).collect();
        let made = Directory::init_zeroed(&words, CAPACITY);
        assert!(made.is_ok(), "there is room for it");
        let words = words.into_iter().map(AtomicU32::into_inner).collect();
        Self { words, known: Known { next: Some(DataKeyVersion::FIRST), ..Known::default() } }
    }

    fn with<R>(&self, f: impl FnOnce(Directory<'_>) -> Result<R, DirectoryError>) -> (R, Vec<u32>) {
        let words: Vec<AtomicU32> = self.words.iter().map(|word| AtomicU32::new(*word)).collect();
        let result = Directory::at(&words, CAPACITY).and_then(f);
        let words = words.into_iter().map(AtomicU32::into_inner).collect();
        // Records are checked before; nothing else is refused.
        (result.unwrap_or_else(|error| panic!("directory: {error}")), words)
    }

    /// Takes records in.
    pub fn apply(&mut self, records: &[Record]) {
        let apply = |directory: Directory<'_>| records.iter().try_for_each(|r| directory.apply(r));
        self.words = self.with(apply).1;
        self.known = self.ask();
    }

    /// Whether the records fit what is known.
    pub fn accepts(&self, records: &[Record]) -> bool {
        self.with(|directory| Ok(directory.check(records).is_ok())).0
    }

    /// Whether a record would change anything.
    pub fn would_change(&self, record: &Record) -> bool {
        self.with(|directory| directory.would_change(record)).0
    }

    /// All that it says.
    pub fn known(&self) -> &Known {
        &self.known
    }

    fn ask(&self) -> Known {
        let ask = |directory: Directory<'_>| {
            let Some(slot) = directory.find(FILE)? else {
                return Ok(Known { next: Some(DataKeyVersion::FIRST), ..Known::default() });
            };
            let mut keys = Vec::new();
            for info in directory.keys(slot)? {
                let version = info?.version;
                let mut wrapped = [0; MAX_WRAPPED_DATA_KEY];
                directory.key(slot, version, &mut wrapped)?;
                keys.push(Key { version, identity: wrapped[0] });
            }
            keys.sort_unstable();
            Ok(Known {
                current: directory.current(slot)?.map(|(version, _)| version),
                destroyed: directory.destroyed(slot)?.0,
                keys,
                next: directory.next_version(slot)?,
                floor: directory.floor(slot)?,
            })
        };
        self.with(ask).0
    }
}

impl Server {
    /// Whether it is open for changes.
    pub fn is_open(&self) -> bool {
        self.memory.as_ref().is_some_and(|memory| matches!(memory.mode, Mode::Open { .. }))
    }

    /// How far recovery is, while it replays WAL.
    pub fn recovery(&self) -> Option<Recovery> {
        match &self.memory.as_ref()?.mode {
            Mode::Recovery(recovery) => Some(*recovery),
            Mode::Open { .. } => None,
        }
    }

    /// Whether users may read: it is open, or consistent.
    pub fn serves(&self) -> bool {
        self.stopped.is_none()
            && (self.is_open() || self.recovery().is_some_and(|recovery| recovery.consistent))
    }

    /// What its directory says.
    pub fn known(&self) -> Known {
        self.memory.as_ref().map(|memory| memory.directory.known().clone()).unwrap_or_default()
    }

    /// The bytes of its key log.
    pub fn log_bytes(&self) -> Option<&[u8]> {
        self.files.bytes(&file_name(SCOPE))
    }

    /// It refuses to go on.
    pub fn stop(&mut self, why: Stop) {
        self.stopped = Some(why);
        self.memory = None;
    }

    /// Makes WAL durable up to an index. In recovery that is `UpdateMinRecoveryPoint`.
    pub fn flush(&mut self, to: usize, order: Order) {
        if self.recovery().is_none() {
            self.flushed = self.flushed.max(to);
        } else if order != Order::RedoMovesNoMinimum {
            self.minimum = self.minimum.max(to);
        }
    }

    /// Writes the page if it is in shared buffers and dirty, and drops it there: smgrwrite.
    pub fn write_page(&mut self, order: Order) {
        let recovery = self.recovery();
        let known = self.known();
        let Some(memory) = &mut self.memory else { return };
        let Buffer::Page { row, lsn, dirty: true } = memory.buffer else { return };
        memory.buffer = Buffer::Empty;
        let below = self.page.and_then(|page| page.key());
        if let Some(recovery) = recovery
            && let Some(key) = below.filter(|key| known.is_unknown(*key))
        {
            // The page on disk holds all that is replayed before its key comes.
            if recovery.consistent {
                return self.stop(Stop::MissingKey);
            }
            let noted = Some(key.version);
            memory.mode = Mode::Recovery(Recovery { noted, ..recovery });
            return;
        }
        match recovery {
            Some(_) => self.minimum = self.minimum.max(lsn),
            None if order == Order::PageBeforeWal => {}
            None => self.flush(lsn, order),
        }
        let current = known.current.map(|version| known.key(version).unwrap_or(lost(version)));
        let seal = match self.kept(lsn) {
            Some(Seal { key, interim: false }) => self.seal(key, order),
            Some(kept) => Some(kept),
            None => current.and_then(|key| self.seal(key, order)),
        };
        self.page = Some(Page { row, lsn, seal });
    }

    /// Where there may be interim pages, a page keeps its key while its LSN stays (`target_over`).
    fn kept(&self, lsn: usize) -> Option<Seal> {
        let (known, page) = (self.known(), self.page?);
        let is_known = |seal: &Seal| known.key(seal.key.version) == Some(seal.key);
        let may_differ = self.interim() != Interim::None && known.current.is_some();
        let kept = page.seal.filter(is_known).filter(|seal| !known.refuses(Some(seal.key)));
        kept.filter(|_| may_differ && page.lsn == lsn)
    }

    /// Writes the page without LSN: nothing is flushed for it.
    pub fn write_map(&mut self, order: Order) {
        let known = self.known();
        if let Some(key) = known.current.and_then(|version| known.key(version)) {
            self.map = self.seal(key, order);
        }
    }

    /// The power is cut, or processes are killed.
    pub fn crash(&mut self, unsynced: Unsynced) {
        self.memory = None;
        self.files.crash(unsynced);
        if self.marks.unsynced && unsynced != Unsynced::Kept {
            self.marks = Marks::default();
        }
    }

    /// Whether anything would be lost in a power cut.
    pub fn has_unsynced(&self) -> bool {
        self.files.has_unsynced() || self.marks.unsynced
    }

    /// What the page says, if it can be read; or could, were its key not locked.
    pub fn visible_row(&self, order: Order) -> Option<u8> {
        match self.memory.as_ref()?.buffer {
            Buffer::Page { row, .. } => Some(row),
            Buffer::Placeholder => None,
            Buffer::Empty => {
                let page = self.page?;
                let known = self.known();
                let is_named = |Seal { key, interim }: Seal| {
                    let by_current = interim && order == Order::InterimOfCurrentKey;
                    !by_current || known.current == Some(key.version)
                };
                let is_readable =
                    |seal: Seal| known.key(seal.key.version) == Some(seal.key) && is_named(seal);
                page.seal.is_none_or(is_readable).then_some(page.row)
            }
        }
    }
}

/// A key that nobody has: that of a page under a destroyed key.
pub fn lost(version: DataKeyVersion) -> Key {
    Key { version, identity: 0 }
}
