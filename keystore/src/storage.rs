//! The few file operations a key log needs, and their implementation on a directory.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A flat directory of small files.
///
/// Every operation but [`append`](Storage::append) that returns `Ok` is durable: it survives a
/// power cut. One that fails, or is killed in the middle, may have happened not at all, in part, or
/// wholly, and durably or not; of bytes not yet durable anything may be found after a power cut: a
/// part, zeros, garbage. `log` is written for exactly these promises, and its tests run on a fake
/// that breaks off at every step.
///
/// Callers exclude each other by a lock of their own. No implementation keeps a file open between
/// calls: another process may have replaced it by [`rename`](Storage::rename).
pub trait Storage {
    /// Names of all files.
    fn names(&self) -> io::Result<Vec<String>>;

    /// Length in bytes, `None` if there is no such file.
    fn len(&self, name: &str) -> io::Result<Option<u64>>;

    /// Bytes from `from`, at most `limit`; `None` if there is no such file.
    fn read(&self, name: &str, from: u64, limit: u64) -> io::Result<Option<Vec<u8>>>;

    /// Makes a file with this content, in place of any of that name. Its *name* need not be durable
    /// before it is renamed.
    fn create(&self, name: &str, bytes: &[u8]) -> io::Result<()>;

    /// Adds to a file that is `at` bytes long; fails if it is not. Durable after the next
    /// [`sync_data`](Storage::sync_data): until then a power cut may leave any part of it.
    fn append(&self, name: &str, at: u64, bytes: &[u8]) -> io::Result<()>;

    /// Cuts a file.
    fn truncate(&self, name: &str, length: u64) -> io::Result<()>;

    /// Gives a file another name, atomically in place of any that had it.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file; no error if there is none.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes the content that can be read now durable, whoever wrote it.
    fn sync_data(&self, name: &str) -> io::Result<()>;

    /// Makes what can be read now durable, name and content, whoever wrote it.
    fn sync(&self, name: &str) -> io::Result<()>;
}

/// Of a data directory that its group may read (`PG_DIR_MODE_GROUP`, file_perm.h).
const GROUP_ACCESS: u32 = 0o750;

/// A directory on disk.
///
/// Its mode is 0700 and that of its files 0600; or 0750 and 0640 where its parent may be read by a
/// group, as PostgreSQL has it for all that is in a data directory (`GetDataDirectoryCreatePerm`,
/// file_perm.c): who makes backups by this right needs the keystore, too.
#[derive(Debug, Clone)]
pub struct FileStorage {
    directory: PathBuf,
    file_mode: u32,
}

impl FileStorage {
    /// The storage in `directory`, which is made if it does not exist (its parent must).
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
        // Names that are not UTF-8 are not ours.
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
        // Removed rather than emptied, so that the mode is ours whoever left a file there.
        self.remove(name)?;
        let path = self.path(name)?;
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(self.file_mode).open(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    }

    fn append(&self, name: &str, at: u64, bytes: &[u8]) -> io::Result<()> {
        let file = self.open_to_write(name)?;
        if file.metadata()?.len() != at {
            return Err(io::Error::other("file has an unexpected length"));
        }
        file.write_all_at(bytes, at)
    }

    fn truncate(&self, name: &str, length: u64) -> io::Result<()> {
        let file = self.open_to_write(name)?;
        if file.metadata()?.len() < length {
            return Err(io::Error::other("file is shorter than expected"));
        }
        file.set_len(length)?;
        file.sync_all()
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.path(from)?, self.path(to)?)?;
        self.sync_directory()
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match fs::remove_file(self.path(name)?) {
            Ok(()) => self.sync_directory(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn sync_data(&self, name: &str) -> io::Result<()> {
        // fdatasync: also writes the new length, without which the data could not be read.
        self.open_to_write(name)?.sync_data()
    }

    fn sync(&self, name: &str) -> io::Result<()> {
        self.open_to_write(name)?.sync_all()?;
        self.sync_directory()
    }
}
