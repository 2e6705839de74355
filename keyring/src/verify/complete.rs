//! Whether a base backup is complete: the files that its manifest names are there and have their
//! checksums, there is no other, and its WAL is unbroken.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use pagevault_keystore::{anchor, audit, escrow, manifest_seal};
use serde::Serialize;
use sha2::{Digest, Sha224, Sha256, Sha384, Sha512};

use super::manifest::{self, Algorithm, Listed, Manifest, Range};
use super::runs::Run;
use super::segments::Histories;
use super::{Context, Findings, control, directories, seal};
use crate::failure::{Failure, unreadable};
use crate::offline::DIRECTORY;
use crate::regular::open_regular;
use crate::tablespaces::{self, Tablespace};
use crate::visible::visible;

/// What may be added to a backup, or changed in it (pg_verifybackup.c, `main`), and the seal.
const IGNORED: [&[u8]; 7] = [
    manifest::NAME.as_bytes(),
    manifest_seal::FILE.as_bytes(),
    seal::UNFINISHED.as_bytes(),
    b"pg_wal",
    b"postgresql.auto.conf",
    b"recovery.signal",
    b"standby.signal",
];
/// The command line of the last server start.
pub(super) const OPTIONS: &str = "postmaster.opts";
const WAL: &[u8] = b"pg_wal";
const CHUNK: usize = 128 << 10;

/// How far completeness was checked.
#[derive(Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub(super) enum Complete {
    /// There is no manifest.
    None,
    /// A server was started here after the backup, and has changed files.
    Started,
    /// The manifest is damaged.
    Damaged,
    /// Everything is compared.
    Compared { files: usize, ranges: Vec<Range>, seal: Sealed },
}

/// Whether the manifest is that of the cluster.
#[derive(Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub(super) enum Sealed {
    No,
    Invalid,
    Yes { time: String, key_version: u32 },
}

impl Complete {
    /// WAL that must be there.
    pub(super) fn ranges(&self) -> &[Range] {
        if let Complete::Compared { ranges, .. } = self { ranges } else { &[] }
    }

    pub(super) fn is_sealed(&self) -> bool {
        matches!(self, Complete::Compared { seal: Sealed::Yes { .. }, .. })
    }
}

/// Compares a directory with its manifest, if that is there and no server was started since. `seal`
/// is the content of the seal's file.
pub(super) fn compare(
    context: &Context<'_>,
    seal: Option<&[u8]>,
    progress: &ProgressBar,
    findings: &mut Findings,
) -> Result<Complete, Failure> {
    let root = context.keystore.data_directory();
    let Some(text) = manifest::read(root)? else { return Ok(Complete::None) };
    // No base backup contains this file (basebackup.c, `excludeFiles`), a server writes it first
    // of all (postmaster.c, `CreateOptsFile`), and nothing removes it.
    if root.join(OPTIONS).exists() {
        return Ok(Complete::Started);
    }
    let parsed = Manifest::parse(&text);
    if let Ok(manifest) = &parsed
        && is_stale(root, manifest)
    {
        return Ok(Complete::Started);
    }
    let sealed = match seal {
        Some(seal) => Some(seal::check(seal, &text, context.keystore, context.unlocked)?),
        None => None,
    };
    let manifest = match parsed {
        Ok(manifest) => manifest,
        Err(what) => {
            findings.damage(format!("{}: {what}", manifest::NAME));
            return Ok(Complete::Damaged);
        }
    };
    let seal = match sealed {
        Some(Ok(seal)) => {
            Sealed::Yes { time: seal.time.to_owned(), key_version: seal.version.get() }
        }
        // That of an earlier backup, in a directory of which this is a backup.
        Some(Err(_)) if manifest.files.contains_key(manifest_seal::FILE.as_bytes()) => Sealed::No,
        Some(Err(what)) => {
            findings.damage(format!("{}: {what}", manifest_seal::FILE));
            Sealed::Invalid
        }
        None => Sealed::No,
    };
    drop(text);
    if manifest.system.is_some_and(|system| system != context.control.system) {
        let what = "it is of a cluster with another system identifier";
        findings.damage(format!("{}: {what}", manifest::NAME));
    }
    compare_files(root, context.tablespaces, &manifest, progress, findings)?;
    let Manifest { files, ranges, .. } = manifest;
    Ok(Complete::Compared { files: files.len(), ranges, seal })
}

