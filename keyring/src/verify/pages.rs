//! Verification of all pages of relations.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Read, Take};
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use pagevault_cipher::checksum::page_checksum;
use pagevault_cipher::page::{self, PAGE_SIZE, Page, Strength};
use pagevault_cipher::{DataKeyVersion, Fork, PageKey};
use pagevault_keystore::{RelFile, state};

use super::broken::Problem;
use super::gaps::Gap;
use super::leftovers::Leftovers;
use super::page_key::{data_key_version, is_locked, page_key};
use super::{Context, Findings};
use crate::failure::{Failure, unreadable};
use crate::regular::open_regular;
use crate::tablespaces::{self, Tablespace};

/// `RELSEG_SIZE`: blocks of a segment of a relation.
pub(crate) const SEGMENT: u32 = 131_072;
const SEGMENT_BYTES: u64 = SEGMENT as u64 * PAGE_SIZE as u64;

/// Tablespaces of the tables in `base` and `global` (src/include/catalog/pg_tablespace.dat).
pub(super) const DEFAULT_TABLESPACE: u32 = 1663;
const GLOBAL_TABLESPACE: u32 = 1664;

/// A file of a relation.
pub(crate) struct RelationFile {
    pub(crate) path: PathBuf,
    pub(crate) file: RelFile,
    pub(crate) fork: Fork,
    /// Number of the segment in the fork.
    pub(crate) segment: u32,
}

/// The files of relations in a data directory, ordered by path.
#[derive(Default)]
pub(super) struct Files {
    /// Those with pages.
    pub(super) whole: Vec<RelationFile>,
    /// Those that contain only what has changed since an earlier backup (`INCREMENTAL_PREFIX`,
    /// basebackup_incremental.h). Such a file stands for the segment.
    pub(super) incremental: Vec<RelationFile>,
}

