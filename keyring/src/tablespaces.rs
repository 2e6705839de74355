//! Where the files of tablespaces are: where the links in `pg_tblspc` lead, and in a base backup
//! where its `tablespace_map` says. A server replaces the links by those of the map before it reads
//! anything else (`InitWalRecovery`, xlogrecovery.c; `StartupXLOG`, xlog.c, up to 14).

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use crate::failure::{Failure, unreadable};
use crate::regular::{read_if_there, read_regular};

/// The directory with the links.
pub(crate) const DIRECTORY: &str = "pg_tblspc";
const MAP: &str = "tablespace_map";
/// Longest map that is read, in bytes.
const LONGEST: u64 = 16 << 20;
/// `MAXPGPATH` (pg_config_manual.h); longer lines are cut.
const LONGEST_LINE: usize = 1024;

/// A tablespace.
pub(crate) struct Tablespace {
    /// The name of its link.
    pub(crate) name: OsString,
    pub(crate) path: PathBuf,
}

impl Tablespace {
    /// Its number, if the name of the link is one.
    pub(crate) fn number(&self) -> Option<u32> {
        number(self.name.to_str()?)
    }
}

/// A number in PostgreSQL's spelling.
pub(crate) fn number(text: &str) -> Option<u32> {
    let number: u32 = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

/// All tablespaces, in the order of their names. `faults`: what a server does not accept.
pub(crate) fn read(root: &Path, faults: &mut Vec<String>) -> Result<Vec<Tablespace>, Failure> {
    let links = root.join(DIRECTORY);
    let mut found = match linked(&links) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
        done => done.map_err(|error| unreadable(&links, &error))?,
    };
    let all = |found: BTreeMap<OsString, PathBuf>| {
        found.into_iter().map(|(name, path)| Tablespace { name, path }).collect()
    };
    // Without a label the server does not read the map.
    let path = root.join(MAP);
    if root.join("backup_label").exists()
        && let Some(map) =
            read_if_there(&path, LONGEST).map_err(|error| unreadable(&path, &error))?
    {
        let Some(mapped) = parse(&map) else {
            faults.push(format!("{MAP}: not valid, and a server does not start with it"));
            return Ok(all(found));
        };
        for (name, target) in mapped {
            let link = links.join(&name);
            // `remove_tablespace_symlink` (tablespace.c) removes a link or an empty directory.
            let is_full = fs::symlink_metadata(&link).is_ok_and(|it| !it.is_symlink())
                && fs::read_dir(&link).is_ok_and(|mut entries| entries.next().is_some());
            if is_full {
                let link = Path::new(DIRECTORY).join(&name);
                faults.push(format!(
                    "{}: a directory with files, where {MAP} names another place",
                    link.display()
                ));
            }
            // A link's target counts from where the link is.
            found.insert(name, links.join(target));
        }
    }
    Ok(all(found))
}

/// Links, and directories of tablespaces in place, by name.
fn linked(links: &Path) -> io::Result<BTreeMap<OsString, PathBuf>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(links)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_symlink() || kind.is_dir() {
            found.insert(entry.file_name(), entry.path());
        }
    }
    Ok(found)
}

/// Names of links, and where they are to lead (`read_tablespace_map`, xlogrecovery.c). A backslash
/// stands before a line break, or a backslash, that belongs to the path.
fn parse(map: &[u8]) -> Option<Vec<(OsString, PathBuf)>> {
    let (mut found, mut line, mut is_escaped) = (Vec::new(), Vec::new(), false);
    for byte in map {
        match byte {
            b'\n' | b'\r' if !is_escaped => {
                if line.is_empty() {
                    continue;
                }
                let space = line.iter().position(|byte| *byte == b' ')?;
                let (name, path) = line.split_at(space);
                let name = OsStr::from_bytes(name);
                number(name.to_str()?)?;
                let path = path.get(1..).filter(|path| !path.is_empty() && !path.contains(&0))?;
                found.push((name.to_owned(), PathBuf::from(OsString::from_vec(path.to_vec()))));
                line.clear();
            }
            b'\\' if !is_escaped => is_escaped = true,
            _ => {
                if line.len() < LONGEST_LINE - 1 {
                    line.push(*byte);
                }
                is_escaped = false;
            }
        }
    }
    (line.is_empty() && !is_escaped).then_some(found)
}

