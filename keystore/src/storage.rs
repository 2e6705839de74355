//! The file operations that a key log needs, and their implementation on a directory.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Why a file was not changed or synced.
#[derive(Debug)]
pub enum StorageError {
    /// The file, or the directory, could not be opened: nothing has happened, and it can be tried
    /// again.
    Open(io::Error),
    /// Opened, and then it failed: nothing, a part or all of it may have happened. After a sync it
    /// is unknown what is durable, and syncing again would not tell, because the kernel reports
    /// what it could not write once.
    Failed(io::Error),
}

impl From<StorageError> for io::Error {
    fn from(error: StorageError) -> io::Error {
        match error {
            StorageError::Open(source) | StorageError::Failed(source) => source,
        }
    }
}

/// A flat directory of small files.
///
/// Each operation except [`append`](Storage::append) is durable when it returns `Ok`: it survives a
/// power failure. An operation that fails or is interrupted may have had no, part or all of its
/// effect, durably or not; but none after [`StorageError::Open`]. Of bytes that are not durable
/// yet, anything may remain after a power failure: a part, zeros, garbage. `log` relies on exactly
/// these guarantees; its tests use a fake that stops at each step.
///
/// Callers exclude each other by a lock of their own. Implementations keep no file open between
/// calls, because another process may replace it by [`rename`](Storage::rename).
pub trait Storage {
    /// Names of all files.
    fn names(&self) -> io::Result<Vec<String>>;

    /// Length in bytes; `None` if there is no such file.
    fn len(&self, name: &str) -> io::Result<Option<u64>>;

    /// At most `limit` bytes from offset `from`; `None` if there is no such file.
    fn read(&self, name: &str, from: u64, limit: u64) -> io::Result<Option<Vec<u8>>>;

    /// Creates a file with this content, replacing any file of that name. The *name* need not be
    /// durable before the file is renamed.
    fn create(&self, name: &str, bytes: &[u8]) -> io::Result<()>;

    /// Appends to a file that is `at` bytes long; fails if it has another length. Durable after the
    /// next [`sync_data`](Storage::sync_data): until then a power failure may leave any part of it.
    fn append(&self, name: &str, at: u64, bytes: &[u8]) -> Result<(), StorageError>;

    /// Truncates a file.
    fn truncate(&self, name: &str, length: u64) -> io::Result<()>;

    /// Renames a file, atomically replacing any file of the new name.
    fn rename(&self, from: &str, to: &str) -> Result<(), StorageError>;

    /// Removes a file; no error if there is none.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes the present content durable, whichever process wrote it.
    fn sync_data(&self, name: &str) -> Result<(), StorageError>;

    /// Makes the present content and the name durable, whichever process wrote them.
    fn sync(&self, name: &str) -> io::Result<()>;
}

/// Mode of a data directory that its group may read (`PG_DIR_MODE_GROUP`, file_perm.h).
const GROUP_ACCESS: u32 = 0o750;

/// A directory on disk.
///
/// Its mode is 0700 and that of its files 0600; or 0750 and 0640 if its parent directory is
/// readable by its group, as PostgreSQL does in a data directory (`GetDataDirectoryCreatePerm`,
/// file_perm.c): roles that make backups by group access need the keystore, too.
#[derive(Debug, Clone)]
pub struct FileStorage {
    directory: PathBuf,
    file_mode: u32,
}

