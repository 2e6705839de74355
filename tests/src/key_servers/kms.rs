//! Emulators of AWS KMS. Neither behaves like AWS in everything, so each test chooses one:
//!
//! | | ministack | moto |
//! |---|---|---|
//! | wrong context | as AWS | as AWS |
//! | damaged ciphertext | decrypts to other plaintext: it is not authenticated | as AWS |
//! | ciphertext of another key than the named one | decrypts to other plaintext | denied |
//! | key states: disabled, pending deletion | as AWS | ignored |
//! | IAM policies, signatures | as AWS, by [`Emulator::ministack_with_iam`] | errors differ |
//! | multi-Region keys | as AWS | no replicas over HTTP |
//! | ReEncrypt, on-demand rotation | missing | available |
//! | TLS | not used here | available |

use std::fs::{self, File, Permissions};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::clock::Clock;
use super::helper::Provider;
use super::{Server, free_port};
use crate::Installation;
use crate::installation::run;

/// The region of all tests.
pub const REGION: &str = "eu-central-1";

/// Credentials of the emulators' root user.
pub const ROOT: (&str, &str) = ("test", "test");

/// A running emulator; killed when dropped.
#[derive(Debug)]
pub struct Emulator {
    process: Child,
    python: PathBuf,
    endpoint: String,
    ca_file: Option<PathBuf>,
    /// Environment variables of its clients.
    variables: Vec<(&'static str, String)>,
}

impl Emulator {
    /// ministack with its defaults: it accepts any credentials.
    ///
    /// # Errors
    /// When it does not start.
    pub fn ministack() -> Result<Emulator> {
        Emulator::start_ministack("false", &[])
    }

    /// ministack with verification of signatures and policies.
    ///
    /// # Errors
    /// When it does not start.
    pub fn ministack_with_iam() -> Result<Emulator> {
        Emulator::start_ministack("true", &[])
    }

    /// The same with a clock that a test can set.
    ///
    /// # Errors
    /// When it does not start.
    pub fn ministack_with_clock(clock: &Clock) -> Result<Emulator> {
        let mut emulator = Emulator::start_ministack("true", &clock.variables())?;
        emulator.variables = clock.variables().into();
        Ok(emulator)
    }

    fn start_ministack(auth: &str, variables: &[(&str, String)]) -> Result<Emulator> {
        let python = Server::Ministack.program().context("no ministack")?;
        start(&python, None, |port| {
            let mut command = Command::new(&python);
            command.args(["-m", "hypercorn", "ministack.app:app", "--bind"]);
            command.arg(format!("127.0.0.1:{port}")).env("AUTH", auth);
            command.envs(variables.iter().map(|(name, value)| (name, value)));
            command
        })
    }

    /// moto, which accepts any credentials.
    ///
    /// # Errors
    /// When it does not start.
    pub fn moto() -> Result<Emulator> {
        let program = Server::Moto.program().context("no moto")?;
        start(&program.with_file_name("python"), None, |port| {
            let mut command = Command::new(&program);
            command.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
            command
        })
    }

    /// moto with TLS: certificate and key in PEM, and the file of the certificate's issuer.
    ///
    /// # Errors
    /// When it does not start.
    pub fn moto_with_tls(certificate: &Path, key: &Path, ca_file: &Path) -> Result<Emulator> {
        let program = Server::Moto.program().context("no moto")?;
        start(&program.with_file_name("python"), Some(ca_file.to_owned()), |port| {
            let mut command = Command::new(&program);
            command.args(["-H", "127.0.0.1", "-p", &port.to_string(), "-s", "-c"]);
            command.arg(certificate).arg("-k").arg(key);
            command
        })
    }

