//! Nodes under Patroni on one machine, with the configuration of the user guide, and an etcd.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::installation::run;
use pagevault_tests::key_servers::{free_port, write_file};
use pagevault_tests::{Installation, KeyFile, process};
use postgres::config::TargetSessionAttrs;
use postgres::{Client, NoTls};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use tempfile::TempDir;

use super::wire::Gate;
use crate::programs::program;

const NODE: &str = include_str!("../../../../docs/examples/patroni/node.yml");
const WITH_KEYS: &str = include_str!("../../../../docs/examples/patroni/with-keys");
const POST_BOOTSTRAP: &str = include_str!("../../../../docs/examples/patroni/post-bootstrap");

/// Time limit for each action of Patroni.
const PATIENCE: Duration = Duration::from_secs(180);

/// The PostgreSQL programs that Patroni runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Programs {
    /// As in the guide.
    WithKeys,
    /// The same, but with stock pg_rewind.
    StockRewind,
}

/// One node: Patroni and its server.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) name: String,
    directory: PathBuf,
    port: u16,
    rest_port: u16,
    pub(crate) patroni: Option<Child>,
    /// Others reach its server and Patroni, and it reaches etcd, through these.
    pub(crate) gates: Gates,
    /// Others do not reach it: Patroni's answers there are old.
    pub(crate) is_alone: bool,
}

#[derive(Debug)]
pub(crate) struct Gates {
    pub(crate) server: Gate,
    pub(crate) rest: Gate,
    pub(crate) etcd: Gate,
}

/// All nodes, and their etcd. Dropping it kills them.
#[derive(Debug)]
pub(crate) struct Group {
    installation: &'static Installation,
    pub(crate) nodes: Vec<Node>,
    etcd: Child,
    pub(crate) keys: KeyFile,
    passed: bool,
    directory: TempDir,
}

impl Group {
    /// Starts this many nodes; the others stream from the first.
    pub(crate) fn start(count: usize, programs: Programs) -> Result<Group> {
        let installation = Installation::get()?;
        let directory = tempfile::Builder::new().prefix("pagevault-patroni-").tempdir()?;
        installation.give(directory.path())?;
        let root = directory.path();
        let keys = KeyFile::create(installation, &root.join("keys"), "main")?;
        make_programs(installation, root, programs)?;
        let (etcd, etcd_port) = start_etcd(installation, root)?;
        let mut group =
            Group { installation, nodes: Vec::new(), etcd, keys, passed: false, directory };
        for number in 1..=count {
            let node = group.make_node(&format!("node{number}"), etcd_port)?;
            group.nodes.push(node);
        }
        // The first one becomes the leader.
        for node in 0..count {
            group.start_node(node)?;
            group.eventually("a leader", |group| group.leader().map(drop))?;
        }
        group.whole()?;
        Ok(group)
    }

    fn make_node(&self, name: &str, etcd_port: u16) -> Result<Node> {
        let directory = self.directory.path().join(name);
        std::fs::create_dir(&directory)?;
        self.installation.give(&directory)?;
        let (port, rest_port) = (free_port()?, free_port()?);
        let node = Node {
            name: name.to_owned(),
            port,
            rest_port,
            patroni: None,
            directory,
            gates: Gates {
                server: Gate::before(port)?,
                rest: Gate::before(rest_port)?,
                etcd: Gate::before(etcd_port)?,
            },
            is_alone: false,
        };
        let local = |port: u16| format!("127.0.0.1:{port}");
        let root = self.directory.path().display();
        let own = node.directory.display();
        let text = replaced(
            NODE,
            &[
                ("node1", name),
                ("  listen: 10.0.0.11:8008", &format!("  listen: {}", local(rest_port))),
                ("10.0.0.11:8008", &local(node.gates.rest.port)),
                ("  listen: 10.0.0.11:5432", &format!("  listen: {}", local(port))),
                ("10.0.0.11:5432", &local(node.gates.server.port)),
                // Patroni would ask etcd for its own address.
                (
                    "10.0.0.10:2379",
                    &format!("{}\n  use_proxies: true", local(node.gates.etcd.port)),
                ),
                ("ttl: 30", "ttl: 15"),
                ("loop_wait: 10", "loop_wait: 1"),
                ("retry_timeout: 10", "retry_timeout: 5"),
                ("/etc/patroni", &root.to_string()),
                ("/var/lib/postgresql/15/main", &format!("{own}/data")),
                ("/var/lib/postgresql/pgpass", &format!("{own}/pgpass")),
                ("hostssl", "host"),
                ("ssl: \"on\"", "ssl: \"off\""),
                ("10.0.0.0/24", "127.0.0.1/32"),
                (
                    "unix_socket_directories: /var/run/postgresql",
                    &format!(
                        "unix_socket_directories: {own}\n    fsync: \"off\"\n    autovacuum: \"off\"\n    \
                         pagevault.unlock_timeout: 1s\n    \
                         log_line_prefix: '%m [%p] %b '"
                    ),
                ),
            ],
        )?;
        write_file(&node.directory.join("patroni.yml"), &text, 0o600)?;
        Ok(node)
    }

