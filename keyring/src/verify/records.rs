//! Verification of all pages and records of WAL.
//!
//! Records are read from the first page whose beginning is present, across pages and segments, as
//! `XLogReadRecord` (xlogreader.c) does. WAL ends where no page with the expected address follows.
//! An incomplete record there was being written, if it is after the last checkpoint's record. WAL
//! before that was on disk (`CreateCheckPoint`, xlog.c).

use std::collections::BTreeMap;

use indicatif::ProgressBar;
use pagevault_cipher::Lsn;
use pagevault_cipher::wal::{address_of, is_zero, mark_of, timeline_of};
use pagevault_keystore::wal_pages::{self, Cause};

use super::headers::{Expected, Header, PAGE, plus};
use super::pages::fill;
use super::runs::Run;
use super::segments::{Histories, Segment};
use super::wal_keys::{Keys, Learned, NoKey};
use super::wal_record::{HEADER, XLOG, kind};
use super::{Context, Control, Findings};
use crate::failure::{Failure, unreadable};
use crate::regular::{open_regular, read_if_there};

/// Offset of the CRC.
const RECORD_CRC: usize = 20;
/// `XLOG_SWITCH` (pg_control.h).
const SWITCH: u8 = 0x40;
/// Maximum size of a record (`XLogRecordMaxSize`, 1020 MB).
const MAX_RECORD: usize = 1020 << 20;

/// Decrypts all pages of all segments, and checks all records. Returns what follows without a gap.
pub(super) fn verify(
    context: &Context<'_>,
    segments: &[Segment],
    histories: &Histories,
    progress: &ProgressBar,
    findings: &mut Findings,
) -> Result<Vec<Run>, Failure> {
    let mut keys = Keys::of_keystore(context, findings);
    let Control { segment: size, system, timeline: newest, redo, checkpoint, .. } = context.control;
    let of_redo = context.control.noted.map(|noted| noted.timeline);
    let is_replayed = |timeline| of_redo.is_some_and(|of| histories.continues(timeline, of, redo));
    let mut expected = Expected::new(system, size, &version(context)?);
    let mut runs = Vec::new();
    let mut reader = Reader { redo, size, ..Reader::default() };
    // Readers at the ends of segments that one of a child timeline continues.
    let joints = histories.joints(segments, size);
    let is_joint = |place| joints.iter().any(|((_, start), parent)| (*parent, *start) == place);
    let mut ends: BTreeMap<(u32, Lsn), (Reader, Learned)> = BTreeMap::new();
    let mut page = [0; PAGE];
    for segment in segments {
        let (timeline, start) = (segment.name.timeline, segment.name.start(size));
        let parent = joints.get(&(timeline, start));
        let joint = parent.and_then(|parent| ends.get(&(*parent, start)));
        if reader.timeline != timeline || joint.is_some() {
            runs.append(&mut reader.runs);
            let (before, learned) = joint.cloned().unwrap_or_default();
            keys.learned = learned;
            let on_disk = checkpoint.filter(|_| timeline == newest).unwrap_or(Lsn::INVALID);
            let is_replayed = is_replayed(timeline);
            reader = Reader { redo, size, timeline, is_replayed, on_disk, ..before };
            reader.runs.iter_mut().for_each(|run| run.timeline = timeline);
        }
        let failed = |error| unreadable(&segment.path, &error);
        let mut input = open_regular(&segment.path).map_err(failed)?;
        for address in (start.0..plus(start, size as usize).0).step_by(PAGE).map(Lsn) {
            let length = fill(&mut input, &mut page).map_err(failed)?;
            progress.inc(length as u64);
            let of = timeline_of(&page).unwrap_or(0);
            // Left over from a parent, in the child's segment or in one that the server would not
            // read.
            let is_left_over = || {
                let owners = [newest, timeline].map(|child| histories.owner(child, address));
                owners.into_iter().flatten().any(|owner| of < owner)
            };
            // Never written, or left over from an earlier use of the file.
            let is_there = length == PAGE && !is_zero(&page) && address_of(&page) == Some(address);
            let mut is_valid = is_there && !is_left_over();
            if is_valid {
                match mark_of(&page) {
                    Some(_) => findings.wal_sealed += 1,
                    None => findings.wal_plaintext += 1,
                }
                if let Err(fault) = wal_pages::open(&keys, &mut page, |_, found| found == address) {
                    let path = context.show(&segment.path);
                    let why = match fault.cause {
                        Cause::Key(NoKey) => keys.reason(fault.version, address),
                        Cause::OtherKey => {
                            format!("{address}: wrong WAL key of version {}", fault.version)
                        }
                    };
                    findings.damage(format!("{path}, {why}"));
                    reader.reset();
                    continue;
                }
                is_valid = expected.accepts(&page, address)
                    && histories.has(timeline, of)
                    && reader.latest <= of;
            }
            if is_valid {
                reader.page(&page, address, &mut keys, findings);
                reader.latest = of;
                continue;
            }
            reader.mark_incomplete();
            reader.end(findings);
            // The first page of a segment is read before others (`ReadPageInternal`).
            if length < PAGE || address == start {
                break;
            }
        }
        let end = (timeline, plus(start, size as usize));
        if is_joint(end) {
            ends.insert(end, (reader.last(), keys.learned.clone()));
        }
    }
    reader.end(findings);
    runs.append(&mut reader.runs);
    Ok(runs)
}

