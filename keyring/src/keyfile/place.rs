//! Where a key file, or a program that is given keys, may lie and who may reach it.
//!
//! Once the directories above the file are known to be changeable by root and ourselves only, no
//! other user can exchange what a path means between our looking and our opening.

use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use nix::unistd::{AccessFlags, access, geteuid};
use pagevault_keystore::protocol::ErrorClass;

use super::way::follow;
use crate::provider::ProviderError;

/// What lies at a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// A file of master keys.
    KeyFile,
    /// A program of the operator's.
    Program,
    /// A file that holds credentials.
    Credentials,
    /// A certificate, or another file that tells whom to believe.
    Trusted,
    /// A Unix socket at which keys are asked for.
    Socket,
    /// A data directory or a file of its keystore, read without its server.
    Keystore,
    /// A file that says which providers there are.
    Providers,
}

impl What {
    pub(crate) fn name(self) -> &'static str {
        match self {
            What::KeyFile => "key file",
            What::Program => "program",
            What::Credentials => "credentials file",
            What::Trusted => "file",
            What::Socket => "socket",
            What::Keystore => "keystore",
            What::Providers => "file of providers",
        }
    }
}

/// A file's directory, free of symbolic links, and its name therein.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    what: What,
    /// As it was given, with the links in it.
    way: PathBuf,
    directory: PathBuf,
    name: OsString,
}

impl Place {
    /// Follows the symbolic links above the key file at the absolute `path`.
    ///
    /// # Errors
    /// `unreachable` if there is no such directory, `denied` if it may not be entered.
    pub fn resolve(path: &Path) -> Result<Place, ProviderError> {
        Place::resolve_as(What::KeyFile, path)
    }

    /// [`Place::resolve`] for what may be something else than a key file.
    pub fn resolve_as(what: What, path: &Path) -> Result<Place, ProviderError> {
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(ProviderError::new(
                ErrorClass::BadOptions,
                format!("path \"{}\" names no file", path.display()),
            ));
        };
        let directory = above.canonicalize().map_err(|error| {
            let shown = above.display();
            let failure = io_error(&error, &format!("could not find directory \"{shown}\""));
            match (error.kind(), what) {
                (io::ErrorKind::NotFound, What::KeyFile) => failure.with_hint(format!(
                    "Check the path. As the user that runs the server: mkdir -m 0700 \"{shown}\""
                )),
                (io::ErrorKind::NotFound, _) => failure.with_hint("Check the path."),
                _ => failure,
            }
        })?;
        Ok(Place { what, way: above.to_owned(), directory, name: name.to_owned() })
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The file's path.
    pub fn path(&self) -> PathBuf {
        self.directory.join(&self.name)
    }

    /// The path under which the next content of the file is written.
    pub fn next_path(&self) -> PathBuf {
        let mut name = OsString::from(".");
        name.push(&self.name);
        name.push(".new");
        self.directory.join(name)
    }

