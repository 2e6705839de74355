//! Verification of all pages and records of WAL.
//!
//! Records are read from the first page whose beginning is present, across pages and segments, as
//! `XLogReadRecord` (xlogreader.c) does. WAL ends where no page with the expected address follows.
//! An incomplete record there was being written, if it is after the last checkpoint's record. WAL
//! before that was on disk (`CreateCheckPoint`, xlog.c).

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use pagevault_cipher::residue::without_trace;
use pagevault_cipher::wal::{address_of, is_zero, mark_of, timeline_of};
use pagevault_cipher::{KeyVersion, Lsn, PageKey};
use pagevault_keystore::wal::{WalPhase, key_place, stretch_at};
use pagevault_keystore::wal_pages::{self, WalKeys};
use pagevault_keystore::wal_segments::{Name, parse_name};
use pagevault_keystore::wal_timelines::{history_name, owner_of};

use super::blocks::blocks_of;
use super::key_records::{self, HEADER, files_concerned};
use super::manifest::Range;
use super::pages::fill;
use super::{Context, Findings};
use crate::failure::{Failure, unreadable};
use crate::regular::{open_regular, read_if_there};

const PAGE: usize = 8192;
/// `SizeOfXLogShortPHD`, `SizeOfXLogLongPHD`, `XLP_LONG_HEADER`.
const SHORT_HEADER: usize = 24;
const LONG_HEADER: usize = 40;
const HAS_LONG_HEADER: u8 = 0x02;
/// `XLP_FIRST_IS_OVERWRITE_CONTRECORD`
const OVERWRITES: u8 = 0x08;
/// Offset of the CRC.
const RECORD_CRC: usize = 20;
/// `RM_XLOG_ID` and `XLOG_SWITCH`.
const XLOG: u8 = 0;
const SWITCH: u8 = 0x40;
/// Maximum size of a record (`XLogRecordMaxSize`, 1020 MB).
const MAX_RECORD: usize = 1020 << 20;

/// Maximum size of a history file in bytes; it has a line of some 100 bytes for each earlier
/// timeline.
const MAX_HISTORY: u64 = 16 << 20;

/// A file in `pg_wal`.
pub(super) struct Segment {
    pub(super) path: PathBuf,
    name: Name,
}

/// All segments in a directory, by timeline and address.
pub(super) fn segments(directory: &Path) -> Result<Vec<Segment>, Failure> {
    let entries = std::fs::read_dir(directory).map_err(|error| unreadable(directory, &error))?;
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|error| unreadable(directory, &error))?;
        let name = entry.file_name().into_string().unwrap_or_default();
        if let Some(name) = parse_name(name.as_bytes()) {
            found.push(Segment { path: entry.path(), name });
        }
    }
    found.sort_by_key(|segment| (segment.name.timeline, segment.name.number));
    Ok(found)
}

/// Segments of an archive that have WAL of these ranges, and are not among `segments`.
pub(super) fn archived(
    segments: &[Segment],
    archive: &Path,
    ranges: &[Range],
    size: u64,
) -> Result<Vec<Segment>, Failure> {
    let mut archived = self::segments(archive)?;
    archived.retain(|segment| {
        let Lsn(start) = segment.name.start(size);
        let holds =
            |range: &Range| start < range.end.0 && range.start.0 < start.saturating_add(size);
        ranges.iter().any(holds) && segments.iter().all(|other| other.name != segment.name)
    });
    Ok(archived)
}

/// All of them, by timeline and address.
pub(super) fn merged(mut segments: Vec<Segment>, mut others: Vec<Segment>) -> Vec<Segment> {
    segments.append(&mut others);
    segments.sort_by_key(|segment| (segment.name.timeline, segment.name.number));
    segments
}

/// WAL without a gap.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    /// The timeline of its segments.
    pub(super) timeline: u32,
    /// The beginning of the first record.
    first: Lsn,
    /// The end of the last record; after a switch, that of the segment.
    pub(super) reached: Lsn,
}

impl Run {
    /// Whether a record that begins at `began` is the next one: immediately, or after the header of
    /// a page.
    fn follows(&self, began: Lsn) -> bool {
        let Lsn(reached) = self.reached;
        let header = match reached {
            _ if !reached.is_multiple_of(PAGE as u64) => return began == self.reached,
            _ if began.0 - reached.min(began.0) == LONG_HEADER as u64 => LONG_HEADER,
            _ => SHORT_HEADER,
        };
        began == self.reached + header as u64
    }

    /// Whether it has the record at `address`; or, if a page begins there, after the page's header.
    pub(super) fn includes(&self, address: Lsn) -> bool {
        let header = if address.0.is_multiple_of(PAGE as u64) { LONG_HEADER } else { 0 };
        self.first <= address + header as u64 && address <= self.reached
    }
}

