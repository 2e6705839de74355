//! Pods without Kubernetes: a stock server, and the tree of pagevault's image, mounted read-only
//! elsewhere; user 26; the operator's files, settings, environment and command lines
//! (CloudNativePG 1.30, pkg/management/postgres).

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::errors::SqlError;
use pagevault_tests::installation::run;
use pagevault_tests::{Installation, process};
use postgres::{Client, NoTls};
use tempfile::TempDir;
use yaml_rust2::{Yaml, YamlLoader};

const CATALOG: &str = include_str!("../../../../docs/examples/cloudnativepg/catalog.yaml");
const CLUSTER: &str = include_str!("../../../../docs/examples/cloudnativepg/cluster.yaml");

/// User and group of the operator's images.
const USER: u32 = 26;

/// Time limit for each action.
const PATIENCE: Duration = Duration::from_secs(120);

/// What all pods of a test share: the images, and what is projected.
#[derive(Debug)]
pub(crate) struct Host {
    root: TempDir,
}

/// Which environment a program gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Env {
    /// That of the instance manager (`initdb`, `pg_basebackup`, `pg_ctl promote`).
    Manager,
    /// In addition what extensions ask for (`buildPostgresEnv`, instance.go).
    Postgres,
}

impl Host {
    /// Makes the images.
    pub(crate) fn new() -> Result<Host> {
        let root = tempfile::Builder::new().prefix("pagevault-cnpg-").tempdir()?;
        let host = Host { root };
        fs::set_permissions(host.root.path(), fs::Permissions::from_mode(0o755))?;
        host.copy_server()?;
        let tool = crate_root().join("tools/cnpg-image");
        let pg_config = Installation::get()?.program("pg_config");
        run(Command::new(tool).arg("tree").arg(host.at("image")).arg(pg_config))?;
        for directory in ["extensions", "extensions/pagevault", "elsewhere", "archive", "projected"]
        {
            fs::create_dir(host.at(directory))?;
            fs::set_permissions(host.at(directory), fs::Permissions::from_mode(0o755))?;
        }
        for directory in ["archive", "projected"] {
            chown(host.at(directory), Some(USER), Some(USER))?;
        }
        // `initdb` asks for the name of its user.
        fs::write(
            host.at("passwd"),
            format!("root:x:0:0::/:/bin/sh\npostgres:x:{USER}:{USER}::/:/bin/sh\n"),
        )?;
        fs::set_permissions(host.at("passwd"), fs::Permissions::from_mode(0o644))?;
        Ok(host)
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// The server's own files without those of pagevault, as in the operator's images.
    fn copy_server(&self) -> Result<()> {
        let bin = Installation::get()?.program("");
        let bin = bin.canonicalize()?;
        // PREFIX/lib/postgresql/18/bin, or PREFIX/bin.
        let prefix =
            bin.ancestors().find(|path| path.join("share").is_dir() && path.join("lib").is_dir());
        let prefix = prefix.context("the installation has no prefix")?;
        run(Command::new("cp").arg("-a").arg(prefix).arg(self.at("server")))?;
        let listed =
            run(Command::new("find").arg(self.at("server")).args(["-name", "pagevault*"]))?;
        ensure!(listed.contains("pagevault.so"), "pagevault is not installed: {listed}");
        for path in listed.lines() {
            fs::remove_file(path).with_context(|| path.to_owned())?;
        }
        fs::write(self.at("bin"), bin.strip_prefix(prefix)?.to_string_lossy().as_bytes())?;
        Ok(())
    }

    pub(crate) fn bin(&self) -> Result<PathBuf> {
        Ok(self.at("server").join(fs::read_to_string(self.at("bin"))?))
    }

    /// A program in a pod, as user 26, with the image mounted and a read-only root.
    pub(crate) fn command(&self, program: &Path, env: Env) -> Result<Command> {
        let root = self.root.path().display();
        let script = format!(
            "mount --bind '{root}' '{root}'
             mount --bind '{root}/passwd' /etc/passwd
             mount --bind '{root}/image' '{root}/extensions/pagevault'
             mount -o remount,bind,ro '{root}/extensions/pagevault'
             mount -o remount,bind,ro /
             cd \"$(pwd)\"
             exec setpriv --reuid {USER} --regid {USER} --clear-groups --no-new-privs \"$@\""
        );
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-ec", &script, "sh"]);
        command.env_clear().stdin(Stdio::null()).current_dir("/");
        let path = format!("{}:/usr/bin:/bin", self.bin()?.display());
        command.env("PATH", &path).env("LC_ALL", "C").env("TZ", "UTC");
        if env == Env::Postgres {
            // For the program alone: what mounts the image cannot load a library from there.
            let image = self.at("extensions/pagevault").display().to_string();
            let extension = extension()?;
            let mut path = path;
            for entry in list(&extension["bin_path"]) {
                path = format!("{path}:{image}/{}", entry.as_str().context("a path")?);
            }
            command.args(["env", &format!("PATH={path}")]);
            for entry in list(&extension["env"]) {
                let value = entry["value"].as_str().context("a value")?;
                let name = entry["name"].as_str().context("a name")?;
                command.arg(format!("{name}={}", value.replace("${image_root}", &image)));
            }
        }
        command.arg(program);
        Ok(command)
    }

    /// A pod whose volume is empty.
    pub(crate) fn pod(&self, name: &str) -> Result<Pod<'_>> {
        // As volumes are that belong to the group of the pod (fsGroup).
        fs::create_dir(self.at(name))?;
        chown(self.at(name), Some(0), Some(USER))?;
        fs::set_permissions(self.at(name), fs::Permissions::from_mode(0o2775))?;
        Ok(Pod { host: self, name: name.to_owned(), server: None })
    }
}

