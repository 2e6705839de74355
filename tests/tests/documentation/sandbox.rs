//! Runs a page: with its own cluster, and with a directory that contains the paths named in the
//! documentation.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use age::secrecy::ExposeSecret;
use anyhow::{Context, Result, bail, ensure};
use pagevault_tests::installation::run as run_command;
use pagevault_tests::key_servers::kms::{Emulator, REGION, ROOT};
use pagevault_tests::key_servers::pykmip::PyKmip;
use pagevault_tests::key_servers::vault::Vault;
use pagevault_tests::key_servers::{Server, write_file};
use pagevault_tests::{Cluster, Settings, process};

use crate::output;
use crate::page::{Block, Language, Page, Start};

/// Paths in the documentation, and their replacements. `{dir}` is the sandbox.
const PLACES: &[(&str, &str)] = &[
    ("/usr/lib/postgresql/15/bin", "{bindir}"),
    ("/var/lib/postgresql/15/main", "{dir}/data"),
    ("/var/lib/postgresql", "{dir}/var"),
    ("/var/lib/pagevault-tokens", "{dir}/var/tokens"),
    ("/etc/pagevault", "{dir}/etc/pagevault"),
    ("/etc/patroni", "{dir}/etc/patroni"),
    ("primary.example.com", "{dir}"),
    ("https://vault.example.com:8200", "{vault}"),
    ("kmip.example.com:5696", "{kmip}"),
];

/// Replacements for commands that need rights the test lacks; they run as the server user.
const STAND_INS: &[(&str, &str)] = &[
    // sudo -u postgres COMMAND
    ("sudo", "if [ \"$1\" = -u ]; then shift 2; fi\nexec \"$@\""),
    // install without changing owners
    (
        "install",
        "for word; do shift; case $word in -o | -g) skip=1 ;;\n\
         *) if [ \"${skip:-}\" ]; then skip=; else set -- \"$@\" \"$word\"; fi ;; esac; done\n\
         exec /usr/bin/install \"$@\"",
    ),
    // systemctl start|stop|restart|reload postgresql
    // age-keygen -o FILE, where there is no age
    ("age-keygen", "[ \"$1\" = -o ] && cp {dir}/identity \"$2\" && chmod 600 \"$2\""),
    ("systemctl", "exec pg_ctl \"$1\" -w -s -m fast -D {dir}/data -l {dir}/log"),
];

/// Runs every block of a page.
pub(crate) fn run(page: &Page) -> Result<()> {
    ensure!(page.problems.is_empty(), "{}", page.problems.join("\n"));
    if page.blocks.is_empty() {
        return Ok(());
    }
    let sandbox = Sandbox::new(page)?;
    for block in &page.blocks {
        sandbox.block(block).with_context(|| format!("{} line {}", page.name, block.line))?;
    }
    sandbox.cluster.finish()
}

struct Sandbox {
    _strays: Strays,
    cluster: Cluster,
    vault: Option<Vault>,
    kms: Option<Emulator>,
    kmip: Option<PyKmip>,
    /// Text in blocks, and its replacement here.
    read_as: Vec<(String, String)>,
}

