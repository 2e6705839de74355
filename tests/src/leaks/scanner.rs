//! Finds pieces of many values in many bytes, in one pass.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::{Canary, spellings};
use crate::datafile::if_exists;

/// This many consecutive bytes of a value are a hit.
const CONSECUTIVE: usize = 8;
/// This many bytes are a hit if never more than one foreign byte is between pieces.
const WITH_GAPS: usize = 12;

/// Length of the pieces that are looked up first.
const GRAM: usize = 4;
/// A gram is looked up at every third byte of a file. The longest part of each hit contains
/// [`STRIDE`] consecutive grams, so one of them is at such a position.
const STRIDE: usize = 3;

/// Number of bits of the filter that avoids nearly all lookups.
const FILTER_BITS: u32 = 20;

/// One place where a piece of a canary was found.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Hit {
    /// Name of the canary.
    pub canary: String,
    /// Its spelling.
    pub spelling: &'static str,
    /// Approximate offset.
    pub offset: usize,
}

struct Pattern {
    canary: usize,
    spelling: &'static str,
    bytes: Vec<u8>,
    /// Bytes per byte of the value.
    width: usize,
}

/// Recognizes a number of canaries.
pub struct Scanner {
    names: Vec<String>,
    patterns: Vec<Pattern>,
    /// Positions of each gram: pattern and offset.
    grams: HashMap<[u8; GRAM], Vec<(usize, usize)>>,
    filter: Vec<bool>,
}

impl Scanner {
    /// A scanner for these values.
    #[must_use]
    pub fn new<'a>(canaries: impl IntoIterator<Item = &'a Canary>) -> Scanner {
        let mut scanner = Scanner {
            names: Vec::new(),
            patterns: Vec::new(),
            grams: HashMap::new(),
            filter: vec![false; 1 << FILTER_BITS],
        };
        for canary in canaries {
            scanner.names.push(canary.name.clone());
            for (spelling, bytes) in spellings::of(&canary.bytes) {
                let width = bytes.len() / canary.bytes.len().max(1);
                let canary = scanner.names.len() - 1;
                scanner.add(Pattern { canary, spelling, bytes, width });
            }
        }
        scanner
    }

    fn add(&mut self, pattern: Pattern) {
        let number = self.patterns.len();
        for (at, gram) in pattern.bytes.windows(GRAM).enumerate() {
            let Some(gram) = gram.first_chunk() else { continue };
            self.grams.entry(*gram).or_default().push((number, at));
            self.filter[slot(*gram)] = true;
        }
        self.patterns.push(pattern);
    }

    /// Canaries of which `bytes` contains a piece, once for each spelling.
    #[must_use]
    pub fn scan(&self, bytes: &[u8]) -> Vec<Hit> {
        let mut found = HashSet::new();
        let mut hits = Vec::new();
        let mut at = 0;
        // Optimized by hand for builds without optimization, where every call is expensive: tests
        // scan gigabytes.
        while at + GRAM <= bytes.len() {
            let gram = [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
            if self.filter[slot(gram)] {
                for &(number, offset) in self.grams.get(&gram).into_iter().flatten() {
                    let pattern = &self.patterns[number];
                    let key = (pattern.canary, pattern.spelling);
                    if !found.contains(&key) && is_hit(pattern, offset, bytes, at) {
                        found.insert(key);
                        hits.push(Hit {
                            canary: self.names[pattern.canary].clone(),
                            spelling: pattern.spelling,
                            offset: at,
                        });
                    }
                }
            }
            at += STRIDE;
        }
        hits
    }

    /// Scans all files below these directories, following symbolic links (tablespaces).
    ///
    /// # Errors
    /// When an existing file cannot be read.
    pub fn scan_trees(&self, roots: &[&Path]) -> Result<BTreeMap<PathBuf, Vec<Hit>>> {
        let mut found = BTreeMap::new();
        let mut paths: Vec<PathBuf> = roots.iter().map(|root| root.to_path_buf()).collect();
        while let Some(path) = paths.pop() {
            if path.is_dir() {
                for entry in if_exists(std::fs::read_dir(&path))?.into_iter().flatten() {
                    paths.push(entry?.path());
                }
                continue;
            }
            if !path.is_file() {
                continue; // a socket
            }
            let read = std::fs::read(&path).with_context(|| format!("read {}", path.display()));
            let Some(bytes) = if_exists(read)? else { continue };
            let hits = self.scan(&bytes);
            if !hits.is_empty() {
                found.insert(path, hits);
            }
        }
        Ok(found)
    }
}