impl FileStorage {
    /// The storage in `directory`, which is created if it does not exist (its parent must exist).
    pub fn new(directory: &Path) -> io::Result<Self> {
        let parent = directory.parent().filter(|path| *path != Path::new(""));
        let parent = File::open(parent.unwrap_or(Path::new(".")))?;
        let group = parent.metadata()?.mode() & GROUP_ACCESS == GROUP_ACCESS;
        let (mode, file_mode) = if group { (0o750, 0o640) } else { (0o700, 0o600) };
        match DirBuilder::new().mode(mode).create(directory) {
            Ok(()) => parent.sync_all()?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                if !fs::symlink_metadata(directory)?.is_dir() {
                    return Err(io::ErrorKind::NotADirectory.into());
                }
            }
            Err(error) => return Err(error),
        }
        Ok(Self { directory: directory.to_owned(), file_mode })
    }

    /// The mode of its files.
    #[must_use]
    pub fn file_mode(&self) -> u32 {
        self.file_mode
    }

    fn path(&self, name: &str) -> io::Result<PathBuf> {
        if name.is_empty() || name.contains(['/', '\0']) || name == "." || name == ".." {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(self.directory.join(name))
    }

    fn open(&self, name: &str, options: &OpenOptions) -> io::Result<Option<File>> {
        match options.open(self.path(name)?) {
            Ok(file) if file.metadata()?.is_file() => Ok(Some(file)),
            Ok(_) => Err(io::Error::other("not a regular file")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn open_to_write(&self, name: &str) -> io::Result<File> {
        self.open(name, OpenOptions::new().write(true))?
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn sync_directory(&self) -> io::Result<()> {
        File::open(&self.directory)?.sync_all()
    }
}

impl Storage for FileStorage {
    fn names(&self) -> io::Result<Vec<String>> {
        // Names that are not UTF-8 are not pagevault's.
        let names =
            fs::read_dir(&self.directory)?.map(|entry| Ok(entry?.file_name().into_string()));
        names.filter_map(|name: io::Result<_>| name.map(Result::ok).transpose()).collect()
    }

    fn len(&self, name: &str) -> io::Result<Option<u64>> {
        match fs::metadata(self.path(name)?) {
            Ok(metadata) => Ok(Some(metadata.len())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn read(&self, name: &str, from: u64, limit: u64) -> io::Result<Option<Vec<u8>>> {
        let Some(mut file) = self.open(name, OpenOptions::new().read(true))? else {
            return Ok(None);
        };
        let length = file.metadata()?.len().saturating_sub(from).min(limit);
        let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or(0));
        file.seek(SeekFrom::Start(from))?;
        file.take(limit).read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    }

    fn create(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        // Removed rather than truncated, so that the mode is right, whatever file was there.
        self.remove(name)?;
        let path = self.path(name)?;
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(self.file_mode).open(path)?;
        // Whatever the umask is.
        file.set_permissions(Permissions::from_mode(self.file_mode))?;
        file.write_all(bytes)?;
        file.sync_all()
    }

    fn append(&self, name: &str, at: u64, bytes: &[u8]) -> Result<(), StorageError> {
        let file = self.open_to_write(name).map_err(StorageError::Open)?;
        let write = || {
            if file.metadata()?.len() != at {
                return Err(io::Error::other("file has an unexpected length"));
            }
            file.write_all_at(bytes, at)
        };
        write().map_err(StorageError::Failed)
    }

    fn truncate(&self, name: &str, length: u64) -> io::Result<()> {
        let file = self.open_to_write(name)?;
        if file.metadata()?.len() < length {
            return Err(io::Error::other("file is shorter than expected"));
        }
        file.set_len(length)?;
        file.sync_all()
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), StorageError> {
        let open = || Ok((self.path(from)?, self.path(to)?, File::open(&self.directory)?));
        // Before the rename: afterwards there would be no way back if it could not be opened.
        let (from, to, directory) = open().map_err(StorageError::Open)?;
        let renamed = fs::rename(from, to).and_then(|()| directory.sync_all());
        renamed.map_err(StorageError::Failed)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match fs::remove_file(self.path(name)?) {
            Ok(()) => self.sync_directory(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn sync_data(&self, name: &str) -> Result<(), StorageError> {
        let file = self.open_to_write(name).map_err(StorageError::Open)?;
        // fdatasync: also writes the new length, which is needed to read the data.
        file.sync_data().map_err(StorageError::Failed)
    }

    fn sync(&self, name: &str) -> io::Result<()> {
        self.open_to_write(name)?.sync_all()?;
        self.sync_directory()
    }
}
