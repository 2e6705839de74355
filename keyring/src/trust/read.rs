//! Reading files [named in options or the environment](super): credentials, which options never
//! contain themselves, certificates, configuration. They must be outside of data directories, have
//! a maximum size, and opening them never blocks.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::fcntl::OFlag;
use pagevault_keystore::protocol::ErrorClass;
use zeroize::Zeroizing;

use super::resolve::follow;
use super::{FileKind, data_directory_above, insecure, require};
use crate::failure::Failure;

/// Maximum size of credentials in bytes.
const LIMIT: u64 = 64 * 1024;

/// Maximum size of certificates and configuration in bytes.
const TEXT_LIMIT: u64 = 4 * 1024 * 1024;

/// Opens a regular file that meets the rules for `what`.
///
/// # Errors
/// `unreachable` if it cannot be opened (a mount or an agent may be late), `insecure` if other
/// users can read, write or replace it, `bad_options` if it is not a regular file.
pub(crate) fn open(path: &Path, what: FileKind) -> Result<File, Failure> {
    let shown = path.display();
    let absolute = std::path::absolute(path).map_err(|error| unreadable(path, &error))?;
    let place = follow(what, &absolute)
        .map_err(|unresolved| unresolved.or(|error| unreadable(path, error)))?;
    if let Some(root) = place.parent().and_then(data_directory_above) {
        return Err(insecure(format!("file \"{shown}\" is inside the data directory"))
            .with_detail(format!(
                "Database users can make the server write files in \"{}\".",
                root.display()
            ))
            .with_hint("Move the file to another directory, for example /etc/pagevault."));
    }
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let opened = OpenOptions::new().read(true).custom_flags(flags.bits()).open(&place);
    let file = opened.map_err(|error| unreadable(path, &error))?;
    let metadata = file.metadata().map_err(|error| unreadable(path, &error))?;
    if !metadata.is_file() {
        return Err(wrong(path, "It is not a regular file."));
    }
    require(what, path, &metadata)?;
    Ok(file)
}

/// Reads a file with one line of printable ASCII, without surrounding white space.
///
/// # Errors
/// Those of [`open`]; `bad_options` for other content.
pub(crate) fn read(path: &Path, what: FileKind) -> Result<Zeroizing<String>, Failure> {
    let file = open(path, what)?;
    let wrong = |detail: &str| {
        wrong(path, detail).with_hint("The file must contain only the credential, on one line.")
    };
    // With full capacity: a string that grows leaves copies behind.
    let mut text = Zeroizing::new(String::with_capacity(LIMIT as usize + 1));
    file.take(LIMIT + 1).read_to_string(&mut text).map_err(|error| match error.kind() {
        std::io::ErrorKind::InvalidData => wrong("It is not a text file."),
        _ => unreadable(path, &error),
    })?;
    let secret = Zeroizing::new(text.trim().to_owned());
    if secret.is_empty() || secret.len() as u64 > LIMIT {
        return Err(wrong("It is empty or too long."));
    }
    if !secret.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(wrong("It does not consist of one word of printable ASCII."));
    }
    Ok(secret)
}

/// Reads a file that may have many lines, into memory that is wiped.
///
/// # Errors
/// Those of [`open`]; `bad_options` if it is too large.
pub(crate) fn read_whole(path: &Path, what: FileKind) -> Result<Zeroizing<Vec<u8>>, Failure> {
    let file = open(path, what)?;
    let length = file.metadata().map_err(|error| unreadable(path, &error))?.len();
    if length > TEXT_LIMIT {
        return Err(wrong(path, "It is too long."));
    }
    let mut bytes = Zeroizing::new(Vec::with_capacity(length as usize + 1));
    // The file may be longer than it reports.
    file.take(TEXT_LIMIT + 1).read_to_end(&mut bytes).map_err(|error| unreadable(path, &error))?;
    if bytes.len() as u64 > TEXT_LIMIT {
        return Err(wrong(path, "It is too long."));
    }
    Ok(bytes)
}

fn unreadable(path: &Path, error: &std::io::Error) -> Failure {
    let shown = path.display();
    Failure::new(ErrorClass::Unreachable, format!("could not read \"{shown}\""))
        .with_detail(format!("{error}."))
        .with_hint("The server's operating system user must be able to read this file.")
}

fn wrong(path: &Path, detail: &str) -> Failure {
    let shown = path.display();
    Failure::new(ErrorClass::BadOptions, format!("\"{shown}\" cannot be used"))
        .with_detail(detail)
        .with_hint("Check the path.")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{Permissions, set_permissions, write};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn only_safe_files_of_one_word_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        let read_as = |content: &[u8], mode: u32, what: FileKind| {
            write(&path, content).unwrap();
            set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            read(&path, what).map(|text| text.to_string()).map_err(|error| error.class)
        };
        assert_eq!(read_as(b" hvs.abc\n", 0o600, FileKind::Credentials), Ok("hvs.abc".to_owned()));
        assert_eq!(read_as(b"hvs.abc", 0o640, FileKind::Credentials), Ok("hvs.abc".to_owned()));
        assert_eq!(read_as(b"hvs.abc", 0o644, FileKind::ServiceAccount), Ok("hvs.abc".to_owned()));
        for (mode, what) in [
            (0o644, FileKind::Credentials),
            (0o604, FileKind::Credentials),
            (0o620, FileKind::Credentials),
            (0o646, FileKind::ServiceAccount),
        ] {
            assert_eq!(read_as(b"hvs.abc", mode, what), Err(ErrorClass::Insecure));
        }
        let large = vec![b'a'; LIMIT as usize + 1];
        for content in
            [&b""[..], b" \n ", b"two words", b"two\nlines", b"\xff\xfe", b"a\0b", &large]
        {
            assert_eq!(read_as(content, 0o600, FileKind::Credentials), Err(ErrorClass::BadOptions));
        }
        let missing = read(&directory.path().join("none"), FileKind::Credentials).unwrap_err();
        assert_eq!(missing.class, ErrorClass::Unreachable);
        let no_file = read(directory.path(), FileKind::Credentials).unwrap_err();
        assert_eq!(no_file.class, ErrorClass::BadOptions);
    }
}
