//! The audit trail of this program, which may run while the server is down: lines in the file
//! `audit.tools` in the keystore's directory, in the form of the server's lines.
//!
//! Each use of the program is a run of the trail with two lines. The first is written before any
//! key is unwrapped.

use std::borrow::Cow;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use nix::unistd::geteuid;
use pagevault_cipher::secret::fill_random;
use pagevault_keystore::audit::{AuditKey, MAX_LINE, Place, TOOLS, next_line};
use pagevault_keystore::storage::FileStorage;

use super::SCOPE;
use crate::clock::now_us;
use crate::failure::{Failure, refuse};
use crate::offline::{DIRECTORY, DatabaseKeys, Keystore};

/// An action with the keys of a data directory, as the audit trail records it.
pub(crate) struct TrailEntry {
    path: PathBuf,
    place: Place,
    /// JSON members of the lines.
    facts: String,
}

impl TrailEntry {
    /// Records that the action is attempted.
    ///
    /// # Errors
    /// If that cannot be written. Then the action must not be performed.
    pub(crate) fn begin(
        keystore: &Keystore,
        action: &str,
        object: &str,
        to: &str,
    ) -> Result<Self, Failure> {
        let path = keystore.data_directory().join(DIRECTORY).join(TOOLS);
        let refused = |error: &dyn std::fmt::Display| {
            refuse(format!("could not write to the audit trail \"{}\": {error}", path.display()))
                .with_detail("Nothing was done.")
        };
        // The recipients of keys are recorded completely, or the action is refused.
        if serde_json::Value::from(to).to_string().len() > MAX_TO {
            return Err(refused(&"its recipients do not fit into one audit line"));
        }
        let facts = serde_json::json!({
            "action": action,
            "by": "pagevault-keyring",
            "user": geteuid().as_raw(),
            "object": cut(object),
            "to": to,
        })
        .to_string();
        let facts = facts.trim_start_matches('{').trim_end_matches('}').to_owned();
        let mut run = [0; 16];
        fill_random(&mut run).map_err(|error| refused(&error))?;
        let previous = last(&path).map_err(|error| refused(&error))?;
        let mut place = Place::before(run);
        let text = format!("{facts},\"outcome\":\"attempted\"");
        let line = next_line(&mut place, previous.as_ref(), now_us(), &text, None);
        append(&path, &line).map_err(|error| refused(&error))?;
        Ok(Self { path, place, facts })
    }

    /// Records the outcome.
    ///
    /// # Errors
    /// If that cannot be written.
    pub(crate) fn end(
        mut self,
        keystore: &Keystore,
        keys: Option<&DatabaseKeys>,
        outcome: &str,
    ) -> io::Result<()> {
        let newest = keys.and_then(|keys| {
            let of_cluster = keys.iter().filter(|(scope, _, _)| *scope == SCOPE);
            of_cluster.max_by_key(|(_, version, _)| *version)
        });
        let key =
            newest.map(|(_, version, key)| AuditKey::derive(key.expose(), &keystore.id(), version));
        let text = format!("{},\"outcome\":\"{outcome}\"", self.facts);
        let line = next_line(&mut self.place, None, now_us(), &text, key.as_ref());
        append(&self.path, &line)
    }
}

/// Maximum length of the recipients in bytes, as JSON.
const MAX_TO: usize = MAX_LINE / 2;

/// Truncates text so that the line does not become too long, even after escaping. The result says
/// so.
fn cut(text: &str) -> Cow<'_, str> {
    let cut = &text[..text.floor_char_boundary(MAX_LINE / 16)];
    match cut.len() == text.len() {
        true => text.into(),
        false => format!("{cut}... ({} bytes)", text.len()).into(),
    }
}