/// Whether a server was started in a directory since the backup whose manifest is there. The
/// manifest stays, and is in copies that omit [`OPTIONS`]; so is the label that the server has
/// renamed. In a backup of such a server that is of an earlier backup.
pub(super) fn is_stale(root: &Path, manifest: &Manifest) -> bool {
    let start = manifest.ranges.iter().map(|range| range.start).min();
    control::recovered_from(root).zip(start).is_some_and(|(from, start)| from >= start)
}

fn compare_files(
    root: &Path,
    tablespaces: &[Tablespace],
    manifest: &Manifest,
    progress: &ProgressBar,
    findings: &mut Findings,
) -> Result<(), Failure> {
    let mut found = Found::default();
    walk(root, &[], &mut found, findings)?;
    for Tablespace { name, path } in tablespaces {
        let below = [tablespaces::DIRECTORY.as_bytes(), b"/", name.as_bytes()].concat();
        match fs::metadata(path) {
            Ok(target) if target.is_dir() => walk(path, &below, &mut found, findings)?,
            // [`absent`](super::absent) reports it.
            _ if name.to_str().and_then(tablespaces::number).is_some() => {}
            Ok(_) => findings.damage(format!("{}: not a directory", shown(&below))),
            Err(error) => findings.damage(format!("{}: {error}", shown(&below))),
        }
    }
    directories::compare(&found.directories, manifest, findings);
    let Found { files: found, others, .. } = found;
    let bytes = manifest.files.values().fold(0_u64, |sum, file| sum.saturating_add(file.size));
    progress.inc_length(bytes);
    for (path, listed) in manifest.files.iter().filter(|(path, _)| !is_ignored(path)) {
        let what = match found.get(path) {
            None if others.contains(path) => None,
            None => Some("missing"),
            Some(file) => difference(file, listed, progress)?,
        };
        if let Some(what) = what {
            findings.damage(format!("{}: {what}, according to {}", shown(path), manifest::NAME));
        }
    }
    for path in found.keys().filter(|path| !manifest.files.contains_key(*path)) {
        findings.damage(format!("{}: not in {}", shown(path), manifest::NAME));
    }
    Ok(())
}

/// Reports WAL that is missing. `by`: who needs it.
pub(super) fn require_wal(
    ranges: &[Range],
    by: &str,
    runs: &[Run],
    histories: &Histories,
    findings: &mut Findings,
) {
    for range in ranges {
        let serving = runs.iter().filter(|run| run.serves(range, histories));
        let start = serving.filter(|run| run.includes(range.start));
        let Range { timeline, end, .. } = *range;
        match start.map(|run| run.reached).max() {
            Some(reached) if reached >= end => {}
            Some(reached) => findings.damage(format!(
                "WAL of timeline {timeline} ends or is broken at {reached}; {by} needs it up to {end}"
            )),
            None => findings.damage(format!(
                "WAL of timeline {timeline} at {} is missing; {by} needs it up to {end}",
                range.start
            )),
        }
    }
}

pub(super) fn shown(path: &[u8]) -> String {
    visible(&String::from_utf8_lossy(path))
}

/// Whether a file is not compared with the manifest.
pub(super) fn is_ignored(path: &[u8]) -> bool {
    let first = path.split(|byte| *byte == b'/').next();
    // Programs for operators write these.
    let ours = [escrow::RESTORED, audit::TOOLS, anchor::ACCEPTED]
        .map(|name| format!("{DIRECTORY}/{name}"));
    IGNORED.iter().any(|name| *name == path || *name == b"pg_wal" && first == Some(*name))
        || ours.iter().any(|name| name.as_bytes() == path)
}

