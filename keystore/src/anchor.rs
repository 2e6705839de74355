//! What a cluster has reached, as a note that is stored outside of it, and the comparison with what
//! a data directory contains (docs/design/0042-anchor.md).
//!
//! A note is one line of JSON, because stores and programs of operators hold text:
//!
//! ```text
//! {"version":<1 or 2>,"keystore":"<32 hex>","system":"<decimal>","timeline":<n>,
//!  "checkpoint":"<LSN>","generation":<n>,"time":"<UTC>","accepted":"<reason>",
//!  "directory":"<32 hex>"}
//! ```
//!
//! `system` is PostgreSQL's system identifier, as text because it may be too large for a number of
//! JSON. `checkpoint` is the address of a checkpoint record, as PostgreSQL shows it. `generation`
//! counts the notes of a cluster. `accepted` and `directory` are there if a person wrote the note,
//! with `pagevault-keyring accept-restore`: it writes the random number `directory` into the data
//! directory that was accepted, too. Such a note has version 2, others have 1. Notes of version 1
//! with `accepted` and without `directory` are read.

use std::fmt;

use pagevault_cipher::Lsn;
use serde::{Deserialize, Serialize};

use crate::line::{hex, unhex};
use crate::wal_segments::parse_name;
use crate::wal_timelines::owner_of;

/// The version of the format without the number of a data directory.
const VERSION: u32 = 1;
/// The version with it.
const WITH_DIRECTORY: u32 = 2;
/// Largest note in bytes.
pub const MAX_NOTE: usize = 4096;
/// Longest reason in bytes.
pub const MAX_REASON: usize = 512;
/// Name in requests to the helper that concern an anchor instead of a key provider.
pub const KIND: &str = "anchor";
/// The option of such a request: the path of the file that describes the store.
pub const FILE: &str = "file";

/// A place in the WAL of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// The timeline.
    pub timeline: u32,
    /// The address.
    pub lsn: Lsn,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on timeline {}", self.lsn, self.timeline)
    }
}

/// A cluster and its standbys; another after `initdb` or `pg_upgrade`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// The identity of the keystore, if there is one.
    pub keystore: Option<[u8; 16]>,
    /// PostgreSQL's system identifier.
    pub system: u64,
}

/// What a cluster had reached at some time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// The identity of its keystore.
    pub keystore: [u8; 16],
    /// PostgreSQL's system identifier.
    pub system: u64,
    /// A checkpoint that was durable.
    pub reached: Position,
    /// The number of the note.
    pub generation: u64,
    /// When it was written, UTC; for people.
    pub time: String,
    /// The reason that a person has given for it.
    pub accepted: Option<String>,
    /// The number in the data directory that was accepted.
    pub directory: Option<DirectoryNumber>,
}

/// A random number, by which the data directory is known that was accepted.
pub type DirectoryNumber = [u8; 16];

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    version: u32,
    keystore: String,
    system: String,
    timeline: u32,
    checkpoint: String,
    generation: u64,
    time: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    accepted: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    directory: Option<String>,
}

/// Why a note cannot be read. Repeats nothing of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoteError {
    /// Not the JSON above.
    #[error("it is not a note of pagevault")]
    Malformed,
    /// Of a later release.
    #[error("it has format version {0}, which this release does not know")]
    Version(u32),
    /// A field has a value that no release writes.
    #[error("its field \"{0}\" is invalid")]
    Field(&'static str),
}

impl Note {
    /// The note as text.
    #[must_use]
    pub fn encode(&self) -> String {
        let text = Text {
            version: if self.directory.is_some() { WITH_DIRECTORY } else { VERSION },
            keystore: hex(&self.keystore),
            system: self.system.to_string(),
            timeline: self.reached.timeline,
            checkpoint: self.reached.lsn.to_string(),
            generation: self.generation,
            time: self.time.clone(),
            accepted: self.accepted.clone(),
            directory: self.directory.as_ref().map(|number| hex(number)),
        };
        // Text and numbers can always be represented in JSON.
        serde_json::to_string(&text).unwrap_or_default()
    }

