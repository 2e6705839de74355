//! A TPM in software (swtpm), used through libtpm2-pkcs11.

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::softhsm::PIN;
use crate::Installation;
use crate::installation::run;

/// Paths of the module in several distributions.
const MODULES: &[&str] = &[
    "/usr/lib/x86_64-linux-gnu/pkcs11/libtpm2_pkcs11.so",
    "/usr/lib/aarch64-linux-gnu/pkcs11/libtpm2_pkcs11.so",
    "/usr/lib64/pkcs11/libtpm2_pkcs11.so",
];

/// Where the module is.
pub(super) fn module() -> Option<PathBuf> {
    MODULES.iter().map(PathBuf::from).find(|path| path.exists())
}

/// A TPM with the token `pagevault`, and an RSA key `db-kek` in it. Dropping it stops it.
pub struct Tpm {
    directory: TempDir,
    module: PathBuf,
    swtpm: Child,
}

impl Tpm {
    /// # Errors
    /// When any of it fails.
    pub fn start() -> Result<Tpm> {
        let module = module().context("there is no module for TPMs on this machine")?;
        let directory = tempfile::Builder::new().prefix("pagevault-tpm-").tempdir()?;
        Installation::get()?.give(directory.path())?;
        for name in ["state", "store", "data"] {
            std::fs::create_dir(directory.path().join(name))?;
            Installation::get()?.give(&directory.path().join(name))?;
        }
        let swtpm = run_swtpm(directory.path())?;
        let mut tpm = Tpm { directory, module, swtpm };
        tpm.wait()?;
        super::write_file(&tpm.path("pin"), PIN, 0o600)?;
        let label = "--label=pagevault";
        tpm.tool(&["--slot-index=0", "--init-token", label, "--so-pin=5678"])?;
        let pin = "--pin=env:PIN";
        tpm.tool(&["--token-label=pagevault", "--init-pin", "--login", "--so-pin=5678", pin])?;
        tpm.tool(&[
            "--token-label=pagevault",
            "--login",
            pin,
            "--keypairgen",
            "--key-type=RSA:2048",
            "--label=db-kek",
            "--id=01",
        ])?;
        // A TPM holds three objects at a time, and `pkcs11-tool` has left some. Machines have a
        // resource manager for that (/dev/tpmrm0).
        tpm.stop();
        tpm.swtpm = run_swtpm(tpm.directory.path())?;
        tpm.wait()?;
        Ok(tpm)
    }

    fn stop(&mut self) {
        if let Some(pid) = Pid::from_raw(self.swtpm.id().cast_signed()) {
            let _ = kill_process(pid, Signal::KILL);
        }
        let _ = self.swtpm.wait();
        for name in ["socket", "socket.ctrl"] {
            let _ = std::fs::remove_file(self.path(name));
        }
    }

    /// Waits until it listens.
    fn wait(&mut self) -> Result<()> {
        let end = Instant::now() + Duration::from_secs(30);
        while !self.path("socket").exists() || !self.path("socket.ctrl").exists() {
            ensure!(self.swtpm.try_wait()?.is_none(), "swtpm has ended");
            ensure!(Instant::now() < end, "swtpm does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// A file or directory of this TPM.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn environment(&self) -> [(&'static str, String); 3] {
        [
            ("TPM2_PKCS11_STORE", self.path("store").display().to_string()),
            ("TPM2_PKCS11_TCTI", format!("swtpm:path={}", self.path("socket").display())),
            ("TPM2_PKCS11_LOG_LEVEL", "0".to_owned()),
        ]
    }

    /// Runs `pkcs11-tool`.
    fn tool(&self, arguments: &[&str]) -> Result<String> {
        let tool = super::on_path("pkcs11-tool").context("there is no pkcs11-tool")?;
        run(Installation::get()?
            .command(tool.to_str().context("path")?)
            .envs(self.environment())
            .env("PIN", PIN)
            .args(["--module".as_ref(), self.module.as_path() as &Path])
            .args(arguments))
    }

    /// Options of a provider that uses it.
    #[must_use]
    pub fn options(&self) -> Value {
        let environment: serde_json::Map<String, Value> = self
            .environment()
            .into_iter()
            .map(|(name, value)| (name.into(), json!(value)))
            .collect();
        json!({
            "module": self.module,
            "token": "pagevault",
            "pin_file": self.path("pin"),
            "environment": environment,
        })
    }
}

impl Drop for Tpm {
    fn drop(&mut self) {
        self.stop();
    }
}

fn run_swtpm(directory: &Path) -> Result<Child> {
    let at = |name: &str| directory.join(name).display().to_string();
    let program = super::on_path("swtpm").context("there is no swtpm")?;
    Ok(Installation::get()?
        .command(program.to_str().context("path")?)
        .args(["socket", "--tpm2", "--flags", "not-need-init,startup-clear"])
        .args(["--tpmstate", &format!("dir={}", at("state"))])
        .args(["--server", &format!("type=unixio,path={}", at("socket"))])
        // Where the module expects it.
        .args(["--ctrl", &format!("type=unixio,path={}", at("socket.ctrl"))])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?)
}