    /// Stops the process with SIGSTOP: connections get no reply, until [`Emulator::wake`].
    ///
    /// # Errors
    /// When it does not run.
    pub fn freeze(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    /// Continues the process after [`Emulator::freeze`].
    ///
    /// # Errors
    /// When it does not run.
    pub fn wake(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let process = Pid::from_child(&self.process);
        Ok(kill_process_group(process, signal)?)
    }

    /// Its URL.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// One call as root, by AWS's own client: service, operation, parameters.
    ///
    /// # Errors
    /// When the emulator returns an error.
    pub fn aws(&self, service: &str, operation: &str, parameters: Value) -> Result<Value> {
        self.aws_in(REGION, service, operation, parameters)
    }

    /// [`aws`](Emulator::aws) in another region.
    ///
    /// # Errors
    /// When the emulator returns an error.
    pub fn aws_in(
        &self,
        region: &str,
        service: &str,
        operation: &str,
        parameters: Value,
    ) -> Result<Value> {
        const CALL: &str = "
import json, sys, botocore.session
service, operation, parameters, region, endpoint, ca_file = sys.argv[1:]
client = botocore.session.Session().create_client(
    service, region, endpoint_url=endpoint, verify=ca_file or None)
print(json.dumps(getattr(client, operation)(**json.loads(parameters)), default=str))";
        let ca_file = self.ca_file.clone().unwrap_or_default();
        let mut command = Command::new(&self.python);
        command.args(["-c", CALL, service, operation, &parameters.to_string(), region]);
        command.arg(&self.endpoint).arg(ca_file);
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command.env("AWS_ACCESS_KEY_ID", ROOT.0).env("AWS_SECRET_ACCESS_KEY", ROOT.1);
        serde_json::from_str(&run(&mut command)?).context("understand AWS's reply")
    }

    /// Creates a key and returns its ARN.
    ///
    /// # Errors
    /// When the emulator returns an error.
    pub fn create_key(&self) -> Result<String> {
        let reply = self.aws("kms", "create_key", json!({"KeyUsage": "ENCRYPT_DECRYPT"}))?;
        let arn = reply["KeyMetadata"]["Arn"].as_str();
        arn.map(str::to_owned).with_context(|| format!("no ARN in {reply}"))
    }

    /// A provider with this emulator as its endpoint.
    #[must_use]
    pub fn provider(&self, credentials: &Credentials) -> Provider {
        let options = json!({"region": REGION, "endpoint": self.endpoint,
            "insecure_loopback_http": true, "credentials_file": credentials.path()});
        without_ambient_credentials(Provider::new("aws_kms", options))
    }
}

/// `provider` without credentials from the environment or the machine.
#[must_use]
pub fn without_ambient_credentials(provider: Provider) -> Provider {
    // Empty variables count as unset.
    provider
        .env("AWS_EC2_METADATA_DISABLED", "true")
        .env("AWS_ACCESS_KEY_ID", "")
        .env("AWS_PROFILE", "default")
        .env("AWS_REGION", "")
        .env("AWS_DEFAULT_REGION", "")
        .env("HOME", "/nonexistent")
}

impl Drop for Emulator {
    fn drop(&mut self) {
        // It has child processes.
        let group = Pid::from_child(&self.process);
        let _ = kill_process_group(group, Signal::KILL);
        let _ = self.process.wait();
    }
}

fn start(
    python: &Path,
    ca_file: Option<PathBuf>,
    command: impl Fn(u16) -> Command,
) -> Result<Emulator> {
    // Another process may take the port first.
    for _ in 0..5 {
        let port = free_port()?;
        let scheme = if ca_file.is_some() { "https" } else { "http" };
        let output = tempfile::NamedTempFile::new()?;
        let log = || File::options().append(true).open(output.path());
        let mut command = command(port);
        command.stdin(Stdio::null()).stdout(log()?).stderr(log()?).process_group(0);
        let mut emulator = Emulator {
            process: command.spawn().with_context(|| format!("start {command:?}"))?,
            python: python.to_owned(),
            endpoint: format!("{scheme}://127.0.0.1:{port}"),
            ca_file: ca_file.clone(),
            variables: Vec::new(),
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let is_bound = TcpStream::connect(("127.0.0.1", port)).is_ok();
            if let Some(status) = emulator.process.try_wait()? {
                let output = fs::read_to_string(output.path())?;
                if output.contains("in use") {
                    break;
                }
                bail!("{command:?}: {status}: {output}");
            }
            if is_bound {
                return Ok(emulator);
            }
            ensure!(
                Instant::now() < deadline,
                "{command:?} does not listen: {}",
                fs::read_to_string(output.path())?
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    bail!("no port stayed free")
}

/// A shared credentials file of the server user.
#[derive(Debug)]
pub struct Credentials {
    directory: TempDir,
}

impl Credentials {
    /// Those of the emulators' root user.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn root() -> Result<Credentials> {
        Credentials::of(ROOT.0, ROOT.1)
    }

    /// A file with this access key ID and secret.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn of(id: &str, secret: &str) -> Result<Credentials> {
        Credentials::from_text(&format!(
            "[default]\naws_access_key_id = {id}\naws_secret_access_key = {secret}\n"
        ))
    }

    /// A file with any content.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn from_text(text: &str) -> Result<Credentials> {
        let credentials = Credentials { directory: TempDir::new()? };
        fs::write(credentials.path(), text)?;
        fs::set_permissions(credentials.path(), Permissions::from_mode(0o600))?;
        let installation = Installation::get()?;
        installation.give(credentials.directory.path())?;
        installation.give(&credentials.path())?;
        Ok(credentials)
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.directory.path().join("credentials")
    }
}
