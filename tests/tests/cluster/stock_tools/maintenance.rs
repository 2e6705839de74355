//! `vacuumdb`, `reindexdb`, `clusterdb` and `pg_amcheck` on a cluster in which everything is
//! encrypted.

use anyhow::{Context, Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::leaks::{Canary, Scanner, report};
use pagevault_tests::{Cluster, Settings};

use super::complaints;
use crate::life::{CONTENT, everything};

/// Whether this installation lacks amcheck; prints a message if so.
fn lacks_amcheck(cluster: &Cluster) -> bool {
    let lacks = !cluster.installation().has_extension("amcheck");
    if lacks {
        eprintln!("SKIPPED: this installation has no amcheck");
    }
    lacks
}

#[test]
fn rebuilt_relations_stay_sealed() -> Result<()> {
    let (mut cluster, _keys) = everything(Settings::default().wal_segment_size(1))?;
    cluster.allow_log("cannot reindex system catalogs concurrently");
    let canary = Canary::text("maintained");
    cluster.sql(&format!(
        "INSERT INTO t (name) SELECT '{0}' || i FROM generate_series(1, 1000) i;
         UPDATE t SET name = name || '!' WHERE id % 3 = 0; DELETE FROM t WHERE id % 5 = 0;
         CREATE INDEX ON t (name); CLUSTER t USING t_pkey;
         CREATE MATERIALIZED VIEW mv AS SELECT * FROM t",
        canary.as_str()
    ))?;
    let content = cluster.text(CONTENT)?;
    let scanner = Scanner::new([&canary]);
    for (program, arguments) in [
        ("vacuumdb", &["--all", "--analyze", "--jobs=2"][..]),
        ("vacuumdb", &["--all", "--freeze", "--disable-page-skipping"]),
        ("vacuumdb", &["--all", "--analyze-in-stages"]),
        ("reindexdb", &["--all", "--concurrently"]),
        ("reindexdb", &["--schema=public", "--jobs=2", "postgres"]),
        ("reindexdb", &["--system", "postgres"]),
        ("clusterdb", &["--all"]),
        ("vacuumdb", &["--all", "--full"]),
        ("reindexdb", &["--all"]),
    ] {
        let what = format!("{program} {}", arguments.join(" "));
        run(cluster.program(program).arg("--quiet").args(arguments))?;
        ensure!(cluster.text(CONTENT)? == content, "{what}: rows");
        let drift = cluster.text("SELECT count(*) FROM pagevault.drift(true)")?;
        ensure!(drift == "0", "{what}: {drift} relations are not sealed");
        cluster.sql("CHECKPOINT")?;
        let found = scanner.scan_trees(&[&cluster.data_directory()])?;
        ensure!(found.is_empty(), "{what}: {}", report(&found));
    }
    if !lacks_amcheck(&cluster) {
        let thorough = ["--all", "--install-missing", "--heapallindexed", "--rootdescend"];
        run(cluster.program("pg_amcheck").args(thorough))?;
    }
    cluster.crash()?;
    ensure!(cluster.text(CONTENT)? == content, "rows after a crash");
    cluster.finish()
}

#[test]
fn pg_amcheck_names_a_damaged_relation_and_checks_the_rest() -> Result<()> {
    let (mut cluster, _keys) = everything(Settings::default().conf("autovacuum = off"))?;
    cluster.allow_log("connection to client lost");
    if lacks_amcheck(&cluster) {
        return cluster.finish();
    }
    cluster.sql("CREATE EXTENSION amcheck")?;
    let path = cluster.text("SELECT pg_relation_filepath('large')")?;
    cluster.stop(pagevault_tests::StopMode::Fast)?;
    let path = cluster.data_directory().join(path);
    let mut bytes = std::fs::read(&path)?;
    *bytes.get_mut(8192 * 3 + 5000).context("four pages")? ^= 1;
    std::fs::write(&path, bytes)?;
    cluster.start_server()?;
    let output = cluster.program("pg_amcheck").args(["--all", "--progress"]).output()?;
    let response = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.code() == Some(2), "{}: {response}", output.status);
    ensure!(response.contains("heap table \"postgres.public.large\":"), "{response}");
    ensure!(response.contains("block 3 of relation"), "{response}");
    ensure!(response.matches("heap table").count() == 1, "{response}");
    let vacuum = complaints(cluster.program("vacuumdb").arg("--disable-page-skipping"))?;
    ensure!(vacuum.contains("block 3 of relation"), "{vacuum}");
    ensure!(vacuum.contains("of relation \"public.large\""), "{vacuum}");
    cluster.allow_log("is not as it was encrypted");
    cluster.finish()
}
