//! What `verify` finds, and what becomes of it when WAL is read.

use std::collections::{BTreeSet, HashMap, HashSet};

use pagevault_cipher::page::Strength;
use pagevault_keystore::RelFile;

use super::absent::Absent;
use super::blocks::{Place, blocks_of};
use super::broken::{Broken, Problem};
use super::control::Control;
use super::databases::replaced_by;
use super::gaps::{Gap, Gaps};
use super::key_records::files_concerned;
use super::leftovers::Leftovers;
use super::maps::Maps;
use super::pages;
use super::referenced::Referenced;
use crate::visible::visible;

/// Maximum number of damages, except of pages, that are kept until WAL is read.
const WRONG: usize = 100_000;

/// Maximum number of damages that are listed; more are counted.
pub(super) const LISTED: usize = 100;

/// The result.
#[derive(Default)]
pub(super) struct Findings {
    pub(super) files: u64,
    pub(super) sealed: u64,
    /// Of these, pages with a tag of 128 bits, and of 20 bits.
    pub(super) full_tags: u64,
    pub(super) short_tags: u64,
    pub(super) plaintext: u64,
    pub(super) empty: u64,
    pub(super) shredded: u64,
    /// Pages of key groups that are locked.
    pub(super) locked: u64,
    pub(super) skipped: u64,
    pub(super) wal_sealed: u64,
    pub(super) wal_plaintext: u64,
    pub(super) records: u64,
    pub(super) damaged: u64,
    pub(super) listed: Vec<String>,
    /// Files that belong to no relation and are damaged.
    pub(super) left_over: BTreeSet<String>,
    /// Pages that the server does not accept in these files: how many, and the first.
    pub(super) refused: HashMap<(RelFile, pages::Refusal), (u64, Vec<String>)>,
    /// Files of which WAL says whether they contain encrypted pages only, or since when.
    pub(super) concerned: HashSet<RelFile>,
    /// Such pages of which recovery decides.
    pub(super) undecided: u64,
    /// Damaged pages, of which WAL says whether recovery reads them.
    pub(super) broken: Broken,
    /// Other damages of files, by the path. WAL says whether a relation needs the file.
    pub(super) wrong: Vec<(RelFile, String, String)>,
    /// Tablespaces whose files are not there.
    pub(super) absent: Absent,
    /// Maps of catalogs that are damaged.
    pub(super) maps: Maps,
    /// Segments after one that is missing or not full.
    pub(super) gaps: Gaps,
    /// Those of which recovery decides.
    pub(super) undecided_gaps: Vec<String>,
    /// What WAL says about files, if that is asked.
    pub(super) referenced: Option<Referenced>,
    /// Such pages that recovery replaces.
    pub(super) torn: u64,
    /// Pages of maps that are read as empty.
    pub(super) emptied: u64,
    /// Files that end within a block, and in which.
    pub(super) partial: Vec<String>,
    /// Files of an incremental backup that have only what has changed.
    pub(super) incremental: u64,
    /// What could not be examined.
    pub(super) unknown: Vec<String>,
    /// Empty directories that are in no new cluster.
    pub(super) added_directories: Vec<String>,
}

impl Findings {
    pub(super) fn count(&mut self, state: pages::State) {
        let count = match state {
            pages::State::Empty => &mut self.empty,
            pages::State::Plaintext => &mut self.plaintext,
            pages::State::Sealed(strength) => {
                self.full_tags += u64::from(strength == Strength::Full);
                self.short_tags += u64::from(strength == Strength::Short);
                &mut self.sealed
            }
            pages::State::Shredded => &mut self.shredded,
            pages::State::Locked => &mut self.locked,
            pages::State::Emptied => &mut self.emptied,
            // See `decide`.
            pages::State::Refused(_) => return,
        };
        *count += 1;
    }

    pub(super) fn refused(&mut self, what: (RelFile, pages::Refusal), place: String) {
        let (pages, listed) = self.refused.entry(what).or_default();
        *pages += 1;
        if listed.len() < LISTED {
            listed.push(place);
        }
    }

