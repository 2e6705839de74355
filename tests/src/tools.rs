//! Programs: PostgreSQL's own, run against a cluster, and scripts for its server.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Result, ensure};

use crate::Cluster;
use crate::installation::run;

impl Cluster {
    /// A client program of this installation, with the environment to connect to the database
    /// `postgres`.
    #[must_use]
    pub fn program(&self, name: &str) -> Command {
        let mut command = self.installation().command(name);
        command
            .env("PGHOST", self.directory())
            .env("PGUSER", "postgres")
            .env("PGDATABASE", "postgres");
        command
    }

    /// Runs `pgbench` to its end and returns its report.
    ///
    /// # Errors
    /// When it fails.
    pub fn pgbench(&self, arguments: &[&str]) -> Result<String> {
        run(self.program("pgbench").args(arguments))
    }

    /// Starts `pgbench` in the background without its output; it ends with its server.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn pgbench_in_background(&self, arguments: &[&str]) -> Result<Child> {
        Ok(self
            .program("pgbench")
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?)
    }

    /// Stock `pg_checksums --check` over the data directory; the server must be down.
    ///
    /// # Errors
    /// When it finds a bad page; its report is in the message.
    pub fn pg_checksums(&self) -> Result<String> {
        run(self.program("pg_checksums").arg("--check").arg("-D").arg(self.data_directory()))
    }

    /// Output and exit code of `pagevault-keyring verify`, which needs a server that is down.
    ///
    /// # Errors
    /// When it cannot be run.
    pub fn verify_offline(&self, directory: &Path) -> Result<(String, Option<i32>)> {
        let output = self.program("pagevault-keyring").arg("verify").arg(directory).output()?;
        let response = [output.stdout, output.stderr].concat();
        Ok((String::from_utf8_lossy(&response).into_owned(), output.status.code()))
    }

    /// Verifies `directory` like [`Cluster::verify_offline`], and expects this exit code and these
    /// words in the output.
    ///
    /// # Errors
    /// When something else comes out.
    pub fn expect_verified(&self, directory: &Path, code: i32, words: &[&str]) -> Result<()> {
        let (response, found) = self.verify_offline(directory)?;
        ensure!(found == Some(code), "exit code {found:?} instead of {code}: {response}");
        for word in words {
            ensure!(response.contains(word), "{word}: {response}");
        }
        Ok(())
    }

    /// Stock `pg_basebackup` into `target`, which verifies page checksums and fails on a bad one,
    /// then `pg_verifybackup`.
    ///
    /// # Errors
    /// When either finds an error.
    pub fn base_backup(&self, target: &Path) -> Result<()> {
        run(self.program("pg_basebackup").args(["--checkpoint=fast", "-D"]).arg(target))?;
        run(self.program("pg_verifybackup").arg(target)).map(drop)
    }

    /// Writes a shell script for the server next to the data directory. Returns its path.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn script(&self, name: &str, body: &str) -> Result<String> {
        let path = self.directory().join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{body}\n"))?;
        std::fs::set_permissions(&path, Permissions::from_mode(0o755))?;
        self.installation().give(&path)?;
        Ok(path.to_string_lossy().into_owned())
    }

    /// Writes a program for providers of kind "command" that gives keys back as they are, and runs
    /// `first` before it unwraps one. Returns the provider's options.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn key_program(&self, name: &str, first: &str) -> Result<String> {
        let body = "read -r protocol
while read -r name value; do
  case $name in operation) operation=$value;; plaintext | wrapped) key=$value;; esac
done
case $operation in
  wrap) echo \"wrapped $key\"; echo key_version 1;;
  unwrap) FIRST; echo \"plaintext $key\";;
esac";
        let program = self.script(name, &body.replace("FIRST", first))?;
        Ok(format!("{{\"wrap\": [\"{program}\"], \"unwrap\": [\"{program}\"]}}"))
    }
}
