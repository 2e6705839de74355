//! A server of KMIP (PyKMIP) with its own storage and certificates, and additions that PyKMIP lacks
//! (`pykmip_server.py`).

use std::io::Write;
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::certificates::Authority;
use super::helper::Provider;
use super::{Server, free_port};
use crate::Installation;

/// The server and its administrator; see its comment.
const PROGRAM: &str = include_str!("pykmip_server.py");

/// What the server has in addition to PyKMIP itself: Re-key, and attributes that tell whether a key
/// can leave it.
#[must_use]
pub fn complete() -> Value {
    json!({"re_key": true, "extractable": true})
}

/// A server that a test can stop, pause and restart. Dropping it kills it.
pub struct PyKmip {
    python: PathBuf,
    directory: TempDir,
    port: u16,
    child: Option<Child>,
    authority: Authority,
}

impl PyKmip {
    /// A [`complete`] server with the key `db-kek`, which cannot leave it.
    ///
    /// # Errors
    /// When any of it fails.
    pub fn start() -> Result<PyKmip> {
        let server = PyKmip::bare()?;
        server.behave(&complete())?;
        server.make_key("db-kek")?;
        Ok(server)
    }

    /// PyKMIP as it is, without keys.
    ///
    /// # Errors
    /// When it does not start.
    pub fn bare() -> Result<PyKmip> {
        let python = Server::PyKmip.program().context("there is no PyKMIP on this machine")?;
        let directory = tempfile::Builder::new().prefix("pagevault-kmip-").tempdir()?;
        Installation::get()?.give(directory.path())?;
        let (port, authority) = (free_port()?, Authority::new()?);
        let mut server = PyKmip { python, directory, port, child: None, authority };
        server.write("pykmip_server.py", PROGRAM, 0o644)?;
        server.write("ca.pem", server.authority.pem(), 0o644)?;
        for (name, hosts) in [("server", &["127.0.0.1", "localhost"][..]), ("client", &[])] {
            server.sign(name, hosts)?;
        }
        server.write("client.conf", "[client]\nhost=127.0.0.1\n", 0o644)?;
        server.make_directory("policy")?;
        let path = |name: &str| server.path(name).display().to_string();
        let settings = format!(
            "[server]\nhostname=127.0.0.1\nport={port}\ncertificate_path={}\nkey_path={}\n\
             ca_path={}\nauth_suite=TLS1.2\npolicy_path={}\nenable_tls_client_auth=True\n\
             logging_level=INFO\ndatabase_path={}\n",
            path("server.pem"),
            path("server.key"),
            path("ca.pem"),
            path("policy"),
            path("database"),
        );
        server.write("server.conf", &settings, 0o644)?;
        server.restart()?;
        Ok(server)
    }

