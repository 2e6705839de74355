//! Owner and permissions of files, directories and programs that are named in options, the
//! environment or the command line. The same rules apply everywhere; "user" is the current user:
//!
//! | file | owner | forbidden mode bits | |
//! |---|---|---|---|
//! | key file | user | 0077 | one name, not a symbolic link |
//! | credentials | root, user | 0027 | agents write them readable for a group |
//! | token of a service account | root, user | 0022 | Kubernetes makes it world-readable |
//! | trusted file | root, user | 0022 | |
//! | program | root, user | 0022 | not a symbolic link |
//! | module of PKCS#11 | root, user | 0022 | |
//! | keystore, read without its server | root, user | 0022 | |
//! | the same, on a volume | root, user | 0022 | directories above may be writable by others |
//! | the same, in a data directory of mode 0700 | root, user | | one name |
//! | socket | root, user | | also the user of the listener (`net::socket`) |
//!
//! Credentials are tokens, secret IDs, private keys, AWS credentials and identities for escrow.
//! Trusted files are certificates, authorities, AWS configuration, role IDs, lists of providers,
//! anchor files and escrow bundles.
//!
//! Each directory above must belong to root or the user, and may be writable by others only if it
//! has the sticky bit. Each symbolic link in the path must belong to root or the user (`resolve`).
//! Kubernetes mounts a ConfigMap read-only as a directory of mode 0777; this is accepted for
//! trusted files.
//!
//! Access control lists need no check of their own: they show in the mode, whose group bits are the
//! maximum that the list grants (acl(5)).

pub(crate) mod read;
pub(crate) mod resolve;

use crate::failure::Failure;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::unistd::geteuid;
use pagevault_keystore::protocol::ErrorClass;
use rustix::fs::{StatVfsMountFlags, statvfs};

/// Kinds of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// A file of master keys.
    KeyFile,
    /// A program of the operator.
    Program,
    /// A shared library that is loaded to use a PKCS#11 token.
    Module,
    /// A file with credentials.
    Credentials,
    /// The token of this container's Kubernetes service account.
    ServiceAccount,
    /// A certificate, or another file that decides what is trusted.
    Trusted,
    /// The Unix socket of a key server.
    Socket,
    /// A data directory or a file of its keystore, read without its server.
    Keystore,
    /// The same, below directories that others may write to, if the operator says so.
    KeystoreOnVolume,
    /// The same, in a data directory that only its owner can enter: Kubernetes makes all files
    /// of a volume writable for a group.
    KeystoreBehindDoor,
    /// A file that describes providers.
    Providers,
    /// A file that describes the store of an anchor, or contains its note.
    Anchor,
    /// A recovery bundle.
    Bundle,
}

impl FileKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            FileKind::KeyFile => "key file",
            FileKind::Program => "program",
            FileKind::Module => "module",
            FileKind::Credentials => "credentials file",
            FileKind::ServiceAccount => "token file",
            FileKind::Trusted => "file",
            FileKind::Socket => "socket",
            FileKind::Keystore | FileKind::KeystoreOnVolume | FileKind::KeystoreBehindDoor => {
                "keystore"
            }
            FileKind::Providers => "providers file",
            FileKind::Anchor => "anchor file",
            FileKind::Bundle => "bundle",
        }
    }

    /// Whether root may own it.
    fn may_belong_to_root(self) -> bool {
        self != FileKind::KeyFile
    }

    /// Bits that its mode must not have.
    fn forbidden(self) -> u32 {
        match self {
            FileKind::KeyFile => 0o077,
            FileKind::Credentials => 0o027,
            FileKind::KeystoreBehindDoor => 0,
            _ => WRITABLE,
        }
    }
}

/// Mode bits that let others than the owner write.
const WRITABLE: u32 = 0o022;

const STICKY: u32 = 0o1000;

/// Owner and mode of a file, and the current user.
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

/// Refuses a file, or the directory at the end of a path, that another user owns or can write, or
/// can read if it is secret. The sticky bit of a directory does not help here.
pub(crate) fn require(what: FileKind, path: &Path, metadata: &Metadata) -> Result<(), Failure> {
    judge(what, path, Rights::of(metadata))
}

