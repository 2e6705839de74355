//! Files, directories and programs that the options, the environment or the command line name: whom
//! they must belong to, and who else may read and write them. One rule, here, for all of them.
//!
//! | what | owner | mode must not have | |
//! |---|---|---|---|
//! | key file | we | 0077 | one name, no link |
//! | credentials: tokens, secret IDs, private keys, AWS credentials, identities of escrow | root, we | 0027 | the group may read, as agents that write them do it |
//! | token of a service account | root, we | 0022 | Kubernetes mounts them readable to all in the container |
//! | certificates, authorities, AWS configuration, role IDs, lists of providers, bundles of escrow | root, we | 0022 | they tell whom to believe |
//! | program | root, we | 0022 | no link |
//! | keystore of a data directory, read without its server | root, we | 0022 | |
//! | socket | root, we | | who listens is asked of the kernel (`net::socket`) |
//!
//! Each directory above it belongs to root or to us, and others can write there only if it has the
//! sticky bit; each symbolic link on the way belongs to root or to us (`way`). A ConfigMap of
//! Kubernetes lies in a directory of mode 0777 that is mounted read-only: that will do for what
//! tells whom to believe.
//!
//! Access control lists show in the mode: the bits of the group are then what the list grants at
//! most (acl(5)).

pub(crate) mod read;
pub(crate) mod way;

use crate::failure::Failure;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::unistd::geteuid;
use pagevault_keystore::protocol::ErrorClass;
use rustix::fs::{StatVfsMountFlags, statvfs};

/// What lies at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// A file of master keys.
    KeyFile,
    /// A program of the operator's.
    Program,
    /// A file that holds credentials.
    Credentials,
    /// The token by which Kubernetes says who we are.
    ServiceAccount,
    /// A certificate, or another file that tells whom to believe.
    Trusted,
    /// A Unix socket at which keys are asked for.
    Socket,
    /// A data directory or a file of its keystore, read without its server.
    Keystore,
    /// A file that says which providers there are.
    Providers,
    /// A recovery bundle.
    Bundle,
}

impl What {
    pub(crate) fn name(self) -> &'static str {
        match self {
            What::KeyFile => "key file",
            What::Program => "program",
            What::Credentials => "credentials file",
            What::ServiceAccount => "token file",
            What::Trusted => "file",
            What::Socket => "socket",
            What::Keystore => "keystore",
            What::Providers => "file of providers",
            What::Bundle => "bundle",
        }
    }

    /// Whether it may be root's.
    fn may_be_roots(self) -> bool {
        self != What::KeyFile
    }

    /// Bits that its mode must not have.
    fn forbidden(self) -> u32 {
        match self {
            What::KeyFile => 0o077,
            What::Credentials => 0o027,
            _ => WRITABLE,
        }
    }
}

/// Bits of a mode by which others than the owner may write.
const WRITABLE: u32 = 0o022;

const STICKY: u32 = 0o1000;

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

/// Refuses a file, or the directory that a path leads to, that somebody else owns or may write, or
/// read where that gives it away; be it a directory with the sticky bit.
pub(crate) fn require(what: What, path: &Path, metadata: &Metadata) -> Result<(), Failure> {
    judge(what, path, Rights::of(metadata))
}

fn judge(what: What, path: &Path, rights: Rights) -> Result<(), Failure> {
    let Rights { mode, owner, us } = rights;
    let (shown, name) = (path.display(), what.name());
    if owner != us && !(owner == 0 && what.may_be_roots()) {
        let error = insecure(format!("{name} \"{shown}\" belongs to another user"));
        return Err(match what {
            What::Program => error
                .with_detail(format!(
                    "It belongs to user ID {owner}, who could change it; we run as user ID {us}."
                ))
                .with_hint(format!("Run as root: chown root \"{shown}\"")),
            _ => error
                .with_detail(format!("It belongs to user ID {owner}; we run as user ID {us}."))
                .with_hint(ownership_hint(path, owner, us)),
        });
    }
    if mode & what.forbidden() == 0 {
        return Ok(());
    }
    Err(match what {
        What::KeyFile => insecure(format!("key file \"{shown}\" is open to other users"))
            .with_detail(format!("Its mode is {mode:04o}; it must be 0600 or less."))
            .with_hint(format!(
                "Run: chmod 0600 \"{shown}\". If others may have read the key, rotate it and \
                 re-wrap what it wraps."
            )),
        What::Credentials => insecure(format!("\"{shown}\" is open to others"))
            .with_detail(format!("Its mode is {mode:04o}; it must be 0640 or less."))
            .with_hint(format!("Give it to the server's user alone: chmod 0600 \"{shown}\"")),
        _ => insecure(format!("{name} \"{shown}\" can be changed by other users"))
            .with_detail(format!("Its mode is {mode:04o}."))
            .with_hint(format!("Run: chmod go-w \"{shown}\"")),
    })
}

