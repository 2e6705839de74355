//! The file provider's keys, made and changed only by the real `pagevault-keyring`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::Installation;
use crate::installation::run;

/// A key file that a test can take away and bring back.
#[derive(Debug)]
pub struct KeyFile {
    installation: &'static Installation,
    path: PathBuf,
}

impl KeyFile {
    /// Makes the file with one key in it, as the server user.
    ///
    /// # Errors
    /// When `pagevault-keyring` refuses.
    pub fn create(installation: &'static Installation, path: &Path, key: &str) -> Result<KeyFile> {
        let file = KeyFile { installation, path: path.to_owned() };
        file.add_key(key)?;
        Ok(file)
    }

    /// Adds one more key.
    ///
    /// # Errors
    /// When `pagevault-keyring` refuses.
    pub fn add_key(&self, key: &str) -> Result<()> {
        run(self
            .installation
            .command("pagevault-keyring")
            .args(["file", "create"])
            .arg(&self.path)
            .args(["--key", key]))
        .map(drop)
    }

    /// Where the file is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The statement that makes this file a provider.
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

    /// Takes the file away, as an outage of the provider.
    ///
    /// # Errors
    /// When it is not there.
    pub fn take_away(&self) -> Result<()> {
        std::fs::rename(&self.path, self.away()).context("take the key file away")
    }

    /// Brings it back.
    ///
    /// # Errors
    /// When it was not taken away.
    pub fn bring_back(&self) -> Result<()> {
        std::fs::rename(self.away(), &self.path).context("bring the key file back")
    }
}
