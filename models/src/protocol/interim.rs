//! Interim keys: what recovery writes pages under while the key of their group is locked, and the
//! marks of files that have such pages (`keys/usage/interim.rs`). The model's file is in a group.

use super::Bounds;
use super::order::Order;
use super::server::{Buffer, Server, Stop, lost};
use super::wal::{Key, WalRecord};

/// What a page is sealed under.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Seal {
    /// The data key.
    pub key: Key,
    /// Not this, but the interim key that is derived for it.
    pub interim: bool,
}

/// What a server finds when it starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Start {
    /// The key provider of the group answers.
    Open,
    /// It does not: the key of the group is locked.
    Locked,
    /// The same, and the server is killed when its data directory is consistent and its pages are
    /// written. At the next start the provider answers.
    LockedAndKilled,
}

impl Start {
    /// Whether the key is locked at first.
    pub fn is_locked(self) -> bool {
        self != Self::Open
    }
}

/// What is in the folder of marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Marks {
    /// The mark of the file.
    pub file: bool,
    /// The mark that stands for all files.
    pub any: bool,
    /// They were not synced.
    pub unsynced: bool,
}

/// What shared memory says of interim pages (`shmem/control.rs`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Interim {
    /// There are none.
    None,
    /// Only marked files have any.
    Marked,
    /// Files that are not marked may have some.
    Unmarked,
}

impl Server {
    /// Whether the key of the group is locked.
    pub fn is_locked(&self) -> bool {
        self.memory.as_ref().is_some_and(|memory| memory.locked)
    }

    /// Whether it has stopped so that another start goes on: its keystore has the key then, and
    /// redo writes over the page.
    pub fn may_start_again(&self) -> bool {
        self.stopped == Some(Stop::LockedKey { came_late: true }) && !self.started_again
    }

    /// It is started again, and the provider is still away.
    pub fn start_again(&mut self, bounds: &Bounds) {
        (self.stopped, self.started_again) = (None, true);
        self.open_keystore(bounds.order, true);
        self.check_consistency(bounds);
    }

    /// The provider answers.
    pub fn unlock(&mut self) {
        if let Some(memory) = &mut self.memory {
            memory.locked = false;
        }
    }

    /// What shared memory says.
    pub fn interim(&self) -> Interim {
        self.memory.as_ref().map_or(Interim::None, |memory| memory.interim)
    }

    fn set_interim(&mut self, next: Interim) {
        if let Some(memory) = &mut self.memory {
            memory.interim = next;
        }
    }

    /// At server start (`interim::start`).
    pub fn note_marks(&mut self) {
        self.set_interim(match self.marks {
            Marks { any: true, .. } => Interim::Unmarked,
            Marks { file: true, .. } => Interim::Marked,
            _ => Interim::None,
        });
    }

    /// At server start from a base backup, or after `pg_rewind` (`interim::start`): pages and marks
    /// were copied at different moments, so any file of a group may have interim pages.
    pub fn note_copied(&mut self, order: Order) {
        if order != Order::CopyBelievesMarks {
            self.marks.any = true;
            self.set_interim(Interim::Unmarked);
        }
    }

    /// What a page is sealed under that is to be under this key (`page::io::seal`).
    pub fn seal(&mut self, key: Key, order: Order) -> Option<Seal> {
        let version = key.version;
        if !self.is_locked() || key == lost(version) {
            return Some(Seal { key, interim: false });
        }
        match order {
            Order::LockedInPlaintext => None,
            Order::LockedAsDestroyed => Some(Seal { key: lost(version), interim: false }),
            _ => {
                self.mark(order);
                Some(Seal { key, interim: true })
            }
        }
    }

    /// `interim::mark`.
    fn mark(&mut self, order: Order) {
        if !self.marks.file {
            let unsynced = order == Order::InterimMarkNotDurable;
            self.marks = Marks { file: true, any: self.marks.any, unsynced };
        }
        if self.interim() == Interim::None {
            self.set_interim(Interim::Marked);
        }
    }

    /// A page under an interim key is read.
    fn interim_was_read(&mut self) {
        if self.interim() == Interim::None {
            self.set_interim(Interim::Unmarked);
        }
    }

