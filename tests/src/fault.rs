//! Stops processes of a server at fault points, which exist only in builds with the feature
//! `fault_points` (`extension/src/fault.rs`; `tools/test-server` makes one).

use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};
use rustix::process::Pid;

use crate::datafile::holds;
use crate::{Cluster, Installation};

pub(crate) const STOP_AT: &str = "pagevault.stop_at";
pub(crate) const STOPPED: &str = "pagevault.stopped";

fn has_fault_points(installation: &Installation) -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let library = std::fs::read(installation.library_directory().join("pagevault.so"));
        library.is_ok_and(|library| holds(&library, STOP_AT.as_bytes()))
    })
}

impl Cluster {
    /// From now on, each process that reaches the fault point stops there; processes stopped at
    /// another point continue. Points on the page path take the number of a relation file:
    /// `page.sealed 16384`; `rekey.worker` takes that of a database.
    ///
    /// # Errors
    /// When the server was built without fault points.
    pub fn stop_at(&self, point: &str) -> Result<()> {
        ensure!(
            has_fault_points(self.installation()),
            "the extension has no fault points: build it with the feature fault_points, as tools/test-server does"
        );
        let directory = self.data_directory();
        let _ = std::fs::remove_file(directory.join(STOPPED));
        let new = self.directory().join(STOP_AT);
        std::fs::write(&new, point)?;
        self.installation().give(&new)?;
        std::fs::rename(&new, directory.join(STOP_AT)).context("place the name of a fault point")
    }

    /// Waits until a process has reached the point; returns its process id.
    ///
    /// # Errors
    /// When none reaches it within 60 s.
    pub fn stopped_at(&self, point: &str) -> Result<Pid> {
        let name = point.split(' ').next().unwrap_or_default();
        self.eventually_that(point, || {
            let reported = std::fs::read_to_string(self.data_directory().join(STOPPED));
            let reported = reported.context("nobody has come by")?;
            ensure!(reported.ends_with(&format!(" {name}")), "somebody stands at {reported:?}");
            Ok(())
        })?;
        let reported = std::fs::read_to_string(self.data_directory().join(STOPPED))?;
        let pid = reported.split(' ').next().unwrap_or_default().parse()?;
        Pid::from_raw(pid).context("a process")
    }

    /// Lets all stopped processes continue.
    pub fn resume(&self) {
        for file in [STOP_AT, STOPPED] {
            let _ = std::fs::remove_file(self.data_directory().join(file));
        }
    }
}
