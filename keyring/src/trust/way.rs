//! The way to a file: each directory on it, and each symbolic link, must be root's or ours.
//!
//! [`Place`](crate::keyfile::place::Place) wants the file itself where its path says; credentials,
//! certificates and data directories are often reached by links, as Kubernetes and certificate
//! managers make them. A link is as good as a directory: who owns it, or may write where it lies,
//! chooses the file. So links are followed here, one by one, and what is opened then is a path
//! without any.
//!
//! In a sticky directory (`/tmp`) others may make names, but neither remove nor exchange those of
//! root and ours; so it will do on the way, as long as the next step is root's or ours. It will not
//! do for what is at the end of it: see [`require`](super::require).

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use nix::unistd::geteuid;

use super::{What, check_directory, insecure};
use crate::failure::Failure;

/// As many as Linux follows.
const MOST_LINKS: usize = 40;

/// Why there is no way, or none that is safe.
pub(crate) enum Astray {
    /// The system's error.
    Io(io::Error),
    Unsafe(Failure),
}

impl From<io::Error> for Astray {
    fn from(error: io::Error) -> Self {
        Astray::Io(error)
    }
}

impl Astray {
    /// As an error; `unreachable` says it for the system's.
    pub(crate) fn or(self, unreachable: impl FnOnce(&io::Error) -> Failure) -> Failure {
        match self {
            Astray::Io(error) => unreachable(&error),
            Astray::Unsafe(error) => error,
        }
    }
}

/// Follows an absolute path to its end, which must exist. What is there is not looked at.
pub(crate) fn follow(what: What, path: &Path) -> Result<PathBuf, Astray> {
    if !path.is_absolute() {
        return Err(io::Error::from(io::ErrorKind::InvalidInput).into());
    }
    let mut at = PathBuf::from("/");
    let mut left = steps(path);
    let mut links = 0;
    check_directory(what, &at).map_err(Astray::Unsafe)?;
    while let Some(step) = left.pop_front() {
        if step == ".." {
            at.pop();
            continue;
        }
        let next = at.join(step);
        let metadata = fs::symlink_metadata(&next)?;
        if metadata.is_symlink() {
            links += 1;
            if links > MOST_LINKS {
                return Err(io::Error::from_raw_os_error(nix::libc::ELOOP).into());
            }
            check_link(what, &next, &metadata).map_err(Astray::Unsafe)?;
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
            check_directory(what, &next).map_err(Astray::Unsafe)?;
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

fn check_link(what: What, link: &Path, metadata: &Metadata) -> Result<(), Failure> {
    let (owner, us) = (metadata.uid(), geteuid().as_raw());
    if owner == 0 || owner == us {
        return Ok(());
    }
    let (shown, name) = (link.display(), what.name());
    Err(insecure(format!("symbolic link \"{shown}\" is not safe for a {name}"))
        .with_detail(format!(
            "It belongs to user ID {owner}, who could exchange the {name}; we run as user ID {us}."
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
        follow(What::Credentials, path).map_err(|astray| match astray {
            Astray::Io(_) => ErrorClass::Unreachable,
            Astray::Unsafe(error) => error.class,
        })
    }

    #[test]
    fn links_are_followed_and_every_step_is_judged() {
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
        // Who can write where a link lies chooses the file.
        assert_eq!(class(&at("open/link")), Err(ErrorClass::Insecure));
        fs::set_permissions(at("open"), fs::Permissions::from_mode(0o1777)).unwrap();
        assert_eq!(class(&at("open/link")), Ok(token));
        if geteuid().is_root() {
            // Somebody else's link in a sticky directory.
            std::os::unix::fs::lchown(at("open/link"), Some(65534), None).unwrap();
            assert_eq!(class(&at("open/link")), Err(ErrorClass::Insecure));
            chown(at("safe"), Some(65534), None).unwrap();
            assert_eq!(class(&at("around/link")), Err(ErrorClass::Insecure));
        }
    }

    #[test]
    fn what_is_at_the_end_is_not_excused_by_a_sticky_bit() {
        let root = tempfile::tempdir().unwrap();
        let judge = |mode| {
            fs::set_permissions(root.path(), fs::Permissions::from_mode(mode)).unwrap();
            require(What::Keystore, root.path(), &fs::metadata(root.path()).unwrap())
        };
        assert!(judge(0o700).is_ok() && judge(0o755).is_ok());
        assert!(judge(0o1777).is_err() && judge(0o770).is_err());
    }
}