    /// The page is read, unless it is in shared buffers.
    pub fn read_page(&mut self) {
        let is_read = self.memory.as_ref().is_some_and(|memory| memory.buffer == Buffer::Empty);
        if is_read && self.page.and_then(|page| page.seal).is_some_and(|seal| seal.interim) {
            self.interim_was_read();
        }
    }

    /// What the page of the file, and that without LSN, are sealed under on disk.
    pub fn seals(&self) -> impl Iterator<Item = Seal> + use<> {
        [self.page.and_then(|page| page.seal), self.map].into_iter().flatten()
    }

    /// Whether a page on disk is under an interim key (`interim::has_pages`).
    pub fn has_interim_pages(&self) -> bool {
        self.seals().any(|seal| seal.interim)
    }

    /// When the data directory is consistent (`interim::drop_locked_pages`).
    pub fn drop_locked_pages(&mut self, order: Order) {
        if !self.is_locked() {
            return;
        }
        if order != Order::LockedPagesDropped {
            self.write_page(order);
        }
        if let Some(memory) = &mut self.memory {
            memory.buffer = Buffer::Empty;
        }
    }

    /// The keys of the file were destroyed (`interim::destroy`).
    pub fn destroy_interim_pages(&mut self, order: Order) {
        let is_meant = match self.interim() {
            _ if self.recovery().is_none() => true,
            Interim::None => false,
            Interim::Marked => self.marks.file,
            Interim::Unmarked => true,
        };
        if !is_meant || order == Order::InterimPagesOutliveKeys {
            return;
        }
        if let Some(page) = &mut self.page
            && let Some(Seal { key, interim: true }) = page.seal
        {
            page.seal = Some(Seal { key: lost(key.version), interim: false });
        }
        self.map = self.map.filter(|seal| !seal.interim);
    }

    /// When all WAL is replayed (`destruction::after_redo`).
    pub fn after_redo(&mut self, order: Order) {
        let known = self.known();
        if known.current.is_some() && known.current <= known.destroyed {
            if let Some(memory) = &mut self.memory {
                memory.buffer = Buffer::Empty;
            }
            self.destroy_interim_pages(order);
        }
    }

    /// Whether the file is marked, and has pages under interim keys, so that it gets another key.
    pub fn is_to_rekey(&self) -> bool {
        let is_encrypted = self.known().current.is_some();
        is_encrypted && !self.is_locked() && self.marks.file && self.has_interim_pages()
    }

    /// Whether a job of the file finds the page under an interim key, and has not logged it yet.
    pub fn may_rewrite_interim_page(&self) -> bool {
        let Some(page) = self.page else { return false };
        let is_logged = match self.memory.as_ref().map(|memory| memory.buffer) {
            Some(Buffer::Page { lsn, .. }) => lsn > page.lsn,
            _ => false,
        };
        !self.is_locked() && page.seal.is_some_and(|seal| seal.interim) && !is_logged
    }

    /// The job gives WAL an image of the page, and makes it dirty.
    pub fn rewrite_page(&mut self, order: Order) {
        let Some(row) = self.visible_row(order) else { return };
        self.read_page();
        self.wal.push(WalRecord::Row { row, image: true });
        let lsn = self.wal.len();
        if let Some(memory) = &mut self.memory {
            memory.buffer = Buffer::Page { row, lsn, dirty: true };
        }
        if order == Order::UnmarkedWhenLogged {
            self.unmark();
        }
    }

    /// Whether [`Self::look_for_interim`] changes anything.
    pub fn may_look_for_interim(&self) -> bool {
        match self.interim() {
            Interim::None => false,
            Interim::Marked => !self.marks.file || !self.is_locked() && !self.has_interim_pages(),
            Interim::Unmarked => true,
        }
    }

    /// Workers look for pages in files that are not marked (`interim::find_unmarked`), for files to
    /// rekey, and remove marks (`interim::to_rekey`, `interim_in`).
    pub fn look_for_interim(&mut self, bounds: &Bounds) {
        if self.interim() == Interim::Unmarked {
            let has_key = !self.known().keys.is_empty() && self.file_lives(bounds);
            if has_key && self.has_interim_pages() {
                self.mark(bounds.order);
            }
            self.marks.any = false;
            self.set_interim(Interim::Marked);
        } else {
            self.unmark();
        }
    }

    fn unmark(&mut self) {
        self.marks.file = false;
        self.set_interim(Interim::None);
    }
}