/// All files of relations. `version` is the directory that PostgreSQL uses in tablespaces
/// (`TABLESPACE_VERSION_DIRECTORY`, relpath.h); others are those of other versions, which
/// `pg_upgrade` leaves.
pub(super) fn files(
    data_directory: &Path,
    tablespaces: &[Tablespace],
    version: Option<&str>,
) -> Result<Files, Failure> {
    let mut files = Files::default();
    in_database(&data_directory.join("global"), GLOBAL_TABLESPACE, 0, &mut files)?;
    in_tablespace(&data_directory.join("base"), DEFAULT_TABLESPACE, &mut files)?;
    for tablespace in tablespaces {
        let Some(number) = tablespace.number() else { continue };
        for (name, path) in entries(&tablespace.path)? {
            if name.starts_with("PG_") && version.is_none_or(|version| version == name) {
                in_tablespace(&path, number, &mut files)?;
            }
        }
    }
    files.whole.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

/// Checks that every file that another one continues exists and is full. (Truncation leaves empty
/// files behind.)
pub(super) fn check_segments(
    context: &Context<'_>,
    files: &Files,
    leftovers: &mut Leftovers<'_>,
    findings: &mut Findings,
) {
    let length = |file: &RelationFile| fs::metadata(&file.path).map_or(0, |found| found.len());
    for (file, what, end) in gaps(files, length) {
        let shown = context.show(&file.path);
        let what = format!("{shown}: the segment before it is {what}");
        let &RelationFile { file, fork, segment, ref path } = file;
        let gap = Gap { file, fork, segment, path: path.clone(), end, shown, what };
        findings.gap(gap, context.control, leftovers);
    }
}

/// Files before which a segment is missing or not full, and the first block that is missing: after
/// those of the last segment before that has any.
fn gaps(
    files: &Files,
    length: impl Fn(&RelationFile) -> u64,
) -> Vec<(&RelationFile, &'static str, u32)> {
    let of = |file: &RelationFile| (file.file, file.fork as u8);
    let place = |file: &RelationFile| (of(file), file.segment);
    let whole = files.whole.iter().map(|file| (place(file), length(file)));
    // Of how many blocks it makes a segment is known only when backups are combined.
    let incremental = files.incremental.iter().map(|file| (place(file), SEGMENT_BYTES));
    let lengths: HashMap<_, _> = whole.chain(incremental).collect();
    let with_pages: BTreeMap<_, _> =
        lengths.iter().map(|(place, length)| (*place, *length)).filter(|it| it.1 > 0).collect();
    let end = |file: &RelationFile| {
        let (&(_, segment), &length) = with_pages.range((of(file), 0)..place(file)).next_back()?;
        let blocks = u32::try_from(length / PAGE_SIZE as u64).unwrap_or(SEGMENT).min(SEGMENT);
        Some(segment.saturating_mul(SEGMENT).saturating_add(blocks))
    };
    let later = files.whole.iter().chain(&files.incremental).filter(|file| file.segment > 0);
    let gap = |file| {
        let (of, segment) = place(file);
        let before = lengths.get(&(of, segment - 1));
        let what = if before.is_some() { "not full" } else { "missing" };
        let is_gap = lengths.get(&place(file)) != Some(&0) && before != Some(&SEGMENT_BYTES);
        is_gap.then(|| (file, what, end(file).unwrap_or(0)))
    };
    later.filter_map(gap).collect()
}

fn in_tablespace(directory: &Path, tablespace: u32, files: &mut Files) -> Result<(), Failure> {
    for (name, path) in entries(directory)? {
        if let Some(database) = tablespaces::number(&name) {
            in_database(&path, tablespace, database, files)?;
        }
    }
    Ok(())
}

fn in_database(
    directory: &Path,
    tablespace: u32,
    database: u32,
    files: &mut Files,
) -> Result<(), Failure> {
    for (name, path) in entries(directory)? {
        let incremental = name.strip_prefix("INCREMENTAL.");
        let list = match incremental {
            Some(_) => &mut files.incremental,
            None => &mut files.whole,
        };
        // Temporary tables, the relation map and others have different names.
        let Some((relation, fork, segment)) = parse(incremental.unwrap_or(&name)) else { continue };
        let file = RelFile { tablespace, database, relation };
        list.push(RelationFile { path, file, fork, segment });
    }
    Ok(())
}

/// Number, fork and segment: `16384`, `16384_fsm`, `16384.1`, `16384_vm.2`.
pub(crate) fn parse(name: &str) -> Option<(u32, Fork, u32)> {
    let (name, segment) = match name.split_once('.') {
        Some((name, segment)) => (name, tablespaces::number(segment)?),
        None => (name, 0),
    };
    let (relation, fork) = match name.split_once('_') {
        None => (name, Fork::Main),
        Some((relation, "fsm")) => (relation, Fork::FreeSpaceMap),
        Some((relation, "vm")) => (relation, Fork::VisibilityMap),
        Some((relation, "init")) => (relation, Fork::Init),
        Some(_) => return None,
    };
    Some((tablespaces::number(relation)?, fork, segment))
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
        let what = format!("{path} is larger than a segment; its pages were not read");
        findings.wrong(file.file, path, what, context.control, leftovers);
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
                Err(problem) => problems.push(((file.file, file.fork, block), problem)),
            }
            block = block.saturating_add(1);
        }
        progress.inc(length as u64);
        if !problems.is_empty() && leftovers.includes(file.file) {
            findings.left_over(&context.show(&file.path));
            return Ok(());
        }
        for (place, problem) in problems {
            findings.broken(place, context.show(&file.path), problem, context.control);
        }
        if is_cut {
            // A full disk leaves a part of a block (`mdextend`, md.c). It is not counted
            // (`mdnblocks`), and overwritten when the relation grows. In a segment that another
            // one continues it is damage ([`check_segments`]).
            findings.partial.push(format!("{} block {block}", context.show(&file.path)));
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
    /// Its key group is locked. Only the checksum of the encrypted page was checked, if it has one.
    Locked,
    /// A page of a map that the server reads as empty.
    Emptied,
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
///
/// Maps are read with `RBM_ZERO_ON_ERROR` (`vm_readbuf`, visibilitymap.c; `fsm_readbuf`,
/// freespace.c): their pages may be torn in any state of the cluster, because some changes of them
/// are not logged (`visibilitymap_clear`), and one that is damaged is empty. A missing key is an
/// error to the server also here, but before a free space map is consistent.
pub(super) fn open(
    context: &Context<'_>,
    file: &RelationFile,
    page: &mut Page,
    block: u32,
    keys: &mut Keys,
) -> Result<State, Problem> {
    let fork = file.fork;
    let is_map = matches!(fork, Fork::FreeSpaceMap | Fork::VisibilityMap);
    let may_be_sealed = page::may_be_sealed(page, block, context.control.checksums);
    match open_strictly(context, file, page, block, keys) {
        Ok(state) => Ok(state),
        Err(Problem::Content(_)) if is_map => Ok(State::Emptied),
        Err(Problem::Key(_)) if is_map && !may_be_sealed => Ok(State::Emptied),
        Err(Problem::Key(_)) if fork == Fork::FreeSpaceMap && !context.control.ended => {
            Ok(State::Emptied)
        }
        Err(problem) => Err(problem),
    }
}

fn open_strictly(
    context: &Context<'_>,
    file: &RelationFile,
    page: &mut Page,
    block: u32,
    keys: &mut Keys,
) -> Result<State, Problem> {
    let checksums = context.control.checksums;
    if page::is_zero(page) {
        return Ok(State::Empty);
    }
    let entry = context.keystore.state().file(file.file);
    // The server reads a map that it does not accept as empty.
    let is_map = matches!(file.fork, Fork::FreeSpaceMap | Fork::VisibilityMap);
    let Some(version) = page::version_of(page) else {
        check(page, block, checksums).map_err(Problem::Content)?;
        if !is_map && entry.is_some_and(|entry| entry.is_sealed_only()) {
            return Ok(State::Refused(Refusal::Plaintext));
        }
        return Ok(State::Plaintext);
    };
    let own = data_key_version(context, file.file, version);
    let is_destroyed = |entry: &state::File| own.is_some_and(|version| entry.is_destroyed(version));
    if entry.is_some_and(is_destroyed) {
        return Ok(State::Shredded);
    }
    let is_locked = is_locked(context, file.file, version);
    if !is_locked && let Entry::Vacant(place) = keys.entry(version) {
        place.insert(page_key(context, file.file, version).map_err(Problem::Key)?);
    }
    if checksums && stored_checksum(page) != page_checksum(page, block) {
        let what = "the checksum of the encrypted page is wrong";
        return Err(Problem::Content(what.to_owned()));
    }
    let mut strength = Strength::Unauthenticated;
    if let Some(key) = keys.get(&version) {
        let opened = page::open(page, key, block, file.fork, checksums);
        strength = opened.map_err(|error| Problem::Content(error.to_string()))?.unwrap_or(strength);
    }
    if !is_locked {
        check(page, block, checksums).map_err(Problem::Content)?;
    }
    if !is_map && entry.is_some_and(|entry| own.is_some() && own < entry.floor()) {
        return Ok(State::Refused(Refusal::Former));
    }
    Ok(if is_locked { State::Locked } else { State::Sealed(strength) })
}

/// Like `PageIsVerified` (bufpage.c). A page whose `pd_upper` is zero is new (`PageIsNew`), and
/// then all of it has to be zero, which [`open_strictly`] has found it not to be: the first sector
/// of a torn page is lost.
fn check(page: &Page, block: u32, checksums: bool) -> Result<(), String> {
    if checksums && stored_checksum(page) != page_checksum(page, block) {
        return Err("the checksum is wrong".to_owned());
    }
    let field = |at: usize| u16::from_le_bytes([page[at], page[at + 1]]);
    let (lower, upper, special) = (field(12), field(14), field(16));
    let is_sane = upper != 0
        && lower <= upper
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

    fn file(segment: u32) -> RelationFile {
        let file = RelFile { tablespace: 1663, database: 5, relation: 16384 };
        RelationFile { path: PathBuf::from(segment.to_string()), file, fork: Fork::Main, segment }
    }

    #[test]
    fn a_segment_follows_a_full_one() {
        let found = |whole: &[(u32, u64)], incremental: &[u32]| -> Vec<(u32, &'static str, u32)> {
            let lengths: HashMap<u32, u64> = whole.iter().copied().collect();
            let files = Files {
                whole: whole.iter().map(|(segment, _)| file(*segment)).collect(),
                incremental: incremental.iter().map(|segment| file(*segment)).collect(),
            };
            let gaps = gaps(&files, |file| lengths[&file.segment]);
            gaps.into_iter().map(|(file, what, end)| (file.segment, what, end)).collect()
        };
        let full = SEGMENT_BYTES;
        assert_eq!(found(&[(0, full), (1, 8192), (2, 0), (3, 0)], &[]), []);
        let end = SEGMENT - 1;
        assert_eq!(found(&[(0, full - 4096), (1, 8192)], &[]), [(1, "not full", end)]);
        assert_eq!(found(&[(1, full), (2, 8192)], &[]), [(1, "missing", 0)]);
        // Behind the last segment with pages, all are missing.
        assert_eq!(found(&[(0, 8192), (1, 0), (2, 8192)], &[]), [(2, "not full", 1)]);
        assert_eq!(found(&[(0, full), (4, 8192)], &[]), [(4, "missing", SEGMENT)]);
        // A relation that has grown beyond a segment since the backup that an incremental one
        // continues.
        assert_eq!(found(&[(1, 8192)], &[0]), []);
        assert_eq!(found(&[(0, full), (2, 8192)], &[1]), []);
        let end = 2 * SEGMENT;
        assert_eq!(found(&[(3, 8192)], &[1]), [(3, "missing", end), (1, "missing", 0)]);
        assert_eq!(found(&[(0, 8192)], &[1, 3]), [(1, "not full", 1), (3, "missing", end)]);
    }

    #[test]
    fn incremental_files_are_of_the_same_relations() {
        let directory = tempfile::tempdir().unwrap();
        for name in
            ["16384", "16384.1", "INCREMENTAL.16384.2", "INCREMENTAL.16385_vm", "INCREMENTAL."]
        {
            fs::write(directory.path().join(name), "").unwrap();
        }
        let mut files = Files::default();
        in_database(directory.path(), 1663, 5, &mut files).unwrap();
        let places = |files: &[RelationFile]| {
            let place = |file: &RelationFile| (file.file.relation, file.fork, file.segment);
            let mut places: Vec<_> = files.iter().map(place).collect();
            places.sort_unstable_by_key(|(relation, _, segment)| (*relation, *segment));
            places
        };
        assert_eq!(places(&files.whole), [(16384, Fork::Main, 0), (16384, Fork::Main, 1)]);
        let changed = [(16384, Fork::Main, 2), (16385, Fork::VisibilityMap, 0)];
        assert_eq!(places(&files.incremental), changed);
    }

    #[test]
    fn headers_are_judged_as_the_server_judges_them() {
        let is_sane = |lower: u16, upper: u16, special: u16| {
            let mut page = [7; PAGE_SIZE];
            for (at, value) in [(12, lower), (14, upper), (16, special)] {
                page[at..at + 2].copy_from_slice(&value.to_le_bytes());
            }
            check(&page, 0, false).is_ok()
        };
        assert!(is_sane(28, 8000, 8192) && is_sane(24, 8176, 8176));
        for (lower, upper, special) in [
            (0, 0, 0),
            (0, 0, 8192),
            (29, 28, 8192),
            (24, 8184, 8176),
            (24, 80, 8200),
            (24, 80, 83),
        ] {
            assert!(!is_sane(lower, upper, special), "{lower} {upper} {special}");
        }
    }

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
