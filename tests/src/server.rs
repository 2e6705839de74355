//! The server of a cluster: starting, stopping and killing it.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::{Cluster, StopMode, process};

/// How long a server may take until it accepts connections.
const START: Duration = Duration::from_secs(120);
/// How long a server may take to stop.
const STOP: Duration = Duration::from_secs(60);
/// Between two looks.
const POLL: Duration = Duration::from_millis(20);

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

    /// [`Cluster::start_server`] with more arguments for `postgres`.
    ///
    /// As `pg_ctl start --wait`, whose own processes would take a tenth of a test's time.
    ///
    /// # Errors
    /// As [`Cluster::start_server`].
    pub fn start_server_with(&self, arguments: &[&str]) -> Result<()> {
        let before = self.log().len();
        let (output, errors) = (self.open_log()?, self.open_log()?);
        let mut postmaster = self
            .installation()
            .command("postgres")
            .envs(self.environment().iter().map(|(name, value)| (name, value)))
            .arg("-D")
            .arg(self.data_directory())
            .args(arguments)
            .stdout(output)
            .stderr(errors)
            .process_group(0)
            .spawn()
            .context("start the server")?;
        let id = postmaster.id();
        let deadline = Instant::now() + START;
        let ended = loop {
            if let Some(status) = postmaster.try_wait()? {
                break Some(status.to_string());
            }
            if process::is_up(&self.data_directory(), id) {
                break None;
            }
            if Instant::now() > deadline {
                break Some("not within 120 s".to_owned());
            }
            thread::sleep(POLL);
        };
        if let Some(how) = ended {
            let log = self.log();
            bail!("the server does not start ({how}): {}", log.get(before..).unwrap_or(&log));
        }
        // Its exit status must be taken, or it would stay as a zombie.
        thread::spawn(move || postmaster.wait());
        Ok(())
    }

    fn open_log(&self) -> Result<File> {
        let path = self.log_path();
        let log = File::options().create(true).append(true).mode(0o600).open(&path)?;
        self.installation().give(&path)?;
        Ok(log)
    }

    /// Stops the server, as `pg_ctl stop --wait`.
    ///
    /// # Errors
    /// When it does not run, or has not stopped within 60 s.
    pub fn stop(&self, mode: StopMode) -> Result<()> {
        let data = self.data_directory();
        let postmaster = process::postmaster(&data).context("the server does not run")?;
        let signal = match mode {
            StopMode::Fast => Signal::INT,
            StopMode::Immediate => Signal::QUIT,
        };
        kill_process(postmaster, signal)?;
        let deadline = Instant::now() + STOP;
        while process::postmaster(&data).is_some() {
            ensure!(Instant::now() < deadline, "the server does not stop within 60 s");
            thread::sleep(POLL);
        }
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
