//! Opening files of a data directory that anybody may have written: there may be a FIFO, a device,
//! or a link to one. Opening a FIFO waits for a writer, opening a device may have effects, and
//! reading either may never end.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::fcntl::OFlag;

/// Opens a regular file for reading, and never blocks. Symbolic links are followed.
///
/// # Errors
/// Those of the system; also if it is not a regular file.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    // Checked before opening, since opening a device has effects: a watchdog starts, a tape
    // rewinds.
    require(&fs::metadata(path)?)?;
    // Files in /proc are regular, but reading them may block.
    let flags = OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits()).open(path)?;
    // The file may have been replaced since the first check.
    require(&file.metadata()?)?;
    Ok(file)
}

/// The content of a regular file that has at most `limit` bytes, whatever size it reports.
///
/// # Errors
/// Those of [`open_regular`]; also if the file is larger.
pub(crate) fn read_regular(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let file = open_regular(path)?;
    let too_large = || io::Error::other(format!("it has more than {limit} bytes"));
    if file.metadata()?.len() > limit {
        return Err(too_large());
    }
    let mut bytes = Vec::new();
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit { Err(too_large()) } else { Ok(bytes) }
}

/// Like [`read_regular`]; `None` if there is no such file.
///
/// # Errors
/// Those of [`read_regular`].
pub(crate) fn read_if_there(path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
    match read_regular(path, limit) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some),
    }
}

fn require(metadata: &fs::Metadata) -> io::Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    Err(io::Error::other("it is not a regular file"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    #[test]
    fn only_regular_files_are_opened() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        fs::write(path("file"), "12345").unwrap();
        symlink("file", path("link")).unwrap();
        mkfifo(&path("fifo"), Mode::S_IRWXU).unwrap();
        symlink("fifo", path("link-to-fifo")).unwrap();
        symlink("/dev/zero", path("link-to-device")).unwrap();
        let _socket = UnixListener::bind(path("socket")).unwrap();
        fs::create_dir(path("directory")).unwrap();
        for name in ["fifo", "link-to-fifo", "link-to-device", "socket", "directory"] {
            let error = open_regular(&path(name)).unwrap_err();
            assert_eq!(error.to_string(), "it is not a regular file", "{name}");
        }
        assert_eq!(open_regular(&path("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(read_if_there(&path("none"), 5).unwrap(), None);
        assert!(read_if_there(&path("fifo"), 5).is_err());
        for name in ["file", "link"] {
            assert_eq!(read_regular(&path(name), 5).unwrap(), b"12345");
            assert_eq!(read_if_there(&path(name), 5).unwrap().unwrap(), b"12345");
        }
    }

    #[test]
    fn no_more_is_read_than_the_limit() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        fs::write(&path, "12345").unwrap();
        // The second file reports the size 0.
        for path in [path.as_path(), Path::new("/proc/self/status")] {
            let error = read_regular(path, 4).unwrap_err();
            assert_eq!(error.to_string(), "it has more than 4 bytes");
        }
    }
}
