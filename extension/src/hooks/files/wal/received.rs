//! Plaintext WAL in `pg_wal` that a base backup has brought: `pg_basebackup -X stream` stores what
//! it receives, and the stream is plaintext. It is sealed before the server that was made of the
//! backup begins to replay it.
//!
//! A page that is sealed in its place could be torn by a power cut, partly plaintext and partly
//! not, and WAL would end there. So each segment is written anew, beside the old one, and takes its
//! name when it is on disk. When that is certain, and not before, the old file's bytes are
//! overwritten. Interrupted at any point, the name leads to one of the two complete files, and the
//! next start goes on: until a start has succeeded there is a `backup_label`.
//!
//! If the server dies between the last two steps, plaintext remains in blocks that no file has, as
//! in those of any file that is removed. The same applies to blocks of which the file system or the
//! disk has kept a copy.
//!
//! A page may be sealed under an older key than that of the server that wrote it: the keystore is
//! that of the backup, and later switches are in WAL. Pages say which key they are under.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use pagevault_cipher::{KeyVersion, Lsn, wal};
use pagevault_keystore::wal_pages::{self, WalKeys};
use pagevault_keystore::wal_segments::parse_name;
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::PAGE;
use crate::fault;
use crate::keys::usage::cache;
use crate::keys::usage::wal::{self as keys, ServerKeys};
use crate::pg::report::{Report, Result};
use crate::pg::{control_file, process};

/// The server removes files of this kind itself when it starts (`RemoveTempXlogFiles`, xlog.c).
const UNFINISHED: &str = "xlogtemp.pagevault";

/// Bytes that are read and written at a time.
const CHUNK: usize = 128 * PAGE;

/// What has been sealed.
#[derive(Default)]
struct Done {
    segments: u64,
    pages: u64,
}

/// Why a segment stays as it is.
enum Stopped {
    Io(io::Error),
    /// The page at this address cannot be sealed.
    Key(Lsn),
    /// The new file has the name, and it is not known whether it has it on disk.
    Uncertain(io::Error),
}

impl From<io::Error> for Stopped {
    fn from(error: io::Error) -> Self {
        Stopped::Io(error)
    }
}

/// Seals the plaintext pages of a base backup that are to be encrypted. In the postmaster, or a
/// server for a single user, before there is any process that reads WAL, and when keys are there.
///
/// # Errors
/// If a segment was replaced and that cannot be made durable. Other failures are warned of, and
/// leave plaintext, with which the server works.
pub(crate) fn seal_backup() -> Result<()> {
    if keys::active().is_none() || !control_file::is_of_backup() {
        return Ok(());
    }
    let mut done = Done::default();
    let sealed = seal_all(&process::data_directory().join("pg_wal"), &mut done);
    // This process forks all others.
    cache::wipe();
    if done.segments > 0 {
        let Done { segments, pages } = done;
        Report::new(
            PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION,
            format!(
                "pagevault: encrypted {pages} pages in {segments} WAL segments of the base backup"
            ),
        )
        .send(PgLogLevel::LOG);
    }
    let (path, stopped) = match sealed {
        Ok(()) => return Ok(()),
        Err(stopped) => stopped,
    };
    let cause = match stopped {
        Stopped::Io(error) => format!("{error}."),
        Stopped::Key(address) => format!("The WAL key for the page at {address} is not available."),
        Stopped::Uncertain(error) => {
            return Err(Report::new(
                PgSqlErrorCode::ERRCODE_IO_ERROR,
                format!("could not sync directory \"{}\": {error}", path.display()),
            )
            .detail("WAL segments of the base backup were replaced there by encrypted ones.")
            .hint("Check the disk. If it is not to be trusted, make a new copy."));
        }
    };
    Report::new(
        PgSqlErrorCode::ERRCODE_IO_ERROR,
        format!("could not encrypt WAL segment \"{}\" of the base backup", path.display()),
    )
    .detail(format!("{cause} It and those behind it stay as they are until they are recycled."))
    .send(PgLogLevel::WARNING);
    Ok(())
}

