//! The server of a cluster: starting, stopping and killing it.

use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::Ordering::Relaxed;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::installation::run;
use crate::{Cluster, StopMode, process};

impl Cluster {
    /// Starts the server, which was killed or stopped immediately; once more if it fails by a
    /// defect of PostgreSQL itself. Returns whether it failed by that.
    ///
    /// # Errors
    /// As [`Cluster::start_server`].
    pub fn start_after_crash(&mut self) -> Result<bool> {
        match self.start_server() {
            Err(error) if self.failed_by_unlogged_file(&format!("{error:#}")) => {
                self.allow_log("File exists");
                self.start_server().context("the start after a known failure")?;
                Ok(true)
            }
            other => other.map(|()| false),
        }
    }

    /// Whether the server, which said `log` when it ended, was stopped by a defect of PostgreSQL
    /// itself.
    pub(crate) fn failed_by_unlogged_file(&self, log: &str) -> bool {
        is_unlogged_file(log, &self.data_directory())
    }

    /// Starts the server and waits until it accepts connections.
    ///
    /// # Errors
    /// When the server does not within 120 s; the message contains the new part of its log.
    pub fn start_server(&self) -> Result<()> {
        self.start_server_with(&[])
    }

    /// [`Cluster::start_server`] with more arguments for `pg_ctl`.
    ///
    /// # Errors
    /// As [`Cluster::start_server`].
    pub fn start_server_with(&self, arguments: &[&str]) -> Result<()> {
        let before = self.log().len();
        let status = self
            .installation()
            .command("pg_ctl")
            .envs(self.environment().iter().map(|(name, value)| (name, value)))
            .args(["start", "--wait", "--silent", "--timeout=120"])
            .arg("--log")
            .arg(self.log_path())
            .arg("-D")
            .arg(self.data_directory())
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()?;
        if !status.success() {
            let log = self.log();
            bail!("the server does not start: {}", log.get(before..).unwrap_or(&log));
        }
        Ok(())
    }

    /// Stops the server.
    ///
    /// # Errors
    /// When it has not stopped within 60 s.
    pub fn stop(&self, mode: StopMode) -> Result<()> {
        let name = match mode {
            StopMode::Fast => "fast",
            StopMode::Immediate => "immediate",
        };
        run(self
            .installation()
            .command("pg_ctl")
            .args(["stop", "--wait", "--silent", "--timeout=60", "--mode", name])
            .arg("-D")
            .arg(self.data_directory()))?;
        match mode {
            StopMode::Fast => Ok(()),
            StopMode::Immediate => self.has_crashed(),
        }
    }

    /// Requires a server that was to start to have admitted no session, and to end by itself.
    ///
    /// # Errors
    /// When it admits one, or still runs after a minute.
    pub fn admits_nobody_and_ends(&self) -> Result<()> {
        ensure!(self.client().is_err(), "a session is admitted");
        self.eventually_that("the server", || {
            ensure!(process::postmaster(&self.data_directory()).is_none(), "it runs");
            Ok(())
        })
    }

    /// Stops fast and starts again.
    ///
    /// # Errors
    /// As [`Cluster::stop`] and [`Cluster::start_server`].
    pub fn restart(&self) -> Result<()> {
        self.stop(StopMode::Fast)?;
        self.start_server()
    }

    /// Sends SIGKILL to every process of the cluster.
    ///
    /// # Errors
    /// When a process survives.
    pub fn kill(&self) -> Result<()> {
        process::kill_all(&self.data_directory())?;
        // If nothing reaps orphans, a dead postmaster stays as a zombie, and the next one believes
        // that it is running.
        let locks = ["data/postmaster.pid", ".s.PGSQL.5432.lock"];
        for lock in locks.map(|name| self.directory().join(name)) {
            if lock.exists() {
                std::fs::remove_file(lock)?;
            }
        }
        self.has_crashed()
    }

    /// Sends SIGKILL to one process of the server and waits until the postmaster has ended all
    /// others and recovered. Until it notices the death, queries still succeed.
    ///
    /// # Errors
    /// When the server is not back within 60 s.
    pub fn crash_process(&self, pid: Pid) -> Result<()> {
        // postmaster.c: PostmasterStateMachine.
        let crashes = || self.log().matches("all server processes terminated").count();
        let before = crashes();
        self.killed.store(true, Relaxed);
        kill_process(pid, Signal::KILL)?;
        self.eventually_that("restart after a crash", || {
            ensure!(crashes() > before, "the postmaster has not noticed it");
            Ok(())
        })?;
        self.eventually("SELECT 1", "1")
    }

    /// [`Cluster::kill`] and then a start, which recovers.
    ///
    /// # Errors
    /// When the server does not start again.
    pub fn crash(&self) -> Result<()> {
        self.kill()?;
        self.start_server()
    }
}

/// A defect of PostgreSQL itself. When an unlogged table's new file is given up, the main fork
/// stays until the next checkpoint, and the init fork goes at once (`mdunlink`, md.c). If the
/// server crashes before the abort is in WAL, redo makes the init fork again, and the end of
/// recovery cannot copy that to a main file that exists (`ResetUnloggedRelations`, reinit.c;
/// `copy_file`, copydir.c). The next start removes the main file first.
fn is_unlogged_file(log: &str, data: &Path) -> bool {
    log.lines().any(|line| {
        let told = line.split_once("FATAL:  could not create file \"").map(|(_, told)| told);
        let path = told.and_then(|told| told.strip_suffix("\": File exists"));
        path.is_some_and(|path| {
            data.join(path).exists() && data.join(format!("{path}_init")).exists()
        })
    })
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir_all, write};

    use anyhow::Result;

    use super::is_unlogged_file;

    #[test]
    fn only_the_known_failure_is_known() -> Result<()> {
        let data = tempfile::tempdir()?;
        let fatal = "12:00 [1] startup FATAL:  could not create file ";
        let known = |path, cause| {
            let log = format!("{fatal}\"{path}\": {cause}\nand more");
            is_unlogged_file(&log, data.path())
        };
        for path in ["base/5/16470", "pg_tblspc/16388/PG_15_202209061/5/16470"] {
            assert!(!known(path, "File exists"), "there is none");
            let file = data.path().join(path);
            create_dir_all(file.parent().unwrap_or(data.path()))?;
            write(&file, "")?;
            assert!(!known(path, "File exists"), "it has no init fork");
            write(data.path().join(format!("{path}_init")), "")?;
            assert!(known(path, "File exists"));
            assert!(!known(path, "No space left on device"));
        }
        assert!(!known("base/5/16470_init", "File exists"));
        Ok(())
    }
}
