//! Instructions that pagevault adds to a statement outside of its ciphers: its hooks, and reads of
//! pages that are in shared buffers already. Counted by callgrind, in single-user mode: there one
//! process does everything, and nothing depends on time.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use pagevault_tests::{Cluster, Settings, StopMode};

use crate::callgrind;

/// Names of figures, and statements. None changes anything: all repetitions do the same.
const STATEMENTS: [(&str, &str); 2] =
    [("nothing", "SELECT 1"), ("a-row", "SELECT v FROM t WHERE id = 7")];

/// A small and a large number of repetitions. The difference excludes the start of the server, and
/// what it caches.
const REPETITIONS: [usize; 2] = [20, 220];

const TABLE: &str = "CREATE TABLE t (id int PRIMARY KEY, v int);
    INSERT INTO t SELECT i, i FROM generate_series(1, 1000) i";

/// By statement, how many more a server executes in which everything is encrypted than a stock one.
pub(crate) fn instructions(directory: &Path) -> Result<BTreeMap<String, f64>> {
    let common = Settings::default().within(directory).conf("autovacuum = off");
    let servers = [common.clone().without_preload(), common];
    let servers = servers.map(|settings| Cluster::start(&settings));
    let [stock, ours] = servers;
    let (mut stock, mut ours) = (stock?, ours?);
    stock.keep_quiet();
    ours.keep_quiet();
    ours.sql("CREATE EXTENSION pagevault")?;
    let keys = ours.key_file("keys", "main")?;
    ours.sql(&keys.add_provider("local"))?;
    ours.sql("SELECT pagevault.set_cluster_master_key('local', 'main')")?;
    ours.sql("ALTER DATABASE postgres SET pagevault.default_encryption = on")?;
    for server in [&stock, &ours] {
        server.sql(TABLE)?;
        server.sql("VACUUM (FREEZE, ANALYZE)")?;
        server.stop(StopMode::Fast)?;
    }
    let mut found = BTreeMap::new();
    for (name, statement) in STATEMENTS {
        let [with, without] = [&ours, &stock].map(|server| count_of_each(server, statement));
        let name = format!("{} statement {name}", std::env::consts::ARCH);
        found.insert(name, (with? - without?).round());
    }
    Ok(found)
}

fn count_of_each(server: &Cluster, statement: &str) -> Result<f64> {
    let mut counts = [0.0; 2];
    for (count, repetitions) in counts.iter_mut().zip(REPETITIONS) {
        *count = count_of(server, statement, repetitions)?;
    }
    let [few, many] = REPETITIONS;
    Ok((counts[1] - counts[0]) / (many - few) as f64)
}

fn count_of(server: &Cluster, statement: &str, repetitions: usize) -> Result<f64> {
    let statements = server.directory().join("statements");
    std::fs::write(&statements, format!("{statement}\n").repeat(repetitions))?;
    let installation = server.installation();
    let output = installation
        .command("/usr/bin/env")
        .args(["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(installation.program("postgres"))
        .args(["--single", "-c", "exit_on_error=on", "-D"])
        .arg(server.data_directory())
        .arg("postgres")
        .stdin(File::open(&statements)?)
        .output()
        .context("run valgrind (Debian package valgrind)")?;
    let report = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{statement}: {}\n{report}", output.status);
    callgrind::collected(&report).with_context(|| format!("the output of valgrind:\n{report}"))
}
