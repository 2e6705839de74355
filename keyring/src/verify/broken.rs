//! Pages that cannot be read, until WAL says whether recovery replaces them.
//!
//! If a large table got a new key while a backup was taken, these may be all of its pages. So they
//! are bits, of stretches of a file.

use std::collections::HashMap;

use pagevault_cipher::Fork;
use pagevault_keystore::RelFile;

use super::blocks::Place;
use super::pages::SEGMENT;

/// Blocks of a stretch.
const STRETCH: u32 = 512;
const WORDS: usize = STRETCH as usize / 64;
/// Maximum number of stretches: some 100 MB, for 2 TB without a gap.
const MAX: usize = 500_000;

/// Why a page cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Problem {
    /// The keystore does not have its key.
    Key(String),
    Content(String),
}

impl Problem {
    pub(super) fn text(&self) -> &str {
        let (Self::Key(text) | Self::Content(text)) = self;
        text
    }
}

/// The pages of a stretch that have the same problem.
struct Marked {
    problem: u32,
    blocks: [u64; WORDS],
}

type Stretches = HashMap<(RelFile, Fork, u32), Vec<Marked>>;

#[derive(Default)]
pub(super) struct Broken {
    /// By tablespace and database. WAL may drop any number of databases.
    databases: HashMap<(u32, u32), Stretches>,
    problems: Vec<Problem>,
    numbers: HashMap<Problem, u32>,
    /// Of the segments of relations.
    paths: HashMap<(RelFile, Fork, u32), String>,
    marked: usize,
}

impl Broken {
    fn marked(&self, place: Place) -> Option<&Vec<Marked>> {
        self.databases.get(&database(place.0))?.get(&stretch(place))
    }

    /// Adds a page of the file at `path`. False if there are too many.
    pub(super) fn insert(&mut self, place: Place, path: String, problem: Problem) -> bool {
        let (file, fork, block) = place;
        let next = self.problems.len() as u32;
        let known = self.numbers.get(&problem).copied();
        let marked = self.marked(place);
        let is_there = |marked: &&Marked| Some(marked.problem) == known;
        if marked.and_then(|marked| marked.iter().find(is_there)).is_none() {
            if self.marked >= MAX {
                return false;
            }
            self.marked += 1;
            let problem = known.unwrap_or_else(|| {
                self.problems.push(problem.clone());
                self.numbers.insert(problem, next);
                next
            });
            let marked = Marked { problem, blocks: [0; WORDS] };
            let stretches = self.databases.entry(database(file)).or_default();
            stretches.entry(stretch(place)).or_default().push(marked);
            self.paths.entry((file, fork, block / SEGMENT)).or_insert(path);
        }
        let number = known.unwrap_or(next);
        let (word, bit) = bit(block);
        let stretches = self.databases.get_mut(&database(file));
        let marked = stretches.and_then(|stretches| stretches.get_mut(&stretch(place)));
        marked
            .into_iter()
            .flatten()
            .filter(|marked| marked.problem == number)
            .for_each(|marked| marked.blocks[word] |= bit);
        true
    }

    /// What is wrong with a page.
    pub(super) fn get(&self, place: Place) -> Option<&Problem> {
        let (word, bit) = bit(place.2);
        let marked = self.marked(place)?;
        let marked = marked.iter().find(|marked| marked.blocks[word] & bit != 0)?;
        self.problems.get(marked.problem as usize)
    }

    /// Whether it was there.
    pub(super) fn remove(&mut self, place: Place) -> bool {
        let (word, bit) = bit(place.2);
        let Some(stretches) = self.databases.get_mut(&database(place.0)) else { return false };
        let Some(marked) = stretches.get_mut(&stretch(place)) else { return false };
        let was_there = marked.iter().any(|marked| marked.blocks[word] & bit != 0);
        marked.iter_mut().for_each(|marked| marked.blocks[word] &= !bit);
        marked.retain(|marked| marked.blocks != [0; WORDS]);
        if marked.is_empty() {
            stretches.remove(&stretch(place));
            if stretches.is_empty() {
                self.databases.remove(&database(place.0));
            }
        }
        was_there
    }

    /// Removes all pages of a database in a tablespace. Returns their number.
    pub(super) fn remove_all(&mut self, tablespace: u32, database: u32) -> u64 {
        let removed = self.databases.remove(&(tablespace, database)).unwrap_or_default();
        let blocks = removed.values().flatten().flat_map(|marked| marked.blocks);
        blocks.map(|word| u64::from(word.count_ones())).sum()
    }

