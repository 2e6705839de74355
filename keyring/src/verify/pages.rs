//! Verification of all pages of relations.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read, Take};
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use pagevault_cipher::checksum::page_checksum;
use pagevault_cipher::page::{self, PAGE_SIZE, Page, Strength};
use pagevault_cipher::residue::without_trace;
use pagevault_cipher::{DataKeyVersion, Fork, PageKey};
use pagevault_keystore::RelFile;

use super::leftovers::Leftovers;
use super::{Context, Findings};
use crate::failure::{Failure, unreadable};
use crate::regular::open_regular;

/// `RELSEG_SIZE`: blocks of a segment of a relation.
pub(crate) const SEGMENT: u32 = 131_072;
const SEGMENT_BYTES: u64 = SEGMENT as u64 * PAGE_SIZE as u64;

/// Tablespaces of the tables in `base` and `global` (src/include/catalog/pg_tablespace.dat).
const DEFAULT_TABLESPACE: u32 = 1663;
const GLOBAL_TABLESPACE: u32 = 1664;

/// A file of a relation.
pub(crate) struct RelationFile {
    pub(crate) path: PathBuf,
    pub(crate) file: RelFile,
    pub(crate) fork: Fork,
    /// Number of the segment in the fork.
    pub(crate) segment: u32,
}

