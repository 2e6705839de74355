//! Relation files in the file system.

use std::fs::File;
use std::io::{BufReader, ErrorKind, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use pagevault_cipher::checksum::page_checksum;
use pagevault_cipher::page::{HEADER_SIZE, PAGE_SIZE, Page};
use pagevault_keystore::RelFile;
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::{ForkNumber, RELSEG_SIZE};
use zeroize::Zeroizing;

use super::compat::relation_path;
use super::process;
use super::report::{Report, Result, code_of};

/// `DEFAULTTABLESPACE_OID` (pg_tablespace_d.h)
const DEFAULT_TABLESPACE: u32 = 1663;

/// `pd_checksum` in a page header (bufpage.h).
const CHECKSUM: std::ops::Range<usize> = 8..10;

/// False if the file does not exist: keys of dropped relations are kept, but need not be copied.
/// True if that cannot be determined.
pub(crate) fn may_exist(file: RelFile) -> bool {
    exists(file).unwrap_or(true)
}

/// Whether the file exists.
///
/// # Errors
/// If that cannot be determined, e.g. without permission for a directory, or after an I/O error.
pub(crate) fn exists(file: RelFile) -> Result<bool> {
    let path = relation_path(file, ForkNumber::MAIN_FORKNUM);
    Path::new(&path).try_exists().map_err(|error| {
        Report::new(
            PgSqlErrorCode::ERRCODE_IO_ERROR,
            format!("could not look for relation file \"{path}\": {error}"),
        )
        .detail("So it is not known whether it is gone. Nothing was changed.")
    })
}

/// False if no fork of the file exists. True if that cannot be determined.
pub(crate) fn may_have_any_fork(file: RelFile) -> bool {
    let may_exist = |fork| Path::new(&relation_path(file, fork)).try_exists().unwrap_or(true);
    (ForkNumber::MAIN_FORKNUM..=ForkNumber::INIT_FORKNUM).any(may_exist)
}

/// Tablespaces that files of a database can be in.
///
/// # Errors
/// If they cannot be listed. Where a file is, decides about its keys.
pub(crate) fn tablespaces() -> Result<Vec<u32>> {
    let list = || -> std::io::Result<Vec<u32>> {
        let mut found = vec![DEFAULT_TABLESPACE];
        for entry in std::fs::read_dir("pg_tblspc")? {
            found.extend(entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
        }
        Ok(found)
    };
    list().map_err(|error| {
        let message = format!("could not read directory \"pg_tblspc\": {error}");
        Report::new(code_of(&error), message)
            .detail("So it is not known where files with keys are. Nothing was changed.")
    })
}

/// Files with the number of this one in others of these tablespaces.
pub(crate) fn elsewhere(file: RelFile, tablespaces: &[u32]) -> impl Iterator<Item = RelFile> {
    let all = tablespaces.iter().map(move |&tablespace| RelFile { tablespace, ..file });
    all.filter(move |other| *other != file)
}

/// Whether the file is in a tablespace whose file system seems not to be mounted: all its files
/// would seem to be gone, with their pages.
pub(crate) fn is_away(file: RelFile) -> bool {
    let path = relation_path(file, ForkNumber::MAIN_FORKNUM);
    // pg_tblspc/16388/PG_15_202209061/5/16470
    let mut above = Path::new(&path).ancestors().skip(2);
    let (Some(of_all), Some(link)) = (above.next(), above.next()) else { return false };
    let is_dropped =
        || link.symlink_metadata().is_err_and(|error| error.kind() == ErrorKind::NotFound);
    link.starts_with("pg_tblspc") && !of_all.is_dir() && !is_dropped()
}

/// The first page of the main fork, if it can be read.
pub(crate) fn first_page(file: RelFile) -> Option<Box<Page>> {
    let mut page = Box::new([0; PAGE_SIZE]);
    let mut file = File::open(relation_path(file, ForkNumber::MAIN_FORKNUM)).ok()?;
    file.read_exact(page.as_mut_slice()).ok().map(|()| page)
}

/// Whether a page on disk, in any fork, is such a one. True if that cannot be determined. Outside
/// of recovery a process that is told to stop does so.
pub(crate) fn any_page(file: RelFile, is_it: impl Fn(&Page) -> bool) -> bool {
    let forks = ForkNumber::MAIN_FORKNUM..=ForkNumber::INIT_FORKNUM;
    forks.into_iter().any(|fork| {
        let path = relation_path(file, fork);
        any_page_of_fork(&path, &is_it).unwrap_or(true)
    })
}

/// Calls `f` with each page of a fork on disk, in order.
pub(crate) fn each_page(
    file: RelFile,
    fork: ForkNumber::Type,
    mut f: impl FnMut(&Page),
) -> std::io::Result<()> {
    let f = std::cell::RefCell::new(&mut f);
    any_page_of_fork(&relation_path(file, fork), &|page: &Page| {
        (f.borrow_mut())(page);
        false
    })
    .map(drop)
}

fn any_page_of_fork(path: &str, is_it: &impl Fn(&Page) -> bool) -> std::io::Result<bool> {
    for segment in 0_u32.. {
        let file = match segment {
            0 => File::open(path),
            _ => File::open(format!("{path}.{segment}")),
        };
        let mut file = match file {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            file => BufReader::with_capacity(64 * PAGE_SIZE, file?),
        };
        let mut page = [0; PAGE_SIZE];
        for read in 0_u32.. {
            if read.is_multiple_of(64) && !process::in_recovery() {
                process::check_for_interrupts();
                if process::is_told_to_stop() {
                    return Err(ErrorKind::Interrupted.into());
                }
            }
            match file.read_exact(&mut page) {
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => break,
                read => read?,
            }
            if is_it(&page) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Whether a file has no page in any fork; false if that cannot be determined. A page in shared
/// buffers has its place in the file, since the file was extended for it.
pub(crate) fn is_empty(file: RelFile) -> bool {
    let has_no_page = |fork| match std::fs::metadata(relation_path(file, fork)) {
        Ok(found) => found.len() == 0,
        Err(error) => error.kind() == ErrorKind::NotFound,
    };
    (ForkNumber::MAIN_FORKNUM..=ForkNumber::INIT_FORKNUM).all(has_no_page)
}

/// Overwrites pages on disk, chosen by their headers: pages of maps with zeros, all but the headers
/// of others, which get a checksum that programs for backups accept. Nobody uses the file, and none
/// of its pages is in shared buffers.
pub(crate) fn overwrite(file: RelFile, is_meant: impl Fn(&[u8]) -> bool) -> Result<()> {
    each_segment(file, |segment, fork, first_block| {
        let is_map = matches!(fork, ForkNumber::FSM_FORKNUM | ForkNumber::VISIBILITYMAP_FORKNUM);
        overwrite_segment(segment, first_block, is_map, &is_meant)
    })
}

/// Changes whole pages on disk: `change` gets each with its fork and block, and says whether it is
/// to be written. Nobody uses the file, and none of its pages is in shared buffers.
pub(crate) fn change_pages(
    file: RelFile,
    mut change: impl FnMut(ForkNumber::Type, u32, &mut Page) -> std::io::Result<bool>,
) -> Result<()> {
    each_segment(file, |segment, fork, first_block| {
        let mut page = Zeroizing::new([0; PAGE_SIZE]);
        let whole = segment.metadata()?.len() / PAGE_SIZE as u64;
        for (block, at) in (first_block..).zip(0..whole) {
            segment.read_exact_at(page.as_mut_slice(), at * PAGE_SIZE as u64)?;
            if change(fork, block, &mut page)? {
                segment.write_all_at(page.as_slice(), at * PAGE_SIZE as u64)?;
            }
        }
        Ok(())
    })
}

/// Calls `f` with each segment of each fork, with the fork and the first block, and makes durable
/// what it writes.
fn each_segment(
    file: RelFile,
    mut f: impl FnMut(&File, ForkNumber::Type, u32) -> std::io::Result<()>,
) -> Result<()> {
    for fork in ForkNumber::MAIN_FORKNUM..=ForkNumber::INIT_FORKNUM {
        let first = relation_path(file, fork);
        for number in 0.. {
            let path = if number == 0 { first.clone() } else { format!("{first}.{number}") };
            let segment = match File::options().read(true).write(true).open(&path) {
                Ok(segment) => segment,
                Err(error) if error.kind() == ErrorKind::NotFound => break,
                Err(error) => return Err(not_written(&path, &error)),
            };
            f(&segment, fork, number * RELSEG_SIZE)
                .and_then(|()| segment.sync_all())
                .map_err(|error| not_written(&path, &error))?;
        }
    }
    Ok(())
}

fn overwrite_segment(
    segment: &File,
    first_block: u32,
    is_map: bool,
    is_meant: impl Fn(&[u8]) -> bool,
) -> std::io::Result<()> {
    let length = segment.metadata()?.len();
    for (block, offset) in (first_block..).zip((0..length).step_by(PAGE_SIZE)) {
        let size = (length - offset).min(PAGE_SIZE as u64) as usize;
        if size < HEADER_SIZE {
            break;
        }
        let mut page = [0; PAGE_SIZE];
        segment.read_exact_at(&mut page[..HEADER_SIZE], offset)?;
        if !is_meant(&page[..HEADER_SIZE]) {
            continue;
        }
        // The part of a page that fitted on a full disk is no page to PostgreSQL.
        if size < PAGE_SIZE || is_map {
            page.fill(0);
        } else if process::data_checksums() {
            let checksum = page_checksum(&page, block);
            page[CHECKSUM].copy_from_slice(&checksum.to_le_bytes());
        }
        segment.write_all_at(&page[..size], offset)?;
    }
    Ok(())
}

fn not_written(path: &str, error: &std::io::Error) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_IO_ERROR,
        format!("could not write file \"{path}\": {error}"),
    )
}

/// Makes the kernel read a part of a file ahead.
pub(crate) fn will_be_read(file: &File, offset: i64, length: i64) {
    // SAFETY: advice about an open descriptor; its result has no effect on us.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), offset, length, libc::POSIX_FADV_WILLNEED) };
}
