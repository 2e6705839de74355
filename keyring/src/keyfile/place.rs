//! Location and permissions of a key file, or of a program that receives keys.
//!
//! Once it is known that only root and the current user can change the directories above the file,
//! no other user can redirect the path between a check and the opening of the file.

use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use nix::unistd::{AccessFlags, access};
use pagevault_keystore::protocol::ErrorClass;

use super::replace;
use crate::failure::Failure;
use crate::trust::resolve::follow;
use crate::trust::{FileKind, check_directory, data_directory_above, insecure, io_error, require};

/// What to do about a key file that is not there. It may have keys in use: to whoever creates
/// another one, the outage becomes a refusal. Where no key can be in use, the callers say how to
/// create one.
const NOT_THERE: &str = "Check the path, restore the key file from its copy, or mount what it is on. Do not create a new one: it would not have the keys in use.";

/// A file's directory, without symbolic links, and its name in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    what: FileKind,
    /// The directory as given, with symbolic links.
    given: PathBuf,
    directory: PathBuf,
    name: OsString,
}

impl Place {
    /// Resolves the symbolic links above the key file at the absolute `path`.
    ///
    /// # Errors
    /// `unreachable` if there is no such directory, or it cannot be accessed.
    pub fn resolve(path: &Path) -> Result<Place, Failure> {
        Place::resolve_as(FileKind::KeyFile, path)
    }

