//! A PKCS#11 token in software (SoftHSM2), used as in the user guide: by the example program and
//! OpenSC's `pkcs11-tool`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::Installation;
use crate::installation::run;

const EXAMPLE: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/examples/pkcs11/pagevault-pkcs11");

/// Paths of the module in several distributions.
const MODULES: &[&str] = &[
    "/usr/lib/softhsm/libsofthsm2.so",
    "/usr/lib64/pkcs11/libsofthsm2.so",
    "/usr/lib/pkcs11/libsofthsm2.so",
];

/// The token's user PIN. It is distinctive, so that leaks are found.
pub const PIN: &str = "739154286";

/// A new token with an AES key `db-kek`, and the example program installed for it.
pub struct SoftHsm {
    directory: TempDir,
    module: &'static str,
}

impl SoftHsm {
    /// # Errors
    /// When any of it fails.
    pub fn start() -> Result<SoftHsm> {
        let module = MODULES.iter().find(|path| Path::new(path).exists());
        let module = module.context("SoftHSM's module is not where it is looked for")?;
        let directory = tempfile::Builder::new().prefix("pagevault-softhsm-").tempdir()?;
        Installation::get()?.give(directory.path())?;
        let token = SoftHsm { directory, module };
        for name in ["tokens", "data"] {
            std::fs::create_dir(token.path(name))?;
            Installation::get()?.give(&token.path(name))?;
        }
        token.write(
            "softhsm2.conf",
            &format!("directories.tokendir = {}\n", token.path("tokens").display()),
            0o644,
        )?;
        token.set_pin(PIN)?;
        token.configure("pagevault", token.module, "")?;
        // Not copied by this process: other threads may fork while it has the file open for
        // writing, and then the file cannot be executed.
        run(Command::new("install").args(["-m", "755", EXAMPLE]).arg(token.program()))?;
        run(token.tool("softhsm2-util")?.args([
            "--init-token",
            "--free",
            "--label=pagevault",
            "--so-pin=5678",
            &format!("--pin={PIN}"),
        ]))?;
        token.make_key("db-kek")?;
        Ok(token)
    }

    /// A file or directory of this token.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The installed example.
    #[must_use]
    pub fn program(&self) -> PathBuf {
        self.path("pagevault-pkcs11")
    }

    /// Options of a provider of kind `command`.
    #[must_use]
    pub fn options(&self) -> Value {
        let program = json!([self.program(), self.path("token.conf")]);
        json!({"wrap": program, "unwrap": program})
    }

    /// Creates a key and returns the token's description of it.
    ///
    /// # Errors
    /// When the token returns an error.
    pub fn make_key(&self, name: &str) -> Result<String> {
        let id: String = name.bytes().map(|byte| format!("{byte:02x}")).collect();
        let made = self.with_token(&[
            "--keygen",
            "--key-type=AES:32",
            "--sensitive",
            &format!("--label={name}"),
            &format!("--id={id}"),
        ])?;
        Ok(made)
    }

    /// Runs `pkcs11-tool`, logged in.
    ///
    /// # Errors
    /// When it fails.
    pub fn with_token(&self, arguments: &[&str]) -> Result<String> {
        run(self
            .tool("pkcs11-tool")?
            .env("PIN", PIN)
            .args(["--module", self.module, "--token-label=pagevault", "--login", "--pin=env:PIN"])
            .args(arguments))
    }

    /// Rewrites the configuration of the example program: token and module; `also` is appended.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn configure(&self, token: &str, module: &str, also: &str) -> Result<()> {
        let (pin, softhsm) = (self.path("pin"), self.path("softhsm2.conf"));
        let (pin, softhsm) = (pin.display(), softhsm.display());
        let text = format!(
            "MODULE={module}\nTOKEN={token}\nPIN_FILE={pin}\nexport SOFTHSM2_CONF={softhsm}\n{also}\n"
        );
        self.write("token.conf", &text, 0o644)
    }

    /// The module that the example uses.
    #[must_use]
    pub fn module(&self) -> &str {
        self.module
    }

    /// Rewrites the PIN file of the example program.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn set_pin(&self, pin: &str) -> Result<()> {
        self.write("pin", pin, 0o600)
    }

    /// Writes a file next to the token.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, name: &str, content: &str, mode: u32) -> Result<()> {
        super::write_file(&self.path(name), content, mode).map(drop)
    }

    /// A command that uses this token, as the server user.
    fn tool(&self, name: &str) -> Result<Command> {
        let path = super::on_path(name).with_context(|| format!("there is no {name}"))?;
        let path = path.to_str().context("path")?;
        let mut command = Installation::get()?.command(path);
        command.env("SOFTHSM2_CONF", self.path("softhsm2.conf"));
        Ok(command)
    }
}
