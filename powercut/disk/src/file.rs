//! One file: what is durable of it, and what has been changed since.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::{Random, Survival};

#[derive(Clone, Debug)]
pub(crate) enum Change {
    Write {
        at: usize,
        bytes: Arc<[u8]>,
    },
    Length(usize),
    /// At least so long.
    Reserve(usize),
}

impl Change {
    fn length_after(&self, length: usize) -> usize {
        match self {
            Change::Write { at, bytes } => length.max(at + bytes.len()),
            Change::Length(length) => *length,
            Change::Reserve(end) => length.max(*end),
        }
    }

    fn apply(&self, to: &mut Vec<u8>) {
        let length = self.length_after(to.len());
        to.resize(length, 0);
        if let Change::Write { at, bytes } = self {
            to[*at..at + bytes.len()].copy_from_slice(bytes);
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct File {
    durable: Arc<Vec<u8>>,
    /// In their order, with their places in the journal.
    pending: Vec<(u64, Change)>,
}

impl File {
    pub(crate) fn durable(bytes: Vec<u8>) -> File {
        File { durable: Arc::new(bytes), pending: Vec::new() }
    }

    pub(crate) fn change(&mut self, place: u64, change: Change) {
        self.pending.push((place, change));
    }

    /// What was changed before `since` is durable.
    pub(crate) fn sync(&mut self, since: u64) {
        let covered = self.pending.partition_point(|(place, _)| *place < since);
        if covered == 0 {
            return;
        }
        let durable = Arc::make_mut(&mut self.durable);
        for (_, change) in self.pending.drain(..covered) {
            change.apply(durable);
        }
    }

    /// What may be left of it.
    pub(crate) fn left(&self, survival: &Survival, random: &Random) -> Arc<Vec<u8>> {
        match survival {
            _ if self.pending.is_empty() => self.durable.clone(),
            Survival::Nothing => self.durable.clone(),
            Survival::Everything => {
                let mut bytes = self.durable.to_vec();
                self.pending.iter().for_each(|(_, change)| change.apply(&mut bytes));
                Arc::new(bytes)
            }
            Survival::Some { percent, sector } => Arc::new(self.some(*percent, *sector, random)),
        }
    }

    /// Each write survives with this chance; with `sector` in two of three cases only sectors of
    /// it do. A sector that survives has all that was written to it before: it lay in one buffer.
    fn some(&self, percent: u64, sector: Option<usize>, random: &Random) -> Vec<u8> {
        const WHOLE: usize = 512;
        let unit = sector.unwrap_or(WHOLE);
        let mut longest = self.durable.len();
        let mut lengths = vec![longest];
        // The sectors that a change touches, and how many changes each has got to the disk.
        let mut versions: BTreeMap<usize, usize> = BTreeMap::new();
        let mut touched = Vec::new();
        for (n, (place, change)) in self.pending.iter().enumerate() {
            let length = change.length_after(lengths[n]);
            let range = match change {
                Change::Write { at, bytes } => *at..at + bytes.len(),
                Change::Length(length) => *length..longest,
                Change::Reserve(_) => 0..0,
            };
            let sectors = range.start / unit..range.end.div_ceil(unit);
            let mut chance = random.of(*place);
            let survives = chance.percent(percent);
            let torn = sector.is_some() && chance.percent(66);
            for at in sectors.clone().filter(|_| !range.is_empty()) {
                if if torn {
                    random.of(*place ^ (at as u64) << 40).percent(percent)
                } else {
                    survives
                } {
                    versions.insert(at, n + 1);
                }
            }
            touched.push((range, sectors));
            longest = longest.max(length);
            lengths.push(length);
        }
        let mut bytes = self.durable.to_vec();
        bytes.resize(longest, 0);
        for (n, ((_, change), (range, sectors))) in self.pending.iter().zip(touched).enumerate() {
            for at in sectors.filter(|at| versions.get(at).is_some_and(|version| n < *version)) {
                let part = range.start.max(at * unit)..range.end.min((at + 1) * unit);
                if part.is_empty() {
                    continue;
                }
                match change {
                    Change::Write { at, bytes: written } => bytes[part.clone()]
                        .copy_from_slice(&written[part.start - at..part.end - at]),
                    Change::Length(_) | Change::Reserve(_) => bytes[part].fill(0),
                }
            }
        }
        let mut chance = random.of(u64::MAX);
        let length = if chance.percent(50) {
            lengths[self.pending.len()]
        } else {
            lengths[chance.below(lengths.len() as u64) as usize]
        };
        bytes.truncate(length);
        bytes.resize(length, 0);
        bytes
    }
}