    /// Starts Patroni without waiting for it.
    pub(crate) fn start_node(&mut self, number: usize) -> Result<()> {
        let node = &self.nodes[number];
        let patroni = program("patroni").context("no patroni")?;
        let log =
            std::fs::File::options().create(true).append(true).open(node.directory.join("log"))?;
        let child = self
            .command(&patroni)?
            .arg(node.directory.join("patroni.yml"))
            .stdout(Stdio::from(log.try_clone()?))
            .stderr(Stdio::from(log))
            .process_group(0)
            .spawn()?;
        self.nodes[number].patroni = Some(child);
        Ok(())
    }

    /// A program run as the server user, with PostgreSQL's programs in PATH.
    fn command(&self, program: &Path) -> Result<Command> {
        let mut command = self.installation.command(&program.display().to_string());
        let own = self.installation.program("");
        let path = std::env::join_paths([own.as_path(), "/usr/bin".as_ref(), "/bin".as_ref()])?;
        command.env("PATH", path).env("HOME", self.directory.path());
        Ok(command)
    }

    /// Sends SIGKILL to Patroni and the server, like a machine failure.
    pub(crate) fn kill_node(&mut self, number: usize) -> Result<()> {
        self.nodes[number].kill()
    }

    /// Stops all nodes and their servers cleanly; the leader last, otherwise another would take
    /// over.
    pub(crate) fn stop(&mut self) -> Result<()> {
        let leader = self.leader()?;
        let others = (0..self.nodes.len()).filter(|number| *number != leader);
        for number in others.chain([leader]) {
            self.nodes[number].stop()?;
        }
        Ok(())
    }

    /// Runs `patronictl` and returns its output.
    pub(crate) fn patronictl(&self, arguments: &[&str]) -> Result<String> {
        let configuration = self.nodes[0].directory.join("patroni.yml");
        let program = program("patroni").context("no patroni")?.with_file_name("patronictl");
        run(self.command(&program)?.arg("-c").arg(configuration).args(arguments))
    }

    /// The leader according to Patroni, if its server accepts writes.
    pub(crate) fn leader(&self) -> Result<usize> {
        let members = self.members()?;
        let number = self.with_role(&members, "leader")?;
        let node = &self.nodes[number];
        ensure!(node.text("SELECT pg_is_in_recovery()")? == "f", "{} is in recovery", node.name);
        Ok(number)
    }

    /// The synchronous standby, which has all acknowledged transactions.
    pub(crate) fn synchronous(&self) -> Result<usize> {
        self.with_role(&self.members()?, "sync_standby")
    }

    pub(crate) fn with_role(&self, members: &Value, role: &str) -> Result<usize> {
        let list = members["members"].as_array().context("no members")?;
        let member = list.iter().find(|member| member["role"] == role);
        let name = &member.with_context(|| format!("no {role} in {members}"))?["name"];
        let known = self.nodes.iter().position(|node| node.name == *name);
        known.with_context(|| format!("{name} is not ours"))
    }

    /// Patroni's REST description of the cluster, from the first node that replies.
    pub(crate) fn members(&self) -> Result<Value> {
        let running = self.nodes.iter().filter(|node| node.patroni.is_some() && !node.is_alone);
        let mut problem = anyhow::anyhow!("no node runs");
        for node in running {
            match node.ask("/cluster") {
                Ok(answer) => return Ok(answer),
                Err(error) => problem = error,
            }
        }
        Err(problem)
    }

