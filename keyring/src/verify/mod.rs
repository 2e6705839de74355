//! `pagevault-keyring verify`: decrypts every page and checks every WAL record of a data directory
//! whose server is down, or of a backup. Changes nothing.

mod complete;
mod control;
mod key_records;
mod leftovers;
mod manifest;
mod pages;
mod records;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use indicatif::{ProgressBar, ProgressStyle};
use pagevault_cipher::page::Strength;
use pagevault_keystore::log::unsettled;
use pagevault_keystore::wal_segments::parse_name;
use pagevault_keystore::{Record, RelFile, Scope};

pub(crate) use self::pages::fill;

use self::complete::Complete;
pub(crate) use self::control::Control;
use self::leftovers::Leftovers;
use crate::access::Access;
use crate::failure::{Failure, refuse, unprintable};
use crate::offline::{DIRECTORY, DatabaseKeys, Keystore};

/// Whether a file of this name belongs to a relation.
pub(crate) fn relation_file(name: &str) -> bool {
    pages::parse(name).is_some()
}

/// Whether a file of this name is a WAL segment.
pub(crate) fn wal_segment(name: &str) -> bool {
    parse_name(name.as_bytes()).is_some()
}

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
    /// Pages in plaintext in files that contain encrypted pages only: how many, and the first.
    refused: HashMap<RelFile, (u64, Vec<String>)>,
    /// Files of which WAL says whether they contain encrypted pages only.
    concerned: HashSet<RelFile>,
    /// Pages in plaintext of which recovery decides.
    undecided: u64,
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
            // See `decide`.
            pages::State::Refused => return,
        };
        *count += 1;
    }

    fn refused(&mut self, file: RelFile, place: String) {
        let (pages, listed) = self.refused.entry(file).or_default();
        *pages += 1;
        if listed.len() < LISTED {
            listed.push(place);
        }
    }

    /// All WAL is read. While it has to be replayed, pages of files that it concerns may be older
    /// or newer than the keystore.
    fn decide(&mut self, control: Control, leftovers: &mut Leftovers<'_>) {
        for (file, (pages, listed)) in std::mem::take(&mut self.refused) {
            if !control.ended && self.concerned.contains(&file) {
                self.undecided += pages;
                self.plaintext += pages;
            } else if leftovers.includes(file) {
                let paths = listed.iter().filter_map(|place| place.split(" block ").next());
                self.left_over.extend(paths.map(str::to_owned));
            } else {
                self.damaged += pages - listed.len() as u64;
                for place in listed {
                    let what = "in plaintext, and the file contains encrypted pages only";
                    self.damage(format!("{place}: {what}"));
                }
            }
        }
    }

    fn left_over(&mut self, file: String) {
        self.left_over.insert(file);
    }

    fn damage(&mut self, what: String) {
        self.damaged += 1;
        if self.listed.len() < LISTED {
            self.listed.push(what);
        }
    }
}

/// Verifies everything and prints the result. WAL that the manifest of a backup names may be in
/// `wal_directory`, too. True if nothing is damaged.
///
/// # Errors
/// If it cannot be verified: the server is running, a key cannot be unwrapped, a file cannot be
/// read.
pub fn verify(
    data_directory: &Path,
    wal_directory: Option<&Path>,
    access: Access,
    out: &mut impl Write,
) -> Result<bool, Failure> {
    if data_directory.join("postmaster.pid").exists() {
        return Err(refuse("a server is running in the data directory")
            .with_detail(format!(
                "Lock file {} exists.",
                data_directory.join("postmaster.pid").display()
            ))
            .with_hint(
                "Stop the server, or verify a base backup. For a running server, use pagevault.verify().",
            ));
    }
    let keystore = Keystore::read(data_directory, access)?;
    let unsettled = unsettled(&keystore)?;
    let unlocked = keystore.unlock(&keystore.needed())?;
    let control = Control::ask(keystore.data_directory())?;
    let mut files = pages::files(keystore.data_directory())?;
    let mut segments = records::segments(&keystore.data_directory().join("pg_wal"))?;
    let length = |path: &Path| fs::metadata(path).map_or(0, |file| file.len());
    let paths = files.iter().map(|file| &file.path);
    let paths = paths.chain(segments.iter().map(|segment| &segment.path));
    // Sparse files may report any length.
    let total = paths.fold(0_u64, |total, path| total.saturating_add(length(path)));
    let progress = progress(total);
    let mut findings = Findings::default();
    if !control.clean {
        findings.skipped = pages::skip_unlogged(&mut files);
    }
    let context = Context { keystore: &keystore, unlocked: &unlocked, control };
    let mut leftovers = Leftovers::new(&context, &files);
    pages::check_segments(&context, &files, &mut leftovers, &mut findings);
    for file in &files {
        pages::verify_file(&context, file, &mut leftovers, &progress, &mut findings)?;
    }
    let complete = complete::compare(&context, &progress, &mut findings)?;
    if let Some(archive) = wal_directory {
        let size = control.segment;
        records::add_archived(&mut segments, archive, complete.ranges(), size)?;
    }
    let runs = records::verify(&context, &segments, &progress, &mut findings)?;
    complete::require_wal(complete.ranges(), &runs, &mut findings);
    findings.decide(control, &mut leftovers);
    progress.finish_and_clear();
    report(&keystore, &unsettled, &findings, &complete, control.clean, out).map_err(unprintable)?;
    Ok(findings.damaged == 0)
}

