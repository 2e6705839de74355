//! Reading a key file, and replacing it without losing a key by a crash or a concurrent writer.
//!
//! Readers take no lock: because of the rename they see the old file or the new one. Writers lock
//! the file itself, which no other user can open. Then they check that it is still the file at its
//! path; if it was replaced while they waited for the lock, they start again with the new file.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

use nix::fcntl::OFlag;
use pagevault_keystore::protocol::ErrorClass;
use zeroize::Zeroizing;

use super::format::{FormatError, KeyFile, SIZE_LIMIT};
use super::place::Place;
use crate::failure::Failure;
use crate::trust::io_error;

/// Reads the key file at `place`.
///
/// # Errors
/// `insecure` if others could have accessed it; `unreachable` if it cannot be opened, is damaged,
/// has a newer format or other content. That does not count as the loss of a key, because the file
/// may just be being copied there.
pub fn load(place: &Place) -> Result<KeyFile, Failure> {
    let (file, metadata) = place.open()?;
    decode(place, &read(place, &file, &metadata)?)
}

/// A key file that nobody else can change while this value exists.
pub struct Locked<'a> {
    place: &'a Place,
    // Holds the lock.
    _file: File,
    /// Its keys. Changes are lost without [`Locked::replace`].
    pub keys: KeyFile,
}

/// Locks the key file at `place` for changing. Waits for other writers without limit: the caller
/// enforces the deadline by ending the process.
pub fn lock(place: &Place) -> Result<Locked<'_>, Failure> {
    loop {
        let (file, metadata) = place.open_to_lock()?;
        file.lock().map_err(|error| {
            io_error(&error, &format!("could not lock key file \"{}\"", place.path().display()))
        })?;
        let replaced = match fs::symlink_metadata(place.path()) {
            Ok(now) => (now.dev(), now.ino()) != (metadata.dev(), metadata.ino()),
            Err(_) => true,
        };
        if !replaced {
            let text = read(place, &file, &metadata)?;
            // A crash between creating and filling the file leaves an empty one.
            let keys = if text.is_empty() { KeyFile::default() } else { decode(place, &text)? };
            return Ok(Locked { place, _file: file, keys });
        }
    }
}

/// Creates an empty file at `place`, to be locked and filled, if it does not exist. Readers refuse
/// an empty file.
pub fn make_if_missing(place: &Place) -> Result<(), Failure> {
    match new_file().open(place.path()) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(io_error(
            &error,
            &format!("could not create key file \"{}\"", place.path().display()),
        )),
    }
}

impl Locked<'_> {
    /// Replaces the file's content by the changed keys, durably: writes another file, syncs it,
    /// renames it, syncs the directory. A crash at any step leaves the old file or the new one.
    pub fn replace(self) -> Result<(), Failure> {
        let path = self.place.path();
        let text = self.keys.encode().map_err(|_| {
            Failure::new(ErrorClass::Denied, format!("key file \"{}\" is full", path.display()))
                .with_detail(format!("It would grow beyond {SIZE_LIMIT} bytes."))
                .with_hint("Create a new key in another file, and use it as the master key.")
        })?;
        self.place.replace(&text).map_err(|error| {
            io_error(&error, &format!("could not write key file \"{}\"", path.display())).with_hint(
                "No key was lost. Check that the directory is writable, and that the disk is not full.",
            )
        })
    }
}

/// Options for creating a new file that only its owner can access.
fn new_file() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600).custom_flags(OFlag::O_NOFOLLOW.bits());
    options
}

fn read(place: &Place, file: &File, metadata: &Metadata) -> Result<Zeroizing<Vec<u8>>, Failure> {
    let shown = place.path();
    // One byte more than the limit: the vector never grows, and a file that is too large is
    // detected.
    let room = usize::try_from(metadata.len()).map_or(SIZE_LIMIT, |size| size.min(SIZE_LIMIT)) + 1;
    let mut text = Zeroizing::new(Vec::with_capacity(room));
    file.take(room as u64).read_to_end(&mut text).map_err(|error| {
        io_error(&error, &format!("could not read key file \"{}\"", shown.display()))
    })?;
    Ok(text)
}

fn decode(place: &Place, text: &[u8]) -> Result<KeyFile, Failure> {
    KeyFile::decode(text).map_err(|error| {
        let path = place.path();
        let shown = path.display();
        let refused = |message: &str, detail: String, hint: String| {
            Failure::new(ErrorClass::Unreachable, format!("key file \"{shown}\" {message}"))
                .with_detail(detail)
                .with_hint(hint)
        };
        let restore = "Restore an intact copy of the file.".to_owned();
        match error {
            FormatError::Empty => refused(
                "is empty",
                "It was created but never written, or it was truncated.".into(),
                format!(
                    "If it never contained a key, run: pagevault-keyring file create \"{shown}\" --key NAME. Otherwise restore an intact copy."
                ),
            ),
            FormatError::TooLarge => refused(
                "is too large",
                format!("A key file has at most {SIZE_LIMIT} bytes."),
                "Check that the path is that of a key file.".into(),
            ),
            FormatError::Malformed { line, column } => refused(
                "cannot be read as a key file",
                format!("It is damaged, or not a key file. The error is at line {line}, column {column}."),
                "Check the path, or restore an intact copy of the file.".into(),
            ),
            FormatError::Version(found) => refused(
                "has an unknown format version",
                format!(
                    "Its format version is {found}; this program reads version {}.",
                    super::format::FORMAT_VERSION
                ),
                "Use a newer pagevault-keyring.".into(),
            ),
            FormatError::Checksum => {
                refused("is damaged", "Its checksum does not match its content.".into(), restore)
            }
            FormatError::Inconsistent => refused(
                "is damaged",
                "It has an invalid name, a key without versions, or versions out of order.".into(),
                restore,
            ),
        }
    })
}