    /// All WAL is read, and it `is_whole` from the redo pointer on. While it has to be replayed,
    /// pages of files that it concerns may be older or newer than the keystore.
    pub(super) fn decide(
        &mut self,
        control: Control,
        is_whole: bool,
        leftovers: &mut Leftovers<'_>,
    ) {
        let broken = std::mem::take(&mut self.broken);
        for (place, problem) in broken.pages() {
            let path = broken.path(place);
            if leftovers.includes(place.0) {
                self.left_over(path);
            } else {
                self.damage(format!("{path} block {}: {}", place.2, problem.text()));
            }
        }
        for (file, path, what) in std::mem::take(&mut self.wrong) {
            if leftovers.includes(file) { self.left_over(&path) } else { self.damage(what) }
        }
        let absent = std::mem::take(&mut self.absent);
        let (maps, created) = std::mem::take(&mut self.maps).rest(control.ended || is_whole);
        absent.rest().chain(maps).for_each(|what| self.damage(what));
        self.unknown.extend(created);
        let mut gaps = std::mem::take(&mut self.gaps);
        for gap in std::mem::take(&mut gaps.found) {
            if leftovers.includes(gap.file) {
                self.left_over(&gap.shown);
            } else if is_whole && gaps.explain(&gap) {
                self.undecided_gaps.push(visible(&gap.what));
            } else {
                self.damage(gap.what);
            }
        }
        for ((file, why), (pages, listed)) in std::mem::take(&mut self.refused) {
            if !control.ended && self.concerned.contains(&file) {
                self.undecided += pages;
                match why {
                    pages::Refusal::Plaintext => self.plaintext += pages,
                    pages::Refusal::Former => self.sealed += pages,
                }
            } else if leftovers.includes(file) {
                let paths = listed.iter().filter_map(|place| place.split(" block ").next());
                paths.for_each(|path| self.left_over(path));
            } else {
                self.damaged += pages - listed.len() as u64;
                for place in listed {
                    self.damage(format!("{place}: {}", why.text()));
                }
            }
        }
    }

    /// A page cannot be decrypted. After a crash, and in a backup, it may have been being written,
    /// or the file may belong to no relation.
    pub(super) fn broken(
        &mut self,
        place: Place,
        path: String,
        problem: Problem,
        control: Control,
    ) {
        let what = format!("{path} block {}: {}", place.2, problem.text());
        if control.ended {
            self.damage(what);
        } else if !self.broken.insert(place, path, problem) {
            self.damage(format!("{what}; there are too many such pages to ask WAL about this one"));
        }
    }

    /// Something is wrong with a file, unless it belongs to no relation.
    pub(super) fn wrong(
        &mut self,
        file: RelFile,
        path: String,
        what: String,
        control: Control,
        leftovers: &mut Leftovers<'_>,
    ) {
        if leftovers.includes(file) {
            self.left_over(&path);
        } else if control.ended || self.wrong.len() >= WRONG {
            self.damage(what);
        } else {
            self.wrong.push((file, path, what));
        }
    }

    /// As [`Findings::wrong`], of which WAL may say more.
    pub(super) fn gap(&mut self, gap: Gap, control: Control, leftovers: &mut Leftovers<'_>) {
        if control.ended || self.gaps.found.len() >= WRONG {
            self.wrong(gap.file, gap.shown, gap.what, control, leftovers);
        } else {
            self.gaps.add(gap);
        }
    }

    /// All files are read: what is found in WAL from now on is compared with what was found there.
    pub(super) fn ask_wal(&mut self, leftovers: &Leftovers<'_>) {
        let wrong = self.wrong.iter().map(|(file, _, _)| *file);
        let gaps = self.gaps.found.iter().map(|gap| gap.file);
        let refused = self.refused.keys().map(|(file, _)| *file);
        let suspects: HashSet<_> =
            self.broken.files().chain(wrong).chain(gaps).chain(refused).collect();
        // Mostly nothing is wrong, and WAL has many records.
        if !suspects.is_empty() {
            self.referenced = Some(Referenced::of(leftovers.new_rows(&suspects)));
        }
    }

    /// Recovery replays this record.
    pub(super) fn replayed(&mut self, record: &[u8]) {
        self.concerned.extend(files_concerned(record));
        self.absent.replayed(record);
        self.maps.replayed(record);
        let Some(referenced) = &mut self.referenced else { return };
        let blocks = blocks_of(record);
        referenced.add(record, &blocks);
        self.gaps.replayed(record, &blocks);
        for (tablespace, database) in replaced_by(record) {
            self.torn += self.broken.remove_all(tablespace, database);
        }
        for (place, restores) in blocks {
            if restores {
                self.torn += u64::from(self.broken.remove(place));
                continue;
            }
            // A later record may restore a page whose key only WAL has. The first about it may have
            // no image even so: `XLOG_HASH_DELETE` has the first page of the bucket only to lock
            // it, and without checksums `XLOG_HEAP2_VISIBLE` changes a bit (`REGBUF_NO_IMAGE`;
            // `hashbucketcleanup`, hash.c; `log_heap_visible`, heapam.c). The server judges such a
            // page when the data directory is consistent.
            if let Some(Problem::Content(problem)) = self.broken.get(place) {
                let what = format!("{} block {}: {problem}", self.broken.path(place), place.2);
                self.broken.remove(place);
                self.damage(what);
            }
        }
    }

    pub(super) fn left_over(&mut self, path: &str) {
        self.left_over.insert(visible(path));
    }

    /// Those of other copies of WAL.
    pub(super) fn add_damages(&mut self, others: Findings) {
        self.damaged += others.damaged - others.listed.len() as u64;
        let new = others.listed.into_iter().filter(|what| !self.listed.contains(what));
        new.collect::<Vec<_>>().into_iter().for_each(|what| self.damage(what));
    }

    pub(super) fn damage(&mut self, what: String) {
        self.damaged += 1;
        if self.listed.len() < LISTED {
            self.listed.push(visible(&what));
        }
    }
}
