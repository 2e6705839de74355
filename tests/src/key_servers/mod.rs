//! Real key servers for tests: Vault or OpenBao, emulators of AWS KMS, PKCS#11 tokens in software,
//! a server of KMIP. For Google's and Azure's services there are none: [`gcp`] and [`azure`] are
//! written after the published descriptions of their REST interfaces.
//!
//! `tools/key-servers` installs them and puts their paths into the environment. Tests of a missing
//! server are skipped with a message ([`missing`]).

pub mod azure;
pub mod canned;
pub mod certificates;
pub mod clock;
pub mod forward;
pub mod gcp;
pub mod helper;
pub mod kms;
pub mod program;
pub mod pykmip;
pub mod rest;
pub mod softhsm;
pub mod tpm;
pub mod vault;

use std::ffi::OsString;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::Installation;
use crate::installation::run;

/// Programs that a test may need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    /// HashiCorp Vault or OpenBao: `PAGEVAULT_VAULT`, else `bao` or `vault` in PATH.
    Vault,
    /// The first, if it is HashiCorp's Vault. Never required: `tools/key-servers vault` builds it.
    HashiCorpVault,
    /// ministack, an emulator of AWS with key states: `PAGEVAULT_MINISTACK` is the Python of its
    /// environment.
    Ministack,
    /// moto, an emulator of AWS with ReEncrypt: `moto_server` in `PAGEVAULT_MOTO`.
    Moto,
    /// The command-line client of AWS, for the emulators: `PAGEVAULT_AWS_CLI`, else `aws` in PATH.
    AwsCli,
    /// SoftHSM2 and `pkcs11-tool` (OpenSC), in PATH.
    SoftHsm,
    /// A TPM in software: `swtpm`, libtpm2-pkcs11, and `pkcs11-tool`.
    Tpm,
    /// PyKMIP, a server of KMIP: `PAGEVAULT_PYKMIP` is the Python of its environment.
    PyKmip,
    /// Tokens of this machine, in the file that `PAGEVAULT_TOKENS` names. Never required.
    Tokens,
}

impl Server {
    /// Path of the program, if it is installed.
    #[must_use]
    pub fn program(self) -> Option<PathBuf> {
        match self {
            Server::Vault => {
                named("PAGEVAULT_VAULT").or_else(|| on_path("bao")).or_else(|| on_path("vault"))
            }
            Server::HashiCorpVault => {
                Server::Vault.program().filter(|program| program.ends_with("vault"))
            }
            Server::Ministack => named("PAGEVAULT_MINISTACK"),
            Server::Moto => named("PAGEVAULT_MOTO").or_else(|| on_path("moto_server")),
            Server::AwsCli => named("PAGEVAULT_AWS_CLI").or_else(|| on_path("aws")),
            Server::SoftHsm => on_path("pkcs11-tool").and_then(|_| on_path("softhsm2-util")),
            Server::Tpm => on_path("pkcs11-tool").and(tpm::module()).and_then(|_| on_path("swtpm")),
            Server::PyKmip => named("PAGEVAULT_PYKMIP"),
            Server::Tokens => named("PAGEVAULT_TOKENS"),
        }
    }
}

/// Whether tests with it run only where somebody has provided it.
#[must_use]
pub fn is_optional(needed: &[Server]) -> bool {
    needed.contains(&Server::Tokens) || needed.contains(&Server::HashiCorpVault)
}

/// Names those of `needed` that are not installed; `None` if all are.
#[must_use]
pub fn missing(needed: &[Server]) -> Option<String> {
    let lacking: Vec<String> = needed
        .iter()
        .filter(|server| server.program().is_none())
        .map(|server| format!("{server:?}"))
        .collect();
    (!lacking.is_empty()).then(|| lacking.join(", "))
}

fn named(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from).filter(|path| path.exists())
}

fn on_path(name: &str) -> Option<PathBuf> {
    let path: OsString = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(name)).find(|file| file.is_file())
}

/// A port of 127.0.0.1 that is currently free.
///
/// # Errors
/// When there is none.
pub fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Writes a file owned by the server user.
///
/// # Errors
/// When it cannot be written.
pub fn write_file(path: &Path, content: &str, mode: u32) -> Result<PathBuf> {
    std::fs::write(path, content)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    Installation::get()?.give(path)?;
    Ok(path.to_owned())
}

/// Writes a program of the server user.
///
/// # Errors
/// When it cannot be written.
pub fn write_program(path: &Path, content: &str) -> Result<()> {
    // Not copied by this process: other threads may fork while it has the file open for writing,
    // and then the file cannot be executed.
    let draft = path.with_extension("draft");
    std::fs::write(&draft, content)?;
    run(Command::new("install").args(["-m", "755"]).args([&draft, path]))?;
    Installation::get()?.give(path)
}
