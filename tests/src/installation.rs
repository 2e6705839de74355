//! The PostgreSQL under test, and the user of its servers.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result, bail, ensure};

static CHOSEN: OnceLock<Result<Installation, String>> = OnceLock::new();

/// A PostgreSQL installation with pagevault installed in it.
#[derive(Debug)]
pub struct Installation {
    /// Major version: 15 to 19.
    pub major: u32,
    /// Output of `pg_config --version`.
    pub version: String,
    bindir: PathBuf,
    pkglibdir: PathBuf,
    sharedir: PathBuf,
    server_user: Option<(u32, u32)>,
}

impl Installation {
    /// The installation passed to [`Installation::select`], otherwise the one that
    /// `PAGEVAULT_PG_CONFIG` names.
    ///
    /// # Errors
    /// When the variable is missing, the program fails, or the tests run as root and the server
    /// user does not exist.
    pub fn get() -> Result<&'static Installation> {
        CHOSEN
            .get_or_init(|| Installation::find().map_err(|error| format!("{error:#}")))
            .as_ref()
            .map_err(|error| anyhow::anyhow!("{error}"))
    }

    /// Selects the installation of a `pg_config` for [`Installation::get`]; servers run as
    /// `server_user` if the tests run as root.
    ///
    /// # Errors
    /// When one was selected before, and as [`Installation::get`].
    pub fn select(pg_config: &Path, server_user: &str) -> Result<&'static Installation> {
        let installation = Installation::open(pg_config.as_os_str(), server_user)?;
        ensure!(CHOSEN.set(Ok(installation)).is_ok(), "an installation is in use already");
        Installation::get()
    }

    /// The installation to upgrade from: that of `PAGEVAULT_OLD_PG_CONFIG`, otherwise the one under
    /// test.
    ///
    /// # Errors
    /// As [`Installation::get`].
    pub fn to_upgrade_from() -> Result<&'static Installation> {
        static OLD: OnceLock<Result<Installation, String>> = OnceLock::new();
        let Some(pg_config) = std::env::var_os("PAGEVAULT_OLD_PG_CONFIG") else {
            return Installation::get();
        };
        let open =
            || Installation::open(&pg_config, &server_user_name()).map_err(|e| format!("{e:#}"));
        OLD.get_or_init(open).as_ref().map_err(|error| anyhow::anyhow!("{error}"))
    }

    fn find() -> Result<Installation> {
        let pg_config = std::env::var_os("PAGEVAULT_PG_CONFIG")
            .context("PAGEVAULT_PG_CONFIG is not set; run the cluster tests with `make test`")?;
        Installation::open(&pg_config, &server_user_name())
    }

    fn open(pg_config: &OsStr, user: &str) -> Result<Installation> {
        let ask = |option: &str| -> Result<String> {
            let output = Command::new(pg_config)
                .arg(option)
                .output()
                .with_context(|| format!("run {}", pg_config.display()))?;
            Ok(String::from_utf8(output.stdout)?.trim().to_owned())
        };
        let version = ask("--version")?;
        Ok(Installation {
            major: major(&version)?,
            version,
            bindir: PathBuf::from(ask("--bindir")?),
            pkglibdir: PathBuf::from(ask("--pkglibdir")?),
            sharedir: PathBuf::from(ask("--sharedir")?),
            server_user: user_of_servers(user)?,
        })
    }

    /// The installation of another `pg_config` than that of the tests.
    ///
    /// # Errors
    /// As [`Installation::get`].
    pub fn of_pg_config(pg_config: &Path) -> Result<&'static Installation> {
        let opened = Installation::open(pg_config.as_os_str(), &server_user_name())?;
        Ok(Box::leak(Box::new(opened)))
    }

    /// A server below a directory, with or without `pg_config`.
    ///
    /// # Errors
    /// When `postgres` does not run, and as [`Installation::get`].
    pub fn of_prefix(prefix: &Path) -> Result<&'static Installation> {
        let bindir = prefix.join("bin");
        // As PostgreSQL's makefiles have it: its own folder unless the prefix names PostgreSQL.
        let own = |name: &str| {
            let directory = prefix.join(name);
            Some(directory.join("postgresql")).filter(|own| own.is_dir()).unwrap_or(directory)
        };
        let version = run(Command::new(bindir.join("postgres")).arg("--version"))?;
        let version = version.trim().replace("postgres (PostgreSQL)", "PostgreSQL");
        Ok(Box::leak(Box::new(Installation {
            major: major(&version)?,
            version,
            pkglibdir: own("lib"),
            sharedir: own("share"),
            bindir,
            server_user: user_of_servers(&server_user_name())?,
        })))
    }

    /// Path of a program of this installation.
    #[must_use]
    pub fn program(&self, name: &str) -> PathBuf {
        self.bindir.join(name)
    }

    /// The directory of the libraries of extensions.
    #[must_use]
    pub fn library_directory(&self) -> &Path {
        &self.pkglibdir
    }

    /// The directory that contains `extension`, the folder of control files and scripts.
    #[must_use]
    pub fn share_directory(&self) -> &Path {
        &self.sharedir
    }

    /// Whether CREATE EXTENSION can find an extension.
    #[must_use]
    pub fn has_extension(&self, name: &str) -> bool {
        self.sharedir.join("extension").join(format!("{name}.control")).exists()
    }

    /// A command that runs a program of this installation as the server user, without input, with a
    /// neutral locale and time zone. `name` may also be an absolute path.
    #[must_use]
    pub fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.program(name));
        if let Some((uid, gid)) = self.server_user {
            // std also drops the supplementary groups when root sets a user.
            command.uid(uid).gid(gid);
        }
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("PG") || text.starts_with("MALLOC_") {
                command.env_remove(name);
            }
        }
        command.env("LC_ALL", "C").env("PGTZ", "UTC").stdin(Stdio::null()).current_dir("/");
        command
    }

    /// Makes the server user the owner of `path` (no effect unless the tests run as root).
    ///
    /// # Errors
    /// When the file system returns an error.
    pub fn give(&self, path: &Path) -> Result<()> {
        if let Some((uid, gid)) = self.server_user {
            std::os::unix::fs::chown(path, Some(uid), Some(gid))
                .with_context(|| format!("give {} to the server user", path.display()))?;
        }
        Ok(())
    }
}

fn major(version: &str) -> Result<u32> {
    version
        .strip_prefix("PostgreSQL ")
        .and_then(|rest| rest.split(|c: char| !c.is_ascii_digit()).next())
        .and_then(|digits| digits.parse().ok())
        .with_context(|| format!("understand version {version:?}"))
}

fn user_of_servers(name: &str) -> Result<Option<(u32, u32)>> {
    rustix::process::geteuid().is_root().then(|| server_user(name)).transpose()
}

fn server_user_name() -> String {
    std::env::var("PAGEVAULT_SERVER_USER").unwrap_or_else(|_| "pagevault".into())
}

fn server_user(name: &str) -> Result<(u32, u32)> {
    let id = |flag: &str| -> Result<u32> {
        let output = Command::new("id").args([flag, name]).output().context("run id")?;
        ensure!(output.status.success(), "there is no user {name:?}; run tools/setup");
        Ok(String::from_utf8(output.stdout)?.trim().parse()?)
    };
    Ok((id("-u")?, id("-g")?))
}

/// Runs `command` and returns its standard output.
///
/// # Errors
/// When it cannot be started or does not exit with 0; the message contains both outputs.
pub fn run(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("run {command:?}"))?;
    if !output.status.success() {
        bail!(
            "{command:?}: {}\n{}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
