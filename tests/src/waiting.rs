//! Waiting for asynchronous work of a server.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::Cluster;

impl Cluster {
    /// Waits until `query` returns `expected`.
    ///
    /// # Errors
    /// When it does not within 60 s.
    pub fn eventually(&self, query: &str, expected: &str) -> Result<()> {
        self.eventually_that(query, || match self.text(query) {
            Ok(text) if text == expected => Ok(()),
            got => bail!("it answers {got:?}, not {expected:?}"),
        })
    }

    /// Waits until the server log contains `text`.
    ///
    /// # Errors
    /// When it does not within 60 s.
    pub fn eventually_logs(&self, text: &str) -> Result<()> {
        self.eventually_that("log", || {
            ensure!(self.log().contains(text), "there is no {text:?} in it");
            Ok(())
        })
    }

    /// Waits until `check` succeeds; the error is `what` with its last error.
    ///
    /// # Errors
    /// When it does not within 60 s.
    pub fn eventually_that(&self, what: &str, check: impl Fn() -> Result<()>) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            match check() {
                Ok(()) => return Ok(()),
                Err(error) if Instant::now() > deadline => bail!("{what}: {error:#}"),
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        }
    }

    /// How many files are marked that may have pages under interim keys.
    ///
    /// # Errors
    /// When the folder of marks cannot be read.
    pub fn interim_marks(&self) -> Result<usize> {
        match std::fs::read_dir(self.data_directory().join("pagevault/interim")) {
            Ok(entries) => Ok(entries.count()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error).context("marks of interim pages"),
        }
    }

    /// Waits until no file is marked.
    ///
    /// # Errors
    /// When that takes longer.
    pub fn wait_for_no_interim_marks(&self, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        loop {
            let left = self.interim_marks()?;
            if left == 0 {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{left} files still have interim pages");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