/// A pod of a cluster.
#[derive(Debug)]
pub(crate) struct Pod<'a> {
    host: &'a Host,
    pub(crate) name: String,
    server: Option<Child>,
}

impl Pod<'_> {
    pub(crate) fn volume(&self) -> PathBuf {
        self.host.at(&self.name)
    }

    pub(crate) fn pgdata(&self) -> PathBuf {
        self.volume().join("pgdata")
    }

    pub(crate) fn tool(&self, name: &str, env: Env) -> Result<Command> {
        let mut command = self.host.command(&self.host.bin()?.join(name), env)?;
        command.env("PGDATA", self.pgdata());
        Ok(command)
    }

    /// `CreateDataDirectory` (initdb.go), and the configuration files.
    pub(crate) fn initdb(&self) -> Result<()> {
        run(self
            .tool("initdb", Env::Manager)?
            .args(["--username", "postgres", "-D"])
            .arg(self.pgdata())
            .args(["--data-checksums", "--no-sync"]))?;
        self.configure(&self.pgdata(), "extensions")
    }

    /// `custom.conf`: the operator's settings, those of the manifest, the image's paths.
    pub(crate) fn configure(&self, pgdata: &Path, extensions: &str) -> Result<()> {
        let root = self.host.root.path().display();
        let mut custom = format!(
            "allow_alter_system = off
             archive_mode = on
             archive_command = 'test ! -f {root}/archive/%f && cp %p {root}/archive/%f'
             cluster_name = 'db'
             dynamic_library_path = '$libdir:{root}/{extensions}/pagevault/lib'
             extension_control_path = '$system:{root}/{extensions}/pagevault/share'
             full_page_writes = on
             hot_standby = true
             listen_addresses = ''
             max_replication_slots = 32
             max_worker_processes = 32
             port = 5432
             restart_after_crash = false
             unix_socket_directories = '{}'
             wal_keep_size = 512MB
             wal_level = logical
             wal_log_hints = on
             wal_sender_timeout = 5s
             wal_receiver_timeout = 5s
             fsync = off
             checkpoint_completion_target = 0
             logging_collector = off
            ",
            self.volume().display()
        );
        let cluster = document(CLUSTER)?;
        let of = &cluster["spec"]["postgresql"];
        let libraries = list(&of["shared_preload_libraries"]).iter().filter_map(Yaml::as_str);
        let libraries = libraries.collect::<Vec<_>>().join(",");
        custom.push_str(&format!("shared_preload_libraries = '{libraries}'\n"));
        for (name, value) in of["parameters"].as_hash().context("parameters")? {
            let (name, value) = (name.as_str().context("name")?, value.as_str().context("value")?);
            custom.push_str(&format!("{name} = '{value}'\n"));
        }
        let path = pgdata.join("postgresql.conf");
        let own = fs::read_to_string(&path)?;
        if !own.contains("include 'custom.conf'") {
            fs::write(&path, own + "\ninclude 'custom.conf'\ninclude 'override.conf'\n")?;
        }
        self.write_to(&pgdata.join("custom.conf"), &custom)?;
        self.write_to(&pgdata.join("override.conf"), "")
    }

    pub(crate) fn write_to(&self, path: &Path, content: &str) -> Result<()> {
        fs::write(path, content)?;
        Ok(chown(path, Some(USER), Some(USER))?)
    }

    /// How others reach this pod's server.
    pub(crate) fn conninfo(&self) -> String {
        format!("host={} user=postgres port=5432", self.volume().display())
    }

    /// `configurePostgresOverrideConfFile` (configuration.go).
    pub(crate) fn follow(&self, primary: &Pod<'_>) -> Result<()> {
        let archive = self.host.at("archive");
        self.write_to(
            &self.pgdata().join("override.conf"),
            &format!(
                "restore_command = 'cp {}/%f %p'\nrecovery_target_timeline = 'latest'\nprimary_conninfo = '{} dbname=postgres'\n",
                archive.display(),
                primary.conninfo()
            ),
        )
    }

    pub(crate) fn make_standby(&self) -> Result<()> {
        self.write_to(&self.pgdata().join("standby.signal"), "")
    }

    /// `ClonePgData` (join.go): without the environment of extensions.
    pub(crate) fn join(&self, primary: &Pod<'_>) -> Result<()> {
        let from = primary.conninfo()
            + " dbname=postgres connect_timeout=5 options='-c wal_sender_timeout=0s'";
        let mut clone = self.tool("pg_basebackup", Env::Manager)?;
        run(clone.arg("-D").arg(self.pgdata()).args(["-v", "-w", "-d", &from]))?;
        self.configure(&self.pgdata(), "extensions")?;
        self.follow(primary)?;
        self.make_standby()
    }

    /// Another pod gets the volume: the kubelet gives it to the group, as `fsGroup` says
    /// (`SetVolumeOwnership`, pkg/volume), and the manager takes back the data directory itself
    /// (`EnsurePgDataPerms`, initdb.go).
    pub(crate) fn mount(&self) -> Result<()> {
        open_for_group(&self.volume())?;
        Ok(fs::set_permissions(self.pgdata(), fs::Permissions::from_mode(0o700))?)
    }

    /// `Run` (instance.go): the server as a child of the manager.
    pub(crate) fn start(&mut self) -> Result<()> {
        self.mount()?;
        let log = fs::File::options().append(true).create(true).open(self.log_path())?;
        let mut server = self.tool("postgres", Env::Postgres)?;
        let mut child =
            server.arg("-D").arg(self.pgdata()).stdout(log.try_clone()?).stderr(log).spawn()?;
        let started = Instant::now();
        while !process::is_up(&self.pgdata(), child.id()) {
            if let Some(status) = child.try_wait()? {
                bail!("the server of {} does not start ({status}):\n{}", self.name, self.log()?);
            }
            ensure!(started.elapsed() < PATIENCE, "{} does not start:\n{}", self.name, self.log()?);
            std::thread::sleep(Duration::from_millis(20));
        }
        self.server = Some(child);
        Ok(())
    }

    fn log_path(&self) -> PathBuf {
        self.volume().join("log")
    }

    pub(crate) fn log(&self) -> Result<String> {
        Ok(fs::read_to_string(self.log_path())?)
    }

    /// `Shutdown` (instance.go).
    pub(crate) fn stop(&mut self) -> Result<()> {
        let mut stop = self.tool("pg_ctl", Env::Manager)?;
        run(stop.arg("-D").arg(self.pgdata()).args(["-m", "fast", "stop", "-w", "-t", "120"]))?;
        self.ended()
    }

    fn ended(&mut self) -> Result<()> {
        if let Some(mut server) = self.server.take() {
            server.wait()?;
        }
        Ok(())
    }

    /// The node is gone.
    pub(crate) fn kill(&mut self) -> Result<()> {
        process::kill_all(&self.pgdata())?;
        self.ended()
    }

    /// `PromoteAndWait` (promote.go).
    pub(crate) fn promote(&self) -> Result<()> {
        let mut promote = self.tool("pg_ctl", Env::Manager)?;
        run(promote.arg("-D").arg(self.pgdata()).args(["-w", "promote", "-t 40000000"]))?;
        self.sql("postgres", "CHECKPOINT")
    }

    /// `Rewind` (instance.go).
    pub(crate) fn rewind(&self, primary: &Pod<'_>, env: Env) -> Result<Command> {
        let control = self.pgdata().join("global/pg_control");
        let old = self.pgdata().join("global/pg_control.old");
        fs::copy(control, &old)?;
        chown(&old, Some(USER), Some(USER))?;
        self.follow(primary)?;
        self.mount()?;
        let mut rewind = self.tool("pg_rewind", env)?;
        rewind.args(["-P", "--source-server", &(primary.conninfo() + " dbname=postgres")]);
        rewind.arg("--target-pgdata").arg(self.pgdata()).arg("--restore-target-wal");
        Ok(rewind)
    }

    pub(crate) fn client(&self, database: &str) -> Result<Client> {
        let mut config = postgres::Config::new();
        config.host_path(self.volume()).port(5432).user("postgres").dbname(database);
        Ok(config.connect(NoTls)?)
    }

    pub(crate) fn sql(&self, database: &str, statements: &str) -> Result<()> {
        run_sql(&mut self.client(database)?, statements)
    }

    pub(crate) fn text(&self, database: &str, query: &str) -> Result<String> {
        text(&mut self.client(database)?, query)
    }

    /// The error of a statement that must fail.
    pub(crate) fn error(&self, statement: &str) -> Result<SqlError> {
        pagevault_tests::cluster::expect_error(&mut self.client("postgres")?, statement)
    }

    pub(crate) fn eventually(&self, database: &str, query: &str, expected: &str) -> Result<()> {
        let started = Instant::now();
        loop {
            let found = self.text(database, query)?;
            if found == expected {
                return Ok(());
            }
            ensure!(
                started.elapsed() < PATIENCE,
                "{}: {query}: {found}\n{}",
                self.name,
                self.log()?
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the other has replayed what this one has written.
    pub(crate) fn is_followed_by(&self, other: &Pod<'_>) -> Result<()> {
        let lsn = self.text("postgres", "SELECT pg_current_wal_insert_lsn()")?;
        other.eventually("postgres", &format!("SELECT pg_last_wal_replay_lsn() >= '{lsn}'"), "t")
    }
}

impl Drop for Pod<'_> {
    fn drop(&mut self) {
        let _ = process::kill_all(&self.pgdata());
        let _ = self.ended();
    }
}

fn open_for_group(path: &Path) -> Result<()> {
    let metadata = fs::symlink_metadata(path)?;
    let mode = metadata.permissions().mode() & 0o7777;
    let added = if metadata.is_dir() { 0o2770 } else { 0o660 };
    if !metadata.is_symlink() {
        fs::set_permissions(path, fs::Permissions::from_mode(mode | added))?;
    }
    if metadata.is_dir() {
        for entry in fs::read_dir(path)? {
            open_for_group(&entry?.path())?;
        }
    }
    Ok(())
}

pub(crate) fn crate_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn document(text: &str) -> Result<Yaml> {
    YamlLoader::load_from_str(text)?.into_iter().next().context("no document")
}

/// pagevault in the catalogue.
fn extension() -> Result<Yaml> {
    let catalog = document(CATALOG)?;
    Ok(catalog["spec"]["images"][0]["extensions"][0].clone())
}

fn list(value: &Yaml) -> &[Yaml] {
    value.as_vec().map_or(&[], Vec::as_slice)
}
