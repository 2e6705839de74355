//! Resolves a path safely: each directory and each symbolic link in it must belong to root or the
//! current user.
//!
//! [`Place`](crate::keyfile::place::Place) requires the file itself at its path. Credentials,
//! certificates and data directories, however, are often reached by symbolic links, which
//! Kubernetes and certificate managers create. Whoever owns a link, or can write to its directory,
//! decides on the file. So links are resolved here one by one, and the result is a path without
//! links.
//!
//! In a sticky directory (`/tmp`) other users can create names, but neither remove nor replace
//! those of root and the current user. So it is accepted in the path if the next component belongs
//! to one of them. It is not accepted as the end of the path: see [`require`](super::require).

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use nix::unistd::geteuid;

use super::{FileKind, check_directory, insecure};
use crate::failure::Failure;

/// Linux has the same limit.
const MAX_LINKS: usize = 40;

/// Why a path could not be resolved safely.
pub(crate) enum Unresolved {
    /// A system error.
    Io(io::Error),
    Unsafe(Failure),
}

impl From<io::Error> for Unresolved {
    fn from(error: io::Error) -> Self {
        Unresolved::Io(error)
    }
}

impl Unresolved {
    /// The failure; `unreachable` converts a system error.
    pub(crate) fn or(self, unreachable: impl FnOnce(&io::Error) -> Failure) -> Failure {
        match self {
            Unresolved::Io(error) => unreachable(&error),
            Unresolved::Unsafe(error) => error,
        }
    }
}

/// Resolves an absolute path, which must exist. The file at its end is not examined.
pub(crate) fn follow(what: FileKind, path: &Path) -> Result<PathBuf, Unresolved> {
    if !path.is_absolute() {
        return Err(io::Error::from(io::ErrorKind::InvalidInput).into());
    }
    let mut at = PathBuf::from("/");
    let mut left = steps(path);
    let mut links = 0;
    check_directory(what, &at).map_err(Unresolved::Unsafe)?;
    while let Some(step) = left.pop_front() {
        if step == ".." {
            at.pop();
            continue;
        }
        let next = at.join(step);
        let metadata = fs::symlink_metadata(&next)?;
        if metadata.is_symlink() {
            links += 1;
            if links > MAX_LINKS {
                return Err(io::Error::from_raw_os_error(nix::libc::ELOOP).into());
            }
            check_link(what, &next, &metadata).map_err(Unresolved::Unsafe)?;
            let target = fs::read_link(&next)?;
            if target.is_absolute() {
                at = PathBuf::from("/");
            }
            let mut target = steps(&target);
            target.append(&mut left);
            left = target;
            continue;
        }
        if !left.is_empty() {
            if !metadata.is_dir() {
                return Err(io::Error::from_raw_os_error(nix::libc::ENOTDIR).into());
            }
            check_directory(what, &next).map_err(Unresolved::Unsafe)?;
        }
        at = next;
    }
    Ok(at)
}

fn steps(path: &Path) -> VecDeque<OsString> {
    let step = |part: Component<'_>| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    };
    path.components().filter_map(step).collect()
}

fn check_link(what: FileKind, link: &Path, metadata: &Metadata) -> Result<(), Failure> {
    let (owner, us) = (metadata.uid(), geteuid().as_raw());
    if owner == 0 || owner == us {
        return Ok(());
    }
    let (shown, name) = (link.display(), what.name());
    Err(insecure(format!("symbolic link \"{shown}\" is not safe for a {name}"))
        .with_detail(format!(
            "It belongs to user ID {owner}, who could replace the {name}; the current user ID is {us}."
        ))
        .with_hint("Give the path of the file itself."))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use pagevault_keystore::protocol::ErrorClass;

    use super::super::require;
    use super::*;

    fn class(path: &Path) -> Result<PathBuf, ErrorClass> {
        follow(FileKind::Credentials, path).map_err(|unresolved| match unresolved {
            Unresolved::Io(_) => ErrorClass::Unreachable,
            Unresolved::Unsafe(error) => error.class,
        })
    }

    #[test]
    fn links_are_resolved_and_every_step_is_checked() {
        let root = tempfile::tempdir().unwrap();
        let base = root.path().canonicalize().unwrap();
        let at = |name: &str| base.join(name);
        for name in ["safe", "safe/deep", "open"] {
            fs::create_dir(at(name)).unwrap();
        }
        fs::write(at("safe/deep/token"), "x").unwrap();
        fs::set_permissions(at("open"), fs::Permissions::from_mode(0o777)).unwrap();
        let token = at("safe/deep/token");
        symlink("deep/token", at("safe/link")).unwrap();
        symlink("../safe/link", at("open/link")).unwrap();
        symlink(at("safe/../safe"), at("around")).unwrap();
        symlink("loop", at("loop")).unwrap();
        assert_eq!(class(&token), Ok(token.clone()));
        assert_eq!(class(&at("safe/link")), Ok(token.clone()));
        assert_eq!(class(&at("around/link")), Ok(token.clone()));
        assert_eq!(class(&at("safe/none")), Err(ErrorClass::Unreachable));
        assert_eq!(class(&at("loop")), Err(ErrorClass::Unreachable));
        assert_eq!(class(&at("safe/link/x")), Err(ErrorClass::Unreachable));
        assert_eq!(class(Path::new("token")), Err(ErrorClass::Unreachable));
        // Whoever can write to a link's directory decides on the file.
        assert_eq!(class(&at("open/link")), Err(ErrorClass::Insecure));
        fs::set_permissions(at("open"), fs::Permissions::from_mode(0o1777)).unwrap();
        assert_eq!(class(&at("open/link")), Ok(token));
        if geteuid().is_root() {
            // Another user's link in a sticky directory.
            std::os::unix::fs::lchown(at("open/link"), Some(65534), None).unwrap();
            assert_eq!(class(&at("open/link")), Err(ErrorClass::Insecure));
            chown(at("safe"), Some(65534), None).unwrap();
            assert_eq!(class(&at("around/link")), Err(ErrorClass::Insecure));
        }
    }

    #[test]
    fn a_sticky_directory_is_refused_at_the_end_of_a_path() {
        let root = tempfile::tempdir().unwrap();
        let judge = |mode| {
            fs::set_permissions(root.path(), fs::Permissions::from_mode(mode)).unwrap();
            require(FileKind::Keystore, root.path(), &fs::metadata(root.path()).unwrap())
        };
        assert!(judge(0o700).is_ok() && judge(0o755).is_ok());
        assert!(judge(0o1777).is_err() && judge(0o770).is_err());
    }
}
