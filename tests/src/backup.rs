//! Base backups by the functions that backup programs use (`pg_backup_start`, `pg_backup_stop`):
//! files are copied in any order, which may take any time.

use std::fs;
use std::os::unix::fs::{lchown, symlink};
use std::path::Path;

use anyhow::{Context, Result};
use postgres::Client;
use tempfile::TempDir;

use crate::cluster::{run_sql, text};
use crate::datafile::if_exists;
use crate::fault::{STOP_AT, STOPPED};
use crate::{Cluster, Installation};

const KEYSTORE: &str = "pagevault";

/// The files that are copied before the keystore.
const FILES: &str = "files";

/// Copied at the end, or part of the running server only.
const LEFT_OUT: [&str; 6] =
    [KEYSTORE, "pg_wal", "postmaster.pid", "postmaster.opts", STOP_AT, STOPPED];

/// A base backup that has begun. It contains the keystore as of the start and everything else as of
/// the end. This is the hardest order: pages may be sealed under keys that only WAL contains. Or
/// the other way round ([`Backup::begin_with_files`]): then the keystore says of pages what they
/// become in WAL.
pub struct Backup<'a> {
    server: &'a Cluster,
    session: Client,
    kept: TempDir,
    keystore_last: bool,
}

impl<'a> Backup<'a> {
    /// Begins with a checkpoint, so no stopped process may hold the keystore's lock.
    ///
    /// # Errors
    /// When the server returns an error, or files cannot be copied.
    pub fn begin(server: &'a Cluster) -> Result<Backup<'a>> {
        let mut session = server.client()?;
        run_sql(&mut session, "SELECT pg_backup_start('a backup', true)")?;
        let kept = tempfile::tempdir_in(server.directory())?;
        copy(&server.data_directory().join(KEYSTORE), &kept.path().join(KEYSTORE), &[])?;
        Ok(Backup { server, session, kept, keystore_last: false })
    }

    /// Like [`Backup::begin`], and copies everything but the keystore now.
    ///
    /// # Errors
    /// As [`Backup::begin`].
    pub fn begin_with_files(server: &'a Cluster) -> Result<Backup<'a>> {
        Backup::begin(server)?.with_files()
    }

    /// Like [`Backup::begin`], and pagevault does not see that a backup is in progress: as if this
    /// were a standby, and the functions had been called on its primary.
    ///
    /// # Errors
    /// As [`Backup::begin`].
    pub fn begin_unseen(server: &'a Cluster) -> Result<Backup<'a>> {
        let note = server.data_directory().join("pagevault.leave_out");
        fs::write(&note, "pg_backup_start")?;
        server.installation().give(&note)?;
        let backup = Backup::begin(server)?;
        fs::remove_file(&note)?;
        Ok(backup)
    }

    /// Like [`Backup::begin_unseen`], and copies everything but the keystore now.
    ///
    /// # Errors
    /// As [`Backup::begin`].
    pub fn begin_unseen_with_files(server: &'a Cluster) -> Result<Backup<'a>> {
        Backup::begin_unseen(server)?.with_files()
    }

    fn with_files(self) -> Result<Backup<'a>> {
        let backup = Backup { keystore_last: true, ..self };
        copy(&backup.server.data_directory(), &backup.kept.path().join(FILES), &LEFT_OUT)?;
        Ok(backup)
    }

    /// Copies the remaining files. The new cluster's server is not started; it has the WAL that it
    /// needs, and is not a standby.
    ///
    /// # Errors
    /// When the server has crashed since, or files cannot be copied.
    pub fn end(mut self) -> Result<Cluster> {
        let data = self.server.data_directory();
        let restored = Cluster::from_files_for(self.server.installation(), |target| {
            let kept = self.kept.path();
            if self.keystore_last {
                fs::rename(kept.join(FILES), target)?;
                copy(&data.join(KEYSTORE), &target.join(KEYSTORE), &[])?;
            } else {
                copy(&data, target, &LEFT_OUT)?;
                fs::rename(kept.join(KEYSTORE), target.join(KEYSTORE))?;
            }
            let label = text(&mut self.session, "SELECT labelfile FROM pg_backup_stop(false)")?;
            fs::write(target.join("backup_label"), label)?;
            self.server.installation().give(&target.join("backup_label"))?;
            copy(&data.join("pg_wal"), &target.join("pg_wal"), &[])
        })?;
        restored.append_conf("primary_conninfo = ''")?;
        Ok(restored)
    }
}

impl Cluster {
    /// Creates a cluster from a copy of a data directory, for example a restored backup. `fill`
    /// gets the path of the data directory, which does not exist yet. The server is not started.
    ///
    /// # Errors
    /// When `fill` fails.
    pub fn from_files(fill: impl FnOnce(&Path) -> Result<()>) -> Result<Cluster> {
        Cluster::from_files_for(Installation::get()?, fill)
    }

    /// As [`Cluster::from_files`], for a server of this installation.
    ///
    /// # Errors
    /// When `fill` fails.
    pub fn from_files_for(
        installation: &'static Installation,
        fill: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<Cluster> {
        let directory = tempfile::Builder::new().prefix("pagevault-").tempdir()?;
        installation.give(directory.path())?;
        let cluster = Cluster::in_directory(installation, directory);
        fill(&cluster.data_directory())?;
        cluster.append_conf(&format!(
            "unix_socket_directories = '{}'",
            cluster.directory().display()
        ))?;
        Ok(cluster)
    }
}

/// Copies a directory, with owners and modes. Files that a running server removes meanwhile are
/// skipped, as `pg_basebackup` does.
fn copy(from: &Path, to: &Path, left_out: &[&str]) -> Result<()> {
    fs::create_dir(to)?;
    for entry in fs::read_dir(from).with_context(|| format!("read {}", from.display()))? {
        let entry = entry?;
        let name = entry.file_name();
        if left_out.iter().any(|left| name == *left) {
            continue;
        }
        let (source, target) = (entry.path(), to.join(&name));
        let Some(kind) = if_exists(entry.file_type())? else { continue };
        if kind.is_dir() {
            if fs::exists(&source)? {
                copy(&source, &target, &[])?;
            }
        } else if kind.is_symlink() {
            symlink(fs::read_link(&source)?, &target)?;
            same_owner(&source, &target)?;
        } else if if_exists(fs::copy(&source, &target))?.is_some() {
            same_owner(from, &target)?;
        }
    }
    fs::set_permissions(to, fs::metadata(from)?.permissions())?;
    same_owner(from, to)
}

fn same_owner(of: &Path, path: &Path) -> Result<()> {
    use std::os::unix::fs::MetadataExt;
    let owner = fs::symlink_metadata(of)?;
    lchown(path, Some(owner.uid()), Some(owner.gid()))
        .with_context(|| format!("give {} away", path.display()))
}