    /// Waits until there is a leader, all others stream from it, and one of them is synchronous.
    /// Returns the leader. All accept connections: a node that was rewound streams before it is
    /// consistent.
    pub(crate) fn whole(&self) -> Result<usize> {
        let others = self.nodes.len() - 1;
        let mut leader = 0;
        self.eventually("all nodes", |group| {
            let number = group.leader()?;
            let streaming = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'";
            let streaming = group.nodes[number].text(streaming)?;
            ensure!(streaming == others.to_string(), "{streaming} of {others} are streaming");
            group.synchronous()?;
            group.nodes.iter().try_for_each(|node| node.text("SELECT 1").map(drop))?;
            leader = number;
            Ok(())
        })?;
        Ok(leader)
    }

    /// Waits until `check` succeeds.
    pub(crate) fn eventually(
        &self,
        what: &str,
        mut check: impl FnMut(&Group) -> Result<()>,
    ) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match check(self) {
                Ok(()) => return Ok(()),
                Err(error) if Instant::now() > deadline => bail!("{what}: {error:#}"),
                Err(_) => std::thread::sleep(Duration::from_millis(250)),
            }
        }
    }

    /// A connection to the server that accepts writes.
    pub(crate) fn writable(&self) -> postgres::Config {
        let mut config = settings();
        for node in &self.nodes {
            config.host("127.0.0.1").port(node.port);
        }
        config.target_session_attrs(TargetSessionAttrs::ReadWrite);
        config
    }

    /// pgbench, to run against a node.
    pub(crate) fn pgbench(&self, number: usize) -> Command {
        let mut command = self.installation.command("pgbench");
        command
            .env("PGHOST", "127.0.0.1")
            .env("PGPORT", self.nodes[number].port.to_string())
            .env("PGUSER", "postgres")
            .env("PGPASSWORD", "change-me")
            .env("PGDATABASE", "postgres")
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    /// A program of PostgreSQL or pagevault, run as the server user.
    pub(crate) fn tool(&self, name: &str) -> Command {
        self.installation.command(name)
    }

    /// Marks the test as successful, so that no logs are printed.
    pub(crate) fn passed(mut self) {
        self.passed = true;
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for node in &mut self.nodes {
            let _ = node.kill();
            if !self.passed {
                let log = node.log();
                let lines: Vec<_> = log.lines().collect();
                eprintln!("--- end of the log of {}", node.name);
                for line in lines.iter().skip(lines.len().saturating_sub(60)) {
                    eprintln!("{line}");
                }
            }
        }
        let _ = self.etcd.kill();
        let _ = self.etcd.wait();
        if std::env::var_os("PAGEVAULT_KEEP").is_some() {
            self.directory.disable_cleanup(true);
            eprintln!("kept {}", self.directory.path().display());
        }
    }
}

impl Node {
    pub(crate) fn data_directory(&self) -> PathBuf {
        self.directory.join("data")
    }