    /// Reads a note.
    ///
    /// # Errors
    /// If it is not one, or of a later version.
    pub fn decode(text: &[u8]) -> Result<Note, NoteError> {
        // Skips other fields: those of a later version must not prevent reading the version.
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        if text.len() > MAX_NOTE {
            return Err(NoteError::Malformed);
        }
        let Versioned { version } =
            serde_json::from_slice(text).map_err(|_| NoteError::Malformed)?;
        if !matches!(version, VERSION | WITH_DIRECTORY) {
            return Err(NoteError::Version(version));
        }
        let text: Text = serde_json::from_slice(text).map_err(|_| NoteError::Malformed)?;
        let lsn = parse_lsn(&text.checkpoint).ok_or(NoteError::Field("checkpoint"))?;
        let printable = |text: &str| !text.chars().any(char::is_control);
        let time = Some(text.time).filter(|time| time.len() <= 64 && printable(time));
        let accepted = text.accepted.map(|reason| {
            let reason = Some(reason).filter(|reason| is_reason(reason));
            reason.ok_or(NoteError::Field("accepted"))
        });
        let directory = text.directory.map(|number| unhex(&number));
        if directory == Some(None)
            || directory.is_some() != (version == WITH_DIRECTORY)
            || directory.is_some() && accepted.is_none()
        {
            return Err(NoteError::Field("directory"));
        }
        Ok(Note {
            keystore: unhex(&text.keystore).ok_or(NoteError::Field("keystore"))?,
            system: parse_system(&text.system).ok_or(NoteError::Field("system"))?,
            reached: Position {
                timeline: Some(text.timeline)
                    .filter(|timeline| *timeline > 0)
                    .ok_or(NoteError::Field("timeline"))?,
                lsn,
            },
            generation: text.generation,
            time: time.ok_or(NoteError::Field("time"))?,
            accepted: accepted.transpose()?,
            directory: directory.flatten(),
        })
    }

    /// Who has written it, for messages.
    #[must_use]
    pub fn origin(&self) -> String {
        match &self.accepted {
            None => format!("note {} of {}", self.generation, self.time),
            Some(reason) => {
                let Self { generation, time, .. } = self;
                format!("note {generation} of {time}, by accept-restore (\"{reason}\")")
            }
        }
    }
}

/// Whether a text can be the reason in a note.
#[must_use]
pub fn is_reason(text: &str) -> bool {
    !text.trim().is_empty() && text.len() <= MAX_REASON && !text.chars().any(char::is_control)
}

fn parse_system(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// An LSN as PostgreSQL prints it.
#[must_use]
pub fn parse_lsn(text: &str) -> Option<Lsn> {
    let (high, low) = text.split_once('/')?;
    let half = |digits: &str| {
        let known = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        (known && digits.len() <= 8).then(|| u32::from_str_radix(digits, 16).ok())?
    };
    Some(Lsn((u64::from(half(high)?) << 32) + u64::from(half(low)?)))
}

const UNCHECKED: &str = "pagevault unchecked 1";

/// The contents of the file that keeps a position which was not compared yet:
///
/// ```text
/// pagevault unchecked 1
/// reached <LSN> <timeline>
/// end <CRC-32C of all lines before, 8 hexadecimal digits>
/// ```
#[must_use]
pub fn encode_unchecked(position: Position) -> String {
    let Position { timeline, lsn } = position;
    with_end(format!("{UNCHECKED}\nreached {lsn} {timeline}\n"))
}

/// The position in such a file; `None` if it is damaged, or of another version.
#[must_use]
pub fn decode_unchecked(bytes: &[u8]) -> Option<Position> {
    let text = std::str::from_utf8(bytes).ok()?;
    let line = text.strip_prefix(UNCHECKED)?.strip_prefix("\nreached ")?.lines().next()?;
    let (lsn, timeline) = line.split_once(' ')?;
    let position = Position { timeline: timeline.parse().ok()?, lsn: parse_lsn(lsn)? };
    (encode_unchecked(position) == text).then_some(position)
}

fn with_end(text: String) -> String {
    let checksum = crc32c::crc32c(text.as_bytes());
    format!("{text}end {checksum:08x}\n")
}

/// Name of the file in the keystore's directory that says that the data directory was accepted.
pub const ACCEPTED: &str = "anchor.accepted";

const ACCEPTED_1: &str = "pagevault accepted 1";

/// The contents of this file:
///
/// ```text
/// pagevault accepted 1
/// directory <32 hexadecimal digits>
/// end <CRC-32C of all lines before, 8 hexadecimal digits>
/// ```
#[must_use]
pub fn encode_accepted(directory: &DirectoryNumber) -> String {
    with_end(format!("{ACCEPTED_1}\ndirectory {}\n", hex(directory)))
}

/// The number in such a file; `None` if it is damaged, or of another version.
#[must_use]
pub fn decode_accepted(bytes: &[u8]) -> Option<DirectoryNumber> {
    let text = std::str::from_utf8(bytes).ok()?;
    let line = text.strip_prefix(ACCEPTED_1)?.strip_prefix("\ndirectory ")?.lines().next()?;
    let directory = unhex(line)?;
    (encode_accepted(&directory) == text).then_some(directory)
}

/// Name of the file in the keystore's directory that says that the cluster has had a note.
pub const NOTED: &str = "anchor.noted";

/// The contents of this file, for people:
///
/// ```text
/// pagevault noted 1
/// ```
///
/// That there is a file says it, also if it is damaged.
pub const NOTED_TEXT: &str = "pagevault noted 1\n";

/// What a data directory is, seen from a note.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// It is where the note says.
    Same,
    /// It contains what the note says, and more.
    Newer,
    /// It ends before the place of the note.
    Older,
    /// The place of the note is not in its history: another timeline has forked off before it, or
    /// the note is of a later timeline.
    OtherTimeline,
    /// The note is of another cluster.
    OtherCluster,
}

