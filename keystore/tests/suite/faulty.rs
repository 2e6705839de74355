//! A directory in memory that fails at a chosen step, and the contents that may be found
//! afterwards.
//!
//! It has two states: what a reader sees now, and what is durable. Each elementary step (write,
//! fsync, rename, fsync of the directory) can fail, after which the process continues, or can be
//! the last step of the process; a write may have been done in part. After a kill the reader's
//! state remains. After a power failure each file contains what was durable and any parts of the
//! rest: unsynced writes reach the disk in any order. After a failed fsync, no later fsync makes
//! its data durable, as on Linux.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io;

use pagevault_keystore::storage::{Storage, StorageError};

/// The fault at the chosen step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Number of the step, from 0.
    pub(crate) step: usize,
    /// The process continues (with an error), or is killed.
    pub(crate) kill: bool,
    /// The part of the step that was done, in quarters; of a write, of its bytes.
    pub(crate) done: usize,
}

/// The whole of a step, in quarters.
pub(crate) const DONE: [usize; 5] = [0, 1, 2, 3, 4];

#[derive(Debug, Clone, Default)]
struct Inode {
    now: Vec<u8>,
    safe: Vec<u8>,
    /// The writes that are in `now` and not in `safe`; they reach the disk separately.
    unsafe_pieces: Vec<Piece>,
}

#[derive(Debug, Clone)]
struct Piece {
    bytes: Vec<u8>,
    /// An fsync has failed to write it.
    lost: bool,
}

/// Up to this number of pieces, each subset of them is tried as the result of a power failure.
const SUBSETS_OF: usize = 8;

impl Inode {
    fn durable(bytes: &[u8]) -> Self {
        Self { now: bytes.to_vec(), safe: bytes.to_vec(), unsafe_pieces: vec![] }
    }

    fn write(&mut self, bytes: &[u8]) {
        self.now.extend_from_slice(bytes);
        let (first, second) = bytes.split_at(bytes.len() / 2);
        let pieces = [first, second].into_iter().filter(|piece| !piece.is_empty());
        let pieces = pieces.map(|piece| Piece { bytes: piece.to_vec(), lost: false });
        self.unsafe_pieces.extend(pieces);
    }

    fn truncate(&mut self, length: usize) {
        self.now.truncate(length);
        let mut left = length.saturating_sub(self.safe.len());
        for piece in &mut self.unsafe_pieces {
            piece.bytes.truncate(left);
            left -= piece.bytes.len();
        }
        self.unsafe_pieces.retain(|piece| !piece.bytes.is_empty());
    }

    fn fsync(&mut self) {
        self.safe.truncate(self.now.len());
        for piece in std::mem::take(&mut self.unsafe_pieces) {
            self.safe.extend(surviving(&piece, true));
        }
    }

    fn fail_fsync(&mut self) {
        self.unsafe_pieces.iter_mut().for_each(|piece| piece.lost = true);
    }
}

fn surviving(piece: &Piece, survives: bool) -> Vec<u8> {
    if survives && !piece.lost { piece.bytes.clone() } else { vec![0; piece.bytes.len()] }
}

#[derive(Debug, Clone, Default)]
struct Disk {
    inodes: Vec<Inode>,
    names: BTreeMap<String, usize>,
    safe_names: BTreeMap<String, usize>,
    steps: usize,
    fault: Option<Fault>,
    hit: bool,
    dead: bool,
    /// Files that cannot be opened for writing; `.` is the directory.
    closed: BTreeSet<String>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct FaultyStorage {
    disk: RefCell<Disk>,
}

impl FaultyStorage {
    /// Sets the next fault; steps are counted from 0 again.
    pub(crate) fn arm(&self, fault: Option<Fault>) {
        let mut disk = self.disk.borrow_mut();
        (disk.steps, disk.fault, disk.hit) = (0, fault, false);
    }

    /// From now on a file, or the directory `.`, cannot be opened for writing.
    pub(crate) fn close(&self, name: &str) {
        self.disk.borrow_mut().closed.insert(name.to_owned());
    }

    /// All can be opened again.
    pub(crate) fn reopen(&self) {
        self.disk.borrow_mut().closed.clear();
    }

    /// Whether the fault has happened.
    pub(crate) fn hit(&self) -> bool {
        self.disk.borrow().hit
    }

    pub(crate) fn dead(&self) -> bool {
        self.disk.borrow().dead
    }

    /// The machine stayed up: readers see the same, nothing more is durable. (Failed fsyncs are
    /// forgotten here, because recovery would be impossible otherwise.)
    pub(crate) fn after_kill(&self) -> Self {
        let mut disk = self.disk.borrow().clone();
        disk.dead = false;
        disk.fault = None;
        let pieces = disk.inodes.iter_mut().flat_map(|inode| &mut inode.unsafe_pieces);
        pieces.for_each(|piece| piece.lost = false);
        Self { disk: RefCell::new(disk) }
    }

