//! `pagevault-keyring inspect`: shows what files contain that can be read without keys. Their
//! content is shown as text without line breaks.

use std::fmt::Display;
use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use pagevault_cipher::page::{self, PAGE_SIZE};
use pagevault_cipher::{Lsn, wal};
use pagevault_keystore::given_up::{self, GivenUp};
use pagevault_keystore::log::{self, unsettled};
use pagevault_keystore::{Scope, batch};

use crate::failure::{Failure, unreadable};
use crate::offline::DIRECTORY;
use crate::options::printable;
use crate::regular::{open_regular, read_regular};
use crate::verify::{fill, relation_file, wal_segment};

/// Maximum size of a segment in bytes, for WAL (`WalSegMaxSize`, xlog_internal.h) and relations
/// (`RELSEG_SIZE`).
const LARGEST_SEGMENT: u64 = 1 << 30;

/// Describes each file; for a data directory, its key files.
///
/// # Errors
/// If a file cannot be read.
pub fn inspect(paths: &[PathBuf], out: &mut impl Write) -> Result<(), Failure> {
    for path in paths {
        if path.is_dir() {
            for file in key_files(path)? {
                inspect_file(&file, out)?;
            }
        } else {
            inspect_file(path, out)?;
        }
    }
    Ok(())
}

/// The key files of a data directory, or of a keystore.
fn key_files(path: &Path) -> Result<Vec<PathBuf>, Failure> {
    let inside = path.join(DIRECTORY);
    let directory = if inside.is_dir() { inside } else { path.to_owned() };
    let entries = fs::read_dir(&directory).map_err(|error| unreadable(&directory, &error))?;
    let mut files = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|error| unreadable(&directory, &error))?;
        let is_one = |name: &str| {
            log::scope_of(name).or(unsettled::scope_of(name)).is_some() || name == given_up::NAME
        };
        if entry.file_name().to_str().is_some_and(is_one) {
            files.push(entry.path());
        }
    }
    files.sort();
    Ok(files)
}

fn inspect_file(path: &Path, out: &mut impl Write) -> Result<(), Failure> {
    let failed = |error: io::Error| unreadable(path, &error);
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let length = fs::metadata(path).map_err(failed)?.len();
    writeln!(out, "{}: {length} bytes", printable(&path.display().to_string())).map_err(failed)?;
    if let Some(scope) = log::scope_of(&name).or(unsettled::scope_of(&name)) {
        if unsettled::scope_of(&name).is_some() {
            writeln!(out, "  records cut off at a server start, kept until recovery ends:")
                .map_err(failed)?;
        }
        let bytes = read_regular(path, log::MAX_LOG).map_err(failed)?;
        key_log(&bytes, scope, out).map_err(failed)
    } else if name == given_up::NAME {
        let bytes = read_regular(path, given_up::LIMIT).map_err(failed)?;
        groups_given_up(&bytes, out).map_err(failed)
    } else if wal_segment(name.strip_suffix(".partial").unwrap_or(&name)) {
        pages(path, wal_state, out).map_err(failed)
    } else if relation_file(&name) {
        pages(path, relation_state, out).map_err(failed)
    } else {
        writeln!(out, "  neither a key file, a WAL segment nor a relation file").map_err(failed)
    }
}

/// Key groups that were destroyed while the server was down.
fn groups_given_up(bytes: &[u8], out: &mut impl Write) -> io::Result<()> {
    let given_up = match GivenUp::decode(bytes) {
        Ok(given_up) => given_up,
        Err(error) => return writeln!(out, "  damaged: {error}"),
    };
    let id = u128::from_be_bytes(given_up.keystore);
    writeln!(
        out,
        "  key groups given up, which the server has not logged yet, keystore {id:032x}"
    )?;
    for record in given_up.records() {
        writeln!(out, "  {}", printable(&batch::describe(&record)))?;
    }
    Ok(())
}

