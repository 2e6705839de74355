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

const INSUFFICIENT_PRIVILEGE: &str = "42501";

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
            if failure.hint.is_some() || failure.class != ErrorClass::Denied {
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
            // With SQLSTATE.
            .args(["--set=ON_ERROR_STOP=1", "--set=VERBOSITY=verbose"])
            .args(settings.iter().map(|Setting(name, value)| format!("--set={name}={value}")))
            .arg("--file=-")
            .env("PGCLIENTENCODING", "UTF8")
            .env_remove("LC_ALL")
            .env("LC_MESSAGES", "C")
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
        let (sqlstate, detail) = error_of(&String::from_utf8_lossy(&output.stderr));
        Err(match output.status.code() {
            Some(2) => Failure::new(ErrorClass::Unreachable, "could not connect to the server")
                .with_detail(detail)
                .with_hint("Say how by --dbname, or by PGHOST, PGUSER and so on."),
            _ if sqlstate.as_deref() == Some(INSUFFICIENT_PRIVILEGE) => {
                Failure::new(ErrorClass::Denied, "the server refused a query").with_detail(detail)
            }
            _ => Failure::new(ErrorClass::Internal, "a query failed").with_detail(detail),
        })
    }
}

/// The SQLSTATE of the last error that psql has printed, and the messages without what only
/// developers need.
fn error_of(printed: &str) -> (Option<String>, String) {
    let mut sqlstate = None;
    let mut lines = Vec::new();
    for line in printed.trim().lines().filter(|line| !line.starts_with("LOCATION:")) {
        let line = line.replace("psql:<stdin>:", "line ");
        let code = line.split_once("ERROR:  ").and_then(|(before, message)| {
            let (code, message) = message.split_once(": ")?;
            let is_code = code.len() == 5 && code.bytes().all(|b| b.is_ascii_alphanumeric());
            is_code.then(|| (code.to_owned(), format!("{before}ERROR:  {message}")))
        });
        lines.push(match code {
            Some((code, line)) => {
                sqlstate = Some(code);
                line
            }
            None => line,
        });
    }
    (sqlstate, lines.join("\n"))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_a_sqlstate() {
        let printed = "psql:<stdin>:3: NOTICE:  00000: hello\nLOCATION:  f, a.c:1\npsql:<stdin>:48: ERROR:  XX001: invalid page\nDETAIL:  why: so\nLOCATION:  f, b.c:2\n";
        let text = "line 3: NOTICE:  00000: hello\nline 48: ERROR:  invalid page\nDETAIL:  why: so";
        assert_eq!(error_of(printed), (Some("XX001".to_owned()), text.to_owned()));
        let other = "psql: error: connection failed: FATAL:  no";
        assert_eq!(error_of(other), (None, other.to_owned()));
    }
}