/// Seals segments until one fails, which is returned with the reason.
fn seal_all(directory: &Path, done: &mut Done) -> std::result::Result<(), (PathBuf, Stopped)> {
    let of = |path: &Path| {
        let path = path.to_owned();
        |error: io::Error| (path, Stopped::Io(error))
    };
    let unfinished = directory.join(UNFINISHED);
    remove(&unfinished).map_err(of(&unfinished))?;
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).map_err(of(directory))? {
        let name = entry.map_err(of(directory))?.file_name();
        names.extend(parse_name(name.as_encoded_bytes()).map(|parsed| (name, parsed)));
    }
    names.sort_by(|(a, _), (b, _)| a.cmp(b));
    for (name, parsed) in names {
        let path = directory.join(name);
        let base = parsed.start(process::wal_segment_size());
        // No server makes a file with such a name.
        if base.0.checked_add(process::wal_segment_size()).is_none() {
            continue;
        }
        match seal_segment(directory, &path, &unfinished, base) {
            Ok(0) => {}
            Ok(pages) => {
                done.segments += 1;
                done.pages += pages;
            }
            Err(Stopped::Uncertain(error)) => {
                return Err((directory.to_owned(), Stopped::Uncertain(error)));
            }
            Err(stopped) => {
                // The segment has its name, and is as it was.
                let _ = remove(&unfinished);
                return Err((path, stopped));
            }
        }
    }
    Ok(())
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// Replaces a segment, if it has pages to be sealed; returns their number.
fn seal_segment(
    directory: &Path,
    path: &Path,
    unfinished: &Path,
    base: Lsn,
) -> std::result::Result<u64, Stopped> {
    let old =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
    let metadata = old.metadata()?;
    if !metadata.is_file() {
        return Ok(0);
    }
    // The server reads whole pages of a segment (`XLogPageRead`, xlogrecovery.c). What is behind
    // them is not taken over.
    let size = metadata.len().min(process::wal_segment_size());
    let size = size - size % PAGE as u64;
    let mut chunk = vec![0; CHUNK];
    let is_sealed = |at: u64| ServerKeys.phase_at(Lsn(base.0 + at)).sealed().is_some();
    let cut = size < metadata.len() && (is_sealed(0) || is_sealed(size));
    if !cut && !has_due(&old, size, base, &mut chunk)? {
        return Ok(0);
    }
    let mut new = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(metadata.mode() & 0o777)
        .open(unfinished)?;
    let mut pages = 0;
    for (at, length) in chunks(size) {
        let run = &mut chunk[..length];
        old.read_exact_at(run, at)?;
        for (page, address) in run.chunks_exact_mut(PAGE).zip((base.0 + at..).step_by(PAGE)) {
            let address = Lsn(address);
            let Some(version) = is_due(page, address) else { continue };
            wal_pages::seal(&ServerKeys, page, PAGE, version, address)
                .map_err(|_| Stopped::Key(address))?;
            pages += 1;
        }
        new.write_all(run)?;
    }
    new.sync_all()?;
    fault::point_of("received.written", 0);
    fs::rename(unfinished, path)?;
    fault::point_of("received.renamed", 0);
    // Until this has succeeded, a power cut may bring the old file back.
    match File::open(directory).and_then(|directory| directory.sync_all()) {
        Ok(()) => {}
        // Not possible there, which the server accepts (`fsync_fname_ext`, fd.c).
        Err(error) if matches!(error.raw_os_error(), Some(libc::EBADF | libc::EINVAL)) => {
            return Ok(pages);
        }
        Err(error) => return Err(Stopped::Uncertain(error)),
    }
    fault::point_of("received.replaced", 0);
    // Other names for the old file, such as those in a copy by hard links, are not ours.
    if old.metadata().map_or(true, |metadata| metadata.nlink() > 0) {
        return Ok(pages);
    }
    // The new file is in its place: failures here leave bytes in blocks that are free.
    chunk.fill(0);
    for (at, length) in chunks(metadata.len()) {
        if old.write_all_at(&chunk[..length], at).is_err() {
            break;
        }
    }
    let _ = old.sync_data();
    Ok(pages)
}

/// Offsets and lengths of the pieces in which a file is read.
fn chunks(size: u64) -> impl Iterator<Item = (u64, usize)> {
    (0..size).step_by(CHUNK).map(move |at| (at, CHUNK.min((size - at) as usize)))
}

fn has_due(file: &File, size: u64, base: Lsn, chunk: &mut [u8]) -> io::Result<bool> {
    for (at, length) in chunks(size) {
        let run = &mut chunk[..length];
        file.read_exact_at(run, at)?;
        let mut pages = run.chunks_exact(PAGE).zip((base.0 + at..).step_by(PAGE));
        if pages.any(|(page, address)| is_due(page, Lsn(address)).is_some()) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The version of the key for a page that is plaintext, and should not be. Pages with another
/// address are left over from an earlier use of the file.
fn is_due(page: &[u8], address: Lsn) -> Option<KeyVersion> {
    if wal::address_of(page) != Some(address) || wal::mark_of(page).is_some() {
        return None;
    }
    ServerKeys.phase_at(address).sealed()
}
