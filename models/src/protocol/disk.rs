//! A disk that loses what was not synced.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;

use pagevault_keystore::batch;
use pagevault_keystore::storage::{Storage, StorageError};

/// Files of the keystore.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Files(BTreeMap<String, Bytes>);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Bytes {
    now: Vec<u8>,
    /// How many of them a power cut leaves.
    durable: usize,
}

/// What becomes of bytes that were written and not synced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unsynced {
    /// They are there: only processes were killed, or the kernel had written them.
    Kept,
    /// A power cut has lost them.
    Lost,
    /// A power cut has left the first half of them.
    Torn,
    /// A power cut has left the end of them, as long as a mark, and zeros before it.
    Hole,
}

impl Files {
    /// The power is cut, or processes are killed.
    pub fn crash(&mut self, unsynced: Unsynced) {
        for Bytes { now, durable } in self.0.values_mut() {
            let left = match unsynced {
                Unsynced::Kept => continue,
                Unsynced::Lost => *durable,
                Unsynced::Torn => (*durable + now.len()) / 2,
                Unsynced::Hole => {
                    let end = now.len().saturating_sub(batch::HEADER);
                    now.iter_mut().take(end).skip(*durable).for_each(|byte| *byte = 0);
                    now.len()
                }
            };
            now.truncate(left);
            *durable = left;
        }
    }

    /// Whether anything would be lost in a power cut.
    pub fn has_unsynced(&self) -> bool {
        self.0.values().any(|file| file.durable < file.now.len())
    }

    /// A copy of all files, as a backup program makes it: at most `listed` bytes of each. It is
    /// durable where it is put.
    pub fn copy(&self, listed: usize) -> Self {
        let mut copy = self.clone();
        for file in copy.0.values_mut() {
            file.now.truncate(listed);
            file.durable = file.now.len();
        }
        copy.0.retain(|_, file| !file.now.is_empty());
        copy
    }

    /// All bytes of a file.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        self.0.get(name).map(|file| file.now.as_slice())
    }

    /// Lets `f` use the files as storage.
    pub fn with<R>(&mut self, f: impl FnOnce(&Mounted) -> R) -> R {
        let mounted = Mounted(RefCell::new(std::mem::take(self)));
        let result = f(&mounted);
        *self = mounted.0.into_inner();
        result
    }
}

/// Files that are in use.
#[derive(Debug)]
pub struct Mounted(RefCell<Files>);

impl Mounted {
    fn change<R>(&self, name: &str, f: impl FnOnce(&mut Bytes) -> R) -> io::Result<R> {
        self.0.borrow_mut().0.get_mut(name).map(f).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Storage for Mounted {
    fn names(&self) -> io::Result<Vec<String>> {
        Ok(self.0.borrow().0.keys().cloned().collect())
    }

    fn len(&self, name: &str) -> io::Result<Option<u64>> {
        Ok(self.0.borrow().bytes(name).map(|bytes| bytes.len() as u64))
    }

    fn read(&self, name: &str, from: u64, limit: u64) -> io::Result<Option<Vec<u8>>> {
        let files = self.0.borrow();
        let Some(bytes) = files.bytes(name) else { return Ok(None) };
        let rest = bytes.iter().skip(from as usize);
        Ok(Some(rest.take(limit as usize).copied().collect()))
    }

    fn create(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let file = Bytes { now: bytes.to_vec(), durable: bytes.len() };
        self.0.borrow_mut().0.insert(name.to_owned(), file);
        Ok(())
    }

    fn append(&self, name: &str, at: u64, bytes: &[u8]) -> Result<(), StorageError> {
        let append = |file: &mut Bytes| {
            if file.now.len() as u64 != at {
                let error = io::Error::other("file has an unexpected length");
                return Err(StorageError::Failed(error));
            }
            file.now.extend_from_slice(bytes);
            Ok(())
        };
        self.change(name, append).map_err(StorageError::Open)?
    }

    fn truncate(&self, name: &str, length: u64) -> io::Result<()> {
        self.change(name, |file| {
            file.now.truncate(length as usize);
            file.durable = file.now.len();
        })
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), StorageError> {
        let mut files = self.0.borrow_mut();
        let missing = || StorageError::Failed(io::ErrorKind::NotFound.into());
        let file = files.0.remove(from).ok_or_else(missing)?;
        files.0.insert(to.to_owned(), file);
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.borrow_mut().0.remove(name);
        Ok(())
    }

    fn sync_data(&self, name: &str) -> Result<(), StorageError> {
        self.sync(name).map_err(StorageError::Open)
    }

    fn sync(&self, name: &str) -> io::Result<()> {
        self.change(name, |file| file.durable = file.now.len())
    }
}