    /// Refuses a place in the data directory, or where the data directory leads by the links that
    /// PostgreSQL knows: `pg_wal` and the tablespaces. A backup copies all of them, and a key that
    /// travels with what it protects protects nothing.
    pub fn outside_of(&self, data_directory: &Path) -> Result<(), ProviderError> {
        let what = || format!("could not find data directory \"{}\"", data_directory.display());
        if !data_directory.is_absolute() {
            return Err(ProviderError::new(ErrorClass::BadRequest, what())
                .with_detail("The path of the data directory is not absolute."));
        }
        let root = data_directory.canonicalize().map_err(|error| ProviderError {
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

    /// Refuses a place below anything that looks like a data directory, whose ever it is.
    pub fn outside_of_any(&self) -> Result<(), ProviderError> {
        match data_directory_above(&self.directory) {
            None => Ok(()),
            Some(root) => Err(self.inside("data directory", root)),
        }
    }

    fn inside(&self, what: &str, root: &Path) -> ProviderError {
        let name = self.what.name();
        let root = root.display();
        insecure(format!("{name} \"{}\" lies inside the {what}", self.path().display()))
            .with_detail(match self.what {
                What::KeyFile => {
                    format!("Every copy and backup of {what} \"{root}\" would carry the key along.")
                }
                _ => {
                    format!("Whatever restores or writes {what} \"{root}\" could exchange it.")
                }
            })
            .with_hint(format!("Put the {name} elsewhere, for example under /etc/pagevault."))
    }

    /// Refuses a place where others could exchange the file: each directory above it must belong to
    /// root or to us, and be writable by others only with the sticky bit; so must each link on the way to it.
    pub fn check_directories(&self) -> Result<(), ProviderError> {
        self.directory
            .ancestors()
            .try_for_each(|directory| check_directory(self.what, directory))?;
        let shown = self.way.display();
        let way = follow(self.what, &self.way).map_err(|astray| {
            astray.or(|error| io_error(error, &format!("could not find directory \"{shown}\"")))
        })?;
        check_directory(self.what, &way)
    }

    /// Refuses a program that somebody else than root and us could have written, and what is none.
    ///
    /// # Errors
    /// `unreachable` if it does not exist, `insecure` or `denied` if it must or can not be run.
    pub fn check_program(&self) -> Result<(), ProviderError> {
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
                .with_detail("Whoever can change the link could choose another program.")
                .with_hint("Give the path of the program itself."));
        }
        if !metadata.is_file() {
            return Err(insecure(format!("program \"{shown}\" is not a regular file"))
                .with_detail("Only a regular file can be run.")
                .with_hint("Give the path of the program itself."));
        }
        judge_program(&path, Rights::of(&metadata))?;
        access(&path, AccessFlags::X_OK).map_err(|error| {
            ProviderError::new(
                ErrorClass::Denied,
                format!("program \"{shown}\" is not executable for the server's user"),
            )
            .with_detail(format!("{}.", error.desc()))
            .with_hint(format!("As its owner, run: chmod go-w,a+rx \"{shown}\""))
        })
    }

    /// Opens the file for reading if nobody else could have read or written it. Never waits, not
    /// even if a FIFO lies there.
    pub fn open(&self) -> Result<(File, Metadata), ProviderError> {
        self.open_with(OpenOptions::new().read(true))
    }

    /// Opens the file as [`Place::open`] does, fit for an exclusive lock: NFS gives one only to who
    /// may write.
    pub fn open_to_lock(&self) -> Result<(File, Metadata), ProviderError> {
        // Reading first: that others own the file says more than that we may not write it.
        self.open()?;
        self.open_with(OpenOptions::new().read(true).write(true))
    }

    fn open_with(&self, options: &mut OpenOptions) -> Result<(File, Metadata), ProviderError> {
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
                // What opening a socket gives.
                Some(nix::libc::ENXIO) => return not_regular(&path),
                _ => {}
            }
            if error.kind() == io::ErrorKind::NotFound {
                return io_error(&error, &format!("key file \"{shown}\" does not exist"))
                    .with_hint(format!(
                        "Bring the file back, or check the path. A new one is made with: \
                         pagevault-keyring file create \"{shown}\" --key NAME"
                    ));
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

/// The directory above `path` that looks like a data directory, if there is one.
pub(crate) fn data_directory_above(path: &Path) -> Option<&Path> {
    path.ancestors().find(|directory| directory.join("PG_VERSION").exists())
}

/// Who owns a file and who may do what to it.
#[derive(Clone, Copy)]
struct Rights {
    mode: u32,
    owner: u32,
    us: u32,
}

impl Rights {
    fn of(metadata: &Metadata) -> Rights {
        let (mode, owner) = (metadata.mode() & 0o7777, metadata.uid());
        Rights { mode, owner, us: geteuid().as_raw() }
    }
}

pub(super) fn check_directory(what: What, directory: &Path) -> Result<(), ProviderError> {
    let shown = directory.display();
    let metadata = fs::metadata(directory)
        .map_err(|error| io_error(&error, &format!("could not examine directory \"{shown}\"")))?;
    judge_directory(what, directory, Rights::of(&metadata))
}

fn judge_directory(what: What, directory: &Path, rights: Rights) -> Result<(), ProviderError> {
    const STICKY: u32 = 0o1000;
    let Rights { mode, owner, us } = rights;
    let shown = directory.display();
    let name = what.name();
    let unsafe_directory = |detail: String| {
        insecure(format!("directory \"{shown}\" is not safe for a {name}")).with_detail(detail)
    };
    if owner != 0 && owner != us {
        return Err(unsafe_directory(format!(
            "It belongs to user ID {owner}, who could exchange the {name}; we run as user ID {us}."
        ))
        .with_hint(ownership_hint(directory, owner, us)));
    }
    if mode & 0o022 != 0 && mode & STICKY == 0 {
        return Err(unsafe_directory(format!(
            "Its mode is {mode:04o}: others than its owner may exchange the {name}."
        ))
        .with_hint(format!("Run: chmod go-w \"{shown}\"")));
    }
    Ok(())
}

fn judge_file(path: &Path, rights: Rights) -> Result<(), ProviderError> {
    let Rights { mode, owner, us } = rights;
    let shown = path.display();
    if owner != us {
        return Err(insecure(format!("key file \"{shown}\" belongs to another user"))
            .with_detail(format!("It belongs to user ID {owner}; we run as user ID {us}."))
            .with_hint(ownership_hint(path, owner, us)));
    }
    if mode & 0o077 != 0 {
        return Err(insecure(format!("key file \"{shown}\" is open to other users"))
            .with_detail(format!("Its mode is {mode:04o}; it must be 0600 or less."))
            .with_hint(format!(
                "Run: chmod 0600 \"{shown}\". If others may have read the key, rotate it and \
                 re-wrap what it wraps."
            )));
    }
    Ok(())
}

fn judge_program(path: &Path, rights: Rights) -> Result<(), ProviderError> {
    let Rights { mode, owner, us } = rights;
    let shown = path.display();
    if owner != 0 && owner != us {
        return Err(insecure(format!("program \"{shown}\" belongs to another user"))
            .with_detail(format!(
                "It belongs to user ID {owner}, who could change it; we run as user ID {us}."
            ))
            .with_hint(format!("Run as root: chown root \"{shown}\"")));
    }
    if mode & 0o022 != 0 {
        return Err(insecure(format!("program \"{shown}\" can be changed by other users"))
            .with_detail(format!("Its mode is {mode:04o}."))
            .with_hint(format!("Run: chmod go-w \"{shown}\"")));
    }
    Ok(())
}

/// Root is hardly ever who the server runs as: more likely the operator forgot to change user.
pub(crate) fn ownership_hint(path: &Path, owner: u32, us: u32) -> String {
    if us == 0 {
        format!("Run this as the user that runs the server; is that user ID {owner}?")
    } else {
        format!("Run as root: chown {us} \"{}\"", path.display())
    }
}

fn check_file(path: &Path, metadata: &Metadata) -> Result<(), ProviderError> {
    let shown = path.display();
    if !metadata.is_file() {
        return Err(not_regular(path));
    }
    judge_file(path, Rights::of(metadata))?;
    if metadata.nlink() > 1 {
        return Err(insecure(format!("key file \"{shown}\" has {} names", metadata.nlink()))
            .with_detail("Another hard link to it may lie where backups or other users reach it.")
            .with_hint(format!(
                "Find the others with: find / -xdev -inum {}, and remove them.",
                metadata.ino()
            )));
    }
    Ok(())
}

fn not_regular(path: &Path) -> ProviderError {
    insecure(format!("key file \"{}\" is not a regular file", path.display()))
        .with_hint("Give the path of a file made with: pagevault-keyring file create")
}

pub(crate) fn insecure(message: impl Into<String>) -> ProviderError {
    ProviderError::new(ErrorClass::Insecure, message)
}

/// Sorts the system's error into our classes.
pub(super) fn io_error(error: &io::Error, message: &str) -> ProviderError {
    let class = match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => ErrorClass::Denied,
        _ => ErrorClass::Unreachable,
    };
    let failure = ProviderError::new(class, message).with_detail(format!("{error}."));
    match error.kind() {
        io::ErrorKind::PermissionDenied => failure.with_hint(format!(
            "User ID {} must own the file and may enter each directory above it.",
            geteuid()
        )),
        // A network file system that restarts, or a moment of shortage.
        io::ErrorKind::Interrupted
        | io::ErrorKind::TimedOut
        | io::ErrorKind::StaleNetworkFileHandle
        | io::ErrorKind::ResourceBusy
        | io::ErrorKind::OutOfMemory => failure.transient(),
        _ => match error.raw_os_error() {
            Some(nix::libc::EIO | nix::libc::EMFILE | nix::libc::ENFILE) => failure.transient(),
            _ => failure,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u32 = 1000;

    fn directory(mode: u32, owner: u32) -> Result<(), ProviderError> {
        judge_directory(What::KeyFile, Path::new("/d"), Rights { mode, owner, us: US })
    }

    fn file(mode: u32, owner: u32) -> Result<(), ProviderError> {
        judge_file(Path::new("/d/f"), Rights { mode, owner, us: US })
    }

    #[test]
    fn directories_of_root_and_us_are_safe_if_only_they_can_write() {
        for owner in [0, US] {
            for (mode, safe) in
                [(0o700, true), (0o755, true), (0o1777, true), (0o775, false), (0o757, false)]
            {
                assert_eq!(directory(mode, owner).is_ok(), safe, "{mode:o} {owner}");
            }
        }
        let error = directory(0o755, 7).unwrap_err();
        assert_eq!(error.class, ErrorClass::Insecure);
        assert_eq!(error.hint, "Run as root: chown 1000 \"/d\"");
    }

    #[test]
    fn files_are_ours_alone() {
        for mode in 0..0o1000 {
            assert_eq!(file(mode, US).is_ok(), mode & 0o077 == 0, "{mode:o}");
            assert!(file(mode, 0).is_err() && file(mode, 7).is_err());
        }
    }

    #[test]
    fn programs_are_written_by_root_or_us_alone() {
        for mode in 0..0o1000 {
            for owner in [0, US] {
                let judged = judge_program(Path::new("/d/p"), Rights { mode, owner, us: US });
                assert_eq!(judged.is_ok(), mode & 0o022 == 0, "{mode:o}");
            }
        }
        let rights = Rights { mode: 0o755, owner: 7, us: US };
        assert_eq!(
            judge_program(Path::new("/d/p"), rights).unwrap_err().class,
            ErrorClass::Insecure
        );
    }

    #[test]
    fn root_is_asked_whether_it_meant_to_be_root() {
        let rights = Rights { mode: 0o600, owner: 26, us: 0 };
        let error = judge_file(Path::new("/d/f"), rights).unwrap_err();
        assert_eq!(error.hint, "Run this as the user that runs the server; is that user ID 26?");
    }
}