/// The last line of the file.
fn last(path: &Path) -> io::Result<Option<Place>> {
    let file = match open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let length = file.metadata()?.len();
    let from = length.saturating_sub(2 * MAX_LINE as u64);
    let mut bytes = vec![0; usize::try_from(length - from).unwrap_or(0)];
    file.read_exact_at(&mut bytes, from)?;
    let text = String::from_utf8_lossy(&bytes);
    Ok(text.lines().rev().find_map(Place::of))
}

fn open(path: &Path) -> io::Result<File> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits()).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("not a regular file")) }
}

/// Where the lines of the file end.
struct End {
    at: u64,
    /// The last line lacks its line break.
    is_open: bool,
}

/// Finds the end of the last whole line. Behind it may be the beginning of a line: a command was
/// killed while it wrote it, or had no room. Then it did nothing without that line, or the line
/// says how it ended.
fn end_of_lines(file: &File) -> io::Result<End> {
    let length = file.metadata()?.len();
    let from = length.saturating_sub(2 * MAX_LINE as u64);
    let mut bytes = vec![0; usize::try_from(length - from).unwrap_or(0)];
    file.read_exact_at(&mut bytes, from)?;
    let begin = match bytes.iter().rposition(|byte| *byte == b'\n') {
        Some(at) => at + 1,
        None if from == 0 => 0,
        None => return Err(io::Error::other("its last line is too long")),
    };
    let is_open = Place::of(&String::from_utf8_lossy(&bytes[begin..])).is_some();
    Ok(End { at: if is_open { length } else { from + begin as u64 }, is_open })
}

/// The size of the file without the beginning of a line at its end; `None` if it has none.
pub(super) fn size_of_lines(path: &Path) -> io::Result<Option<u64>> {
    let file = open(path)?;
    let end = end_of_lines(&file)?.at;
    Ok((end < file.metadata()?.len()).then_some(end))
}

/// Appends a line, or nothing. No other command writes at the same time: they lock the keystore.
fn append(path: &Path, line: &str) -> io::Result<()> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let mut options = OpenOptions::new();
    options.read(true).append(true).create(true).mode(0o600).custom_flags(flags.bits());
    let mut file = options.open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    // A group that makes backups reads it as it reads the other files of the keystore.
    let directory = path.parent().unwrap_or(Path::new("."));
    let mode = metadata.mode() | FileStorage::new(directory)?.file_mode();
    if mode != metadata.mode() {
        file.set_permissions(Permissions::from_mode(mode & 0o7777))?;
    }
    let end = end_of_lines(&file)?;
    file.set_len(end.at)?;
    let before = if end.is_open { "\n" } else { "" };
    let written = file.write_all(format!("{before}{line}\n").as_bytes());
    written.and_then(|()| file.sync_data()).inspect_err(|_| {
        // The first error is reported. The next command removes the beginning of the line.
        let _ = file.set_len(end.at);
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn line(run: u8, previous: Option<&Place>) -> String {
        next_line(&mut Place::before([run; 16]), previous, 7, "\"action\":\"x\"", None)
    }

    #[test]
    fn a_line_does_not_continue_one_that_was_interrupted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(TOOLS);
        let first = line(1, None);
        let second = line(2, Place::of(&first).as_ref());
        let whole = format!("{first}\n{second}\n");
        append(&path, &first).unwrap();
        append(&path, &second).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), whole);
        for kept in 0..second.len() {
            fs::write(&path, format!("{first}\n{}", &second[..kept])).unwrap();
            let end = (kept > 0).then_some(first.len() as u64 + 1);
            assert_eq!(size_of_lines(&path).unwrap(), end, "{kept}");
            let previous = last(&path).unwrap();
            append(&path, &line(2, previous.as_ref())).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), whole, "{kept}");
        }
        // Only the line break is missing.
        fs::write(&path, &first).unwrap();
        assert_eq!(size_of_lines(&path).unwrap(), None);
        append(&path, &second).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), whole);
        // That is no line of this program.
        fs::write(&path, "x".repeat(3 * MAX_LINE)).unwrap();
        append(&path, &second).unwrap_err();
    }
}