/// All files of relations, ordered by path.
pub(super) fn files(data_directory: &Path) -> Result<Vec<RelationFile>, Failure> {
    let mut files = Vec::new();
    in_database(&data_directory.join("global"), GLOBAL_TABLESPACE, 0, &mut files)?;
    in_tablespace(&data_directory.join("base"), DEFAULT_TABLESPACE, &mut files)?;
    for (name, path) in entries(&data_directory.join("pg_tblspc"))? {
        let Some(tablespace) = number(&name) else { continue };
        for (name, path) in entries(&path)? {
            if name.starts_with("PG_") {
                in_tablespace(&path, tablespace, &mut files)?;
            }
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

/// Removes files of unlogged relations, except init forks, from the list: after a crash they may
/// contain anything, and recovery replaces them by the init forks. Returns the number of files
/// removed.
pub(super) fn skip_unlogged(files: &mut Vec<RelationFile>) -> u64 {
    let init = files.iter().filter(|file| file.fork == Fork::Init);
    let unlogged: HashSet<RelFile> = init.map(|file| file.file).collect();
    let before = files.len();
    files.retain(|file| file.fork == Fork::Init || !unlogged.contains(&file.file));
    (before - files.len()) as u64
}

/// Checks that every file that another one continues exists and is full. (Truncation leaves empty
/// files behind.)
pub(super) fn check_segments(
    context: &Context<'_>,
    files: &[RelationFile],
    leftovers: &mut Leftovers<'_>,
    findings: &mut Findings,
) {
    let length = |file: &RelationFile| fs::metadata(&file.path).map_or(0, |found| found.len());
    let place = |file: &RelationFile| (file.file, file.fork, file.segment);
    let lengths: HashMap<_, _> = files.iter().map(|file| (place(file), length(file))).collect();
    for file in
        files.iter().filter(|file| file.segment > 0 && lengths.get(&place(file)) != Some(&0))
    {
        let before = lengths.get(&(file.file, file.fork, file.segment - 1));
        if before != Some(&SEGMENT_BYTES) {
            let path = context.show(&file.path);
            let what = if before.is_some() { "not full" } else { "missing" };
            if leftovers.includes(file.file) {
                findings.left_over(path);
            } else {
                findings.damage(format!("{path}: the segment before it is {what}"));
            }
        }
    }
}

fn in_tablespace(
    directory: &Path,
    tablespace: u32,
    files: &mut Vec<RelationFile>,
) -> Result<(), Failure> {
    for (name, path) in entries(directory)? {
        if let Some(database) = number(&name) {
            in_database(&path, tablespace, database, files)?;
        }
    }
    Ok(())
}

fn in_database(
    directory: &Path,
    tablespace: u32,
    database: u32,
    files: &mut Vec<RelationFile>,
) -> Result<(), Failure> {
    for (name, path) in entries(directory)? {
        // Temporary tables, the relation map and others have different names.
        let Some((relation, fork, segment)) = parse(&name) else { continue };
        let file = RelFile { tablespace, database, relation };
        files.push(RelationFile { path, file, fork, segment });
    }
    Ok(())
}

/// Number, fork and segment: `16384`, `16384_fsm`, `16384.1`, `16384_vm.2`.
pub(crate) fn parse(name: &str) -> Option<(u32, Fork, u32)> {
    let (name, segment) = match name.split_once('.') {
        Some((name, segment)) => (name, number(segment)?),
        None => (name, 0),
    };
    let (relation, fork) = match name.split_once('_') {
        None => (name, Fork::Main),
        Some((relation, "fsm")) => (relation, Fork::FreeSpaceMap),
        Some((relation, "vm")) => (relation, Fork::VisibilityMap),
        Some((relation, "init")) => (relation, Fork::Init),
        Some(_) => return None,
    };
    Some((number(relation)?, fork, segment))
}

/// A number in PostgreSQL's spelling.
fn number(text: &str) -> Option<u32> {
    let number: u32 = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

fn entries(directory: &Path) -> Result<Vec<(String, PathBuf)>, Failure> {
    let list = || -> io::Result<Vec<(String, PathBuf)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            found.extend(entry.file_name().into_string().map(|name| (name, entry.path())));
        }
        Ok(found)
    };
    match list() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        done => done.map_err(|error| unreadable(directory, &error)),
    }
}

/// Decrypts all pages of a file. Stops at the first problem if the file belongs to no relation.
pub(super) fn verify_file(
    context: &Context<'_>,
    file: &RelationFile,
    leftovers: &mut Leftovers<'_>,
    progress: &ProgressBar,
    findings: &mut Findings,
) -> Result<(), Failure> {
    let failed = |error: io::Error| unreadable(&file.path, &error);
    let (mut input, length) = open_segment(&file.path).map_err(failed)?;
    let mut keys = Keys::default();
    let mut bytes = vec![0; 64 * PAGE_SIZE];
    let mut block = file.segment.saturating_mul(SEGMENT);
    findings.files += 1;
    if length > SEGMENT_BYTES {
        let path = context.show(&file.path);
        if leftovers.includes(file.file) {
            findings.left_over(path);
        } else {
            findings.damage(format!("{path} is larger than a segment; its pages were not read"));
        }
        return Ok(());
    }
    loop {
        let length = fill(&mut input, &mut bytes).map_err(failed)?;
        let (pages, rest) = bytes[..length].as_chunks_mut::<PAGE_SIZE>();
        let (count, is_cut) = (pages.len(), !rest.is_empty());
        let mut problems = Vec::new();
        for page in pages {
            match open(context, file, page, block, &mut keys) {
                Ok(State::Refused(why)) => {
                    let place = format!("{} block {block}", context.show(&file.path));
                    findings.refused((file.file, why), place);
                }
                Ok(state) => findings.count(state),
                Err(problem) => {
                    let path = context.show(&file.path);
                    let what = format!("{path} block {block}: {problem}");
                    problems.push(((file.file, file.fork, block), what));
                }
            }
            block = block.saturating_add(1);
        }
        progress.inc(length as u64);
        if (is_cut || !problems.is_empty()) && leftovers.includes(file.file) {
            findings.left_over(context.show(&file.path));
            return Ok(());
        }
        for (place, what) in problems {
            findings.broken(place, what, context.control);
        }
        if is_cut {
            findings.damage(format!("{} ends within block {block}", context.show(&file.path)));
        }
        if count < 64 {
            return Ok(());
        }
    }
}

/// Opens a segment of a relation; also returns its length. At most the size of a segment is read;
/// PostgreSQL accepts no larger one either (`mdnblocks`, md.c).
pub(super) fn open_segment(path: &Path) -> io::Result<(Take<File>, u64)> {
    let file = open_regular(path)?;
    let length = file.metadata()?.len();
    Ok((file.take(SEGMENT_BYTES), length))
}

/// Keys of a file, by version.
pub(super) type Keys = HashMap<DataKeyVersion, PageKey>;

/// Result for a page.
#[derive(Clone, Copy)]
pub(super) enum State {
    Empty,
    Plaintext,
    Sealed(Strength),
    Shredded,
    /// The server does not accept it in this file.
    Refused(Refusal),
}

/// Why the server does not accept a page.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Refusal {
    /// In plaintext, and the file contains encrypted pages only.
    Plaintext,
    /// All pages of the file were rewritten under a later key.
    Former,
}