struct Keys<'a> {
    context: &'a Context<'a>,
    keys: BTreeMap<KeyVersion, PageKey>,
}

struct NoKey;

impl WalKeys for Keys<'_> {
    type Error = NoKey;

    fn phase_at(&self, address: Lsn) -> WalPhase {
        stretch_at(self.context.keystore.state().wal_switches(), address).phase
    }

    fn with_key<R>(&self, version: KeyVersion, f: impl FnOnce(&PageKey) -> R) -> Result<R, NoKey> {
        self.keys.get(&version).map(f).ok_or(NoKey)
    }
}

/// Decrypts all pages of all segments, and checks all records. Returns what follows without a gap.
pub(super) fn verify(
    context: &Context<'_>,
    segments: &[Segment],
    progress: &ProgressBar,
    findings: &mut Findings,
) -> Result<Vec<Run>, Failure> {
    let mut keys = Keys { context, keys: BTreeMap::new() };
    for (version, record) in context.keystore.wal_keys() {
        let (file, data_key_version) = key_place(version);
        let unwrapped = without_trace(|| {
            let key = context.unlocked.data_key(file, data_key_version, record)?;
            keys.keys.insert(version, PageKey::new(&key));
            Some(())
        });
        if unwrapped.is_none() {
            findings.damage(format!("WAL key version {version} cannot be unwrapped"));
        }
    }
    let size = context.control.segment;
    let mut runs = Vec::new();
    let mut reader = Reader { redo: context.control.redo, size, ..Reader::default() };
    let mut timeline = 0;
    // For skipping WAL that the server would not read: a timeline's segments after the point where
    // the next timeline begins.
    let history = history(segments, context.control.timeline)?;
    // Without a history file all segments count.
    let newest = if history.is_empty() { 0 } else { context.control.timeline };
    let mut page = [0; PAGE];
    for segment in segments {
        if timeline != segment.name.timeline {
            timeline = segment.name.timeline;
            runs.append(&mut reader.runs);
            reader = Reader { redo: context.control.redo, size, timeline, ..Reader::default() };
            if timeline == context.control.timeline {
                reader.on_disk = context.control.checkpoint.unwrap_or(Lsn::INVALID);
            }
        }
        let Lsn(base) = segment.name.start(size);
        let failed = |error| unreadable(&segment.path, &error);
        let mut input = open_regular(&segment.path).map_err(failed)?;
        for address in (base..base.saturating_add(size)).step_by(PAGE).map(Lsn) {
            let length = fill(&mut input, &mut page).map_err(failed)?;
            progress.inc(length as u64);
            let of = timeline_of(&page).unwrap_or(0);
            let is_left_over = || of < owner_of(&history, newest, address);
            if length < PAGE
                || is_zero(&page)
                || address_of(&page) != Some(address)
                || is_left_over()
            {
                // Never written, or left over from an earlier use of the file or from a parent
                // timeline.
                reader.mark_incomplete();
                reader.end(findings);
                if length < PAGE {
                    break;
                }
                continue;
            }
            match mark_of(&page) {
                Some(_) => findings.wal_sealed += 1,
                None => findings.wal_plaintext += 1,
            }
            if let Err(fault) = wal_pages::open(&keys, &mut page, |_, found| found == address) {
                let version = fault.version;
                let path = context.show(&segment.path);
                findings.damage(format!("{path}, {}: no WAL key of version {version}", address));
                reader.reset();
                continue;
            }
            reader.page(&page, address, findings);
        }
    }
    reader.end(findings);
    runs.append(&mut reader.runs);
    Ok(runs)
}

/// The history file of a timeline, in the directory of the segments. The first timeline has none.
fn history(segments: &[Segment], timeline: u32) -> Result<Vec<u8>, Failure> {
    let Some(beside) = segments.first() else { return Ok(Vec::new()) };
    let path = beside.path.with_file_name(OsStr::from_bytes(&history_name(timeline)));
    let history = read_if_there(&path, MAX_HISTORY);
    Ok(history.map_err(|error| unreadable(&path, &error))?.unwrap_or_default())
}

/// Assembles records from pages.
#[derive(Default)]
struct Reader {
    /// The address at which the next page is expected.
    next: Option<Lsn>,
    /// The incomplete record, and its address.
    record: Vec<u8>,
    began: Lsn,
    /// A defective record. It is reported if WAL continues after it, or if it was on disk once.
    suspect: Option<String>,
    /// Records that begin up to this address were on disk once.
    on_disk: Lsn,
    /// Records from this address on will be replayed, if any are.
    redo: Lsn,
    /// Size of a segment.
    size: u64,
    timeline: u32,
    /// Records that follow each other.
    runs: Vec<Run>,
}