fn judge(what: FileKind, path: &Path, rights: Rights) -> Result<(), Failure> {
    let Rights { mode, owner, us } = rights;
    let (shown, name) = (path.display(), what.name());
    if owner != us && !(owner == 0 && what.may_belong_to_root()) {
        let error = insecure(format!("{name} \"{shown}\" belongs to another user"));
        return Err(match what {
            FileKind::Program | FileKind::Module => error
                .with_detail(format!(
                    "It belongs to user ID {owner}, who could change it; the current user ID is {us}."
                ))
                .with_hint(format!("Run as root: chown root \"{shown}\"")),
            _ => error
                .with_detail(format!("It belongs to user ID {owner}; the current user ID is {us}."))
                .with_hint(ownership_hint(path, owner, us)),
        });
    }
    if mode & what.forbidden() == 0 {
        return Ok(());
    }
    Err(match what {
        FileKind::KeyFile => insecure(format!("key file \"{shown}\" is accessible to other users"))
            .with_detail(format!("Its mode is {mode:04o}; it must be 0600 or less."))
            .with_hint(format!(
                "Run: chmod 0600 \"{shown}\". If other users may have read the key, rotate it."
            )),
        FileKind::Credentials => {
            insecure(format!("{name} \"{shown}\" is accessible to other users"))
                .with_detail(format!("Its mode is {mode:04o}; it must be 0640 or less."))
                .with_hint(format!("Run: chmod 0600 \"{shown}\""))
        }
        _ => insecure(format!("{name} \"{shown}\" can be changed by other users"))
            .with_detail(format!("Its mode is {mode:04o}."))
            .with_hint(format!("Run: chmod go-w \"{shown}\"")),
    })
}

/// Refuses a directory in which other users could replace files.
pub(crate) fn check_directory(what: FileKind, directory: &Path) -> Result<(), Failure> {
    let shown = directory.display();
    let metadata = fs::metadata(directory)
        .map_err(|error| io_error(&error, &format!("could not examine directory \"{shown}\"")))?;
    judge_directory(what, directory, Rights::of(&metadata), || is_read_only(directory))
}

fn is_read_only(directory: &Path) -> bool {
    statvfs(directory).is_ok_and(|mount| mount.f_flag.contains(StatVfsMountFlags::RDONLY))
}

fn judge_directory(
    what: FileKind,
    directory: &Path,
    rights: Rights,
    is_read_only: impl Fn() -> bool,
) -> Result<(), Failure> {
    let Rights { mode, owner, us } = rights;
    let (shown, name) = (directory.display(), what.name());
    let unsafe_directory = |detail: String| {
        insecure(format!("directory \"{shown}\" is not safe for a {name}")).with_detail(detail)
    };
    if owner != 0 && owner != us {
        return Err(unsafe_directory(format!(
            "It belongs to user ID {owner}, who could replace the {name}; the current user ID is {us}."
        ))
        .with_hint(ownership_hint(directory, owner, us)));
    }
    let is_safe = mode & WRITABLE == 0
        || mode & STICKY != 0
        || matches!(what, FileKind::KeystoreOnVolume | FileKind::KeystoreBehindDoor)
        || matches!(what, FileKind::Trusted | FileKind::ServiceAccount) && is_read_only();
    if !is_safe {
        return Err(unsafe_directory(format!(
            "Its mode is {mode:04o}: users other than its owner could replace the {name}."
        ))
        .with_hint(match what {
            FileKind::Keystore => format!("Run: chmod go-w \"{shown}\". On a volume that Kubernetes makes writable for a group (fsGroup), use --allow-shared-parents instead."),
            _ => format!("Run: chmod go-w \"{shown}\""),
        }));
    }
    Ok(())
}

/// The nearest directory above `path` that looks like a data directory.
pub(crate) fn data_directory_above(path: &Path) -> Option<&Path> {
    path.ancestors().find(|directory| directory.join("PG_VERSION").exists())
}

