//! `pagevault-keyring verify`: decrypts every page and checks every WAL record of a data directory
//! whose server is down, or of a backup. Changes nothing.

mod absent;
mod blocks;
mod broken;
mod btree;
mod catalogs;
mod complete;
mod control;
mod databases;
mod directories;
mod gaps;
mod headers;
mod key_records;
mod labelled;
mod leftovers;
pub mod manifest;
mod maps;
mod new_rows;
mod page_key;
mod pages;
mod records;
mod referenced;
mod report;
mod runs;
mod seal;
mod segments;
mod wal_keys;
mod wal_record;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressStyle};
use pagevault_cipher::page::Strength;
use pagevault_keystore::log;
use pagevault_keystore::wal_segments::parse_name;
use pagevault_keystore::{RelFile, Scope};

pub(crate) use self::pages::fill;
pub use self::seal::seal_manifest;

use self::absent::Absent;
use self::blocks::{Place, blocks_of};
use self::broken::{Broken, Problem};
pub(crate) use self::control::Control;
use self::databases::replaced_by;
use self::gaps::{Gap, Gaps};
use self::key_records::files_concerned;
use self::labelled::Needed;
use self::leftovers::Leftovers;
use self::maps::Maps;
use self::referenced::Referenced;
use self::report::Report;
use self::runs::Run;
use self::segments::{Histories, Segment};
use crate::access::Access;
use crate::failure::{Failure, refuse};
use crate::offline::{DIRECTORY, DatabaseKeys, Keystore};
use crate::tablespaces::{self, Tablespace};
use crate::visible::visible;

/// Whether a file of this name belongs to a relation.
pub(crate) fn relation_file(name: &str) -> bool {
    pages::parse(name).is_some()
}

/// Whether a file of this name is a WAL segment.
pub(crate) fn wal_segment(name: &str) -> bool {
    parse_name(name.as_bytes()).is_some()
}

/// Maximum number of damages, except of pages, that are kept until WAL is read.
const WRONG: usize = 100_000;

/// Maximum number of damages that are listed; more are counted.
const LISTED: usize = 100;

/// The result.
#[derive(Default)]
struct Findings {
    files: u64,
    sealed: u64,
    /// Of these, pages with a tag of 128 bits, and of 20 bits.
    full_tags: u64,
    short_tags: u64,
    plaintext: u64,
    empty: u64,
    shredded: u64,
    skipped: u64,
    wal_sealed: u64,
    wal_plaintext: u64,
    records: u64,
    damaged: u64,
    listed: Vec<String>,
    /// Files that belong to no relation and are damaged.
    left_over: BTreeSet<String>,
    /// Pages that the server does not accept in these files: how many, and the first.
    refused: HashMap<(RelFile, pages::Refusal), (u64, Vec<String>)>,
    /// Files of which WAL says whether they contain encrypted pages only, or since when.
    concerned: HashSet<RelFile>,
    /// Such pages of which recovery decides.
    undecided: u64,
    /// Damaged pages, of which WAL says whether recovery reads them.
    broken: Broken,
    /// Other damages of files, by the path. WAL says whether a relation needs the file.
    wrong: Vec<(RelFile, String, String)>,
    /// Tablespaces whose files are not there.
    absent: Absent,
    /// Maps of catalogs that are damaged.
    maps: Maps,
    /// Segments after one that is missing or not full.
    gaps: Gaps,
    /// Those of which recovery decides.
    undecided_gaps: Vec<String>,
    /// What WAL says about files, if that is asked.
    referenced: Option<Referenced>,
    /// Such pages that recovery replaces.
    torn: u64,
    /// Pages of maps that are read as empty.
    emptied: u64,
    /// Files that end within a block, and in which.
    partial: Vec<String>,
    /// Files of an incremental backup that have only what has changed.
    incremental: u64,
    /// Empty directories that are in no new cluster.
    added_directories: Vec<String>,
}

impl Findings {
    fn count(&mut self, state: pages::State) {
        let count = match state {
            pages::State::Empty => &mut self.empty,
            pages::State::Plaintext => &mut self.plaintext,
            pages::State::Sealed(strength) => {
                self.full_tags += u64::from(strength == Strength::Full);
                self.short_tags += u64::from(strength == Strength::Short);
                &mut self.sealed
            }
            pages::State::Shredded => &mut self.shredded,
            pages::State::Emptied => &mut self.emptied,
            // See `decide`.
            pages::State::Refused(_) => return,
        };
        *count += 1;
    }

    fn refused(&mut self, what: (RelFile, pages::Refusal), place: String) {
        let (pages, listed) = self.refused.entry(what).or_default();
        *pages += 1;
        if listed.len() < LISTED {
            listed.push(place);
        }
    }

