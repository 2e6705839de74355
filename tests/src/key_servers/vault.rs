//! A real Vault or OpenBao with its own storage and certificates, unsealed with one key.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::certificates::Authority;
use super::{Server, free_port};
use crate::Installation;
use crate::installation::run;

/// The policy that the user guide recommends.
pub const POLICY: &str = include_str!("../../../docs/examples/vault/pagevault.hcl");

const QUOTA: &str = "sys/quotas/rate-limit/slow";

/// A server that a test can stop, seal, pause and restart. Dropping it kills it.
pub struct Vault {
    program: PathBuf,
    is_openbao: bool,
    directory: TempDir,
    port: u16,
    cluster_port: u16,
    child: Option<Child>,
    unseal_key: String,
    root_token: String,
    authority: Arc<Authority>,
    /// The leader of the cluster that this server joins.
    leader: Option<String>,
}

impl Vault {
    /// A server with the Transit engine at `transit`, the key `db-kek`, AppRole with a role `db`
    /// that may use it, and an audit log.
    ///
    /// # Errors
    /// When any of it fails.
    pub fn start() -> Result<Vault> {
        let vault = Vault::bare()?;
        vault.set_up()?;
        Ok(vault)
    }

    /// An unsealed server without any of that.
    ///
    /// # Errors
    /// When it does not start.
    pub fn bare() -> Result<Vault> {
        let program = Server::Vault.program().context("there is no Vault on this machine")?;
        let version =
            run(Installation::get()?.command(&program.display().to_string()).arg("version"))?;
        let is_openbao = version.starts_with("OpenBao");
        let mut vault = Vault::prepare(program, is_openbao, Arc::new(Authority::new()?), None)?;
        vault.run_server()?;
        let made = vault.cli(&[
            "operator",
            "init",
            "-key-shares=1",
            "-key-threshold=1",
            "-format=json",
        ])?;
        let made: Value = serde_json::from_str(&made)?;
        let text = |value: &Value| value.as_str().map(str::to_owned).context("operator init");
        vault.unseal_key = text(&made["unseal_keys_b64"][0])?;
        vault.root_token = text(&made["root_token"])?;
        vault.unseal()?;
        Ok(vault)
    }

    /// Another server in the cluster of this one, unsealed: a standby.
    ///
    /// # Errors
    /// When it does not start or join.
    pub fn join(&self) -> Result<Vault> {
        let (program, authority) = (self.program.clone(), Arc::clone(&self.authority));
        let leader = Some(self.address());
        let mut vault = Vault::prepare(program, self.is_openbao, authority, leader)?;
        vault.unseal_key.clone_from(&self.unseal_key);
        vault.root_token.clone_from(&self.root_token);
        vault.run_server()?;
        // Joining happens in the background; only after it the server can be unsealed.
        let deadline = Instant::now() + Duration::from_secs(60);
        while vault.cli(&["operator", "unseal", &vault.unseal_key]).is_err() {
            ensure!(Instant::now() < deadline, "Vault does not join");
            std::thread::sleep(Duration::from_millis(100));
        }
        vault.wait_until_active()?;
        Ok(vault)
    }

    fn prepare(
        program: PathBuf,
        is_openbao: bool,
        authority: Arc<Authority>,
        leader: Option<String>,
    ) -> Result<Vault> {
        let directory = tempfile::Builder::new().prefix("pagevault-vault-").tempdir()?;
        Installation::get()?.give(directory.path())?;
        let vault = Vault {
            program,
            is_openbao,
            directory,
            port: free_port()?,
            cluster_port: free_port()?,
            child: None,
            unseal_key: String::new(),
            root_token: String::new(),
            authority,
            leader,
        };
        vault.write("ca.pem", vault.authority.pem(), 0o644)?;
        let (certificate, key) = vault.authority.sign("vault", &["127.0.0.1"])?;
        vault.write("server.pem", &certificate, 0o644)?;
        vault.write("server.key", &key, 0o600)?;
        let storage = vault.path("storage");
        std::fs::create_dir(&storage)?;
        Installation::get()?.give(&storage)?;
        Ok(vault)
    }

    /// The program of the server, which is also its client.
    #[must_use]
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Environment variables for a client that acts as this server's administrator.
    #[must_use]
    pub fn environment(&self) -> Vec<(String, String)> {
        let variables = |prefix: &str| {
            [
                (format!("{prefix}_ADDR"), self.address()),
                (format!("{prefix}_CACERT"), self.path("ca.pem").display().to_string()),
                (format!("{prefix}_TOKEN"), self.root_token.clone()),
            ]
        };
        [variables("VAULT"), variables("BAO")].concat()
    }

