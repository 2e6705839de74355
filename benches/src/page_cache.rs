//! The kernel's page cache: loading a cluster's relations into it, and dropping them from it.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::Result;
use rustix::fs::{Advice, fadvise};

/// The files of relations in default tablespaces.
fn relation_files(data_directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![data_directory.join("base"), data_directory.join("global")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files
}

/// Reads all relations once.
pub(crate) fn fill(data_directory: &Path) -> Result<()> {
    let mut buffer = vec![0; 1 << 20];
    for path in relation_files(data_directory) {
        let mut file = File::open(path)?;
        while file.read(&mut buffer)? > 0 {}
    }
    Ok(())
}

/// Asks the kernel to drop all relations from its cache. It drops only pages that are already on
/// disk, so checkpoint first. Whether it did so shows in the number of bytes read from disk
/// afterwards.
pub(crate) fn empty(data_directory: &Path) -> Result<()> {
    for path in relation_files(data_directory) {
        let file = File::open(path)?;
        file.sync_data()?;
        fadvise(&file, 0, None, Advice::DontNeed)?;
    }
    Ok(())
}
