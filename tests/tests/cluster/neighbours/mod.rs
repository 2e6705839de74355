//! Other libraries in the same process, which replace the same functions of the server.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, ensure};
use pagevault_tests::datafile::assert_sealed;
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Installation, Settings};

const CANARY: &str = "canary-beside-a-neighbour";

/// A new cluster with the neighbour, in this place among the libraries, and what that shall do.
/// Returns the library's path as well.
fn beside(libraries: &str, does: &str) -> Result<(Cluster, PathBuf)> {
    let mut cluster = Cluster::create(&Settings::default())?;
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cluster/neighbours/neighbour.c");
    let library = cluster.directory().join("neighbour.so");
    let headers = run(cluster.installation().command("pg_config").arg("--includedir-server"))?;
    // A C compiler is required for building Rust programs.
    run(Command::new("cc")
        .args(["-shared", "-fPIC", "-O2", "-I", headers.trim(), "-o"])
        .arg(&library)
        .arg(source)
        .arg("-ldl"))?;
    cluster.installation().give(&library)?;
    let libraries = libraries.replace("neighbour", &library.display().to_string());
    cluster.append_conf(&format!("shared_preload_libraries = '{libraries}'"))?;
    cluster.set_environment("NEIGHBOUR", does);
    Ok((cluster, library))
}

/// Encrypts, crashes, and reads. What is on disk is sealed.
fn works(cluster: Cluster, heard: &[&str]) -> Result<()> {
    let keys = cluster.key_file("keys", "main")?;
    cluster.sql("CREATE EXTENSION pagevault")?;
    cluster.sql(&keys.add_provider("local"))?;
    cluster.sql("SELECT pagevault.set_cluster_master_key('local', 'main')")?;
    cluster.set(&[
        ("pagevault.default_encryption", "on"),
        ("pagevault.wal_encryption", "on"),
        ("pagevault.temp_encryption", "on"),
    ])?;
    cluster.eventually("SELECT wal_encrypted FROM pagevault.status", "t")?;
    cluster.sql(&format!(
        "CREATE TABLE t AS SELECT id, '{CANARY}' || id AS t FROM generate_series(1, 20000) id;
         CREATE INDEX ON t (t); CHECKPOINT"
    ))?;
    assert_sealed(&cluster.family_files("t")?)?;
    cluster.sql("UPDATE t SET id = -id WHERE id % 3 = 0")?;
    cluster.crash()?;
    let rows = "SELECT count(*) || ' ' || sum(id) FROM t";
    ensure!(cluster.text(rows)? == "20000 66683334", "{}", cluster.text(rows)?);
    cluster.sql("CHECKPOINT")?;
    for file in cluster.family_files("t")? {
        ensure!(!file.contains_text(CANARY)?, "{file:?} has plaintext");
    }
    let log = cluster.log();
    for call in heard {
        ensure!(log.contains(&format!("neighbour: {call}")), "{call} never came to the neighbour");
    }
    cluster.finish()
}

#[test]
fn a_library_that_replaces_calls_of_the_c_library_may_be_before_or_after() -> Result<()> {
    for libraries in ["neighbour, pagevault", "pagevault, neighbour"] {
        let (cluster, _) = beside(libraries, "calls")?;
        cluster.start_server()?;
        works(cluster, &["pread", "pwrite"])?;
    }
    Ok(())
}

/// Libraries that use PostgreSQL's hooks, and code that is compiled at run time.
#[test]
fn libraries_of_postgresql_may_be_before_or_after() -> Result<()> {
    let directory = Installation::get()?.library_directory();
    let mut libraries = vec!["pg_stat_statements", "auto_explain", "pg_prewarm", "auth_delay"];
    libraries.retain(|name| directory.join(name).with_extension("so").exists());
    let others = libraries.join(", ");
    for libraries in [format!("{others}, pagevault"), format!("pagevault, {others}")] {
        let settings = Settings::default().without_preload();
        let cluster = Cluster::create(&settings)?;
        cluster.append_conf(&format!(
            "shared_preload_libraries = '{}'
             auto_explain.log_min_duration = 0
             auto_explain.log_analyze = on
             jit = on
             jit_above_cost = 0
             jit_inline_above_cost = 0
             jit_optimize_above_cost = 0",
            libraries.trim_matches([',', ' '])
        ))?;
        cluster.start_server()?;
        works(cluster, &[])?;
    }
    Ok(())
}

#[test]
fn a_later_library_may_chain_to_the_storage_manager() -> Result<()> {
    let (cluster, _) = beside("pagevault, neighbour", "chain")?;
    cluster.start_server()?;
    works(cluster, &["write"])
}

/// pagevault would not find the table.
#[test]
fn an_earlier_library_in_the_storage_manager_is_named() -> Result<()> {
    let (mut cluster, library) = beside("neighbour, pagevault", "chain")?;
    ensure!(cluster.start_server().is_err(), "it starts");
    let log = cluster.log();
    let expected = format!("was replaced by {}", library.display());
    ensure!(log.contains(&expected), "{log}");
    ensure!(log.contains("Name pagevault before that library"), "{log}");
    cluster.allow_log("pagevault cannot work with this server");
    cluster.without_witness("it never ran");
    cluster.finish()
}

#[test]
fn a_later_library_that_bypasses_pagevault_is_named() -> Result<()> {
    let (mut cluster, library) = beside("pagevault, neighbour", "bypass")?;
    let _ = cluster.start_server();
    cluster.admits_nobody_and_ends()?;
    let log = cluster.log();
    ensure!(log.contains("writes pages without it"), "{log}");
    ensure!(log.contains(&format!("was replaced by {}", library.display())), "{log}");
    for text in ["FATAL", "terminating connection because of", "terminated by signal"] {
        cluster.allow_log(text);
    }
    cluster.without_witness("it never ran");
    cluster.finish()
}
