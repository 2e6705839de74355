//! A directory in memory that breaks off at a chosen step, and what may be found there afterwards.
//!
//! It keeps two truths: what a reader sees now, and what is safely on disk. Every elementary step
//! (write, fsync, rename, fsync of the directory) can fail, leaving the process to go on, or be the
//! last the process ever did; a write may have been done in part. After a kill the reader's truth
//! remains. After a power cut each file holds what was safe and any remains of what was not.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;

use pagevault_keystore::storage::Storage;

/// What goes wrong at the chosen step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Which step, from 0.
    pub(crate) step: usize,
    /// The process goes on (with an error) or is gone.
    pub(crate) kill: bool,
    /// How much of the step was done, in quarters; of a write that many bytes.
    pub(crate) done: usize,
}

/// Of a step's work, in quarters.
pub(crate) const DONE: [usize; 5] = [0, 1, 2, 3, 4];

#[derive(Debug, Clone, Default)]
struct Inode {
    now: Vec<u8>,
    safe: Vec<u8>,
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
}

#[derive(Debug, Clone, Default)]
pub(crate) struct FaultyStorage {
    disk: RefCell<Disk>,
}

impl FaultyStorage {
    /// Sets what goes wrong from here on; steps count from 0 again.
    pub(crate) fn arm(&self, fault: Option<Fault>) {
        let mut disk = self.disk.borrow_mut();
        (disk.steps, disk.fault, disk.hit) = (0, fault, false);
    }

    /// Whether the fault has happened.
    pub(crate) fn hit(&self) -> bool {
        self.disk.borrow().hit
    }

    pub(crate) fn dead(&self) -> bool {
        self.disk.borrow().dead
    }

    /// The machine stayed up: readers see what they saw, nothing became safer.
    pub(crate) fn after_kill(&self) -> Self {
        let mut disk = self.disk.borrow().clone();
        disk.dead = false;
        disk.fault = None;
        Self { disk: RefCell::new(disk) }
    }

    /// Everything that a power cut at this moment may leave.
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
                let inodes = contents.iter().map(|c| Inode { now: c.clone(), safe: c.clone() });
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

    /// Content of a file, for tests that damage it.
    pub(crate) fn content(&self, name: &str) -> Vec<u8> {
        self.read(name, 0, u64::MAX).unwrap().unwrap()
    }

    /// Puts a file there, safely.
    pub(crate) fn put(&self, name: &str, bytes: &[u8]) {
        let mut disk = self.disk.borrow_mut();
        disk.inodes.push(Inode { now: bytes.to_vec(), safe: bytes.to_vec() });
        let inode = disk.inodes.len() - 1;
        disk.names.insert(name.to_owned(), inode);
        disk.safe_names.insert(name.to_owned(), inode);
    }
}

/// What a power cut may leave of a file.
fn remains(inode: &Inode) -> Vec<Vec<u8>> {
    let Inode { now, safe } = inode;
    let mut found = vec![now.clone()];
    if now == safe {
        return found;
    }
    found.push(safe.clone());
    if let Some(added) = now.strip_prefix(safe.as_slice()) {
        let with = |tail: &[u8]| [safe.as_slice(), tail].concat();
        for quarter in 1..4 {
            let cut = added.len() * quarter / 4;
            found.push(with(&added[..cut]));
            // Length on disk, data not: zeros; and blocks written in another order.
            let mut hole = added.to_vec();
            hole[..cut].fill(0);
            found.push(with(&hole));
            let mut end = added.to_vec();
            end[cut..].fill(0);
            found.push(with(&end));
        }
        found.push(with(&added[..added.len() - 1]));
        found.push(with(&vec![0; added.len()]));
        found.push(with(&added.iter().map(|byte| byte ^ 0x5A).collect::<Vec<_>>()));
        for at in [0, added.len() / 2, added.len() - 1] {
            let mut flipped = added.to_vec();
            flipped[at] ^= 0x10;
            found.push(with(&flipped));
        }
    }
    found
}

impl Disk {
    /// Begins a step. `Ok`: do it. `Err(quarters)`: do that much of it and report failure.
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

    fn write(&mut self, inode: usize, bytes: &[u8]) -> io::Result<()> {
        self.alive()?;
        let (length, result) = match self.step() {
            Ok(()) => (bytes.len(), Ok(())),
            Err(quarters) => (bytes.len() * quarters / 4, Err(failed("write"))),
        };
        self.inodes[inode].now.extend_from_slice(&bytes[..length]);
        result
    }

    /// A step that is done wholly (4 quarters) or not at all.
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
        self.whole("fsync", |disk| disk.inodes[inode].safe = disk.inodes[inode].now.clone())
    }

    fn fsync_directory(&mut self) -> io::Result<()> {
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

    fn append(&self, name: &str, at: u64, bytes: &[u8]) -> io::Result<()> {
        let mut disk = self.disk.borrow_mut();
        let inode = disk.inode(name)?;
        if disk.inodes[inode].now.len() as u64 != at {
            return Err(failed("length check"));
        }
        disk.write(inode, bytes)?;
        disk.fsync(inode)
    }

    fn truncate(&self, name: &str, length: u64) -> io::Result<()> {
        let mut disk = self.disk.borrow_mut();
        let inode = disk.inode(name)?;
        disk.whole("truncate", |disk| disk.inodes[inode].now.truncate(length as usize))?;
        disk.fsync(inode)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut disk = self.disk.borrow_mut();
        let inode = disk.inode(from)?;
        disk.whole("rename", |disk| {
            disk.names.remove(from);
            disk.names.insert(to.to_owned(), inode);
        })?;
        disk.fsync_directory()
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

    fn sync(&self, name: &str) -> io::Result<()> {
        let mut disk = self.disk.borrow_mut();
        let inode = disk.inode(name)?;
        disk.fsync(inode)?;
        disk.fsync_directory()
    }
}
