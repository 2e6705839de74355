//! Replaces a file by one with other content: there is always a whole one, the old or the new.
//!
//! The new content is written to a file beside it, `.NAME.RANDOM.pagevault-new`. If the writer is
//! killed, the next one removes it, since it may contain master keys. Nothing else may have such a
//! name: it is refused as the path of a key file.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tempfile::Builder;

/// The number of random letters and digits.
const RANDOM: usize = 12;

const SUFFIX: &str = ".pagevault-new";

/// Writes another file, syncs it, renames it, syncs the directory. The caller has a lock that keeps
/// other writers of the file away.
pub(super) fn replace(directory: &Path, name: &OsStr, content: &[u8]) -> io::Result<()> {
    remove_unfinished(directory, name)?;
    let mut new = Builder::new()
        .prefix(&prefix(name))
        .rand_bytes(RANDOM)
        .suffix(SUFFIX)
        .permissions(Permissions::from_mode(0o600))
        .tempfile_in(directory)?;
    new.write_all(content)?;
    new.as_file().sync_all()?;
    new.persist(directory.join(name)).map_err(|failed| failed.error)?;
    File::open(directory)?.sync_all()
}

/// Whether a file of this name may be removed as an unfinished one.
pub(super) fn is_reserved(name: &OsStr) -> bool {
    let name = name.as_bytes();
    let Some(random) = name.len().checked_sub(SUFFIX.len() + RANDOM) else { return false };
    random > 1 && name[random - 1] == b'.' && is_unfinished(name, &name[..random])
}

/// Removes what interrupted writers of this file have left. The lock of the caller ensures that
/// nobody is writing it now.
fn remove_unfinished(directory: &Path, name: &OsStr) -> io::Result<()> {
    let prefix = prefix(name);
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if is_unfinished(entry.file_name().as_bytes(), prefix.as_bytes()) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

fn is_unfinished(found: &[u8], prefix: &[u8]) -> bool {
    let rest = found.strip_prefix(prefix).and_then(|rest| rest.strip_suffix(SUFFIX.as_bytes()));
    prefix.starts_with(b".")
        && rest
            .is_some_and(|rest| rest.len() == RANDOM && rest.iter().all(u8::is_ascii_alphanumeric))
}

fn prefix(name: &OsStr) -> OsString {
    let mut prefix = OsString::from(".");
    prefix.push(name);
    prefix.push(".");
    prefix
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_names_of_unfinished_files_are_reserved() {
        for name in [".k.0123456789Ab.pagevault-new", "..k.0123456789Ab.pagevault-new"] {
            assert!(is_reserved(OsStr::new(name)), "{name}");
        }
        for name in [
            "k",
            ".k.new",
            ".pagevault-new",
            ".0123456789Ab.pagevault-new",
            "k.0123456789Ab.pagevault-new",
            ".k0123456789Ab.pagevault-new",
            ".k.0123456789A.pagevault-new",
            ".k.0123456789A-.pagevault-new",
            ".k.0123456789Ab.pagevault-new.old",
        ] {
            assert!(!is_reserved(OsStr::new(name)), "{name}");
        }
    }

    #[test]
    fn unfinished_files_of_this_file_are_removed_and_no_others() {
        let directory = tempfile::tempdir().unwrap();
        let others = [
            ".k.new",
            ".k.copy.pagevault-new",
            ".k.x.0123456789Ab.pagevault-new",
            ".l.0123456789Ab.pagevault-new",
        ];
        for name in others {
            fs::write(directory.path().join(name), name).unwrap();
        }
        fs::write(directory.path().join(".k.0123456789Ab.pagevault-new"), "half").unwrap();
        replace(directory.path(), OsStr::new("k"), b"new").unwrap();
        assert_eq!(fs::read(directory.path().join("k")).unwrap(), b"new");
        for name in others {
            assert_eq!(fs::read(directory.path().join(name)).unwrap(), name.as_bytes());
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), others.len() + 1);
    }
}