    fn set_up(&self) -> Result<()> {
        if !self.is_openbao {
            let audit = format!("file_path={}", self.path("audit.log").display());
            self.cli(&["audit", "enable", "file", &audit])?;
        }
        self.cli(&["secrets", "enable", "transit"])?;
        self.cli(&["auth", "enable", "approle"])?;
        self.make_key("db-kek")
    }

    /// Creates a Transit key with the properties that pagevault requires, and lets the role `db`
    /// use it.
    ///
    /// # Errors
    /// When Vault returns an error.
    pub fn make_key(&self, name: &str) -> Result<()> {
        self.cli(&["write", &format!("transit/keys/{name}"), "derived=true"])?;
        self.write_policy(name, &POLICY.replace("db-kek", name))?;
        let policies = self.cli(&["policy", "list"])?;
        let policies: Vec<&str> = policies.lines().filter(|policy| *policy != "root").collect();
        let policies = policies.join(",");
        self.cli(&[
            "write",
            "auth/approle/role/db",
            &format!("token_policies={policies}"),
            "token_ttl=20m",
        ])
        .map(drop)
    }

    /// Writes a policy.
    ///
    /// # Errors
    /// When Vault returns an error.
    pub fn write_policy(&self, name: &str, rules: &str) -> Result<()> {
        let file = self.write(&format!("{name}.hcl"), rules, 0o644)?;
        self.cli(&["policy", "write", name, &file.display().to_string()]).map(drop)
    }

    /// Provider options: this server, and AppRole with new credential files.
    ///
    /// # Errors
    /// When Vault returns an error.
    pub fn approle(&self) -> Result<Value> {
        let role = self.cli(&["read", "-field=role_id", "auth/approle/role/db/role-id"])?;
        let secret =
            self.cli(&["write", "-f", "-field=secret_id", "auth/approle/role/db/secret-id"])?;
        let role = self.write("role-id", &role, 0o644)?;
        let secret = self.write("secret-id", &secret, 0o600)?;
        Ok(self.options(json!({"approle": {"role_id_file": role, "secret_id_file": secret}})))
    }

