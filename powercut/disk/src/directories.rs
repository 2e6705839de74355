//! Names: which are durable, and what has happened to them since.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::{Order, Random, Survival};

pub(crate) type Node = usize;
pub(crate) const ROOT: Node = 0;

/// A name in a directory.
type Place = (Node, Vec<u8>);
pub(crate) type Names = BTreeMap<Place, Node>;

/// What one operation did to names, all of it or nothing.
#[derive(Clone, Debug)]
struct Operation {
    place: u64,
    edits: Vec<(Place, Option<Node>)>,
    /// Whose names they are, old and new.
    about: BTreeSet<Node>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Directories {
    now: Names,
    durable: Names,
    pending: Vec<Operation>,
    /// Where each was last.
    parents: HashMap<Node, Place>,
}

impl Directories {
    /// A name that is durable.
    pub(crate) fn durable(&mut self, directory: Node, name: &[u8], node: Node) {
        self.now.insert((directory, name.to_vec()), node);
        self.durable.insert((directory, name.to_vec()), node);
        self.parents.insert(node, (directory, name.to_vec()));
    }

    pub(crate) fn find(&self, path: &[u8]) -> Option<Node> {
        components(path).try_fold(ROOT, |at, name| self.now.get(&(at, name.to_vec())).copied())
    }

    /// The directory and the name of a path whose directory exists.
    pub(crate) fn split<'p>(&self, path: &'p [u8]) -> Option<(Node, &'p [u8])> {
        let name = components(path).next_back()?;
        let directory = path.strip_suffix(name)?;
        Some((self.find(directory)?, name))
    }

    /// The present path.
    pub(crate) fn path(&self, mut node: Node) -> Vec<u8> {
        let mut path = Vec::new();
        while let Some((directory, name)) = self.parents.get(&node) {
            path = if path.is_empty() { name.clone() } else { [name, &b"/"[..], &path].concat() };
            node = *directory;
        }
        path
    }

    pub(crate) fn edit(&mut self, place: u64, edits: Vec<(Place, Option<Node>)>) {
        let mut about = BTreeSet::new();
        for (name, node) in &edits {
            match node {
                Some(node) => {
                    about.extend(self.now.insert(name.clone(), *node));
                    about.insert(*node);
                    self.parents.insert(*node, name.clone());
                }
                None => about.extend(self.now.remove(name)),
            }
        }
        self.pending.push(Operation { place, edits, about });
    }

    /// `node` was synced: its names are durable, or, of a directory, those in it; and those of the
    /// directories that it is in.
    pub(crate) fn sync(&mut self, node: Node, since: u64, order: Order) {
        let mut of = BTreeSet::from([node]);
        let mut at = node;
        while let Some((directory, _)) = self.parents.get(&at) {
            of.insert(*directory);
            at = *directory;
        }
        let covered = |operation: &Operation| {
            operation.place < since
                && (order == Order::Kept
                    || !operation.about.is_disjoint(&of)
                    || operation.edits.iter().any(|((directory, _), _)| *directory == node))
        };
        let wanted: Vec<bool> = self.pending.iter().map(covered).collect();
        let wanted = with_earlier(&self.pending, wanted);
        let pending = std::mem::take(&mut self.pending);
        for (operation, wanted) in pending.into_iter().zip(wanted) {
            if wanted {
                apply(&mut self.durable, &operation);
            } else {
                self.pending.push(operation);
            }
        }
    }

    /// The names that may be left.
    pub(crate) fn left(&self, survival: &Survival, order: Order, random: &Random) -> Names {
        let all = self.pending.len();
        let survives: Vec<bool> = match (survival, order) {
            (Survival::Nothing, _) => vec![false; all],
            (Survival::Everything, _) => vec![true; all],
            (Survival::Some { .. }, Order::Kept) => {
                let first = random.clone().below(all as u64 + 1) as usize;
                (0..all).map(|n| n < first).collect()
            }
            (Survival::Some { percent, .. }, Order::Free) => {
                let of = |operation: &Operation| random.of(operation.place).percent(*percent);
                self.pending.iter().map(of).collect()
            }
        };
        let mut names = self.durable.clone();
        for (operation, survives) in
            self.pending.iter().zip(without_earlier(&self.pending, survives))
        {
            if survives {
                apply(&mut names, operation);
            }
        }
        names
    }
}

fn apply(names: &mut Names, operation: &Operation) {
    for (name, node) in &operation.edits {
        match node {
            Some(node) => names.insert(name.clone(), *node),
            None => names.remove(name),
        };
    }
}

/// With each of these all earlier ones that touch the same names.
fn with_earlier(operations: &[Operation], mut wanted: Vec<bool>) -> Vec<bool> {
    let mut needed: BTreeSet<&Place> = BTreeSet::new();
    for (n, operation) in operations.iter().enumerate().rev() {
        wanted[n] |= operation.edits.iter().any(|(name, _)| needed.contains(name));
        if wanted[n] {
            needed.extend(operation.edits.iter().map(|(name, _)| name));
        }
    }
    wanted
}

/// Without those before which one that touches the same names is lost.
fn without_earlier(operations: &[Operation], mut survives: Vec<bool>) -> Vec<bool> {
    let mut lost: BTreeSet<&Place> = BTreeSet::new();
    for (n, operation) in operations.iter().enumerate() {
        survives[n] &= !operation.edits.iter().any(|(name, _)| lost.contains(name));
        if !survives[n] {
            lost.extend(operation.edits.iter().map(|(name, _)| name));
        }
    }
    survives
}

pub(crate) fn components(path: &[u8]) -> impl DoubleEndedIterator<Item = &[u8]> {
    path.split(|c| *c == b'/').filter(|name| !name.is_empty() && *name != b".")
}
