//! The audit trail of this program, which may run while the server is down: lines in the file
//! `audit.tools` in the keystore's directory, in the form of the server's lines.
//!
//! Each use of the program is a run of the trail with two lines. The first is written before any
//! key is unwrapped.

use std::borrow::Cow;
use std::fs::{OpenOptions, Permissions};
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

fn open(path: &Path) -> io::Result<std::fs::File> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits()).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("not a regular file")) }
}

fn append(path: &Path, line: &str) -> io::Result<()> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o600).custom_flags(flags.bits());
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
    file.write_all(format!("{line}\n").as_bytes())?;
    file.sync_data()
}