    /// The logs of Patroni and the server so far.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.directory.join("log")).unwrap_or_default()
    }

    pub(crate) fn client(&self) -> Result<Client> {
        self.client_to("postgres")
    }

    pub(crate) fn client_to(&self, database: &str) -> Result<Client> {
        let mut config = settings();
        config.host("127.0.0.1").port(self.port).dbname(database);
        config.connect(NoTls).with_context(|| format!("connect to {}", self.name))
    }

    pub(crate) fn sql(&self, statements: &str) -> Result<()> {
        run_sql(&mut self.client()?, statements)
    }

    pub(crate) fn text(&self, query: &str) -> Result<String> {
        text(&mut self.client()?, query)
    }

    /// The response of Patroni's REST interface.
    fn ask(&self, path: &str) -> Result<Value> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.rest_port))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (_, body) = answer.split_once("\r\n\r\n").context("no answer")?;
        serde_json::from_str(body).with_context(|| format!("{path}: {body}"))
    }

    /// Kills Patroni and the programs that it runs, but not the server.
    pub(crate) fn kill_patroni(&mut self) -> Result<()> {
        if let Some(mut patroni) = self.patroni.take() {
            if let Some(group) = i32::try_from(patroni.id()).ok().and_then(Pid::from_raw) {
                let _ = kill_process_group(group, Signal::KILL);
            }
            patroni.wait()?;
        }
        Ok(())
    }

    pub(crate) fn kill(&mut self) -> Result<()> {
        self.kill_patroni()?;
        process::kill_all(&self.data_directory())?;
        // If nothing reaps orphans, a dead postmaster stays as a zombie and seems to be running.
        let lock = self.directory.join(format!(".s.PGSQL.{}.lock", self.port));
        for lock in [self.data_directory().join("postmaster.pid"), lock] {
            if lock.exists() {
                std::fs::remove_file(lock)?;
            }
        }
        Ok(())
    }

    pub(crate) fn stop(&mut self) -> Result<()> {
        let Some(mut patroni) = self.patroni.take() else { return Ok(()) };
        let pid = i32::try_from(patroni.id()).ok().and_then(Pid::from_raw).context("no process")?;
        rustix::process::kill_process(pid, Signal::TERM)?;
        let deadline = Instant::now() + PATIENCE;
        while patroni.try_wait()?.is_none() {
            if Instant::now() > deadline {
                self.patroni = Some(patroni);
                bail!("{} does not end", self.name);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

fn settings() -> postgres::Config {
    let mut config = postgres::Config::new();
    config
        .user("postgres")
        .password("change-me")
        .dbname("postgres")
        .connect_timeout(Duration::from_secs(5));
    config
}

/// An example of the guide with these texts replaced, all of which must occur in it.
fn replaced(example: &str, places: &[(&str, &str)]) -> Result<String> {
    let mut text = example.to_owned();
    for (from, to) in places {
        ensure!(text.contains(from), "the example does not hold {from:?} any more");
        text = text.replace(from, to);
    }
    Ok(text)
}

/// The directory for Patroni's `bin_dir`, and the programs for bootstrapping.
fn make_programs(installation: &Installation, root: &Path, programs: Programs) -> Result<()> {
    let own = installation.program("");
    let own_text = own.display().to_string();
    let own_text = own_text.trim_end_matches('/');
    let with_keys = replaced(WITH_KEYS, &[("/usr/lib/postgresql/15/bin", own_text)])?;
    let with_keys = write_file(&root.join("with-keys"), &with_keys, 0o755)?;
    let keys = root.join("keys").display().to_string();
    let post_bootstrap = replaced(POST_BOOTSTRAP, &[("/etc/pagevault/keys", &keys)])?;
    write_file(&root.join("post-bootstrap"), &post_bootstrap, 0o755)?;
    let bin = root.join("bin");
    std::fs::create_dir(&bin)?;
    for entry in std::fs::read_dir(&own)? {
        let path = entry?.path();
        let name = path.file_name().context("a name")?;
        let wrapped = match name.to_str() {
            Some("pg_basebackup") => true,
            Some("pg_rewind" | "pg_waldump") => programs == Programs::WithKeys,
            _ => false,
        };
        let target = if wrapped { &with_keys } else { &path };
        std::os::unix::fs::symlink(target, bin.join(name))?;
    }
    Ok(())
}

fn start_etcd(installation: &Installation, root: &Path) -> Result<(Child, u16)> {
    let etcd = program("etcd").context("no etcd")?;
    let (port, peers) = (free_port()?, free_port()?);
    let log = std::fs::File::create(root.join("etcd.log"))?;
    let own = format!("http://127.0.0.1:{port}");
    let peers = format!("http://127.0.0.1:{peers}");
    let mut child = installation
        .command(&etcd.display().to_string())
        .arg("--data-dir")
        .arg(root.join("etcd"))
        .args(["--listen-client-urls", &own, "--advertise-client-urls", &own])
        .args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers])
        .args(["--initial-cluster", &format!("default={peers}")])
        .stdout(Stdio::from(log.try_clone()?))
        .stderr(Stdio::from(log))
        .spawn()?;
    let deadline = Instant::now() + PATIENCE;
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        if child.try_wait()?.is_some() || Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            let output = std::fs::read_to_string(root.join("etcd.log")).unwrap_or_default();
            bail!("etcd does not start: {output}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok((child, port))
}
