//! A directory that a power cut may leave.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::Random;

/// How much of what was not synced survives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Survival {
    /// Nothing: the disk is as the last syncs left it.
    Nothing,
    /// Everything, as after the death of all processes.
    Everything,
    /// Each write with this chance; with a size of sectors also parts of writes. Of some files
    /// everything, of some nothing.
    Some {
        /// How many of a hundred.
        percent: u64,
        /// 512 or 4096: what a disk writes as a whole.
        sector: Option<usize>,
    },
}

impl Survival {
    /// One by chance.
    #[must_use]
    pub fn by_chance(random: &mut Random) -> Survival {
        match random.below(10) {
            0 => Survival::Nothing,
            1 => Survival::Everything,
            n => Survival::Some {
                percent: [10, 50, 90][random.below(3) as usize],
                sector: [Some(512), Some(4096), Some(512), Some(4096), None][n as usize % 5],
            },
        }
    }

    pub(crate) fn of_file(self, random: &Random) -> Survival {
        match (self, random.of(1).below(8)) {
            (Survival::Some { .. }, 0) => Survival::Nothing,
            (Survival::Some { .. }, 1) => Survival::Everything,
            _ => self,
        }
    }
}

#[derive(Clone, Debug)]
enum Entry {
    File(Arc<Vec<u8>>),
    Directory,
    Symlink(Vec<u8>),
}

/// What is left; paths begin with a slash.
#[derive(Clone, Debug, Default)]
pub struct Image(BTreeMap<Vec<u8>, Entry>);

impl Image {
    pub(crate) fn directory(&mut self, path: Vec<u8>) {
        self.0.insert(path, Entry::Directory);
    }

    pub(crate) fn symlink(&mut self, path: Vec<u8>, target: Vec<u8>) {
        self.0.insert(path, Entry::Symlink(target));
    }

    pub(crate) fn file(&mut self, path: Vec<u8>, bytes: Arc<Vec<u8>>) {
        self.0.insert(path, Entry::File(bytes));
    }

    /// Contents of a file.
    #[must_use]
    pub fn read(&self, path: &str) -> Option<&[u8]> {
        match self.0.get(&[b"/", path.as_bytes()].concat())? {
            Entry::File(bytes) => Some(bytes),
            Entry::Directory | Entry::Symlink(_) => None,
        }
    }

    /// All paths, in order.
    pub fn paths(&self) -> impl Iterator<Item = String> {
        self.0.keys().map(|path| String::from_utf8_lossy(&path[1..]).into_owned())
    }

    /// Makes it: `target` does not exist yet. What is new is for its owner alone.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn write(&self, target: &Path) -> io::Result<()> {
        let private = |path: &Path| fs::DirBuilder::new().mode(0o700).create(path);
        private(target)?;
        for (path, entry) in &self.0 {
            let path: PathBuf = target.join(OsStr::from_bytes(&path[1..]));
            match entry {
                Entry::Directory => private(&path)?,
                Entry::Symlink(to) => symlink(OsStr::from_bytes(to), &path)?,
                Entry::File(bytes) => {
                    let mut options = fs::OpenOptions::new();
                    let file = options.write(true).create_new(true).mode(0o600).open(&path)?;
                    std::io::Write::write_all(&mut &file, bytes)?;
                }
            }
        }
        Ok(())
    }
}