/// Refuses a directory in which others could exchange what lies there.
pub(crate) fn check_directory(what: What, directory: &Path) -> Result<(), Failure> {
    let shown = directory.display();
    let metadata = fs::metadata(directory)
        .map_err(|error| io_error(&error, &format!("could not examine directory \"{shown}\"")))?;
    judge_directory(what, directory, Rights::of(&metadata), || is_read_only(directory))
}

fn is_read_only(directory: &Path) -> bool {
    statvfs(directory).is_ok_and(|mount| mount.f_flag.contains(StatVfsMountFlags::RDONLY))
}

fn judge_directory(
    what: What,
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
            "It belongs to user ID {owner}, who could exchange the {name}; we run as user ID {us}."
        ))
        .with_hint(ownership_hint(directory, owner, us)));
    }
    let is_safe = mode & WRITABLE == 0
        || mode & STICKY != 0
        || matches!(what, What::Trusted | What::ServiceAccount) && is_read_only();
    if !is_safe {
        return Err(unsafe_directory(format!(
            "Its mode is {mode:04o}: others than its owner may exchange the {name}."
        ))
        .with_hint(format!("Run: chmod go-w \"{shown}\"")));
    }
    Ok(())
}

/// The directory above `path` that looks like a data directory, if there is one.
pub(crate) fn data_directory_above(path: &Path) -> Option<&Path> {
    path.ancestors().find(|directory| directory.join("PG_VERSION").exists())
}

/// Root is hardly ever who the server runs as: more likely the operator forgot to change user.
fn ownership_hint(path: &Path, owner: u32, us: u32) -> String {
    if us == 0 {
        format!("Run this as the user that runs the server; is that user ID {owner}?")
    } else {
        format!("Run as root: chown {us} \"{}\"", path.display())
    }
}

pub(crate) fn insecure(message: impl Into<String>) -> Failure {
    Failure::new(ErrorClass::Insecure, message)
}

/// An error of the system as an outage. That we may not enter a directory or read a file is so as
/// well: it is no word about a key, and `denied` would be taken for one.
pub(crate) fn io_error(error: &io::Error, message: &str) -> Failure {
    let failure = Failure::new(ErrorClass::Unreachable, message).with_detail(format!("{error}."));
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

    fn directory(mode: u32, owner: u32) -> Result<(), Failure> {
        judge_directory(What::KeyFile, Path::new("/d"), Rights { mode, owner, us: US }, || true)
    }

    fn file(mode: u32, owner: u32) -> Result<(), Failure> {
        judge(What::KeyFile, Path::new("/d/f"), Rights { mode, owner, us: US })
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
                let judged =
                    judge(What::Program, Path::new("/d/p"), Rights { mode, owner, us: US });
                assert_eq!(judged.is_ok(), mode & 0o022 == 0, "{mode:o}");
            }
        }
        let rights = Rights { mode: 0o755, owner: 7, us: US };
        assert_eq!(
            judge(What::Program, Path::new("/d/p"), rights).unwrap_err().class,
            ErrorClass::Insecure
        );
    }

    #[test]
    fn root_is_asked_whether_it_meant_to_be_root() {
        let rights = Rights { mode: 0o600, owner: 26, us: 0 };
        let error = judge(What::KeyFile, Path::new("/d/f"), rights).unwrap_err();
        assert_eq!(error.hint(), "Run this as the user that runs the server; is that user ID 26?");
    }

    #[test]
    fn a_directory_open_to_all_will_do_for_what_is_public_if_it_is_mounted_read_only() {
        let rights = Rights { mode: 0o777, owner: 0, us: US };
        let judged =
            |what, read_only| judge_directory(what, Path::new("/d"), rights, || read_only).is_ok();
        for what in [What::Trusted, What::ServiceAccount] {
            assert!(judged(what, true) && !judged(what, false), "{what:?}");
        }
        for what in [What::KeyFile, What::Credentials, What::Program, What::Keystore] {
            assert!(!judged(what, true), "{what:?}");
        }
    }
}
