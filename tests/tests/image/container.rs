//! A container of the image under test.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

fn image() -> String {
    std::env::var("PAGEVAULT_IMAGE").unwrap_or_else(|_| "pagevault:17".into())
}

/// Missing requirements of the tests.
pub(crate) fn lacking() -> Option<String> {
    if docker(&["info"]).is_err() {
        return Some("there is no Docker engine".into());
    }
    let image = image();
    docker(&["image", "inspect", &image])
        .is_err()
        .then(|| format!("there is no image {image} (make image; PAGEVAULT_IMAGE names another)"))
}

/// Runs `docker` and returns its output.
pub(crate) fn docker(arguments: &[&str]) -> Result<String> {
    let output = Command::new("docker").args(arguments).output().context("run docker")?;
    let response = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "docker {arguments:?}: {response}");
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Removed with its volumes when dropped.
pub(crate) struct Container {
    name: String,
}

impl Container {
    /// `docker run -d OPTIONS IMAGE ARGUMENTS`.
    pub(crate) fn run(options: &[&str], arguments: &[&str]) -> Result<Container> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("pagevault-test-{}-{count}", std::process::id());
        let container = Container { name };
        let image = image();
        let begin = ["run", "-d", "--name", &container.name];
        docker(&[&begin[..], options, &[&image], arguments].concat())?;
        Ok(container)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Runs a shell command in the container as its user.
    pub(crate) fn shell(&self, command: &str) -> Result<String> {
        docker(&["exec", "-u", "postgres", &self.name, "bash", "-c", command])
    }

    /// Runs a statement as the superuser `postgres`; columns are separated by `|`.
    pub(crate) fn sql(&self, statement: &str) -> Result<String> {
        docker(&[
            "exec",
            "-u",
            "postgres",
            &self.name,
            "psql",
            "-X",
            "-q",
            "-A",
            "-t",
            "-v",
            "ON_ERROR_STOP=1",
            "-U",
            "postgres",
            "-c",
            statement,
        ])
    }

    /// Waits until the server is set up and accepts connections from outside.
    pub(crate) fn ready(&self) -> Result<()> {
        let ask = "pg_isready -q -h 127.0.0.1";
        self.eventually("it accepts connections", || Ok(self.shell(ask).is_ok()))
    }

    pub(crate) fn restart(&self) -> Result<()> {
        docker(&["restart", &self.name]).map(drop)
    }

    /// Number of occurrences of `text` in the files of the data directory.
    pub(crate) fn in_data_directory(&self, text: &str) -> Result<usize> {
        let found = self.shell(&format!("grep -r -a -o -F -e '{text}' \"$PGDATA\" | wc -l"))?;
        Ok(found.parse()?)
    }

    pub(crate) fn log(&self) -> Result<String> {
        let output = Command::new("docker").args(["logs", &self.name]).output()?;
        Ok(String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    }

    pub(crate) fn inspect(&self, format: &str) -> Result<String> {
        docker(&["inspect", "-f", format, &self.name])
    }

    /// Waits until `check` is true.
    pub(crate) fn eventually(&self, what: &str, check: impl Fn() -> Result<bool>) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(120);
        while !check()? {
            ensure!(
                Instant::now() < deadline,
                "not within 120 s: {what}; its log:\n{}",
                self.log()?
            );
            std::thread::sleep(Duration::from_millis(300));
        }
        Ok(())
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = docker(&["rm", "-f", "-v", &self.name]);
    }
}
