//! A disk: a directory, and a journal of what was done to it.

use std::collections::HashMap;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::directories::{Directories, Node, ROOT};
use crate::file::{Change, File};
use crate::image::Image;
use crate::journal::{Kind, Record};
use crate::{Random, Survival};

/// Whether a file system keeps the order of what happens to names, as one with a journal does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// The first of them survive; a sync makes all that were before it durable.
    Kept,
    /// Each survives or not; a sync makes those durable that it is about.
    Free,
}

/// Which syncs are as if they had not been made: those of files whose path begins so.
pub type Ignore = Option<&'static [u8]>;

#[derive(Clone, Debug)]
pub(crate) enum Kept {
    File(File),
    Directory,
    Symlink(Vec<u8>),
}

/// What was synced, and what was not.
#[derive(Clone, Debug)]
pub struct Disk {
    pub(crate) nodes: Vec<Kept>,
    names: Directories,
    inodes: HashMap<u64, Node>,
    order: Order,
    ignore: Ignore,
}

impl Disk {
    /// A disk on which everything is durable that is in `directory`.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn of(directory: &Path, order: Order, ignore: Ignore) -> io::Result<Disk> {
        let mut disk = Disk {
            nodes: vec![Kept::Directory],
            names: Directories::default(),
            inodes: HashMap::new(),
            order,
            ignore,
        };
        disk.inodes.insert(std::fs::metadata(directory)?.ino(), ROOT);
        disk.load(directory, ROOT)?;
        Ok(disk)
    }

    fn load(&mut self, directory: &Path, at: Node) -> io::Result<()> {
        for entry in std::fs::read_dir(directory)? {
            let entry = entry?;
            let path = entry.path();
            let kind = entry.file_type()?;
            let kept = if kind.is_dir() {
                Kept::Directory
            } else if kind.is_symlink() {
                Kept::Symlink(std::fs::read_link(&path)?.as_os_str().as_bytes().to_vec())
            } else {
                Kept::File(File::durable(std::fs::read(&path)?))
            };
            let node = self.add(kept);
            self.inodes.insert(entry.metadata()?.ino(), node);
            self.names.durable(at, entry.file_name().as_bytes(), node);
            if kind.is_dir() {
                self.load(&path, node)?;
            }
        }
        Ok(())
    }

    /// In place of how names were kept, and of which syncs counted, until now: before the first
    /// record.
    #[must_use]
    pub fn with(mut self, order: Order, ignore: Ignore) -> Disk {
        (self.order, self.ignore) = (order, ignore);
        self
    }

    fn add(&mut self, kept: Kept) -> Node {
        self.nodes.push(kept);
        self.nodes.len() - 1
    }

    /// The next operation happens. False if it cannot have happened after those before it.
    pub fn happens(&mut self, record: &Record<'_>) -> bool {
        match record.kind {
            Kind::Open => self.opened(record).is_some(),
            Kind::Write => {
                let bytes = record.rest.into();
                self.changed(record, Change::Write { at: record.number as usize, bytes })
            }
            Kind::Length => self.changed(record, Change::Length(record.number as usize)),
            Kind::Reserve => self.changed(record, Change::Reserve(record.number as usize)),
            Kind::Sync => self.synced(record.inode, record.number).is_some(),
            Kind::Rename => self.renamed(record).is_some(),
            Kind::Link => self.linked(record).is_some(),
            Kind::Unlink | Kind::RemoveDirectory => {
                let Some((directory, name)) = self.names.split(record.path) else { return false };
                self.names.edit(record.place, vec![((directory, name.to_vec()), None)]);
                true
            }
            Kind::MakeDirectory => self.made(record, Kept::Directory).is_some(),
            Kind::Symlink => self.made(record, Kept::Symlink(record.rest.to_vec())).is_some(),
            Kind::Mark => true,
        }
    }

    fn made(&mut self, record: &Record<'_>, kept: Kept) -> Option<Node> {
        let (directory, name) = self.names.split(record.path)?;
        let node = self.add(kept);
        self.names.edit(record.place, vec![((directory, name.to_vec()), Some(node))]);
        if record.inode != 0 {
            self.inodes.insert(record.inode, node);
        }
        Some(node)
    }

    /// A file that nobody knows yet has been made by whoever opened it, or is about to say so.
    fn opened(&mut self, record: &Record<'_>) -> Option<Node> {
        match self.names.find(record.path) {
            Some(node) => {
                self.inodes.insert(record.inode, node);
                Some(node)
            }
            None => self.made(record, Kept::File(File::default())),
        }
    }

    fn changed(&mut self, record: &Record<'_>, change: Change) -> bool {
        match self.inodes.get(&record.inode).map(|node| &mut self.nodes[*node]) {
            Some(Kept::File(file)) => {
                file.change(record.place, change);
                true
            }
            _ => false,
        }
    }

    fn synced(&mut self, inode: u64, since: u64) -> Option<()> {
        let node = *self.inodes.get(&inode)?;
        if self.ignore.is_some_and(|ignored| self.names.path(node).starts_with(ignored)) {
            return Some(());
        }
        if let Kept::File(file) = &mut self.nodes[node] {
            file.sync(since);
        }
        self.names.sync(node, since, self.order);
        Some(())
    }

    fn renamed(&mut self, record: &Record<'_>) -> Option<()> {
        let node = self.names.find(record.path)?;
        let (from, old) = self.names.split(record.path)?;
        let (to, new) = self.names.split(record.rest)?;
        let edits = vec![((from, old.to_vec()), None), ((to, new.to_vec()), Some(node))];
        self.names.edit(record.place, edits);
        Some(())
    }

    fn linked(&mut self, record: &Record<'_>) -> Option<()> {
        let node = self.names.find(record.path)?;
        let (to, new) = self.names.split(record.rest)?;
        self.names.edit(record.place, vec![((to, new.to_vec()), Some(node))]);
        Some(())
    }

    /// One of the directories that may be left now.
    #[must_use]
    pub fn after_cut(&self, survival: &Survival, seed: u64) -> Image {
        let random = Random::new(seed);
        let names = self.names.left(survival, self.order, &random.of(0));
        let mut image = Image::default();
        let mut below = vec![(ROOT, Vec::new())];
        while let Some((directory, path)) = below.pop() {
            let entries = names.range((directory, Vec::new())..(directory + 1, Vec::new()));
            for ((_, name), node) in entries {
                let path = [&path, &b"/"[..], name].concat();
                match &self.nodes[*node] {
                    Kept::Directory => {
                        below.push((*node, path.clone()));
                        image.directory(path);
                    }
                    Kept::Symlink(target) => image.symlink(path, target.clone()),
                    Kept::File(file) => {
                        let random = random.of(*node as u64);
                        image.file(path, file.left(&survival.of_file(&random), &random));
                    }
                }
            }
        }
        image
    }

    /// The present path of an inode.
    #[must_use]
    pub fn path(&self, inode: u64) -> Option<Vec<u8>> {
        self.inodes.get(&inode).map(|node| self.names.path(*node))
    }
}
