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
mod essentials;
mod findings;
mod gaps;
mod headers;
mod key_files;
mod key_records;
mod labelled;
mod leftovers;
mod locked_groups;
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
mod unlogged;
mod wal_keys;
mod wal_record;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressStyle};
use pagevault_keystore::wal_segments::parse_name;

pub(crate) use self::pages::fill;
pub use self::seal::seal_manifest;

use self::absent::Absent;
use self::complete::Complete;
pub(crate) use self::control::Control;
use self::findings::{Findings, LISTED};
use self::labelled::Needed;
use self::leftovers::Leftovers;
use self::locked_groups::LockedGroup;
use self::maps::Maps;
use self::report::Report;
use self::runs::Run;
use self::segments::{Histories, Segment};
use crate::access::Access;
use crate::failure::{Failure, refuse};
use crate::offline::{DatabaseKeys, Keystore, Locked};
use crate::tablespaces::{self, Tablespace};

/// Whether a file of this name belongs to a relation.
pub(crate) fn relation_file(name: &str) -> bool {
    pages::parse(name).is_some()
}

/// Whether a file of this name is a WAL segment.
pub(crate) fn wal_segment(name: &str) -> bool {
    parse_name(name.as_bytes()).is_some()
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
    /// Accept that the pages of this key group are not verified if its key cannot be unwrapped;
    /// "all" for any group
    #[arg(long, value_name = "GROUP")]
    locked_key_group: Vec<String>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// The result of [`verify`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// No damage.
    Sound,
    /// No damage in what was verified. Pages of key groups were not, and nobody has accepted that.
    NotAll,
    /// There is damage.
    Damaged,
}

/// Verifies everything and prints the result.
///
/// # Errors
/// If it cannot be verified: the server is running, a key that is not of a key group cannot be
/// unwrapped, a file cannot be read.
pub fn verify(
    data_directory: &Path,
    options: &Options,
    access: Access,
    out: &mut impl Write,
) -> Result<Verdict, Failure> {
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
    let (unlocked, locked) = keystore.unlock_but_groups(&needed)?;
    let control = Control::ask(keystore.data_directory())?;
    let mut findings = Findings::default();
    let root = keystore.data_directory();
    let mut faults = Vec::new();
    let tablespaces = tablespaces::read(root, &mut faults)?;
    faults.extend(control.fault().map(str::to_owned));
    faults.extend(control.lacks_keys(keystore.state().forgotten()));
    faults.extend(key_files::faults(&keystore, control)?);
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
    let context = Context {
        keystore: &keystore,
        unlocked: &unlocked,
        locked: &locked,
        control,
        tablespaces: &tablespaces,
    };
    unlogged::take_out(&context, &mut files, &mut findings);
    directories::require_of_wal(root, &mut findings);
    findings.maps = Maps::of(&context, &files, version.as_deref(), &mut findings.unknown);
    let mut leftovers = Leftovers::new(&context, &files);
    pages::check_segments(&context, &files, &mut leftovers, &mut findings);
    for file in &files.whole {
        pages::verify_file(&context, file, &mut leftovers, &progress, &mut findings)?;
    }
    let complete = complete::compare(&context, seal.as_deref(), &progress, &mut findings)?;
    if !matches!(complete, Complete::Compared { .. }) {
        essentials::require(root, control, &mut findings);
    }
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
    let locked = LockedGroup::all(&keystore, &locked, &options.locked_key_group);
    let report = Report::new(&context, &findings, &complete, locked)?;
    if options.json {
        report.print_json(out)?
    } else {
        report.print(out)?
    }
    Ok(report.verdict())
}

/// A key file that a server refuses after a clean shutdown, which leaves no unfinished write.
/// What all checks use.
struct Context<'a> {
    keystore: &'a Keystore,
    unlocked: &'a DatabaseKeys,
    locked: &'a Locked,
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
