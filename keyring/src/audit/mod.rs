//! `pagevault-keyring audit verify`: whether lines of the audit trail were forged, changed or
//! removed.
//!
//! The files may contain anything: sizes are limited, no line is trusted that neither its MAC nor a
//! line with a MAC proves, and messages show only where a line is, never its text.

mod chain;
mod find;
pub(crate) mod tools;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use pagevault_cipher::KeyVersion;
use pagevault_keystore::Scope;
use pagevault_keystore::audit::{AuditKey, Line, Noted, STATE, TOOLS, newest};

pub(crate) use self::chain::Accepted;
use self::chain::{Chain, Finding, Note, Spot, TooMany, Verdict, name};
use crate::access::{Access, read_trusted};
use crate::failure::{Failure, refuse, unprintable, unreadable};
use crate::offline::{DIRECTORY, Keystore};
use crate::options::printable;
use crate::regular::open_regular;
use crate::trust::FileKind;

/// Maximum number of findings that are listed; more are counted.
const LISTED: usize = 100;
/// MACs are made with the cluster's database key.
const SCOPE: Scope = Scope::CLUSTER;

/// The cluster to which the trail belongs.
pub struct Cluster<'a> {
    /// The data directory, or a copy of its keystore.
    pub data_directory: &'a Path,
    /// How its providers may be reached.
    pub access: Access,
}

/// Verifies the trail in these files and prints the result. True if there are no findings. Without
/// a cluster there are no keys; then only the hashes are verified.
///
/// # Errors
/// If a file cannot be read or a key cannot be unwrapped.
pub fn verify(
    files: &[PathBuf],
    cluster: Option<Cluster<'_>>,
    out: &mut impl Write,
) -> Result<bool, Failure> {
    accepted(files, cluster, out).map(|(well, _)| well)
}

/// As [`verify`]; returns also the lines that the server has written. Any role can put texts into
/// a log that look like others.
///
/// # Errors
/// Those of [`verify`].
pub(crate) fn accepted(
    files: &[PathBuf],
    cluster: Option<Cluster<'_>>,
    out: &mut impl Write,
) -> Result<(bool, Accepted), Failure> {
    let Some(Cluster { data_directory, access }) = cluster else {
        let verdict = check(files, None, None, None)?;
        report("the audit trail", files, &verdict, out).map_err(unprintable)?;
        writeln!(out, "MACs were not verified: specify the data directory with -D.")
            .map_err(unprintable)?;
        return Ok((verdict.findings.is_empty(), verdict.accepted));
    };
    let keystore = Keystore::read(data_directory, access)?;
    let folder = keystore.data_directory().join(DIRECTORY);
    // Read before the files, so that lines which the server writes meanwhile do not count as
    // missing.
    let noted = noted(&folder, keystore.file_kind())?;
    let last = noted.as_ref().and_then(|noted| Some((Line::parse(&noted.text)?, noted.written)));
    let keys = keys(&keystore)?;
    let newest = last.as_ref().map(|(line, written)| (line, *written));
    let verdict = check(files, Some(&keys), newest, None)?;
    report("the audit trail", files, &verdict, out).map_err(unprintable)?;
    let (mut well, accepted) = (verdict.findings.is_empty(), verdict.accepted);
    if noted.is_none() {
        writeln!(
            out,
            "  The keystore's file {STATE} is missing or damaged: missing lines at the end cannot be detected."
        )
        .map_err(unprintable)?;
        well = false;
    }
    let own = [folder.join(TOOLS)];
    if fs::symlink_metadata(&own[0]).is_ok() {
        // A file that is not of this program is read as it is.
        let size = tools::size_of_lines(&own[0]).ok().flatten();
        let verdict = check(&own, Some(&keys), None, size)?;
        report("pagevault-keyring's own audit trail", &own, &verdict, out).map_err(unprintable)?;
        if size.is_some() {
            writeln!(
                out,
                "  The last line of {TOOLS} is incomplete and was left out: a command was interrupted while it wrote it, or is writing it."
            )
            .map_err(unprintable)?;
        }
        well &= verdict.findings.is_empty();
    }
    Ok((well, accepted))
}

/// The newest line according to the server's state file.
fn noted(folder: &Path, kind: FileKind) -> Result<Option<Noted>, Failure> {
    let path = folder.join(STATE);
    if fs::symlink_metadata(&path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return Ok(None);
    }
    Ok(newest(&read_trusted(kind, &path)?))
}

/// The MAC keys for all versions of the cluster's database key.
fn keys(keystore: &Keystore) -> Result<BTreeMap<KeyVersion, AuditKey>, Failure> {
    let versions = keystore.state().database_keys().filter(|(scope, _, _)| *scope == SCOPE);
    let wanted: BTreeSet<_> = versions.map(|(scope, version, _)| (scope, version)).collect();
    let unlocked = keystore.unlock(&wanted)?;
    let keys = unlocked.iter().map(|(_, version, key)| {
        (version, AuditKey::derive(key.expose(), &keystore.id(), version))
    });
    Ok(keys.collect())
}