    /// All WAL is read, and it `is_whole` from the redo pointer on. While it has to be replayed,
    /// pages of files that it concerns may be older or newer than the keystore.
    fn decide(&mut self, control: Control, is_whole: bool, leftovers: &mut Leftovers<'_>) {
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
        let maps = std::mem::take(&mut self.maps);
        absent.rest().chain(maps.rest()).for_each(|what| self.damage(what));
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
    fn broken(&mut self, place: Place, path: String, problem: Problem, control: Control) {
        let what = format!("{path} block {}: {}", place.2, problem.text());
        if control.ended {
            self.damage(what);
        } else if !self.broken.insert(place, path, problem) {
            self.damage(format!("{what}; there are too many such pages to ask WAL about this one"));
        }
    }

    /// Something is wrong with a file, unless it belongs to no relation.
    fn wrong(
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
    fn gap(&mut self, gap: Gap, control: Control, leftovers: &mut Leftovers<'_>) {
        if control.ended || self.gaps.found.len() >= WRONG {
            self.wrong(gap.file, gap.shown, gap.what, control, leftovers);
        } else {
            self.gaps.add(gap);
        }
    }

    /// All files are read: what is found in WAL from now on is compared with what was found there.
    fn ask_wal(&mut self, leftovers: &Leftovers<'_>) {
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
    fn replayed(&mut self, record: &[u8]) {
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

    fn left_over(&mut self, path: &str) {
        self.left_over.insert(visible(path));
    }

    /// Those of other copies of WAL.
    fn add_damages(&mut self, others: Findings) {
        self.damaged += others.damaged - others.listed.len() as u64;
        let new = others.listed.into_iter().filter(|what| !self.listed.contains(what));
        new.collect::<Vec<_>>().into_iter().for_each(|what| self.damage(what));
    }

    fn damage(&mut self, what: String) {
        self.damaged += 1;
        if self.listed.len() < LISTED {
            self.listed.push(visible(&what));
        }
    }
}

/// What to verify beyond the directory, and how to print the result.
#[derive(Default, clap::Args)]
pub struct Options {
    /// Directory with archived WAL that the backup needs, if it is not in the backup
    #[arg(long, value_name = "DIR")]
    wal_directory: Option<PathBuf>,
    /// Report damage unless this is a base backup whose manifest was sealed with `seal-manifest`
    #[arg(long)]
    require_seal: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Verifies everything and prints the result. True if nothing is damaged.
///
/// # Errors
/// If it cannot be verified: the server is running, a key cannot be unwrapped, a file cannot be
/// read.
pub fn verify(
    data_directory: &Path,
    options: &Options,
    access: Access,
    out: &mut impl Write,
) -> Result<bool, Failure> {
    seal::refuse_tar(data_directory)?;
    if data_directory.join("postmaster.pid").exists() {
        return Err(refuse("a server is running in the data directory, or was killed")
            .with_detail(format!(
                "Lock file {} exists.",
                data_directory.join("postmaster.pid").display()
            ))
            .with_hint(
                "Stop the server, or verify a base backup. For a running server, use pagevault.verify(). If no server is running there, the lock file is left over from a crash, or is that of the server of which this is a copy: remove it.",
            ));
    }
    let keystore = Keystore::read(data_directory, access)?;
    let seal = seal::read(keystore.data_directory())?;
    let mut needed = keystore.needed();
    needed.extend(seal.as_deref().and_then(|seal| seal::key_of(&keystore, seal)));
    let unlocked = keystore.unlock(&needed)?;
    let control = Control::ask(keystore.data_directory())?;
    let mut findings = Findings::default();
    let root = keystore.data_directory();
    let mut faults = Vec::new();
    let tablespaces = tablespaces::read(root, &mut faults)?;
    faults.extend(control.fault().map(str::to_owned));
    faults.extend(control.lacks_keys(keystore.state().forgotten()));
    if control.ended {
        faults.extend(keystore.torn()?.into_iter().map(torn_file));
    }
    faults.into_iter().for_each(|what| findings.damage(what));
    let version = tablespaces::version_directory(root, control.catalog);
    findings.absent = Absent::of(root, &tablespaces, version.as_deref());
    let mut files = pages::files(root, &tablespaces, version.as_deref())?;
    let pg_wal = root.join("pg_wal");
    let mut segments = segments::segments(&pg_wal)?;
    let length = |path: &Path| fs::metadata(path).map_or(0, |file| file.len());
    let paths = files.whole.iter().map(|file| &file.path);
    let paths = paths.chain(segments.iter().map(|segment| &segment.path));
    // Sparse files may report any length.
    let total = paths.fold(0_u64, |total, path| total.saturating_add(length(path)));
    let progress = progress(total);
    findings.incremental = files.incremental.len() as u64;
    if !control.incremental
        && let Some(file) = files.incremental.first()
    {
        // A server would start, with older files or none.
        let path = file.path.strip_prefix(root).unwrap_or(&file.path).display();
        let what = "of an incremental backup, and backup_label is not that of one";
        findings.damage(format!("{path}: {what}"));
    }
    if !control.ended {
        findings.skipped = pages::skip_unlogged(&mut files.whole);
    }
    let context =
        Context { keystore: &keystore, unlocked: &unlocked, control, tablespaces: &tablespaces };
    directories::require_of_wal(root, &mut findings);
    findings.maps = Maps::of(&context, &files);
    let mut leftovers = Leftovers::new(&context, &files);
    pages::check_segments(&context, &files, &mut leftovers, &mut findings);
    for file in &files.whole {
        pages::verify_file(&context, file, &mut leftovers, &progress, &mut findings)?;
    }
    let complete = complete::compare(&context, seal.as_deref(), &progress, &mut findings)?;
    if options.require_seal && !complete.is_sealed() {
        findings.damage("there is no manifest with a valid seal".to_owned());
    }
    let ranges = complete.ranges().to_vec();
    let mut needed = Needed { wanted: ranges.clone(), required: ranges };
    let mut archived = Vec::new();
    if let Some(archive) = &options.wal_directory {
        if needed.required.is_empty() {
            needed = labelled::needed(control, root, archive)?;
        }
        archived = segments::archived(archive, &needed.wanted, control.segment)?;
    }
    let archive = options.wal_directory.as_deref();
    let directories: Vec<_> = [&*pg_wal].into_iter().chain(archive).collect();
    let all = segments.iter().chain(&archived);
    let histories = Histories::read(all, control.timeline, &directories)?;
    archived = segments::serving(archived, &needed.wanted, control.segment, &histories);
    for segment in &archived {
        let (path, length) = (&segment.path, length(&segment.path));
        progress.inc_length(length);
        // Recovery ends at a file of another size (`RestoreArchivedFile`, xlogarchive.c), wherever
        // its WAL ends.
        if length != control.segment {
            let size = control.segment;
            findings.damage(format!("{}: {length} bytes instead of {size}", path.display()));
        }
    }
    findings.ask_wal(&leftovers);
    let before = findings.damaged;
    let read = |segments: &[Segment], findings: &mut Findings| -> Result<Vec<Run>, Failure> {
        let runs = records::verify(&context, segments, &histories, &progress, findings)?;
        complete::require_wal(&needed.required, "the backup", &runs, &histories, findings);
        Ok(runs)
    };
    // Recovery takes a segment from the archive, if it has it there (`XLogFileReadAnyTLI`,
    // xlogrecovery.c). Without the archive it takes what is in `pg_wal`.
    let own = segments::merged(&segments, &archived);
    segments = segments::merged(&archived, &segments);
    let runs = read(&segments, &mut findings)?;
    if segments.iter().zip(&own).any(|(one, other)| one.path != other.path) {
        let mut others = Findings::default();
        read(&own, &mut others)?;
        findings.add_damages(others);
    }
    let of_redo = control.noted.map_or(0, |noted| noted.timeline);
    if needed.required.is_empty() {
        let required: Vec<_> = control.required(keystore.data_directory()).into_iter().collect();
        complete::require_wal(&required, "the server", &runs, &histories, &mut findings);
        let redo = (of_redo, control.redo);
        let gap = || runs::gap(&runs, &segments, redo, control.segment, &histories);
        // Where recovery may fetch WAL from elsewhere, a gap means nothing. A defective page or
        // record, which was reported, makes one, too.
        if findings.damaged == before
            && !required.is_empty()
            && let Some((run, later)) = gap()
        {
            findings.damage(format!(
                "WAL of timeline {} ends or is broken at {}, and continues at {}",
                run.timeline, run.reached, later.first
            ));
        }
    }
    let is_whole = runs.iter().any(|run| run.is_replayed(of_redo, control.redo, &histories));
    if is_whole {
        leftovers.wal_is_read(findings.referenced.take());
    }
    findings.decide(control, is_whole, &mut leftovers);
    progress.finish_and_clear();
    let report = Report::new(&keystore, &findings, &complete, control.ended)?;
    if options.json {
        report.print_json(out)?
    } else {
        report.print(out)?
    }
    Ok(findings.damaged == 0)
}

/// A key file that a server refuses after a clean shutdown, which leaves no unfinished write.
fn torn_file((scope, torn): (Scope, u64)) -> String {
    let name = log::file_name(scope);
    format!(
        "{DIRECTORY}/{name}: its last {torn} bytes are not readable, and a server that was shut down cleanly does not start with it"
    )
}

/// What all checks use.
struct Context<'a> {
    keystore: &'a Keystore,
    unlocked: &'a DatabaseKeys,
    control: Control,
    tablespaces: &'a [Tablespace],
}

impl Context<'_> {
    fn show(&self, path: &Path) -> String {
        path.strip_prefix(self.keystore.data_directory()).unwrap_or(path).display().to_string()
    }
}

/// Shown only on a terminal.
fn progress(bytes: u64) -> ProgressBar {
    let bar = ProgressBar::new(bytes);
    let style = ProgressStyle::with_template(
        "{wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
    );
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