/// The hits, one line for each file, canary and spelling.
#[must_use]
pub fn report(found: &BTreeMap<PathBuf, Vec<Hit>>) -> String {
    let mut text = String::new();
    for (path, hits) in found {
        for hit in hits {
            text += &format!(
                "{}, byte {}: {} ({})\n",
                path.display(),
                hit.offset,
                hit.canary,
                hit.spelling
            );
        }
    }
    text
}

fn slot(gram: [u8; GRAM]) -> usize {
    (u32::from_le_bytes(gram).wrapping_mul(0x9e37_79b1) >> (32 - FILTER_BITS)) as usize
}

/// Whether `bytes` contains enough of the pattern around `at`, where the gram at `offset` of the
/// pattern begins.
fn is_hit(pattern: &Pattern, offset: usize, bytes: &[u8], at: usize) -> bool {
    let (before, after) = pattern.bytes.split_at(offset);
    let forward = matching(after.iter(), bytes[at..].iter());
    let backward = matching(before.iter().rev(), bytes[..at].iter().rev());
    backward.in_a_row + forward.in_a_row >= CONSECUTIVE * pattern.width
        || backward.total + forward.total >= WITH_GAPS * pattern.width
}

struct Matching {
    in_a_row: usize,
    total: usize,
}

/// How many bytes match the pattern, without gaps and with single foreign bytes between pieces.
fn matching<'a>(
    pattern: impl Iterator<Item = &'a u8>,
    mut bytes: impl Iterator<Item = &'a u8>,
) -> Matching {
    let mut found = Matching { in_a_row: 0, total: 0 };
    let mut gaps = 0;
    for expected in pattern {
        let mut next = bytes.next();
        if next != Some(expected) && found.total > 0 {
            gaps += 1;
            next = bytes.next();
        }
        if next != Some(expected) {
            break;
        }
        found.total += 1;
        if gaps == 0 {
            found.in_a_row += 1;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(length: usize) -> Vec<u8> {
        super::super::hashes("noise").flat_map(u64::to_le_bytes).take(length).collect()
    }

    fn scanner() -> (Canary, Scanner) {
        let canary = Canary::text("bird");
        let scanner = Scanner::new([&canary, &Canary::text("another"), &Canary::binary("b", 16)]);
        (canary, scanner)
    }

    /// Whether `piece` is found at each of a few positions in noise.
    fn found_everywhere(scanner: &Scanner, piece: &[u8]) -> bool {
        (100..109).all(|at| {
            let mut bytes = noise(300);
            bytes.splice(at..at, piece.iter().copied());
            let hits = scanner.scan(&bytes);
            !hits.is_empty() && hits.iter().all(|hit| hit.canary == "bird")
        })
    }

    #[test]
    fn noise_has_no_hits() {
        let (_, scanner) = scanner();
        assert_eq!(scanner.scan(&noise(1_000_000)), []);
        assert_eq!(scanner.scan(&[0; 10_000]), []);
        assert_eq!(scanner.scan(b"a"), []);
    }

    #[test]
    fn every_spelling_is_found() {
        let (canary, scanner) = scanner();
        for (spelling, bytes) in spellings::of(&canary.bytes) {
            assert!(found_everywhere(&scanner, &bytes), "{spelling}");
        }
    }

    #[test]
    fn every_piece_of_eight_bytes_is_found_and_none_of_seven() {
        let (canary, scanner) = scanner();
        for piece in canary.bytes.windows(CONSECUTIVE) {
            assert!(found_everywhere(&scanner, piece));
        }
        for piece in canary.bytes.windows(CONSECUTIVE - 1) {
            assert!(!found_everywhere(&scanner, piece));
        }
    }

    /// pglz puts a control byte before every eight items. Twelve literals in a row are found at any
    /// position relative to these bytes.
    #[test]
    fn literals_of_pglz_are_found() {
        let (canary, scanner) = scanner();
        for piece in canary.bytes.windows(WITH_GAPS) {
            for first in 1..=8 {
                let mut bytes = Vec::new();
                for (number, byte) in piece.iter().enumerate() {
                    if number >= first && (number - first) % 8 == 0 {
                        bytes.push(0x00);
                    }
                    bytes.push(*byte);
                }
                assert!(found_everywhere(&scanner, &bytes), "control byte after {first}");
            }
        }
    }
}