    /// All states that a power failure at this moment may leave.
    pub(crate) fn after_power_cut(&self) -> Vec<Self> {
        let disk = self.disk.borrow();
        let mut contents: Vec<Vec<Vec<u8>>> = vec![vec![]];
        for inode in &disk.inodes {
            let remains = remains(inode);
            contents = contents
                .into_iter()
                .flat_map(|some| {
                    remains.iter().map(move |one| [some.clone(), vec![one.clone()]].concat())
                })
                .collect();
        }
        let mut found = Vec::new();
        for names in [&disk.safe_names, &disk.names] {
            for contents in &contents {
                let inodes = contents.iter().map(|bytes| Inode::durable(bytes));
                let disk = Disk {
                    inodes: inodes.collect(),
                    names: names.clone(),
                    safe_names: names.clone(),
                    ..Disk::default()
                };
                found.push(Self { disk: RefCell::new(disk) });
            }
        }
        found
    }

    /// Contents of a file, for tests that damage it.
    pub(crate) fn content(&self, name: &str) -> Vec<u8> {
        self.read(name, 0, u64::MAX).unwrap().unwrap()
    }

    /// Creates a durable file.
    pub(crate) fn put(&self, name: &str, bytes: &[u8]) {
        let mut disk = self.disk.borrow_mut();
        disk.inodes.push(Inode::durable(bytes));
        let inode = disk.inodes.len() - 1;
        disk.names.insert(name.to_owned(), inode);
        disk.safe_names.insert(name.to_owned(), inode);
    }
}

/// The possible contents of a file after a power failure.
fn remains(inode: &Inode) -> Vec<Vec<u8>> {
    let Inode { now, safe, unsafe_pieces: pieces } = inode;
    if now.len() < safe.len() || pieces.is_empty() {
        // It was truncated at most, which is not durable.
        return BTreeSet::from([now[..now.len().min(safe.len())].to_vec(), safe.clone()])
            .into_iter()
            .collect();
    }
    let mut found = BTreeSet::from([safe.clone()]);
    for mask in subsets(pieces.len()) {
        let mut bytes = safe.clone();
        let mut last = bytes.len();
        for (at, piece) in pieces.iter().enumerate() {
            let survives = mask & 1 << at != 0;
            bytes.extend(surviving(piece, survives));
            if survives {
                last = bytes.len();
            }
        }
        // The length on disk may be behind the data, or ahead of it.
        found.insert(bytes[..last].to_vec());
        found.insert(bytes);
    }
    // The last piece in part, or overwritten.
    if let Some(last) = pieces.last().filter(|piece| !piece.lost) {
        let start = now.len() - last.bytes.len();
        for quarter in 1..4 {
            found.insert(now[..start + last.bytes.len() * quarter / 4].to_vec());
        }
        found.insert(now[..now.len() - 1].to_vec());
        let added = safe.len()..now.len();
        for at in [added.start, added.start.midpoint(added.end), added.end - 1] {
            let mut flipped = now.clone();
            flipped[at] ^= 0x10;
            found.insert(flipped);
        }
        let mut garbage = now.clone();
        garbage[added].iter_mut().for_each(|byte| *byte ^= 0x5A);
        found.insert(garbage);
    }
    found.into_iter().collect()
}

/// All subsets of a few pieces as bit masks. Of many pieces: none, all, one, all but one, from one
/// on, or up to one.
fn subsets(pieces: usize) -> Vec<u64> {
    assert!(pieces < 64, "too many unsynced writes for this simulation");
    let all = (1 << pieces) - 1;
    if pieces <= SUBSETS_OF {
        return (0..=all).collect();
    }
    let some = (0..pieces).map(|at| 1 << at);
    some.flat_map(|one| [one, all & !one, one - 1, all & !(one - 1)]).chain([0, all]).collect()
}

impl Disk {
    /// Begins a step. `Ok`: do it. `Err(quarters)`: do this part of it and report failure.
    fn step(&mut self) -> Result<(), usize> {
        let step = self.steps;
        self.steps += 1;
        match self.fault {
            _ if self.dead => Err(0),
            Some(fault) if fault.step == step => {
                self.hit = true;
                self.dead = fault.kill;
                Err(fault.done)
            }
            _ => Ok(()),
        }
    }

    fn alive(&self) -> io::Result<()> {
        if self.dead { Err(io::Error::other("killed")) } else { Ok(()) }
    }