impl Refusal {
    /// For the report.
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Plaintext => "in plaintext, and the file contains encrypted pages only",
            Self::Former => "under a former key, and the file was rewritten under a later one",
        }
    }
}

/// Decrypts and checks a page in place.
pub(super) fn open(
    context: &Context<'_>,
    file: &RelationFile,
    page: &mut Page,
    block: u32,
    keys: &mut Keys,
) -> Result<State, String> {
    let checksums = context.control.checksums;
    if page::is_zero(page) {
        return Ok(State::Empty);
    }
    let entry = context.keystore.state().file(file.file);
    // The server reads a map that it does not accept as empty.
    let is_map = matches!(file.fork, Fork::FreeSpaceMap | Fork::VisibilityMap);
    let Some(version) = page::version_of(page) else {
        check(page, block, checksums)?;
        if !is_map && entry.is_some_and(|entry| entry.is_sealed_only()) {
            return Ok(State::Refused(Refusal::Plaintext));
        }
        return Ok(State::Plaintext);
    };
    if entry.is_some_and(|entry| entry.is_destroyed(version)) {
        return Ok(State::Shredded);
    }
    if let Entry::Vacant(place) = keys.entry(version) {
        let record = entry.and_then(|entry| entry.keys.get(&version));
        let record =
            record.ok_or_else(|| format!("the keystore has no data key of version {version}"))?;
        let unwrapped = without_trace(|| {
            let key = context.unlocked.data_key(file.file, version, record)?;
            place.insert(PageKey::new(&key));
            Some(())
        });
        unwrapped.ok_or_else(|| format!("data key version {version} cannot be unwrapped"))?;
    }
    if checksums && stored_checksum(page) != page_checksum(page, block) {
        return Err("the checksum of the encrypted page is wrong".to_owned());
    }
    let mut strength = Strength::Unauthenticated;
    if let Some(key) = keys.get(&version) {
        let opened = page::open(page, key, block, file.fork, checksums);
        strength = opened.map_err(|error| error.to_string())?.unwrap_or(strength);
    }
    check(page, block, checksums)?;
    if !is_map && entry.is_some_and(|entry| Some(version) < entry.floor()) {
        return Ok(State::Refused(Refusal::Former));
    }
    Ok(State::Sealed(strength))
}

/// Like `PageIsVerified` (bufpage.c).
fn check(page: &Page, block: u32, checksums: bool) -> Result<(), String> {
    if checksums && stored_checksum(page) != page_checksum(page, block) {
        return Err("the checksum is wrong".to_owned());
    }
    let field = |at: usize| u16::from_le_bytes([page[at], page[at + 1]]);
    let (lower, upper, special) = (field(12), field(14), field(16));
    let is_sane = lower <= upper
        && upper <= special
        && usize::from(special) <= PAGE_SIZE
        && special.is_multiple_of(8);
    if is_sane { Ok(()) } else { Err("the page's header is wrong".to_owned()) }
}

fn stored_checksum(page: &Page) -> u16 {
    u16::from_le_bytes([page[8], page[9]])
}

/// Reads until `bytes` is full or the file ends.
pub(crate) fn fill(input: &mut impl Read, bytes: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < bytes.len() {
        match input.read(&mut bytes[done..])? {
            0 => break,
            more => done += more,
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_relations_are_recognised_by_their_names() {
        assert_eq!(parse("16384"), Some((16384, Fork::Main, 0)));
        assert_eq!(parse("16384.3"), Some((16384, Fork::Main, 3)));
        assert_eq!(parse("1_fsm.1"), Some((1, Fork::FreeSpaceMap, 1)));
        assert_eq!(parse("1_vm"), Some((1, Fork::VisibilityMap, 0)));
        assert_eq!(parse("1_init"), Some((1, Fork::Init, 0)));
        for name in ["t3_16384", "pg_filenode.map", "PG_VERSION", "016", "1_x", "1.", "-1", ""] {
            assert_eq!(parse(name), None, "{name}");
        }
    }
}