/// The content of `PG_VERSION`.
fn version(context: &Context<'_>) -> Result<Vec<u8>, Failure> {
    let path = context.keystore.data_directory().join("PG_VERSION");
    let version = read_if_there(&path, 64).map_err(|error| unreadable(&path, &error))?;
    Ok(version.unwrap_or_default())
}

/// Assembles records from pages.
#[derive(Clone, Default)]
struct Reader {
    /// The address at which the next page is expected.
    next: Option<Lsn>,
    /// The incomplete record, and its address.
    record: Vec<u8>,
    began: Lsn,
    /// A defective record. It is reported if WAL continues after it, or if it was on disk once.
    suspect: Option<(Lsn, &'static str)>,
    /// Records that begin up to this address were on disk once.
    on_disk: Lsn,
    /// Records from this address on will be replayed, if any are.
    redo: Lsn,
    /// The timeline is the one of `redo`, or continues it.
    is_replayed: bool,
    /// Size of a segment.
    size: u64,
    timeline: u32,
    /// The timeline in the header of the last page. A later page has no earlier one
    /// (`XLogReaderValidatePageHeader`).
    latest: u32,
    /// Records that follow each other.
    runs: Vec<Run>,
}

impl Reader {
    /// Processes a page with a valid header.
    fn page(
        &mut self,
        page: &[u8; PAGE],
        address: Lsn,
        keys: &mut Keys<'_>,
        findings: &mut Findings,
    ) {
        if self.next != Some(address) {
            self.end(findings);
        }
        // WAL continues, so the defective record was not its end.
        self.report(findings);
        let header = Header::of(page);
        if !self.record.is_empty() {
            if header.overwrites() {
                // The record was abandoned, and another begins here.
                let abandoned = self.runs.last_mut().filter(|run| run.follows(self.began));
                abandoned.into_iter().for_each(|run| run.reached = address);
                self.record.clear();
            } else if header.continued() != Some(self.total(page, 0) - self.record.len()) {
                // Not the rest of this record (`XLogDecodeNextRecord`, xlogreader.c).
                self.mark_incomplete();
                self.end(findings);
            }
        }
        self.next = Some(plus(address, PAGE));
        let mut at = header.size();
        if self.record.is_empty() {
            // The record that continues here has no beginning; or none continues.
            at = (at + header.continued().unwrap_or(0)).next_multiple_of(8);
        }
        while at + 8 <= PAGE {
            if self.record.is_empty() {
                self.began = plus(address, at);
                if page[at..at + 4] == [0; 4] {
                    // After the last record, or after one that ends the segment.
                    return;
                }
            }
            let total = self.total(page, at);
            if !(HEADER..=MAX_RECORD).contains(&total) {
                self.suspect("invalid record length");
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
                    self.extend(plus(address, at));
                    keys.learn(&self.record);
                    // Behind a defective record, which may be the end of WAL, or behind a gap,
                    // nothing is replayed.
                    let run = self.runs.last().filter(|run| run.includes(self.redo));
                    let is_replayed = self.is_replayed && self.began >= self.redo;
                    if is_replayed && run.is_some() && self.suspect.is_none() {
                        findings.replayed(&self.record);
                    }
                }
                // The next one may be there, and all that is needed.
                false => self.suspect("the record's checksum is wrong"),
            }
            self.record.clear();
        }
    }

    /// A record is complete, and ends at `end`.
    fn extend(&mut self, end: Lsn) {
        let is_switch = kind(&self.record) == Some((XLOG, SWITCH));
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

    /// To be continued, without the runs that have ended.
    fn last(&self) -> Reader {
        Reader { runs: self.runs.last().copied().into_iter().collect(), ..self.clone() }
    }

    /// The incomplete record does not continue on the next page.
    fn mark_incomplete(&mut self) {
        if !self.record.is_empty() {
            self.suspect("the record is incomplete");
        }
    }

    /// WAL ends here: a defective record was being written, unless it was on disk once.
    fn end(&mut self, findings: &mut Findings) {
        self.suspect = self.suspect.take().filter(|(began, _)| *began <= self.on_disk);
        self.report(findings);
        self.reset();
    }

    /// The record is defective. Of several that follow each other, the first is reported.
    fn suspect(&mut self, what: &'static str) {
        self.suspect.get_or_insert((self.began, what));
    }

    fn report(&mut self, findings: &mut Findings) {
        if let Some((began, what)) = self.suspect.take() {
            // A disk need not write in order what nobody has synced yet.
            let unless = match self.on_disk != Lsn::INVALID && began > self.on_disk {
                true => {
                    ". Unless the machine has lost power: then it was being written, and recovery ends before it"
                }
                false => "",
            };
            findings.damage(format!("{began}: {what}{unless}"));
        }
    }

    fn reset(&mut self) {
        (self.next, self.suspect, self.began, self.latest) = (None, None, Lsn::INVALID, 0);
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