    pub(super) fn path(&self, (file, fork, block): Place) -> &str {
        self.paths.get(&(file, fork, block / SEGMENT)).map_or("", String::as_str)
    }

    /// The files of the pages, each once or several times.
    pub(super) fn files(&self) -> impl Iterator<Item = RelFile> {
        self.databases.values().flat_map(HashMap::keys).map(|(file, _, _)| *file)
    }

    /// All pages, by path and block.
    pub(super) fn pages(&self) -> impl Iterator<Item = (Place, &Problem)> {
        let mut stretches: Vec<_> =
            self.databases.values().flat_map(|stretches| stretches.keys().copied()).collect();
        let first = |(file, fork, stretch): (RelFile, Fork, u32)| (file, fork, stretch * STRETCH);
        stretches.sort_unstable_by_key(|stretch| (self.path(first(*stretch)), stretch.2));
        let places = stretches.into_iter().flat_map(move |stretch| {
            let (file, fork, begin) = first(stretch);
            (0..STRETCH).map(move |block| (file, fork, begin + block))
        });
        places.filter_map(|place| Some((place, self.get(place)?)))
    }
}

/// The tablespace and the database of a file.
fn database(file: RelFile) -> (u32, u32) {
    (file.tablespace, file.database)
}

fn stretch((file, fork, block): Place) -> (RelFile, Fork, u32) {
    (file, fork, block / STRETCH)
}

/// The word and the bit of a block.
fn bit(block: u32) -> (usize, u64) {
    let block = block % STRETCH;
    ((block / 64) as usize, 1 << (block % 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: RelFile = RelFile { tablespace: 1663, database: 5, relation: 16384 };

    fn place(block: u32) -> Place {
        (FILE, Fork::Main, block)
    }

    #[test]
    fn each_page_is_kept_once() {
        let mut broken = Broken::default();
        let key = |version: u32| Problem::Key(version.to_string());
        let blocks = [0, 63, 64, 511, 512, SEGMENT - 1, SEGMENT, u32::MAX];
        for block in blocks.into_iter().rev() {
            let path = format!("base/5/16384.{}", block / SEGMENT);
            assert!(broken.insert(place(block), path, key(block % 2)));
        }
        let found: Vec<_> =
            broken.pages().map(|(place, problem)| (place.2, problem.clone())).collect();
        assert_eq!(found, blocks.map(|block| (block, key(block % 2))));
        assert_eq!(broken.path(place(SEGMENT)), "base/5/16384.1");
        assert_eq!(broken.get(place(1)), None);
        assert!(!broken.remove(place(1)) && broken.remove(place(63)) && !broken.remove(place(63)));
        assert_eq!(broken.remove_all(1663, 6), 0);
        assert_eq!(broken.remove_all(1663, 5), 7);
        assert!(broken.files().next().is_none());
    }

    #[test]
    fn a_large_table_takes_little() {
        let mut broken = Broken::default();
        let problem = Problem::Key("the keystore has no data key of version 2".to_owned());
        let blocks = 0..4 * SEGMENT;
        for block in blocks.clone() {
            assert!(broken.insert(place(block), "base/5/16384".to_owned(), problem.clone()));
        }
        assert_eq!((broken.marked, broken.problems.len()), (1024, 1));
        assert!(blocks.into_iter().all(|block| broken.remove(place(block))));
        assert!(broken.files().next().is_none());
    }

    #[test]
    fn databases_that_are_not_there_are_dropped_in_no_time() {
        let mut broken = Broken::default();
        let problem = Problem::Content("the checksum is wrong".to_owned());
        for relation in 0..100_000 {
            let file = RelFile { relation, ..FILE };
            assert!(broken.insert((file, Fork::Main, 7), String::new(), problem.clone()));
        }
        for database in 6..1_000_000 {
            assert_eq!(broken.remove_all(1663, database), 0);
        }
        assert_eq!(broken.remove_all(1663, 5), 100_000);
    }

    #[test]
    fn memory_is_limited() {
        let mut broken = Broken { marked: MAX - 1, ..Broken::default() };
        let problem = |version: u32| Problem::Content(version.to_string());
        assert!(broken.insert(place(0), String::new(), problem(1)));
        assert!(!broken.insert(place(1), String::new(), problem(2)));
        assert!(!broken.insert(place(STRETCH), String::new(), problem(1)));
        assert!(broken.insert(place(1), String::new(), problem(1)));
    }
}
