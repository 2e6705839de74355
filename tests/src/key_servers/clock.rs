//! A clock of programs that a test can set, for what expires after longer than a test lasts.

use std::path::Path;
use std::process::Command;

use anyhow::Result;
use tempfile::TempDir;

use super::write_file;
use crate::Installation;
use crate::installation::run;

/// See its comment.
const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/key_servers/clock.c");

/// The clock of all programs that have its [`Clock::variables`].
pub struct Clock {
    directory: TempDir,
}

impl Clock {
    /// A clock that is right.
    ///
    /// # Errors
    /// When it cannot be compiled.
    pub fn new() -> Result<Clock> {
        let directory = tempfile::Builder::new().prefix("pagevault-clock-").tempdir()?;
        Installation::get()?.give(directory.path())?;
        let clock = Clock { directory };
        run(Command::new("cc")
            .args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"])
            .args([&clock.directory.path().join("clock.so"), Path::new(SOURCE)]))?;
        clock.set(0)?;
        Ok(clock)
    }

    /// Puts it forward or back, against the machine's.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn set(&self, seconds: i64) -> Result<()> {
        write_file(&self.directory.path().join("draft"), &seconds.to_string(), 0o644)?;
        let path = |name| self.directory.path().join(name);
        Ok(std::fs::rename(path("draft"), path("seconds"))?)
    }

    /// Environment variables of programs that have this clock.
    #[must_use]
    pub fn variables(&self) -> [(&'static str, String); 2] {
        let path = |name| self.directory.path().join(name).display().to_string();
        [("LD_PRELOAD", path("clock.so")), ("CLOCK_FILE", path("seconds"))]
    }
}