/// Calls `found` for each text in these files that looks like a line of the trail. Anybody may have
/// written them: see [`accepted`].
///
/// # Errors
/// If a file cannot be read.
pub(crate) fn each_candidate(
    files: &[PathBuf],
    mut found: impl FnMut(&str),
) -> Result<(), Failure> {
    for path in files {
        let opened = open_regular(path).map_err(|error| unreadable(path, &error))?;
        find::lines(&mut BufReader::new(opened), |_, candidates| {
            candidates.iter().for_each(|candidate| found(candidate));
            Ok(())
        })
        .map_err(|error| unreadable(path, &error))?;
    }
    Ok(())
}

/// Verifies the lines of these files, or of their beginnings of this size.
fn check(
    files: &[PathBuf],
    keys: Option<&BTreeMap<KeyVersion, AuditKey>>,
    last: Option<(&Line<'_>, bool)>,
    size: Option<u64>,
) -> Result<Verdict, Failure> {
    let mut chain = Chain::new(keys);
    for (file, path) in files.iter().enumerate() {
        let opened = open_regular(path).map_err(|error| unreadable(path, &error))?;
        let mut too_many = false;
        let opened = opened.take(size.unwrap_or(u64::MAX));
        find::lines(&mut BufReader::new(opened), |number, candidates| {
            chain.add((file, number), candidates).map_err(|TooMany| {
                too_many = true;
                io::Error::other("it contains too many audit lines")
            })
        })
        .map_err(|error| match too_many {
            true => refuse(format!("\"{}\": {error}", path.display()))
                .with_hint("Verify fewer files at a time. If one has so many, a role may have logged most of them: any can log lines that look so. Lines that go to a file of their own (pagevault.audit_destination) are not mixed with such."),
            false => unreadable(path, &error),
        })?;
    }
    Ok(chain.conclude(last))
}

fn report(
    what: &str,
    files: &[PathBuf],
    verdict: &Verdict,
    out: &mut impl Write,
) -> io::Result<()> {
    let Verdict { runs, with_mac, without_mac, findings, more_forged, notes, accepted: _ } =
        verdict;
    let count = findings.len() as u64 + more_forged;
    writeln!(
        out,
        "Lines of {what}: {with_mac} with a MAC, {without_mac} confirmed without a MAC; runs: {runs}."
    )?;
    for note in notes {
        writeln!(out, "  {}", note_text(note))?;
    }
    // Forged lines, which any role can log, must not hide missing ones.
    let mut listed: Vec<_> = findings.iter().collect();
    listed.sort_by_key(|finding| matches!(finding, Finding::Forged(..)));
    listed.truncate(LISTED);
    for finding in &listed {
        writeln!(out, "  {}", finding_text(finding, files))?;
    }
    let more = count - listed.len() as u64;
    if more > 0 {
        writeln!(out, "  and {more} more")?;
    }
    match count {
        0 => writeln!(out, "Nothing is missing, changed or forged."),
        count => writeln!(out, "Problems found: {count}."),
    }
}

fn note_text(note: &Note) -> String {
    match note {
        Note::Begins { run, seq } => {
            format!(
                "the trail begins with line {seq} of run {}; earlier lines are not in these files",
                name(run)
            )
        }
        Note::Branches { run, before, seq, last } => format!(
            "run {} continues after line {seq} of run {}, which has {last} lines: one of them is from a copy or a restored backup",
            name(run),
            name(before)
        ),
        Note::Unwritten { run, seq } => format!(
            "line {seq} of run {} is recorded in {STATE}, but not written yet: the server writes it at its next start at the latest",
            name(run)
        ),
    }
}

fn finding_text(finding: &Finding, files: &[PathBuf]) -> String {
    let place = |(file, line): &Spot| {
        let path = files.get(*file).map_or(String::new(), |path| path.display().to_string());
        format!("{}:{line}", printable(&path))
    };
    match finding {
        Finding::Forged(spot, why) => format!("{}: forged or changed: {why}", place(spot)),
        Finding::Missing { run, from, to } if from == to => {
            format!("missing: line {from} of run {}", name(run))
        }
        Finding::Missing { run, from, to } => {
            format!("missing: lines {from} to {to} of run {}", name(run))
        }
        Finding::Reordered { spot, run, seq } => {
            format!(
                "{}: line {seq} of run {} is out of order: it follows a later line",
                place(spot),
                name(run)
            )
        }
        Finding::Torn { run, seq } => format!(
            "line {seq} of run {} was changed: the next line contains the hash of a different line",
            name(run)
        ),
        Finding::Unconnected { run } => format!(
            "run {} has no link to an earlier run: the file {STATE} was lost, or the run belongs to another cluster",
            name(run)
        ),
        Finding::NoRunBefore { run, before, seq } => {
            format!("missing: run {} with {seq} lines, before run {}", name(before), name(run))
        }
    }
}