impl Verdict {
    /// Whether nothing that the note says is missing.
    #[must_use]
    pub fn contains_the_note(self) -> bool {
        matches!(self, Verdict::Same | Verdict::Newer)
    }

    /// The name in the audit trail.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Same => "same",
            Verdict::Newer => "newer",
            Verdict::Older => "older",
            Verdict::OtherTimeline => "other_timeline",
            Verdict::OtherCluster => "other_cluster",
        }
    }
}

/// Compares a data directory with a note. `history` is the history file of the directory's
/// timeline; empty if there is none.
#[must_use]
pub fn compare(note: &Note, whose: &Identity, here: Position, history: &[u8]) -> Verdict {
    if whose.keystore != Some(note.keystore) || whose.system != note.system {
        return Verdict::OtherCluster;
    }
    // A record at the very end of a timeline is of the next one.
    if owner_of(history, here.timeline, note.reached.lsn) != note.reached.timeline {
        return Verdict::OtherTimeline;
    }
    if here.lsn < note.reached.lsn {
        Verdict::Older
    } else if here == note.reached {
        Verdict::Same
    } else {
        Verdict::Newer
    }
}

/// The place that a data directory without `backup_label` contains, from pg_control: its checkpoint
/// (`checkPoint` and `checkPointCopy.ThisTimeLineID`), or the place that recovery must reach at
/// least (`minRecoveryPoint`, `minRecoveryPointTLI`), whichever is later. The latter counts until
/// the first checkpoint after a promotion (`CreateEndOfRecoveryRecord`, xlog.c).
#[must_use]
pub fn position_of_control(checkpoint: Position, minimum: Position) -> Position {
    if minimum.timeline > 0 && minimum.lsn > checkpoint.lsn { minimum } else { checkpoint }
}

/// The address from which a base backup is replayed, from its `backup_label`.
#[must_use]
pub fn start_of_label(label: &str) -> Option<Lsn> {
    let start = label.lines().find_map(|line| line.strip_prefix("START WAL LOCATION:"))?;
    parse_lsn(start.split_whitespace().next()?)
}

/// The place to which a base backup has to be replayed at least, from its `backup_label`
/// (`read_backup_label`, xlogrecovery.c; `build_backup_content`, xlogbackup.c). Where a label is,
/// pg_control does not count. `None` if the label is not as the server writes it. PostgreSQL takes
/// the first two lines by their place and with any white space, and does without `START TIMELINE`.
#[must_use]
pub fn position_of_label(label: &str) -> Option<Position> {
    // Not `lines`: a carriage return is no end of a line here.
    let mut lines = label.split('\n');
    let (_, segment) = lines.next()?.strip_prefix("START WAL LOCATION: ")?.split_once(" (file ")?;
    let lsn = parse_lsn(lines.next()?.strip_prefix("CHECKPOINT LOCATION: ")?)?;
    let timeline = parse_name(segment.strip_suffix(')')?.as_bytes())?.timeline;
    let mut said = lines.filter_map(|line| line.strip_prefix("START TIMELINE: "));
    let is_said = said.all(|said| said.parse() == Ok(timeline));
    is_said.then_some(Position { timeline, lsn })
}
