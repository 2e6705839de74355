//! Key servers at Unix sockets. Unlike for a TCP port of this machine, at which any user can listen
//! while the server is down, the owner of the listening process is known.
//!
//! Two conditions are required. Only root and the current user may have been able to put the socket
//! there. And the listening process must belong to one of them, according to the kernel
//! (`SO_PEERCRED`, unix(7): the credentials of the process when it called `listen`). Because of the
//! first condition, later connections reach the same socket.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::sys::socket::{
    self, AddressFamily, SockFlag, SockType, UnixAddr, getsockopt, sockopt::PeerCredentials,
};
use nix::unistd::geteuid;
use pagevault_keystore::protocol::ErrorClass;

use crate::failure::Failure;
use crate::trust::resolve::follow;
use crate::trust::{FileKind, insecure};

/// The path of the socket without symbolic links, if root or the current user listens there.
///
/// # Errors
/// `unreachable` if nobody listens, `insecure` if another user does or could.
pub(crate) fn trusted(path: &Path) -> Result<PathBuf, Failure> {
    let shown = path.display();
    let unreachable = |error: &std::io::Error| {
        Failure::new(ErrorClass::Unreachable, format!("could not reach unix://{shown}"))
            .with_detail(format!("{error}."))
            .with_hint("Check that the provider runs and listens there.")
            .transient()
    };
    let place = follow(FileKind::Socket, path).map_err(|unresolved| unresolved.or(unreachable))?;
    let metadata = fs::symlink_metadata(&place).map_err(|error| unreachable(&error))?;
    if !metadata.file_type().is_socket() {
        return Err(insecure(format!("\"{shown}\" is not a socket"))
            .with_detail("A key server cannot listen there.")
            .with_hint("Give the path of the socket."));
    }
    let us = geteuid().as_raw();
    let is_ours = |user: u32| user == 0 || user == us;
    let foreign = |user: u32, what: &str| {
        insecure(format!("key server at unix://{shown} belongs to another user"))
            .with_detail(format!("{what} has user ID {user}; the current user ID is {us}."))
            .with_hint("Run the key server as root or as the server's operating system user, or connect to it by https.")
    };
    if !is_ours(metadata.uid()) {
        return Err(foreign(metadata.uid(), "The owner of the socket"));
    }
    let stream = connect(&place).map_err(|errno| unreachable(&errno.into()))?;
    let peer = getsockopt(&stream, PeerCredentials).map_err(|errno| unreachable(&errno.into()))?;
    if !is_ours(peer.uid()) {
        return Err(foreign(peer.uid(), "The process that listens at the socket"));
    }
    Ok(place)
}

/// Connects without blocking: if the listener accepts no connections, a blocking connect waits
/// while the queue is full (unix(7)).
fn connect(path: &Path) -> nix::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket::socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    socket::connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown};
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn a_listener_that_takes_no_connections_is_not_waited_for() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().canonicalize().unwrap().join("socket");
        let flags = SockFlag::SOCK_CLOEXEC;
        let listener = socket::socket(AddressFamily::Unix, SockType::Stream, flags, None).unwrap();
        socket::bind(listener.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        socket::listen(&listener, socket::Backlog::new(0).unwrap()).unwrap();
        let mut waiting = Vec::new();
        // Each connection occupies a place in the queue until it is full.
        let error = loop {
            match connect(&path) {
                Ok(stream) => waiting.push(UnixStream::from(stream)),
                Err(error) => break error,
            }
        };
        assert_eq!(error, nix::Error::EAGAIN);
        assert_eq!(trusted(&path).unwrap_err().class, ErrorClass::Unreachable);
    }

    #[test]
    fn only_sockets_of_root_and_this_user_are_used() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().canonicalize().unwrap().join("socket");
        let class = || trusted(&path).map_err(|error| error.class);
        assert_eq!(class(), Err(ErrorClass::Unreachable));
        fs::write(&path, "").unwrap();
        assert_eq!(class(), Err(ErrorClass::Insecure));
        fs::remove_file(&path).unwrap();
        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(class(), Ok(path.clone()));
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(class(), Err(ErrorClass::Insecure));
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o700)).unwrap();
        if geteuid().is_root() {
            chown(&path, Some(65534), None).unwrap();
            assert_eq!(class(), Err(ErrorClass::Insecure));
            chown(&path, Some(0), None).unwrap();
        }
        drop(listener);
        assert_eq!(class(), Err(ErrorClass::Unreachable));
    }
}
