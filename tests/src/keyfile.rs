//! Keys of the provider `file`, changed only by the real `pagevault-keyring`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::Installation;
use crate::installation::run;

/// A key file that a test can remove and restore.
#[derive(Debug)]
pub struct KeyFile {
    installation: &'static Installation,
    path: PathBuf,
}

impl KeyFile {
    /// Creates the file with one key, as the server user.
    ///
    /// # Errors
    /// When `pagevault-keyring` fails.
    pub fn create(installation: &'static Installation, path: &Path, key: &str) -> Result<KeyFile> {
        let file = KeyFile { installation, path: path.to_owned() };
        file.add_key(key)?;
        Ok(file)
    }

    /// Adds one more key.
    ///
    /// # Errors
    /// When `pagevault-keyring` fails.
    pub fn add_key(&self, key: &str) -> Result<()> {
        run(self
            .installation
            .command("pagevault-keyring")
            .args(["file", "create"])
            .arg(&self.path)
            .args(["--key", key]))
        .map(drop)
    }

    /// Path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The statement that adds this file as a provider.
    #[must_use]
    pub fn add_provider(&self, name: &str) -> String {
        format!(
            "SELECT pagevault.add_provider('{name}', 'file', '{{\"path\": \"{}\"}}')",
            self.path.display()
        )
    }

    fn away(&self) -> PathBuf {
        self.path.with_extension("away")
    }

    /// Moves the file away, like an outage of the provider.
    ///
    /// # Errors
    /// When it does not exist.
    pub fn take_away(&self) -> Result<()> {
        std::fs::rename(&self.path, self.away()).context("take the key file away")
    }

    /// Moves the file back.
    ///
    /// # Errors
    /// When it was not moved away.
    pub fn bring_back(&self) -> Result<()> {
        std::fs::rename(self.away(), &self.path).context("bring the key file back")
    }
}