impl Sandbox {
    fn new(page: &Page) -> Result<Sandbox> {
        let mut settings = Settings::default()
            .conf("max_worker_processes = 16")
            .conf("pagevault.rekey_rate = 0")
            .conf("pagevault.keyring_timeout = 10")
            .conf("wal_level = logical");
        if page.start == Start::Nothing {
            // Without the library, its settings are unknown.
            settings = Settings::default().without_preload();
        }
        let mut cluster = Cluster::start(&settings)?;
        // Chapters also show failures.
        cluster.allow_log("");
        let strays = Strays(cluster.directory().join("var"));
        let (vault, kms, kmip) = (None, None, None);
        let mut sandbox =
            Sandbox { _strays: strays, cluster, vault, kms, kmip, read_as: Vec::new() };
        for directory in ["bin", "etc", "home", "home/docs", "var"] {
            sandbox.make_directory(directory)?;
        }
        copy(&crate::root().join("docs/examples"), &sandbox.path("home/docs/examples"))?;
        run_command(
            std::process::Command::new("chmod").args(["-R", "a+rX"]).arg(sandbox.path("home/docs")),
        )?;
        let pair = age::x25519::Identity::generate();
        let identity =
            format!("# public key: {}\n{}\n", pair.to_public(), pair.to_string().expose_secret());
        write_file(&sandbox.path("identity"), &identity, 0o644)?;
        for (name, body) in STAND_INS {
            let body = body.replace("{dir}", &sandbox.path("").display().to_string());
            sandbox.program(name, &body)?;
        }
        sandbox.serve_keys(&page.needs)?;
        sandbox.map(page);
        match page.start {
            Start::Nothing => {}
            Start::Extension => sandbox.cluster.sql("CREATE EXTENSION pagevault")?,
            Start::Keys => {
                sandbox.make_directory("etc/pagevault")?;
                let keys = sandbox.cluster.key_file("etc/pagevault/keys", "main")?;
                sandbox.cluster.sql("CREATE EXTENSION pagevault")?;
                sandbox.cluster.sql(&keys.add_provider("local"))?;
                sandbox.cluster.sql("SELECT pagevault.set_cluster_master_key('local', 'main')")?;
            }
        }
        Ok(sandbox)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.cluster.directory().join(name)
    }

    fn make_directory(&self, name: &str) -> Result<()> {
        fs::create_dir_all(self.path(name))?;
        self.cluster.installation().give(&self.path(name))
    }

    /// Creates a program that precedes the machine's in PATH.
    fn program(&self, name: &str, body: &str) -> Result<()> {
        write_file(&self.path("bin").join(name), &format!("#!/bin/bash\n{body}\n"), 0o755).map(drop)
    }

    fn serve_keys(&mut self, needs: &[Server]) -> Result<()> {
        if needs.contains(&Server::Vault) {
            let vault = Vault::bare()?;
            let mut body = String::new();
            for (name, value) in vault.environment() {
                writeln!(body, "export {name}='{value}'")?;
            }
            writeln!(body, "exec {} \"$@\"", vault.program().display())?;
            self.program("vault", &body)?;
            self.make_directory("etc/pagevault")?;
            let authority = fs::read_to_string(vault.path("ca.pem"))?;
            write_file(&self.path("etc/pagevault/vault-ca.pem"), &authority, 0o644)?;
            self.vault = Some(vault);
        }
        if needs.contains(&Server::Moto) {
            let kms = Emulator::moto()?;
            let client = Server::AwsCli.program().context("no aws")?;
            let body = format!(
                "export AWS_ENDPOINT_URL='{}' AWS_DEFAULT_REGION={REGION} AWS_ACCESS_KEY_ID={} AWS_SECRET_ACCESS_KEY={}\n\
                 exec {} \"$@\"",
                kms.endpoint(),
                ROOT.0,
                ROOT.1,
                client.display()
            );
            self.program("aws", &body)?;
            self.make_directory("etc/pagevault")?;
            let credentials = format!(
                "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n",
                ROOT.0, ROOT.1
            );
            write_file(&self.path("etc/pagevault/aws-credentials"), &credentials, 0o600)?;
            self.kms = Some(kms);
        }
        if needs.contains(&Server::PyKmip) {
            let kmip = PyKmip::start()?;
            self.make_directory("var/kmip")?;
            for name in ["client.pem", "client.key", "ca.pem"] {
                let content = fs::read_to_string(kmip.path(name))?;
                write_file(&self.path("var/kmip").join(name), &content, 0o600)?;
            }
            self.kmip = Some(kmip);
        }
        Ok(())
    }

    fn map(&mut self, page: &Page) {
        let places = PLACES.iter().map(|(name, place)| ((*name).to_owned(), (*place).to_owned()));
        let mut read_as = page.read_as.clone();
        read_as.extend(places);
        let bindir = self.cluster.installation().program("");
        let values = [
            ("{dir}", self.cluster.directory().display().to_string()),
            ("{bindir}", bindir.display().to_string().trim_end_matches('/').to_owned()),
            ("{vault}", self.vault.as_ref().map(Vault::address).unwrap_or_default()),
            ("{kmip}", self.kmip.as_ref().map(PyKmip::address).unwrap_or_default()),
            ("{kms}", self.kms.as_ref().map(|kms| kms.endpoint().to_owned()).unwrap_or_default()),
        ];
        for (_, meaning) in &mut read_as {
            for (name, value) in &values {
                *meaning = meaning.replace(name, value);
            }
        }
        self.read_as = read_as;
    }