    /// Provider options: this server, and a token in the file `name`.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn token(&self, name: &str, token: &str) -> Result<Value> {
        let file = self.write(name, token, 0o600)?;
        Ok(self.options(json!({"token_file": file})))
    }

    /// Provider options: this server with this authentication.
    #[must_use]
    pub fn options(&self, auth: Value) -> Value {
        json!({"address": self.address(), "ca_file": self.path("ca.pem"), "auth": auth})
    }

    /// `https://127.0.0.1:<port>`.
    #[must_use]
    pub fn address(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// The Unix socket on which it listens too.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.path("socket")
    }

    /// The port of 127.0.0.1 that it listens on.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// A path in the server's directory.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes a file for the server user and returns its path.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, name: &str, content: &str, mode: u32) -> Result<PathBuf> {
        super::write_file(&self.path(name), content, mode)
    }

    /// A client certificate by the authority of the server's certificate: certificate, key.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn client_certificate(&self, name: &str) -> Result<(String, String)> {
        self.authority.sign(name, &[])
    }

    /// Content of Vault's audit log.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn audit_log(&self) -> Result<String> {
        Ok(std::fs::read_to_string(self.path("audit.log"))?)
    }

    /// Runs the command-line client with the root token and returns its output.
    ///
    /// # Errors
    /// When it fails; the message contains its output.
    pub fn cli(&self, arguments: &[&str]) -> Result<String> {
        let output = self.command()?.args(arguments).output()?;
        ensure!(
            output.status.success(),
            "vault {arguments:?}: {}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8(output.stdout)?.trim().to_owned())
    }

    fn command(&self) -> Result<Command> {
        let mut command = Installation::get()?.command(&self.program.display().to_string());
        command.env("HOME", self.directory.path()).envs(self.environment());
        Ok(command)
    }

    fn run_server(&mut self) -> Result<()> {
        let log = std::fs::File::options().create(true).append(true).open(self.path("log"))?;
        let path = |name| self.path(name).display().to_string();
        let cluster = self.cluster_port;
        let joins = self.leader.as_ref().map_or(String::new(), |leader| {
            format!(
                "  retry_join {{\n    leader_api_addr = \"{leader}\"\n    leader_ca_cert_file = \"{}\"\n  }}\n",
                path("ca.pem")
            )
        });
        let node = if joins.is_empty() { "one" } else { "two" };
        let mut configuration = format!(
            "storage \"raft\" {{\n  path = \"{}\"\n  node_id = \"{node}\"\n  performance_multiplier = 1\n{joins}}}\n\
             listener \"tcp\" {{\n  address = \"127.0.0.1:{}\"\n  cluster_address = \"127.0.0.1:{cluster}\"\n  tls_cert_file = \"{}\"\n  \
             tls_key_file = \"{}\"\n}}\n\
             listener \"unix\" {{\n  address = \"{}\"\n}}\n\
             disable_mlock = true\napi_addr = \"{}\"\n\
             cluster_addr = \"https://127.0.0.1:{cluster}\"\n",
            path("storage"),
            self.port,
            path("server.pem"),
            path("server.key"),
            path("socket"),
            self.address()
        );
        if self.is_openbao {
            // Clients of the API may not choose which files the server writes, so audit logs are
            // set up in its configuration.
            configuration += &format!(
                "audit \"file\" \"file\" {{\n  options {{ file_path = \"{}\" }}\n}}\n",
                path("audit.log")
            );
        }
        let file = self.write("server.hcl", &configuration, 0o600)?;
        let mut child = self
            .command()?
            .arg("server")
            .arg(format!("-config={}", file.display()))
            .stdout(Stdio::from(log.try_clone()?))
            .stderr(Stdio::from(log))
            .spawn()?;
        let deadline = Instant::now() + Duration::from_secs(60);
        // Exit status: 2 sealed, 0 unsealed, 1 no reply yet.
        while self.command()?.arg("status").output()?.status.code() == Some(1) {
            if let Some(status) = child.try_wait()? {
                let response = std::fs::read_to_string(self.path("log")).unwrap_or_default();
                bail!("Vault has ended: {status}: {response}");
            }
            ensure!(Instant::now() < deadline, "Vault does not answer");
            std::thread::sleep(Duration::from_millis(50));
        }
        self.child = Some(child);
        Ok(())
    }

    /// Kills the server with SIGKILL.
    pub fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts and unseals the server again.
    ///
    /// # Errors
    /// When it does not start.
    pub fn restart(&mut self) -> Result<()> {
        self.run_server()?;
        self.unseal()
    }

    /// Starts the server again, sealed.
    ///
    /// # Errors
    /// When it does not start.
    pub fn restart_sealed(&mut self) -> Result<()> {
        self.run_server()
    }

    /// Whether it is OpenBao.
    #[must_use]
    pub fn is_openbao(&self) -> bool {
        self.is_openbao
    }

    /// Limits Transit to one request a minute, until [`Vault::allow_requests`].
    ///
    /// # Errors
    /// When Vault returns an error.
    pub fn limit_requests(&self) -> Result<()> {
        let quota = ["path=transit", "rate=1", "interval=60s"];
        self.cli(&[&["write", QUOTA], &quota[..]].concat()).map(drop)
    }

    /// Removes the limit.
    ///
    /// # Errors
    /// When Vault returns an error.
    pub fn allow_requests(&self) -> Result<()> {
        self.cli(&["delete", QUOTA]).map(drop)
    }

    /// Seals the server.
    ///
    /// # Errors
    /// When Vault returns an error.
    pub fn seal(&self) -> Result<()> {
        self.cli(&["operator", "seal"]).map(drop)
    }

    /// Unseals the server and waits until it is ready.
    ///
    /// # Errors
    /// When Vault returns an error.
    pub fn unseal(&self) -> Result<()> {
        self.cli(&["operator", "unseal", &self.unseal_key])?;
        self.wait_until_active()
    }

    /// Waits until the server is active, which happens shortly after unsealing.
    fn wait_until_active(&self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.cli(&["token", "lookup"]).is_err() {
            ensure!(
                Instant::now() < deadline,
                "Vault does not become active: {}",
                std::fs::read_to_string(self.path("log")).unwrap_or_default()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Stops the process with SIGSTOP: connections are accepted but get no reply, until
    /// [`Vault::wake`].
    ///
    /// # Errors
    /// When the server does not run.
    pub fn freeze(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    /// Continues the process after [`Vault::freeze`].
    ///
    /// # Errors
    /// When the server does not run.
    pub fn wake(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let child = self.child.as_ref().context("Vault does not run")?;
        let pid = Pid::from_raw(i32::try_from(child.id())?).context("no process")?;
        Ok(kill_process(pid, signal)?)
    }
}

impl Drop for Vault {
    fn drop(&mut self) {
        self.stop();
    }
}
