//! On Ctrl-C, stops the servers and removes their files.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::Result;
use pagevault_tests::process;

/// Directories of running clusters, each with its `data` inside.
static CLUSTERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// From now on an interrupt kills the servers of the registered directories and ends the program.
pub(crate) fn install() -> Result<()> {
    ctrlc::set_handler(|| {
        for directory in CLUSTERS.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _ = process::kill_all(&directory.join("data"));
            let _ = std::fs::remove_dir_all(directory);
        }
        eprintln!("pagevault-bench: interrupted; servers ended, their data removed");
        std::process::exit(130);
    })?;
    Ok(())
}

/// Registers the directory of a cluster.
pub(crate) fn watch(directory: &Path) {
    CLUSTERS.lock().unwrap_or_else(PoisonError::into_inner).push(directory.to_owned());
}