    fn translate(&self, text: &str) -> String {
        self.read_as.iter().fold(text.to_owned(), |text, (name, place)| text.replace(name, place))
    }

    fn block(&self, block: &Block) -> Result<()> {
        let text = self.translate(&block.text);
        let outcome = match block.language {
            Language::Conf => {
                self.cluster.append_conf(&text)?;
                self.cluster.restart().map(|()| String::new())
            }
            Language::Sql => self.sql(&text),
            Language::Sh => self.shell(&text),
        };
        match (outcome, &block.fails_with) {
            (Ok(printed), None) => {
                let Some(shown) = &block.prints else { return Ok(()) };
                output::compare(&self.translate(shown), &printed)
            }
            (Err(error), None) => Err(error),
            (Ok(printed), Some(_)) => bail!("this must fail: {text}\n{printed}"),
            (Err(error), Some(expected)) => {
                let response = format!("{error:#}");
                let expected = self.translate(expected);
                ensure!(
                    response.contains(&expected),
                    "it fails, but not with {expected:?}: {response}"
                );
                Ok(())
            }
        }
    }

    fn sql(&self, text: &str) -> Result<String> {
        let file = write_file(&self.path("block.sql"), text, 0o644)?;
        self.run(&format!("psql -X -q -v ON_ERROR_STOP=1 -f '{}'", file.display()))
    }

    /// Variables and functions stay for later blocks: variables are exported, and both are kept in
    /// a file between blocks.
    fn shell(&self, text: &str) -> Result<String> {
        let file = write_file(&self.path("block.sh"), text, 0o644)?;
        let kept = self.path("variables");
        self.run(&format!(
            "[ ! -e '{kept}' ] || . '{kept}'\nset -a\n. '{file}'\nset +a\n{{ export -p; declare -f; }} > '{kept}'",
            kept = kept.display(),
            file = file.display()
        ))
    }

    /// Runs a script in a shell that exits at the first failure; returns its output.
    fn run(&self, script: &str) -> Result<String> {
        // Files instead of pipes, because a server started by a block keeps them open.
        let (printed, response) = (self.path("printed"), self.path("said"));
        let installation = self.cluster.installation();
        let path = format!(
            "{}:{}:{}",
            self.path("bin").display(),
            installation.program("").display(),
            std::env::var("PATH").unwrap_or_default()
        );
        let mut command = installation.command("/usr/bin/timeout");
        command
            .args(["--kill-after=5", "150", "/bin/bash", "-e", "-o", "pipefail", "-c", script])
            .current_dir(self.path("home"))
            .env("HOME", self.path("home"))
            .env("PATH", path)
            .env("PGHOST", self.cluster.directory())
            .env("PGUSER", "postgres")
            .env("PGDATABASE", "postgres")
            .env("AWS_EC2_METADATA_DISABLED", "true")
            .stdin(Stdio::null())
            .stdout(File::create(&printed)?)
            .stderr(File::create(&response)?);
        let status = command.status().context("run a shell")?;
        let printed = fs::read_to_string(printed)?;
        ensure!(
            status.success(),
            "{status}\n{script}\n{printed}{}",
            fs::read_to_string(response).unwrap_or_default()
        );
        Ok(printed)
    }
}

/// Servers started by blocks, with their data directories in this directory.
struct Strays(PathBuf);

impl Drop for Strays {
    fn drop(&mut self) {
        for entry in fs::read_dir(&self.0).into_iter().flatten().filter_map(Result::ok) {
            let _ = process::kill_all(&entry.path());
        }
    }
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    run_command(std::process::Command::new("cp").arg("-r").arg(from).arg(to)).map(drop)
}