    /// A certificate of the server's authority, in the files NAME.pem and NAME.key.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn sign(&self, name: &str, hosts: &[&str]) -> Result<()> {
        let (certificate, key) = self.authority.sign(name, hosts)?;
        self.write(&format!("{name}.pem"), &certificate, 0o644)?;
        self.write(&format!("{name}.key"), &key, 0o600).map(drop)
    }

    /// Starts it again.
    ///
    /// # Errors
    /// When it does not start.
    pub fn restart(&mut self) -> Result<()> {
        self.stop();
        let log = std::fs::File::create(self.path("output"))?;
        let mut command = self.command("serve")?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0);
        let mut child = command.spawn()?;
        let deadline = Instant::now() + Duration::from_secs(120);
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            let output = || std::fs::read_to_string(self.path("output")).unwrap_or_default();
            ensure!(child.try_wait()?.is_none(), "PyKMIP has ended: {}", output());
            ensure!(Instant::now() < deadline, "PyKMIP does not listen: {}", output());
            std::thread::sleep(Duration::from_millis(20));
        }
        self.child = Some(child);
        Ok(())
    }

    /// Kills it.
    pub fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // It has child processes.
            let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
            let _ = child.wait();
        }
    }

    /// Pauses it: it accepts connections and says nothing.
    ///
    /// # Errors
    /// When it does not run.
    pub fn freeze(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    /// Ends a pause.
    ///
    /// # Errors
    /// When it does not run.
    pub fn wake(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let child = self.child.as_ref().context("PyKMIP does not run")?;
        Ok(kill_process_group(Pid::from_child(child), signal)?)
    }

    /// Changes what it has, and its faults.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn behave(&self, behaviour: &Value) -> Result<()> {
        self.write("draft.json", &behaviour.to_string(), 0o644)?;
        Ok(std::fs::rename(self.path("draft.json"), self.path("behaviour.json"))?)
    }

    /// Adds to what it [`complete`]ly has.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn also(&self, more: &Value) -> Result<()> {
        let mut behaviour = complete();
        if let (Some(all), Some(more)) = (behaviour.as_object_mut(), more.as_object()) {
            all.extend(more.clone());
        }
        self.behave(&behaviour)
    }

    /// Makes a key that cannot leave the server, and returns its unique identifier.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn make_key(&self, name: &str) -> Result<String> {
        self.administer(json!(["make", name, false]))
    }

    /// Performs a call of its administrator, who is the owner of the keys.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn administer(&self, call: Value) -> Result<String> {
        let result = self.administer_all(&[call])?.remove(0);
        Ok(result.as_str().map_or_else(|| result.to_string(), str::to_owned))
    }

    /// Performs calls.
    ///
    /// # Errors
    /// When the server refuses one.
    pub fn administer_all(&self, calls: &[Value]) -> Result<Vec<Value>> {
        let mut command = self.command("do")?;
        command.arg(self.port.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let mut input = child.stdin.take().context("no pipe")?;
        input.write_all(json!(calls).to_string().as_bytes())?;
        drop(input);
        let output = child.wait_with_output()?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{calls:?}: {error}");
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    fn command(&self, mode: &str) -> Result<Command> {
        let python = self.python.to_str().context("path")?;
        let mut command = Installation::get()?.command(python);
        command.args(["-W", "ignore"]).arg(self.path("pykmip_server.py"));
        command.arg(mode).arg(self.directory.path());
        Ok(command)
    }

    /// `127.0.0.1:<port>`.
    #[must_use]
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The port of 127.0.0.1 that it listens on.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Provider options: this server, and the certificate of the keys' owner.
    #[must_use]
    pub fn options(&self) -> Value {
        self.options_of("client")
    }

    /// Provider options with another certificate.
    #[must_use]
    pub fn options_of(&self, client: &str) -> Value {
        json!({
            "address": self.address(),
            "ca_file": self.path("ca.pem"),
            "cert_file": self.path(&format!("{client}.pem")),
            "key_file": self.path(&format!("{client}.key")),
        })
    }

    /// A provider with these options.
    #[must_use]
    pub fn provider(&self, options: Value) -> Provider {
        Provider::new("kmip", options)
    }

    /// A file or directory of this server.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes a file of the server user.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, name: &str, content: &str, mode: u32) -> Result<PathBuf> {
        super::write_file(&self.path(name), content, mode)
    }

    fn make_directory(&self, name: &str) -> Result<()> {
        std::fs::create_dir(self.path(name))?;
        Installation::get()?.give(&self.path(name))
    }

    /// Number of operations of this name since its start, also refused ones.
    ///
    /// # Errors
    /// When there was none at all.
    pub fn count(&self, operation: &str) -> Result<usize> {
        let operations = std::fs::read_to_string(self.path("operations"))?;
        Ok(operations.lines().filter(|name| *name == operation).count())
    }

    /// What it has logged.
    ///
    /// # Errors
    /// When there is no log.
    pub fn log(&self) -> Result<String> {
        Ok(std::fs::read_to_string(self.path("server.log"))?)
    }
}

impl Drop for PyKmip {
    fn drop(&mut self) {
        self.stop();
    }
}
