//! Records of database keys and providers that make earlier ones obsolete.
//!
//! A copy of the log that ends between the two has the earlier one, which was in force by then, and
//! WAL has the later one. When the earlier one is left out, the later one must be in its place: a
//! start that replays WAL cannot do without database keys and providers.

use std::collections::{BTreeMap, BTreeSet};

use pagevault_cipher::KeyVersion;

use super::Room;
use crate::batch;
use crate::record::Record;
use crate::scope::Scope;

/// What a database key or a provider is known by.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Name<'a> {
    DatabaseKey(Scope, KeyVersion),
    Provider(&'a str),
}

impl<'a> Name<'a> {
    fn of(record: &'a Record) -> Option<Self> {
        match record {
            Record::DatabaseKey { scope, version, .. } => Some(Self::DatabaseKey(*scope, *version)),
            Record::Provider { name, .. } => Some(Self::Provider(name)),
            _ => None,
        }
    }
}

/// Kept records that make others obsolete.
pub(super) struct Successors<'a> {
    /// Those that have no place yet.
    waiting: BTreeMap<Name<'a>, &'a Record>,
    moved: BTreeSet<Name<'a>>,
    /// Whether what takes the place of the log up to here must not be longer.
    is_tight: bool,
    /// Length in bytes of the log up to here.
    before: usize,
    /// Length in bytes of what was arranged so far.
    now: usize,
    /// Number of obsolete records that stay for lack of room.
    pub(super) obsolete: usize,
}

impl<'a> Successors<'a> {
    /// Of records, and whether each is kept.
    pub(super) fn among(
        records: impl Iterator<Item = (&'a Record, bool)> + Clone,
        room: Room,
    ) -> Self {
        let named = records.filter_map(|(record, stays)| Some((Name::of(record)?, record, stays)));
        let obsolete: BTreeSet<_> =
            named.clone().filter(|(.., stays)| !stays).map(|(name, ..)| name).collect();
        let waiting = named.filter(|(name, _, stays)| *stays && obsolete.contains(name));
        let waiting: BTreeMap<_, _> = waiting.map(|(name, record, _)| (name, record)).collect();
        let is_tight = room == Room::AsBefore && !waiting.is_empty();
        Self { waiting, moved: BTreeSet::new(), is_tight, before: 0, now: 0, obsolete: 0 }
    }

    /// A batch of the log, or a mark, and what takes its place, begin.
    pub(super) fn begin_batch(&mut self) {
        self.before += batch::HEADER;
        self.now += batch::HEADER;
    }

    /// The batch ends; nothing may have taken its place.
    pub(super) fn end_batch(&mut self, is_empty: bool) {
        self.now -= if is_empty { batch::HEADER } else { 0 };
    }

    /// The next record of the log.
    pub(super) fn pass(&mut self, record: &Record) {
        self.before += self.length(record);
    }

    /// The next records that were arranged.
    pub(super) fn add(&mut self, records: &[&Record]) {
        self.now += records.iter().map(|record| self.length(record)).sum::<usize>();
    }

    /// What takes the place of a record that is not kept, and was [passed](Self::pass) last. `None`
    /// if it has no successor; nothing if that has a place before.
    pub(super) fn in_place_of(&mut self, obsolete: &'a Record) -> Option<Option<&'a Record>> {
        let name = Name::of(obsolete)?;
        let Some(successor) = self.waiting.get(&name).copied() else {
            return self.moved.contains(&name).then_some(None);
        };
        if self.is_tight && self.now + self.length(successor) > self.before {
            self.obsolete += 1;
            return Some(Some(obsolete));
        }
        self.waiting.remove(&name);
        self.moved.insert(name);
        Some(Some(successor))
    }

    /// Whether a kept record has no place before this one, which is its own.
    pub(super) fn is_here(&mut self, record: &'a Record) -> bool {
        Name::of(record).is_none_or(|name| {
            self.waiting.remove(&name);
            !self.moved.contains(&name)
        })
    }

    fn length(&self, record: &Record) -> usize {
        if !self.is_tight {
            return 0;
        }
        // Nothing is longer than a record that cannot be encoded.
        batch::encode(std::slice::from_ref(record))
            .map_or(usize::MAX >> 16, |bytes| bytes.len() - batch::HEADER)
    }
}