/// What there is, by paths within the backup.
#[derive(Default)]
struct Found {
    files: BTreeMap<Vec<u8>, PathBuf>,
    directories: BTreeSet<Vec<u8>>,
    /// Links, FIFOs and others, which are reported.
    others: BTreeSet<Vec<u8>>,
}

/// All files and directories in `directory`, which is `below` in the backup, except those in
/// tablespaces. A backup contains no link: the server omits it (`sendDir`, basebackup.c). Where it
/// leads, somebody else may write.
fn walk(
    directory: &Path,
    below: &[u8],
    found: &mut Found,
    findings: &mut Findings,
) -> Result<(), Failure> {
    let failed = |error| unreadable(directory, &error);
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let mut name = below.to_vec();
        if !name.is_empty() {
            name.push(b'/');
        }
        name.extend_from_slice(entry.file_name().as_bytes());
        let kind = entry.file_type().map_err(failed)?;
        if name == WAL
            || below == tablespaces::DIRECTORY.as_bytes() && (kind.is_dir() || kind.is_symlink())
        {
            continue;
        }
        if is_ignored(&name) && (kind.is_file() || kind.is_symlink()) {
            if kind.is_symlink() {
                findings.damage(format!("{}: a link, and not a file", shown(&name)));
            }
        } else if kind.is_dir() {
            walk(&entry.path(), &name, found, findings)?;
            found.directories.insert(name);
        } else if kind.is_file() {
            found.files.insert(name, entry.path());
        } else {
            let what = if kind.is_symlink() { "a link, and " } else { "" };
            findings.damage(format!("{}: {what}not a file or directory", shown(&name)));
            // Reported once.
            found.others.insert(name);
        }
    }
    Ok(())
}

/// How a file differs from what the manifest says.
fn difference(
    path: &Path,
    listed: &Listed,
    progress: &ProgressBar,
) -> Result<Option<&'static str>, Failure> {
    let failed = |error| unreadable(path, &error);
    let mut file = open_regular(path).map_err(failed)?;
    if file.metadata().map_err(failed)?.len() != listed.size {
        return Ok(Some("another size"));
    }
    let Some(expected) = &listed.checksum else { return Ok(None) };
    let sum = match expected.algorithm {
        Algorithm::Crc32c => {
            let mut crc = 0;
            each(&mut file, progress, |bytes| crc = crc32c::crc32c_append(crc, bytes))
                // `pg_checksum_final` writes it as it is in memory.
                .map(|()| crc.to_le_bytes().to_vec())
        }
        Algorithm::Sha224 => hashed::<Sha224>(&mut file, progress),
        Algorithm::Sha256 => hashed::<Sha256>(&mut file, progress),
        Algorithm::Sha384 => hashed::<Sha384>(&mut file, progress),
        Algorithm::Sha512 => hashed::<Sha512>(&mut file, progress),
    };
    let is_same = sum.map_err(failed)? == expected.value;
    Ok(if is_same { None } else { Some("another checksum") })
}

fn hashed<D: Digest>(file: &mut fs::File, progress: &ProgressBar) -> io::Result<Vec<u8>> {
    let mut hash = D::new();
    each(file, progress, |bytes| hash.update(bytes))?;
    Ok(hash.finalize().to_vec())
}

fn each(file: &mut fs::File, progress: &ProgressBar, mut f: impl FnMut(&[u8])) -> io::Result<()> {
    let mut bytes = vec![0; CHUNK];
    loop {
        match file.read(&mut bytes)? {
            0 => return Ok(()),
            length => f(&bytes[..length]),
        }
        progress.inc(CHUNK as u64);
    }
}