/// What all checks use.
struct Context<'a> {
    keystore: &'a Keystore,
    unlocked: &'a DatabaseKeys,
    control: Control,
}

impl Context<'_> {
    fn show(&self, path: &Path) -> String {
        path.strip_prefix(self.keystore.data_directory()).unwrap_or(path).display().to_string()
    }
}

/// Number of data keys that were cut off from key files and are not in them, by scope.
fn unsettled(keystore: &Keystore) -> Result<Vec<(Scope, usize)>, Failure> {
    let is_key = |record: &Record| matches!(record, Record::DataKey { .. });
    let mut found = Vec::new();
    for (scope, records) in keystore.unsettled()? {
        let missing = unsettled::missing(keystore.state(), records);
        found.push((scope, missing.iter().filter(|record| is_key(record)).count()));
    }
    found.retain(|(_, count)| *count > 0);
    Ok(found)
}

/// Shown only on a terminal.
fn progress(bytes: u64) -> ProgressBar {
    let bar = ProgressBar::new(bytes);
    let style = ProgressStyle::with_template(
        "{wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
    );
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn report(
    keystore: &Keystore,
    unsettled: &[(Scope, usize)],
    findings: &Findings,
    complete: &Complete,
    clean: bool,
    out: &mut impl Write,
) -> io::Result<()> {
    let needed = keystore.needed();
    let keys = keystore.state().files().flat_map(|(_, entry)| entry.keys.values());
    let keys = keys.filter(|key| needed.contains(&(key.scope, key.key_version))).count();
    writeln!(out, "keys         {keys} data keys; all their database keys could be unwrapped")?;
    for (scope, count) in unsettled {
        writeln!(
            out,
            "unsettled    {count} data keys in {DIRECTORY}/{}, cut off at a server start and not in the key files. Replay of\n             WAL restores them. If WAL is permanently lost, use: pagevault-keyring restore-unsettled",
            unsettled::name(*scope)
        )?;
    }
    writeln!(
        out,
        "relations    {} files: {} pages encrypted, {} in plaintext, {} empty, {} whose keys were destroyed",
        findings.files, findings.sealed, findings.plaintext, findings.empty, findings.shredded
    )?;
    if findings.full_tags + findings.short_tags > 0 {
        writeln!(
            out,
            "authentic    {} encrypted pages, by tags of 128 bits; {} by tags of 20 bits",
            findings.full_tags, findings.short_tags
        )?;
    }
    writeln!(
        out,
        "WAL          {} pages encrypted, {} in plaintext; {} records",
        findings.wal_sealed, findings.wal_plaintext, findings.records
    )?;
    match complete {
        Complete::Unknown => {
            writeln!(out, "manifest     none: that no file is missing was not checked")?;
        }
        Complete::Started => {
            writeln!(out, "manifest     not compared: a server was started here after the backup")?
        }
        Complete::Unreadable => writeln!(out, "manifest     not compared: it is damaged")?,
        Complete::Compared(manifest) => writeln!(
            out,
            "manifest     compared with {} files and {} ranges of WAL",
            manifest.files.len(),
            manifest.ranges.len()
        )?,
    }
    for damage in &findings.listed {
        writeln!(out, "damaged      {damage}")?;
    }
    let listed = findings.listed.len() as u64;
    if findings.damaged > listed {
        writeln!(out, "             and {} more", findings.damaged - listed)?;
    }
    for file in findings.left_over.iter().take(LISTED) {
        writeln!(
            out,
            "left over    {file}: belongs to no relation; created by a transaction that did not commit"
        )?;
    }
    if findings.left_over.len() > LISTED {
        writeln!(out, "             and {} more", findings.left_over.len() - LISTED)?;
    }
    if findings.undecided > 0 {
        writeln!(
            out,
            "undecided    {} pages in plaintext, in files that WAL encrypts or decrypts: a server that has replayed it\n             refuses those that it does not explain. Verify again then",
            findings.undecided
        )?;
    }
    if findings.skipped > 0 {
        let files = findings.skipped;
        writeln!(out, "skipped      {files} files of unlogged relations, which recovery resets")?;
    }
    if findings.damaged > 0 && !clean {
        writeln!(
            out,
            "             This is a backup, or its server was not shut down cleanly: recovery repairs pages that were\n             being written. Start the server, shut it down, and verify again."
        )?;
    }
    match findings.damaged {
        0 => writeln!(out, "\nNo damage found."),
        count => writeln!(out, "\nDamage found: {count}."),
    }
}