    fn inode(&self, name: &str) -> io::Result<usize> {
        self.names.get(name).copied().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn open(&self, name: &str) -> io::Result<()> {
        match self.closed.contains(name) {
            true => Err(io::ErrorKind::PermissionDenied.into()),
            false => Ok(()),
        }
    }

    fn open_to_write(&self, name: &str) -> io::Result<usize> {
        self.open(name).and_then(|()| self.inode(name))
    }

    fn write(&mut self, inode: usize, bytes: &[u8]) -> io::Result<()> {
        self.alive()?;
        let (length, result) = match self.step() {
            Ok(()) => (bytes.len(), Ok(())),
            Err(quarters) => (bytes.len() * quarters / 4, Err(failed("write"))),
        };
        self.inodes[inode].write(&bytes[..length]);
        result
    }

    /// A step that is done completely (4 quarters) or not at all.
    fn whole(&mut self, what: &str, act: impl FnOnce(&mut Self)) -> io::Result<()> {
        self.alive()?;
        match self.step() {
            Ok(()) => {
                act(self);
                Ok(())
            }
            Err(quarters) => {
                if quarters == 4 {
                    act(self);
                }
                Err(failed(what))
            }
        }
    }

    fn fsync(&mut self, inode: usize) -> io::Result<()> {
        let result = self.whole("fsync", |disk| disk.inodes[inode].fsync());
        if result.is_err() && !self.dead {
            self.inodes[inode].fail_fsync();
        }
        result
    }

    fn fsync_directory(&mut self) -> io::Result<()> {
        self.open(".")?;
        self.whole("fsync directory", |disk| disk.safe_names = disk.names.clone())
    }
}

fn failed(what: &str) -> io::Error {
    io::Error::other(format!("{what} failed"))
}

impl Storage for FaultyStorage {
    fn names(&self) -> io::Result<Vec<String>> {
        Ok(self.disk.borrow().names.keys().cloned().collect())
    }

    fn len(&self, name: &str) -> io::Result<Option<u64>> {
        let disk = self.disk.borrow();
        disk.alive()?;
        Ok(disk.inode(name).ok().map(|inode| disk.inodes[inode].now.len() as u64))
    }

    fn read(&self, name: &str, from: u64, limit: u64) -> io::Result<Option<Vec<u8>>> {
        let disk = self.disk.borrow();
        disk.alive()?;
        let Ok(inode) = disk.inode(name) else { return Ok(None) };
        let bytes = disk.inodes[inode].now.iter().skip(from as usize);
        Ok(Some(bytes.take(usize::try_from(limit).unwrap()).copied().collect()))
    }

    fn create(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let mut disk = self.disk.borrow_mut();
        disk.whole("create", |disk| {
            disk.inodes.push(Inode::default());
            let inode = disk.inodes.len() - 1;
            disk.names.insert(name.to_owned(), inode);
        })?;
        let inode = disk.inode(name)?;
        disk.write(inode, bytes)?;
        disk.fsync(inode)
    }

    fn append(&self, name: &str, at: u64, bytes: &[u8]) -> Result<(), StorageError> {
        let mut disk = self.disk.borrow_mut();
        let inode = disk.open_to_write(name).map_err(StorageError::Open)?;
        if disk.inodes[inode].now.len() as u64 != at {
            return Err(StorageError::Failed(failed("length check")));
        }
        disk.write(inode, bytes).map_err(StorageError::Failed)
    }

    fn truncate(&self, name: &str, length: u64) -> io::Result<()> {
        let mut disk = self.disk.borrow_mut();
        let inode = disk.open_to_write(name)?;
        disk.whole("truncate", |disk| disk.inodes[inode].truncate(length as usize))?;
        disk.fsync(inode)
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), StorageError> {
        let mut disk = self.disk.borrow_mut();
        let inode = disk.open(".").and_then(|()| disk.inode(from)).map_err(StorageError::Open)?;
        let rename = |disk: &mut Disk| {
            disk.names.remove(from);
            disk.names.insert(to.to_owned(), inode);
        };
        let renamed = disk.whole("rename", rename).and_then(|()| disk.fsync_directory());
        renamed.map_err(StorageError::Failed)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut disk = self.disk.borrow_mut();
        if disk.inode(name).is_err() {
            return Ok(());
        }
        disk.whole("remove", |disk| {
            disk.names.remove(name);
        })?;
        disk.fsync_directory()
    }

    fn sync_data(&self, name: &str) -> Result<(), StorageError> {
        let mut disk = self.disk.borrow_mut();
        let inode = disk.open_to_write(name).map_err(StorageError::Open)?;
        disk.fsync(inode).map_err(StorageError::Failed)
    }

    fn sync(&self, name: &str) -> io::Result<()> {
        let mut disk = self.disk.borrow_mut();
        let inode = disk.open_to_write(name)?;
        disk.fsync(inode)?;
        disk.fsync_directory()
    }
}