impl Reader {
    /// Processes a page.
    fn page(&mut self, page: &[u8; PAGE], address: Lsn, findings: &mut Findings) {
        if self.next != Some(address) {
            self.end(findings);
        }
        // WAL continues, so the defective record was not its end.
        if let Some(suspect) = self.suspect.take() {
            findings.damage(suspect);
        }
        self.next = Some(address + PAGE as u64);
        let header = if page[2] & HAS_LONG_HEADER == 0 { SHORT_HEADER } else { LONG_HEADER };
        let rest = u32::from_le_bytes([page[16], page[17], page[18], page[19]]) as usize;
        let mut at = header;
        if self.record.is_empty() {
            // The record that continues here has no beginning; or none continues.
            at = (header + rest).next_multiple_of(8);
        } else if rest == 0 {
            // The record was abandoned, and another begins here
            // (`XLP_FIRST_IS_OVERWRITE_CONTRECORD`).
            if page[2] & OVERWRITES != 0 {
                let abandoned = self.runs.last_mut().filter(|run| run.follows(self.began));
                abandoned.into_iter().for_each(|run| run.reached = address);
            }
            self.record.clear();
        }
        while at + 8 <= PAGE {
            if self.record.is_empty() {
                self.began = address + at as u64;
                if page[at..at + 4] == [0; 4] {
                    // After the last record, or after one that ends the segment.
                    return;
                }
            }
            let total = self.total(page, at);
            if !(HEADER..=MAX_RECORD).contains(&total) {
                self.suspect = Some(format!("{}: invalid record length", self.began));
                self.record.clear();
                return;
            }
            let part = (total - self.record.len()).min(PAGE - at);
            self.record.extend_from_slice(&page[at..at + part]);
            at = (at + part).next_multiple_of(8);
            if self.record.len() < total {
                return;
            }
            match is_right(&self.record) {
                true => {
                    findings.records += 1;
                    self.extend(address + at as u64);
                    if self.began >= self.redo {
                        findings.concerned.extend(files_concerned(&self.record));
                        // Most backups have none, and WAL has many records.
                        if !findings.broken.is_empty() {
                            for (place, restores) in blocks_of(&self.record) {
                                findings.replayed(&place, restores);
                            }
                        }
                    }
                }
                false => {
                    self.suspect = Some(format!("{}: the record's checksum is wrong", self.began));
                    self.record.clear();
                    return;
                }
            }
            self.record.clear();
        }
    }

    /// A record is complete, and ends at `end`.
    fn extend(&mut self, end: Lsn) {
        let is_switch = self.record[key_records::MANAGER] == XLOG
            && self.record[key_records::INFO] & !key_records::OF_THE_SERVER == SWITCH;
        // The rest of the segment is not used (`XLogDecodeNextRecord`, xlogreader.c).
        let reached = if is_switch {
            Lsn(end.0.checked_next_multiple_of(self.size).unwrap_or(end.0))
        } else {
            end
        };
        match self.runs.last_mut().filter(|run| run.follows(self.began)) {
            Some(run) => run.reached = reached,
            None => {
                self.runs.push(Run { timeline: self.timeline, first: self.began, reached });
            }
        }
    }

    /// `xl_tot_len`, which is never divided between pages.
    fn total(&self, page: &[u8; PAGE], at: usize) -> usize {
        let bytes = if self.record.is_empty() { &page[at..] } else { &self.record[..] };
        bytes.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes) as usize)
    }

    /// The incomplete record does not continue on the next page.
    fn mark_incomplete(&mut self) {
        if !self.record.is_empty() {
            self.suspect = Some(format!("{}: the record is incomplete", self.began));
        }
    }

    /// WAL ends here: a defective record was being written, unless it was on disk once.
    fn end(&mut self, findings: &mut Findings) {
        if let Some(suspect) = self.suspect.take().filter(|_| self.began <= self.on_disk) {
            findings.damage(suspect);
        }
        self.reset();
    }

    fn reset(&mut self) {
        (self.next, self.suspect, self.began) = (None, None, Lsn::INVALID);
        self.record.clear();
    }
}

/// Verifies the CRC of a record: over its data first, then its header up to the CRC
/// (`XLogRecordAssemble`).
fn is_right(record: &[u8]) -> bool {
    let (Some(header), Some(data)) = (record.get(..RECORD_CRC), record.get(HEADER..)) else {
        return false;
    };
    let stored = record.get(RECORD_CRC..HEADER).and_then(|crc| crc.first_chunk());
    let crc = crc32c::crc32c_append(crc32c::crc32c(data), header);
    stored.map(|stored| u32::from_le_bytes(*stored)) == Some(crc)
}