/// The server never runs as root: if this process does, the operator probably forgot to change the
/// user.
fn ownership_hint(path: &Path, owner: u32, us: u32) -> String {
    if us == 0 {
        format!("Run this command as the user that runs the server (user ID {owner}?).")
    } else {
        format!("Run as root: chown {us} \"{}\"", path.display())
    }
}

pub(crate) fn insecure(message: impl Into<String>) -> Failure {
    Failure::new(ErrorClass::Insecure, message)
}

/// The failure for a system error, as an outage. Missing permission for a directory or file is an
/// outage too: `denied` would be taken for a refusal of the key.
pub(crate) fn io_error(error: &io::Error, message: &str) -> Failure {
    let failure = Failure::new(ErrorClass::Unreachable, message).with_detail(format!("{error}."));
    match error.kind() {
        io::ErrorKind::PermissionDenied => failure.with_hint(format!(
            "User ID {} must own the file, and must have access to each directory above it.",
            geteuid()
        )),
        // A network file system that restarts, or a temporary shortage.
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

    fn directory(mode: u32, owner: u32) -> Result<(), Failure> {
        judge_directory(FileKind::KeyFile, Path::new("/d"), Rights { mode, owner, us: US }, || true)
    }

    fn file(mode: u32, owner: u32) -> Result<(), Failure> {
        judge(FileKind::KeyFile, Path::new("/d/f"), Rights { mode, owner, us: US })
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
        assert_eq!(error.hint(), "Run as root: chown 1000 \"/d\"");
    }

    #[test]
    fn key_files_belong_to_the_user_alone() {
        for mode in 0..0o1000 {
            assert_eq!(file(mode, US).is_ok(), mode & 0o077 == 0, "{mode:o}");
            assert!(file(mode, 0).is_err() && file(mode, 7).is_err());
        }
    }

    #[test]
    fn programs_are_writable_by_root_or_the_user_only() {
        for mode in 0..0o1000 {
            for owner in [0, US] {
                let judged =
                    judge(FileKind::Program, Path::new("/d/p"), Rights { mode, owner, us: US });
                assert_eq!(judged.is_ok(), mode & 0o022 == 0, "{mode:o}");
            }
        }
        let rights = Rights { mode: 0o755, owner: 7, us: US };
        assert_eq!(
            judge(FileKind::Program, Path::new("/d/p"), rights).unwrap_err().class,
            ErrorClass::Insecure
        );
    }

    #[test]
    fn the_hint_for_root_asks_for_the_servers_user() {
        let rights = Rights { mode: 0o600, owner: 26, us: 0 };
        let error = judge(FileKind::KeyFile, Path::new("/d/f"), rights).unwrap_err();
        assert_eq!(
            error.hint(),
            "Run this command as the user that runs the server (user ID 26?)."
        );
    }

    #[test]
    fn above_a_keystore_on_a_volume_only_the_owner_counts() {
        let judged = |what, mode, owner| {
            let rights = Rights { mode, owner, us: US };
            judge_directory(what, Path::new("/d"), rights, || false).is_ok()
        };
        for mode in [0o777, 0o775, 0o2775] {
            for owner in [0, US] {
                assert!(judged(FileKind::KeystoreOnVolume, mode, owner), "{mode:o} {owner}");
                assert!(!judged(FileKind::Keystore, mode, owner), "{mode:o} {owner}");
            }
            assert!(!judged(FileKind::KeystoreOnVolume, mode, 7), "{mode:o}");
        }
    }

    #[test]
    fn read_only_mounts_with_mode_0777_are_accepted_for_trusted_files() {
        let rights = Rights { mode: 0o777, owner: 0, us: US };
        let judged =
            |what, read_only| judge_directory(what, Path::new("/d"), rights, || read_only).is_ok();
        for what in [FileKind::Trusted, FileKind::ServiceAccount] {
            assert!(judged(what, true) && !judged(what, false), "{what:?}");
        }
        for what in
            [FileKind::KeyFile, FileKind::Credentials, FileKind::Program, FileKind::Keystore]
        {
            assert!(!judged(what, true), "{what:?}");
        }
    }
}
