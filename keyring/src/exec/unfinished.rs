//! Puts the target's own keystore back, if `pg_rewind` was killed after it had replaced it, and
//! before it wrote the control file: the target still has its WAL, which needs its own keys.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use pagevault_keystore::briefing::{KEPT, KEPT_CONTROL, KEPT_FILES, KEPT_MADE, NOT_KEPT, WAITING};

use crate::access::{Access, trusted_directories};
use crate::failure::{Failure, refuse};
use crate::offline::{DIRECTORY, require_no_server};
use crate::regular::{read_if_there, read_regular};

/// More than a control file has (8 KiB).
const CONTROL_LIMIT: u64 = 64 * 1024;
/// More than the names of all key files have.
const MADE_LIMIT: u64 = 64 << 20;

/// Puts back what was kept. If it is killed, it can be repeated.
///
/// # Errors
/// If anybody but root and the current user could have written there; if files cannot be read or
/// written.
pub(super) fn put_back(target: &Path, access: &Access) -> Result<(), Failure> {
    // A server that was started has written the control file; it is left alone all the same.
    if fs::symlink_metadata(target.join(KEPT)).is_err() || require_no_server(target).is_err() {
        return Ok(());
    }
    let (target, directory, _) = trusted_directories(target, DIRECTORY, access)?;
    let (_, kept, _) = trusted_directories(&target, KEPT, access)?;
    let (_, files, _) = trusted_directories(&kept, KEPT_FILES, access)?;
    undo(&target, &directory, &kept, &files).map_err(|error| {
        refuse(format!("could not put the keystore of \"{}\" back: {error}", target.display()))
            .with_detail("pg_rewind was killed after it had replaced it.")
            .with_hint("Make a new copy of the source.")
    })
}

fn undo(target: &Path, directory: &Path, kept: &Path, files: &Path) -> io::Result<()> {
    let control = read_if_there(&kept.join(KEPT_CONTROL), CONTROL_LIMIT)?;
    let Some(control) = control else { return Ok(()) };
    if read_regular(&target.join("global/pg_control"), CONTROL_LIMIT)? == control {
        for entry in fs::read_dir(files)? {
            let entry = entry?;
            if !entry.file_type()?.is_file() {
                return Err(io::Error::other("something else than a file was kept"));
            }
            // It stays, until all are back.
            let name = entry.file_name();
            let mut new = name.clone();
            new.push(WAITING);
            remove(&directory.join(&new))?;
            fs::hard_link(entry.path(), directory.join(&new))?;
            fs::rename(directory.join(&new), directory.join(&name))?;
            // It does nothing if both are the same file already.
            remove(&directory.join(&new))?;
        }
        let made = read_regular(&kept.join(KEPT_MADE), MADE_LIMIT)?;
        for name in made.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            remove(
                &directory.join(Path::new(OsStr::from_bytes(name)).file_name().unwrap_or_default()),
            )?;
        }
        File::open(directory)?.sync_all()?;
    }
    let old = target.join(NOT_KEPT);
    match fs::remove_dir_all(&old) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::rename(kept, &old)?;
    File::open(target)?.sync_all()?;
    fs::remove_dir_all(&old)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use pagevault_keystore::protocol::ErrorClass;

    use super::*;

    #[test]
    fn only_files_of_the_same_control_file_are_put_back() {
        for is_same in [true, false] {
            let root = tempfile::tempdir().unwrap();
            let target = root.path();
            let path = |name: &str| target.join(name);
            for directory in ["global", DIRECTORY, &format!("{KEPT}/{KEPT_FILES}")] {
                fs::create_dir_all(path(directory)).unwrap();
            }
            put_back(target, &Access::default()).unwrap();
            let control: &[u8] = if is_same { b"control" } else { b"written" };
            fs::write(path("global/pg_control"), control).unwrap();
            fs::write(path(&format!("{KEPT}/{KEPT_CONTROL}")), b"control").unwrap();
            fs::write(path(&format!("{KEPT}/{KEPT_MADE}")), b"6.keys\0").unwrap();
            for name in ["a", "b", "c"] {
                fs::write(path(&format!("{KEPT}/{KEPT_FILES}/{name}")), "old").unwrap();
            }
            // One was replaced, one not yet, one removed; and there is a new one.
            let of = |name: &str| path(DIRECTORY).join(name);
            fs::write(of("a"), "new").unwrap();
            fs::hard_link(path(&format!("{KEPT}/{KEPT_FILES}/b")), of("b")).unwrap();
            fs::write(of("6.keys"), "new").unwrap();
            put_back(target, &Access::default()).unwrap();
            let mut found: Vec<_> = fs::read_dir(path(DIRECTORY))
                .unwrap()
                .map(|entry| entry.unwrap().path())
                .map(|path| (path.file_name().unwrap().to_owned(), fs::read(path).unwrap()))
                .collect();
            found.sort();
            let expected: &[(&str, &str)] = match is_same {
                true => &[("a", "old"), ("b", "old"), ("c", "old")],
                false => &[("6.keys", "new"), ("a", "new"), ("b", "old")],
            };
            let expected: Vec<_> = expected
                .iter()
                .map(|(name, content)| ((*name).into(), content.as_bytes().to_vec()))
                .collect();
            assert_eq!(found, expected);
            assert!(!path(KEPT).exists() && !path(NOT_KEPT).exists());
        }
    }

    #[test]
    fn nothing_is_put_back_where_others_can_write() {
        let files = format!("{KEPT}/{KEPT_FILES}");
        for open in ["", DIRECTORY, KEPT, &files] {
            let root = tempfile::tempdir().unwrap();
            let target = root.path();
            let path = |name: &str| target.join(name);
            for directory in ["global", DIRECTORY, &files] {
                fs::create_dir_all(path(directory)).unwrap();
            }
            for name in ["global/pg_control", &format!("{KEPT}/{KEPT_CONTROL}")] {
                fs::write(path(name), b"control").unwrap();
            }
            fs::write(path(&format!("{KEPT}/{KEPT_MADE}")), b"6.keys\0").unwrap();
            fs::write(path(&format!("{files}/a")), "old").unwrap();
            for name in ["a", "6.keys"] {
                fs::write(path(&format!("{DIRECTORY}/{name}")), "new").unwrap();
            }
            fs::set_permissions(path(open), Permissions::from_mode(0o777)).unwrap();
            let refused = put_back(target, &Access::default()).unwrap_err();
            assert_eq!(refused.class, ErrorClass::Insecure, "{open}");
            for name in ["a", "6.keys"] {
                assert_eq!(fs::read(path(&format!("{DIRECTORY}/{name}"))).unwrap(), b"new");
            }
            fs::set_permissions(path(open), Permissions::from_mode(0o700)).unwrap();
            put_back(target, &Access::default()).unwrap();
            assert_eq!(fs::read(path(&format!("{DIRECTORY}/a"))).unwrap(), b"old");
        }
    }
}