/// The name of the directory that PostgreSQL uses in tablespaces (`TABLESPACE_VERSION_DIRECTORY`,
/// relpath.h). `None` if the major version cannot be read.
pub(crate) fn version_directory(root: &Path, catalog: Option<u32>) -> Option<String> {
    Some(format!("{}{}", of_major(root)?, catalog?))
}

/// PostgreSQL's major version. `None` if it cannot be read.
pub(crate) fn major(root: &Path) -> Option<u32> {
    let version = read_regular(&root.join("PG_VERSION"), 64).ok()?;
    std::str::from_utf8(&version).ok()?.trim().parse().ok()
}

/// How this name begins. After pg_upgrade, tablespaces have the directory of the old cluster, too.
pub(crate) fn of_major(root: &Path) -> Option<String> {
    Some(format!("PG_{}_", major(root)?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn maps_are_read_as_the_server_reads_them() {
        let map = b"16384 /srv/one\n16385  two\\\nthree\\\\\r\n\n1 /x\n";
        let expected = [("16384", "/srv/one"), ("16385", " two\nthree\\"), ("1", "/x")];
        let expected = expected.map(|(name, path)| (OsString::from(name), PathBuf::from(path)));
        assert_eq!(parse(map).unwrap(), expected);
        assert_eq!(parse(b"").unwrap(), []);
        for invalid in
            ["1 /x", "1 /x\\\n", "1\n", " /x\n", "1 \n", "x /x\n", "../1 /x\n", "01 /x\n"]
        {
            assert_eq!(parse(invalid.as_bytes()), None, "{invalid}");
        }
    }

    #[test]
    fn the_map_of_a_backup_replaces_links() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let of = || -> Vec<(String, PathBuf)> {
            let found = read(root, &mut Vec::new()).unwrap();
            found.into_iter().map(|it| (it.name.into_string().unwrap(), it.path)).collect()
        };
        assert_eq!(of(), []);
        let links = root.join(DIRECTORY);
        fs::create_dir_all(links.join("2")).unwrap();
        symlink("/elsewhere", links.join("1")).unwrap();
        let place = |name: &str| (name.to_owned(), links.join(name));
        assert_eq!(of(), [place("1"), place("2")]);
        fs::write(root.join(MAP), "1 /srv/one\n3 three\n").unwrap();
        assert_eq!(of(), [place("1"), place("2")]);
        fs::write(root.join("backup_label"), "").unwrap();
        let one = ("1".to_owned(), PathBuf::from("/srv/one"));
        let three = ("3".to_owned(), links.join("three"));
        assert_eq!(of(), [one.clone(), place("2"), three.clone()]);
        // The last line with a number counts, and many lines take no long time.
        let many: String = (1..200_000).map(|line| format!("{} x{line}\n", line % 2 + 3)).collect();
        fs::write(root.join(MAP), many + "1 /srv/one\n4 x\n3 three\n").unwrap();
        let four = ("4".to_owned(), links.join("x"));
        assert_eq!(of(), [one, place("2"), three, four]);
        let many: String = (0..200_000).rev().map(|number| format!("{number} x\n")).collect();
        fs::write(root.join(MAP), many).unwrap();
        assert_eq!(of().len(), 200_000);

        let mut faults = Vec::new();
        fs::write(root.join(MAP), "2 /srv/two\n").unwrap();
        read(root, &mut faults).unwrap();
        assert_eq!(faults.len(), 0);
        fs::write(links.join("2/file"), "").unwrap();
        read(root, &mut faults).unwrap();
        fs::write(root.join(MAP), "2").unwrap();
        read(root, &mut faults).unwrap();
        assert_eq!(faults.len(), 2);
    }

    #[test]
    fn only_the_directory_of_this_version_is_used() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(version_directory(root.path(), Some(202_209_061)), None);
        fs::write(root.path().join("PG_VERSION"), "15\n").unwrap();
        let expected = Some("PG_15_202209061".to_owned());
        assert_eq!(version_directory(root.path(), Some(202_209_061)), expected);
        assert_eq!(version_directory(root.path(), None), None);
    }
}