    /// Like [`Place::resolve`], for any kind of file.
    pub fn resolve_as(what: FileKind, path: &Path) -> Result<Place, Failure> {
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Failure::new(
                ErrorClass::BadOptions,
                format!("path \"{}\" does not contain a file name", path.display()),
            ));
        };
        if replace::is_reserved(name) {
            return Err(Failure::new(
                ErrorClass::BadOptions,
                format!("path \"{}\" has a reserved file name", path.display()),
            )
            .with_detail("Files with such names are unfinished copies, and are removed.")
            .with_hint("Use another name."));
        }
        let directory = above.canonicalize().map_err(|error| {
            let shown = above.display();
            let failure = io_error(&error, &format!("could not find directory \"{shown}\""));
            match (error.kind(), what) {
                (io::ErrorKind::NotFound, FileKind::KeyFile) => failure.with_hint(NOT_THERE),
                (io::ErrorKind::NotFound, _) => failure.with_hint("Check the path."),
                _ => failure,
            }
        })?;
        Ok(Place { what, given: above.to_owned(), directory, name: name.to_owned() })
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The file's path.
    pub fn path(&self) -> PathBuf {
        self.directory.join(&self.name)
    }

    /// The path of a file to lock instead of this one.
    pub fn lock_path(&self) -> PathBuf {
        let mut name = OsString::from(".");
        name.push(&self.name);
        name.push(".lock");
        self.directory.join(name)
    }

    /// Replaces the file, durably. The caller has a lock that keeps other writers away.
    ///
    /// # Errors
    /// If there is no room, or the directory is not writable: the old file is still there.
    pub fn replace(&self, content: &[u8]) -> io::Result<()> {
        replace::replace(&self.directory, &self.name, content)
    }

    /// Refuses a place in the data directory, or in a directory to which PostgreSQL has links
    /// there: `pg_wal` and the tablespaces. A backup copies all of them, and then would contain
    /// both the key and the data that it protects.
    pub fn outside_of(&self, data_directory: &Path) -> Result<(), Failure> {
        let what = || format!("could not find data directory \"{}\"", data_directory.display());
        if !data_directory.is_absolute() {
            return Err(Failure::new(ErrorClass::BadRequest, what())
                .with_detail("The path of the data directory is not absolute."));
        }
        let root = data_directory.canonicalize().map_err(|error| Failure {
            class: ErrorClass::BadRequest,
            ..io_error(&error, &what())
        })?;
        let tablespaces = root.join("pg_tblspc");
        let mut roots = vec![("data directory", root.clone())];
        roots.extend(root.join("pg_wal").canonicalize().map(|path| ("WAL directory", path)));
        for entry in fs::read_dir(tablespaces).into_iter().flatten().flatten() {
            roots.extend(entry.path().canonicalize().map(|path| ("tablespace", path)));
        }
        match roots.into_iter().find(|(_, root)| self.directory.starts_with(root)) {
            None => Ok(()),
            Some((what, root)) => Err(self.inside(what, &root)),
        }
    }

    /// Refuses a place below any directory that looks like a data directory.
    pub fn require_outside_data_directories(&self) -> Result<(), Failure> {
        match data_directory_above(&self.directory) {
            None => Ok(()),
            Some(root) => Err(self.inside("data directory", root)),
        }
    }

    fn inside(&self, what: &str, root: &Path) -> Failure {
        let name = self.what.name();
        let root = root.display();
        insecure(format!("{name} \"{}\" is inside the {what}", self.path().display()))
            .with_detail(match self.what {
                FileKind::KeyFile => {
                    format!("Every copy and backup of {what} \"{root}\" would contain the key.")
                }
                _ => {
                    format!("Anyone who can restore or write {what} \"{root}\" could replace it.")
                }
            })
            .with_hint(format!("Move the {name} to another directory, for example /etc/pagevault."))
    }

    /// Refuses a place where others could replace the file: each directory above it must belong to
    /// root or to the current user, and may be writable by others only if it has the sticky bit.
    /// The same applies to each symbolic link in the path.
    pub fn check_directories(&self) -> Result<(), Failure> {
        self.directory
            .ancestors()
            .try_for_each(|directory| check_directory(self.what, directory))?;
        let shown = self.given.display();
        let resolved = follow(self.what, &self.given).map_err(|unresolved| {
            unresolved.or(|error| io_error(error, &format!("could not find directory \"{shown}\"")))
        })?;
        check_directory(self.what, &resolved)
    }

    /// Refuses a program that anybody but root and the current user could have written, and files
    /// that are not programs.
    ///
    /// # Errors
    /// `unreachable` if it does not exist or cannot be run, `insecure` if it must not be run.
    pub fn check_program(&self) -> Result<(), Failure> {
        let path = self.path();
        let shown = path.display();
        let metadata = fs::symlink_metadata(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                io_error(&error, &format!("program \"{shown}\" does not exist"))
                    .with_hint("Install the program, or check the path.")
            }
            _ => io_error(&error, &format!("could not examine program \"{shown}\"")),
        })?;
        if metadata.is_symlink() {
            return Err(insecure(format!("program \"{shown}\" is a symbolic link"))
                .with_detail("A user who can change the link could choose another program.")
                .with_hint("Give the path of the program itself."));
        }
        if !metadata.is_file() {
            return Err(insecure(format!("program \"{shown}\" is not a regular file"))
                .with_detail("Only a regular file can be run.")
                .with_hint("Give the path of the program itself."));
        }
        require(FileKind::Program, &path, &metadata)?;
        access(&path, AccessFlags::X_OK).map_err(|error| {
            Failure::new(
                ErrorClass::Unreachable,
                format!("program \"{shown}\" is not executable for the server's user"),
            )
            .with_detail(format!("{}.", error.desc()))
            .with_hint(format!("As its owner, run: chmod go-w,a+rx \"{shown}\""))
        })
    }

    /// Opens the file for reading if nobody else could have read or written it. Never blocks, not
    /// even on a FIFO.
    pub fn open(&self) -> Result<(File, Metadata), Failure> {
        self.open_with(OpenOptions::new().read(true))
    }

    /// Like [`Place::open`], for an exclusive lock: NFS grants one only on a file that is open for
    /// writing.
    pub fn open_to_lock(&self) -> Result<(File, Metadata), Failure> {
        // Open for reading first: an error about the owner says more than a missing write
        // permission.
        self.open()?;
        self.open_with(OpenOptions::new().read(true).write(true))
    }

    fn open_with(&self, options: &mut OpenOptions) -> Result<(File, Metadata), Failure> {
        let path = self.path();
        let shown = path.display();
        let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let opened = options.custom_flags(flags.bits()).open(&path);
        let file = opened.map_err(|error| {
            match error.raw_os_error() {
                Some(nix::libc::ELOOP) => {
                    return insecure(format!("key file \"{shown}\" is a symbolic link"))
                        .with_hint("Give the path of the file itself.");
                }
                // The error of opening a socket.
                Some(nix::libc::ENXIO) => return not_regular(&path),
                _ => {}
            }
            if error.kind() == io::ErrorKind::NotFound {
                return io_error(&error, &format!("key file \"{shown}\" does not exist"))
                    .with_hint(NOT_THERE);
            }
            io_error(&error, &format!("could not open key file \"{shown}\""))
        })?;
        let metadata = file
            .metadata()
            .map_err(|error| io_error(&error, &format!("could not examine \"{shown}\"")))?;
        check_file(&path, &metadata)?;
        Ok((file, metadata))
    }
}

fn check_file(path: &Path, metadata: &Metadata) -> Result<(), Failure> {
    let shown = path.display();
    if !metadata.is_file() {
        return Err(not_regular(path));
    }
    require(FileKind::KeyFile, path, metadata)?;
    if metadata.nlink() > 1 {
        return Err(insecure(format!("key file \"{shown}\" has {} hard links", metadata.nlink()))
            .with_detail("Another hard link may be where backups or other users can reach it.")
            .with_hint(format!(
                "Find the other links with: find / -xdev -inum {}, and remove them.",
                metadata.ino()
            )));
    }
    Ok(())
}

fn not_regular(path: &Path) -> Failure {
    insecure(format!("key file \"{}\" is not a regular file", path.display()))
        .with_hint("Specify the path of a file that was created by: pagevault-keyring file create")
}
