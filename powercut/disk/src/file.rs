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
    /// Lengths are metadata, of which the first so many changes survive; without one that made the
    /// file shorter nothing survives that was written behind that end later.
    fn some(&self, percent: u64, sector: Option<usize>, random: &Random) -> Vec<u8> {
        const WHOLE: usize = 512;
        let unit = sector.unwrap_or(WHOLE);
        let mut lengths = vec![self.durable.len()];
        for (n, (_, change)) in self.pending.iter().enumerate() {
            lengths.push(change.length_after(lengths[n]));
        }
        let mut chance = random.of(u64::MAX);
        let known = match chance.percent(50) {
            true => self.pending.len(),
            false => chance.below(lengths.len() as u64) as usize,
        };
        // How many changes each sector has got to the disk, and where what is lost begins.
        let mut versions: BTreeMap<usize, usize> = BTreeMap::new();
        let mut end = usize::MAX;
        for (n, (place, change)) in self.pending.iter().enumerate() {
            match change {
                Change::Write { at, bytes } => {
                    let mut chance = random.of(*place);
                    let survives = chance.percent(percent);
                    let torn = sector.is_some() && chance.percent(66);
                    let of_sector =
                        |at: usize| random.of(*place ^ (at as u64) << 40).percent(percent);
                    for at in (at / unit..(at + bytes.len()).div_ceil(unit))
                        .filter(|at| at * unit < end)
                        .filter(|at| if torn { of_sector(*at) } else { survives })
                    {
                        versions.insert(at, n + 1);
                    }
                }
                Change::Length(length) if n >= known => end = end.min(*length),
                Change::Length(_) | Change::Reserve(_) => {}
            }
        }
        let mut bytes = self.durable.to_vec();
        bytes.resize(lengths.iter().copied().max().unwrap_or(0), 0);
        for (n, (_, change)) in self.pending.iter().enumerate() {
            match change {
                Change::Write { at, bytes: written } => {
                    for sector in (at / unit..(at + written.len()).div_ceil(unit))
                        .filter(|at| versions.get(at).is_some_and(|version| n < *version))
                    {
                        let first = (sector * unit).max(*at);
                        let last = ((sector + 1) * unit).min(at + written.len()).min(end);
                        if first < last {
                            bytes[first..last].copy_from_slice(&written[first - at..last - at]);
                        }
                    }
                }
                Change::Length(length) if n < known => bytes[*length..].fill(0),
                Change::Length(_) | Change::Reserve(_) => {}
            }
        }
        bytes.truncate(lengths[known]);
        bytes
    }
}
