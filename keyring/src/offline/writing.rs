//! What commands observe that write files of a keystore without its server.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::unistd::geteuid;
use pagevault_keystore::storage::{FileStorage, Storage};

use super::{DIRECTORY, Keystore};
use crate::access::Access;
use crate::failure::{Failure, refuse, unreadable};

/// Between two attempts to lock.
const PAUSE: Duration = Duration::from_millis(50);

impl Keystore {
    /// Like [`Keystore::read`], for a command that then writes there, as the user of the server.
    /// Other such commands wait until this value is dropped: what one has read, no other replaces.
    ///
    /// # Errors
    /// Those of [`Keystore::read`]; also if the keystore belongs to another user.
    pub(crate) fn read_to_write(data_directory: &Path, access: Access) -> Result<Self, Failure> {
        let lock = lock(&data_directory.join(DIRECTORY), access.time())?;
        let keystore = Self { _lock: lock, ..Self::read(data_directory, access)? };
        require_owner(&keystore)?;
        Ok(keystore)
    }
}

/// Locks a directory, after other commands. `None` if there is none, which reading reports.
fn lock(directory: &Path, limit: Duration) -> Result<Option<Flock<File>>, Failure> {
    let is_directory = OFlag::O_DIRECTORY.bits();
    let Ok(mut file) = OpenOptions::new().read(true).custom_flags(is_directory).open(directory)
    else {
        return Ok(None);
    };
    let deadline = Instant::now() + limit;
    let failed = |why: &str| {
        refuse(format!("could not lock \"{}\": {why}", directory.display()))
            .with_detail("Nothing was changed.")
    };
    loop {
        file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(held) => return Ok(Some(held)),
            // NFS has no locks of directories.
            Err((_, Errno::EBADF | Errno::ENOLCK | Errno::EOPNOTSUPP)) => return Ok(None),
            // Who may read the directory may lock it, too.
            Err((_, Errno::EAGAIN)) if Instant::now() >= deadline => {
                return Err(failed("another process has locked it").with_hint(
                    "Let another pagevault-keyring that writes there end. fuser or lslocks name the process.",
                ));
            }
            Err((file, Errno::EAGAIN | Errno::EINTR)) => file,
            Err((_, error)) => return Err(failed(&error.to_string())),
        };
        thread::sleep(PAUSE);
    }
}

/// Writes a file of the keystore's directory atomically.
pub(crate) fn put(keystore: &Keystore, name: &str, bytes: &[u8]) -> std::io::Result<()> {
    let storage = FileStorage::new(&keystore.data_directory().join(DIRECTORY))?;
    let new = format!("{name}.new");
    storage.create(&new, bytes)?;
    Ok(storage.rename(&new, name)?)
}

/// Files that are written here must belong to the server's user.
fn require_owner(keystore: &Keystore) -> Result<(), Failure> {
    let directory = keystore.data_directory().join(DIRECTORY);
    let owner = fs::metadata(&directory).map_err(|error| unreadable(&directory, &error))?.uid();
    if owner == geteuid().as_raw() {
        return Ok(());
    }
    Err(refuse("the data directory belongs to another user")
        .with_detail(format!("\"{}\" belongs to user ID {owner}.", directory.display()))
        .with_hint("Run this command as the user that runs the server."))
}

/// Refuses a data directory in which a server runs.
pub(crate) fn require_no_server(data_directory: &Path) -> Result<(), Failure> {
    let lock = data_directory.join("postmaster.pid");
    if lock.exists() {
        return Err(refuse("a server is running in the data directory")
            .with_detail(format!("Lock file {} exists.", lock.display()))
            .with_hint(
                "Stop the server. If no server is running, the lock file is left over from a crash: remove it.",
            ));
    }
    Ok(())
}

/// Removes a file that was written, and that only a server which starts reads, if one runs now.
///
/// A server writes its lock file before it reads the keystore (`PostmasterMain`, postmaster.c). So
/// if none is there, the next start finds the file. A server that runs may have missed it, and must
/// not find it when it is started again, however late.
pub(crate) fn require_not_started(keystore: &Keystore, name: &str) -> Result<(), Failure> {
    if require_no_server(keystore.data_directory()).is_ok() {
        return Ok(());
    }
    let directory = keystore.data_directory().join(DIRECTORY);
    let shown = directory.join(name);
    let shown = shown.display();
    let detail = match FileStorage::new(&directory).and_then(|storage| storage.remove(name)) {
        Ok(()) => {
            format!("The file \"{shown}\" was removed again. The server may have read it before.")
        }
        Err(error) => format!(
            "The file \"{shown}\" counts at the next start; it could not be removed: {error}."
        ),
    };
    Err(refuse("a server was started at the same time")
        .with_detail(detail)
        .with_hint("Stop the server before you run the command again."))
}

/// Refuses a data directory in which a server runs, or that of a standby.
pub(crate) fn require_stopped(data_directory: &Path) -> Result<(), Failure> {
    require_no_server(data_directory)?;
    if data_directory.join("standby.signal").exists() {
        return Err(refuse("the data directory belongs to a standby")
            .with_hint("Run this command on the primary, and create its standbys again. To make this server the primary instead, remove standby.signal."));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use pagevault_keystore::Scope;
    use pagevault_keystore::log::Log;

    use super::*;

    #[test]
    fn a_file_beside_a_server_that_was_started_is_removed() {
        let data = tempfile::tempdir().unwrap();
        let data = data.path();
        let storage = FileStorage::new(&data.join(DIRECTORY)).unwrap();
        Log::create(&storage, [7; 16], Scope::CLUSTER, &[]).unwrap();
        let keystore = Keystore::read_to_write(data, Access::default()).unwrap();
        put(&keystore, "file", b"x").unwrap();
        require_not_started(&keystore, "file").unwrap();
        assert_eq!(storage.len("file").unwrap(), Some(1));
        fs::write(data.join("postmaster.pid"), "").unwrap();
        let refused = require_not_started(&keystore, "file").unwrap_err();
        assert_eq!(refused.message, "a server was started at the same time");
        assert_eq!(storage.len("file").unwrap(), None);
    }
}
