//! Runs `psql`.

use std::ffi::OsStr;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use pagevault_keystore::protocol::ErrorClass;
use serde_json::Value;

use super::conninfo::{require_no_secret, with_database};
use crate::bindir;
use crate::failure::{Failure, refuse};

/// Seconds that a connection may take, unless the environment says otherwise.
const CONNECT_TIMEOUT: &str = "10";

/// A variable of `psql`, and its value.
pub(crate) struct Setting(pub(crate) &'static str, pub(crate) &'static str);

/// How to reach a server: the program `psql`, and a connection string, where the environment of
/// libpq (PGHOST and so on) does not say everything.
pub(crate) struct Psql {
    program: PathBuf,
    conninfo: Option<String>,
}

impl Psql {
    /// # Errors
    /// If there is no `psql`, or the connection string contains a password.
    pub(crate) fn new(conninfo: Option<String>) -> Result<Self, Failure> {
        conninfo.as_deref().map_or(Ok(()), require_no_secret)?;
        let program = bindir::find(OsStr::new("psql")).map_err(|failure| {
            failure.with_hint("Install PostgreSQL's client programs, or add them to PATH.")
        })?;
        Ok(Self { program, conninfo })
    }

    /// The JSON document that a script prints in a database; by default in that of the connection.
    pub(crate) fn ask(
        &self,
        database: Option<&str>,
        script: &str,
        settings: &[&Setting],
    ) -> Result<Value, Failure> {
        let output = self.run(database, script, settings).map_err(|failure| {
            if failure.hint.is_some() {
                return failure;
            }
            failure.with_hint(
                "Connect as a superuser, or as a member of pagevault_admin and pg_monitor.",
            )
        })?;
        // Names may be in any encoding (SQL_ASCII).
        serde_json::from_str(&String::from_utf8_lossy(&output.stdout)).map_err(|error| {
            Failure::new(ErrorClass::Internal, "the server's answer is not JSON")
                .with_detail(format!("{error}."))
        })
    }

    /// Runs statements in a database, and stops at the first error.
    pub(crate) fn run(
        &self,
        database: Option<&str>,
        script: &str,
        settings: &[&Setting],
    ) -> Result<Output, Failure> {
        let mut command = Command::new(&self.program);
        command
            .args(["--no-psqlrc", "--quiet", "--no-align", "--tuples-only", "--no-password"])
            .arg("--set=ON_ERROR_STOP=1")
            .args(settings.iter().map(|Setting(name, value)| format!("--set={name}={value}")))
            .arg("--file=-")
            .env("PGCLIENTENCODING", "UTF8")
            .env("PGAPPNAME", "pagevault-keyring")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if std::env::var_os("PGCONNECT_TIMEOUT").is_none() {
            command.env("PGCONNECT_TIMEOUT", CONNECT_TIMEOUT);
        }
        let conninfo = self.conninfo.as_deref();
        let target = database.map(|database| with_database(conninfo, database));
        if let Some(target) = target.or(self.conninfo.clone()) {
            command.arg(format!("--dbname={target}"));
        }
        let output = run_with_input(&mut command, script).map_err(|error| {
            refuse(format!("could not run \"{}\": {error}", self.program.display()))
        })?;
        if output.status.success() {
            return Ok(output);
        }
        let errors = String::from_utf8_lossy(&output.stderr);
        let detail = errors.trim().replace("psql:<stdin>:", "line ");
        Err(match output.status.code() {
            Some(2) => Failure::new(ErrorClass::Unreachable, "could not connect to the server")
                .with_detail(detail)
                .with_hint("Say how by --dbname, or by PGHOST, PGUSER and so on."),
            _ => Failure::new(ErrorClass::Denied, "the server refused a query").with_detail(detail),
        })
    }
}

/// The output of a program that reads a script. The script fits into the buffer of a pipe.
fn run_with_input(command: &mut Command, script: &str) -> std::io::Result<Output> {
    let mut child = command.spawn()?;
    if let Some(mut input) = child.stdin.take() {
        // A program that has ended already says why.
        let _ = input.write_all(script.as_bytes());
    }
    child.wait_with_output()
}