/// Header and records of a key file.
fn key_log(bytes: &[u8], scope: Scope, out: &mut impl Write) -> io::Result<()> {
    let contents = match log::replay(bytes, scope) {
        Ok(contents) => contents,
        Err(error) => return writeln!(out, "  damaged: {error}"),
    };
    let position = contents.position;
    let id = u128::from_be_bytes(position.keystore_id);
    let whose = scope.name();
    writeln!(out, "  key file of {whose}, format {}, keystore {id:032x}", log::VERSION)?;
    writeln!(
        out,
        "  rewritten {} times, {} of {} bytes known to be durable, {} bytes of an unfinished write",
        position.generation, position.settled, position.end, contents.torn
    )?;
    for record in &contents.records {
        writeln!(out, "  {}", printable(&batch::describe(record)))?;
    }
    Ok(())
}

fn relation_state(page: &[u8; PAGE_SIZE], _at: u64) -> String {
    match page::version_of(page) {
        _ if page::is_zero(page) => "empty".to_owned(),
        Some(version) => format!("encrypted, data key version {version}"),
        None => "plaintext".to_owned(),
    }
}

fn wal_state(page: &[u8; PAGE_SIZE], at: u64) -> String {
    let address = wal::address_of(page).unwrap_or(Lsn::INVALID);
    if wal::is_zero(page) {
        return "empty".to_owned();
    }
    // The smallest WAL segment has 1 MB.
    if address.offset_in(1 << 20) != at % (1 << 20) {
        return "left over from an earlier use of the file".to_owned();
    }
    match wal::mark_of(page) {
        Some(mark) => format!("encrypted, WAL key version {}", mark.get()),
        None => "plaintext".to_owned(),
    }
}

/// Prints runs of pages with the same state.
fn pages(
    path: &Path,
    state: impl Fn(&[u8; PAGE_SIZE], u64) -> String,
    out: &mut impl Write,
) -> io::Result<()> {
    let file = open_regular(path)?;
    let more = file.metadata()?.len().saturating_sub(LARGEST_SEGMENT);
    let mut input = file.take(LARGEST_SEGMENT);
    let mut page = [0; PAGE_SIZE];
    let mut run: Option<(u64, String)> = None;
    let mut block = 0;
    loop {
        let length = fill(&mut input, &mut page)?;
        let now = match length {
            PAGE_SIZE => Some(state(&page, block * PAGE_SIZE as u64)),
            _ => None,
        };
        if let Some((from, before)) =
            run.as_ref().filter(|(_, before)| Some(before) != now.as_ref())
        {
            show(out, *from, block - 1, before)?;
            run = None;
        }
        match now {
            Some(now) => run = run.or(Some((block, now))),
            None if length > 0 => {
                return writeln!(out, "  and {length} bytes of an incomplete page");
            }
            None if more > 0 => {
                return writeln!(out, "  and {more} bytes more than the maximum size of a segment");
            }
            None => return Ok(()),
        }
        block += 1;
    }
}

fn show(out: &mut impl Write, from: u64, to: u64, what: &dyn Display) -> io::Result<()> {
    if from == to {
        writeln!(out, "  page {from}: {what}")
    } else {
        writeln!(out, "  pages {from} to {to}: {what}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(name: &str, bytes: &[u8]) -> String {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(name);
        fs::write(&path, bytes).unwrap();
        let mut out = Vec::new();
        inspect(&[path], &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        text.lines().skip(1).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn pages_are_listed_in_runs() {
        let mut bytes = vec![0; 4 * PAGE_SIZE + 7];
        bytes[PAGE_SIZE + 10..PAGE_SIZE + 12].copy_from_slice(&(3_u16 << 3).to_le_bytes());
        bytes[2 * PAGE_SIZE] = 1;
        bytes[3 * PAGE_SIZE] = 1;
        assert_eq!(
            shown("16384", &bytes),
            "  page 0: empty\n  page 1: encrypted, data key version 3\n  pages 2 to 3: plaintext\n  and 7 bytes of an incomplete page"
        );
    }

    #[test]
    fn files_may_contain_anything() {
        let noise: Vec<u8> =
            (0..60_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        for name in ["cluster.keys", "5.keys", "1_fsm", "000000010000000000000001", "other"] {
            for length in [0, 1, 39, 40, 41, 8191, 8192, 60_000] {
                shown(name, &noise[..length]);
            }
        }
        assert!(shown("cluster.keys", &noise).contains("damaged"));
        assert!(shown("other", &noise).contains("neither"));
    }
}
