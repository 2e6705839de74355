//! PKCS#11 tokens in software (SoftHSM2).

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::helper::Provider;
use crate::Installation;
use crate::installation::run;

/// Paths of the module in several distributions.
const MODULES: &[&str] = &[
    "/usr/lib/softhsm/libsofthsm2.so",
    "/usr/lib64/pkcs11/libsofthsm2.so",
    "/usr/lib/pkcs11/libsofthsm2.so",
];

/// A module with defects; see its comment.
const FAULTY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/key_servers/module.c");

/// The tokens' user PIN. It is distinctive, so that leaks are found.
pub const PIN: &str = "739154286";

/// Label of the first token.
pub const TOKEN: &str = "pagevault";

/// A store of tokens: at first one, with an AES key `db-kek` that has the id 01.
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
            token.make_directory(name)?;
        }
        let tokens = token.path("tokens");
        token.write(
            "softhsm2.conf",
            &format!("directories.tokendir = {}\n", tokens.display()),
            0o644,
        )?;
        token.set_pin(PIN)?;
        token.make_token(TOKEN)?;
        token.make_key("db-kek")?;
        Ok(token)
    }

    /// Makes another token; its label need not be new.
    ///
    /// # Errors
    /// When it fails.
    pub fn make_token(&self, label: &str) -> Result<()> {
        run(self.tool("softhsm2-util")?.args([
            "--init-token",
            "--free",
            "--so-pin=5678",
            &format!("--label={label}"),
            &format!("--pin={PIN}"),
        ]))?;
        Ok(())
    }

    /// A file or directory of this store.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Makes a directory of the server user.
    ///
    /// # Errors
    /// When it fails.
    pub fn make_directory(&self, name: &str) -> Result<()> {
        std::fs::create_dir(self.path(name))?;
        Installation::get()?.give(&self.path(name))
    }

    /// The module.
    #[must_use]
    pub fn module(&self) -> &str {
        self.module
    }

    /// Options of a provider that uses the first token.
    #[must_use]
    pub fn options(&self) -> Value {
        json!({
            "module": self.module,
            "token": TOKEN,
            "pin_file": self.path("pin"),
            "environment": {"SOFTHSM2_CONF": self.path("softhsm2.conf")},
        })
    }

    /// Options with a module that has defects, as these variables say.
    ///
    /// # Errors
    /// When it cannot be compiled.
    pub fn faulty(&self, variables: &[(&str, &str)]) -> Result<Value> {
        let module = self.path("module.so");
        if !module.exists() {
            run(Command::new("cc").args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"]).args([
                &module,
                Path::new(FAULTY),
                Path::new("-ldl"),
            ]))?;
            Installation::get()?.give(&module)?;
        }
        let mut options = self.options();
        options["module"] = json!(module);
        options["environment"]["REAL_MODULE"] = json!(self.module);
        for (name, value) in variables {
            options["environment"][*name] = json!(value);
        }
        Ok(options)
    }

    /// A provider with these options.
    #[must_use]
    pub fn provider(&self, options: Value) -> Provider {
        let mut provider = Provider::new("pkcs11", options);
        // It must exist, because the module may not be in it.
        provider.data_directory = self.path("data");
        provider
    }

    /// Creates a key with the id 01, as in the user guide, and returns the token's description.
    ///
    /// # Errors
    /// When the token returns an error.
    pub fn make_key(&self, name: &str) -> Result<String> {
        self.with_token(&[
            "--keygen",
            "--key-type=AES:32",
            "--sensitive",
            &format!("--label={name}"),
            "--id=01",
        ])
    }

    /// The serial number of the first token.
    ///
    /// # Errors
    /// When the module does not show it.
    pub fn serial(&self) -> Result<String> {
        let slots = run(self.tool("pkcs11-tool")?.args(["--module", self.module, "--list-slots"]))?;
        let line = slots.lines().find_map(|line| line.split_once("serial num"));
        Ok(line.context("no serial number")?.1.trim_start_matches([' ', ':']).trim().to_owned())
    }

    /// Removes all keys of this name.
    ///
    /// # Errors
    /// When there is none.
    pub fn drop_key(&self, name: &str) -> Result<()> {
        self.object(TOKEN, &["drop", name, "none"])
    }

    /// Runs `pkcs11-tool`, logged in to the first token.
    ///
    /// # Errors
    /// When it fails.
    pub fn with_token(&self, arguments: &[&str]) -> Result<String> {
        run(self
            .tool("pkcs11-tool")?
            .env("PIN", PIN)
            .args(["--module", self.module, "--login", "--pin=env:PIN"])
            .arg(format!("--token-label={TOKEN}"))
            .args(arguments))
    }

    /// Makes, changes or removes a key (`src/bin/pkcs11-object.rs`).
    ///
    /// # Errors
    /// When the token returns an error.
    pub fn object(&self, token: &str, arguments: &[&str]) -> Result<()> {
        let tests = std::env::current_exe()?;
        let built = tests.parent().and_then(Path::parent).context("no directory of programs")?;
        let program = built.join("pkcs11-object");
        ensure!(program.exists(), "{} is not built", program.display());
        // A copy, because the server user may not reach the original. Not copied by this process:
        // other threads may fork while it has the file open for writing, and then the file cannot
        // be executed.
        let copy = self.path("pkcs11-object");
        if !copy.exists() {
            run(Command::new("install").args(["-m", "755"]).args([&program, &copy]))?;
        }
        run(self
            .tool(copy.to_str().context("path")?)?
            .env("PIN", PIN)
            .args([self.module, token])
            .args(arguments))
        .map(drop)
    }

    /// Rewrites the PIN file.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn set_pin(&self, pin: &str) -> Result<()> {
        self.write("pin", pin, 0o600).map(drop)
    }

    /// Writes a file next to the token.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, name: &str, content: &str, mode: u32) -> Result<PathBuf> {
        super::write_file(&self.path(name), content, mode)
    }

    /// A command that uses these tokens, as the server user.
    fn tool(&self, name: &str) -> Result<Command> {
        let path = if name.contains('/') {
            PathBuf::from(name)
        } else {
            super::on_path(name).with_context(|| format!("there is no {name}"))?
        };
        let mut command = Installation::get()?.command(path.to_str().context("path")?);
        command.env("SOFTHSM2_CONF", self.path("softhsm2.conf"));
        Ok(command)
    }
}
