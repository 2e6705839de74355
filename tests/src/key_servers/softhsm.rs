//! A PKCS#11 token in software (SoftHSM2), used as the user guide says: by the example program,
//! with OpenSC's `pkcs11-tool`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::Installation;
use crate::installation::run;

const EXAMPLE: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/examples/pkcs11/pagevault-pkcs11");

/// Where distributions put the module.
const MODULES: &[&str] = &[
    "/usr/lib/softhsm/libsofthsm2.so",
    "/usr/lib64/pkcs11/libsofthsm2.so",
    "/usr/lib/pkcs11/libsofthsm2.so",
];

/// The token's user PIN: easy to find where it must not be.
pub const PIN: &str = "739154286";

/// A token of its own with an AES key `db-kek`, and the example program installed for it.
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
        // Not copied by this process, which other threads may fork while it has the file open for
        // writing: such a file cannot be run.
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

    /// Makes a key and returns what the token tells about it.
    ///
    /// # Errors
    /// When the token refuses.
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

    /// Another content for the example's configuration: token and module; `also` comes last.
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

    /// Another content for the example's PIN file.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn set_pin(&self, pin: &str) -> Result<()> {
        self.write("pin", pin, 0o600)
    }

    /// Writes a file beside the token's.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, name: &str, content: &str, mode: u32) -> Result<()> {
        super::write_file(&self.path(name), content, mode).map(drop)
    }

    /// A program that finds this token, as the server user.
    fn tool(&self, name: &str) -> Result<Command> {
        let path = super::on_path(name).with_context(|| format!("there is no {name}"))?;
        let path = path.to_str().context("path")?;
        let mut command = Installation::get()?.command(path);
        command.env("SOFTHSM2_CONF", self.path("softhsm2.conf"));
        Ok(command)
    }
}
