//! `pagevault-keyring init`: from a stock server to an encrypted table, and nothing twice.

use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use pagevault_tests::{Cluster, Settings};

use crate::doctor::keyring;

#[test]
fn a_stock_server_is_set_up_once() -> Result<()> {
    let settings = Settings::default().without_preload();
    let cluster = Cluster::start(&settings)?;
    let keys = cluster.directory().join("it's keys").display().to_string();
    let run = |more: &[&str]| {
        let mut arguments = vec!["init", "--key-file", &keys];
        arguments.extend(more);
        keyring(&cluster, "postgres", &arguments)
    };
    // Without --apply it prints.
    let (code, script, errors) = run(&[])?;
    ensure!(code == 0 && errors.is_empty(), "{code}: {script}{errors}");
    for line in [
        "ALTER SYSTEM SET shared_preload_libraries = 'pagevault';",
        "-- Restart the server here.",
        "CREATE EXTENSION pagevault;",
    ] {
        ensure!(script.contains(line), "{line}: {script}");
    }
    ensure!(cluster.text("SELECT count(*) FROM pg_extension WHERE extname = 'pagevault'")? == "0");

    // The test's configuration names the setting too; ALTER SYSTEM outranks it.
    let (code, output, errors) = run(&["--apply"])?;
    ensure!(code == 2, "{code}: {output}{errors}");
    ensure!(output.contains("undo: ALTER SYSTEM RESET shared_preload_libraries"), "{output}");
    let (code, output, _) = run(&["--apply"])?;
    ensure!(code == 2 && !output.contains("did "), "{code}: {output}");
    ensure!(output.contains("Restart the server"), "{output}");
    cluster.restart()?;
    let (code, output, errors) = run(&["--apply"])?;
    ensure!(code == 0, "{code}: {output}{errors}");
    ensure!(output.contains("Created key \"main\"") && output.contains("can encrypt"), "{output}");
    let before = cluster.text("SELECT pagevault.report()->'cluster'->'database_keys'")?;
    let (code, output, _) = run(&["--apply"])?;
    ensure!(code == 0 && output.contains("Everything is there; nothing was changed."), "{output}");
    ensure!(cluster.text("SELECT pagevault.report()->'cluster'->'database_keys'")? == before);
    cluster.sql("CREATE TABLE t (id int); SELECT pagevault.encrypt('t')")?;

    // An outage of the key file does not become a new key, which would lock everything.
    fs::rename(&keys, format!("{keys}.away"))?;
    for arguments in [&["--apply"][..], &["--apply", "--provider", "second"], &[]] {
        let (code, output, errors) = run(arguments)?;
        ensure!(code == 1 && output.is_empty(), "{code}: {output}");
        ensure!(errors.contains("keys\" is missing") && errors.contains("Restore"), "{errors}");
    }
    ensure!(!Path::new(&keys).exists(), "another key was made");
    fs::rename(format!("{keys}.away"), &keys)?;
    let (code, _, errors) = run(&["--apply", "--key", "another"])?;
    ensure!(code == 1 && errors.contains("key \"another\" is missing in key file"), "{errors}");

    // The name belongs to another file.
    let other = cluster.key_file("other", "main")?.path().display().to_string();
    let (code, _, errors) =
        keyring(&cluster, "postgres", &["init", "--key-file", &other, "--apply"])?;
    ensure!(code == 1 && errors.contains("another provider called \"local\""), "{errors}");
    let (code, _, errors) = keyring(&cluster, "postgres", &["init", "--apply"])?;
    ensure!(code == 1 && errors.contains("no provider is given"), "{errors}");
    cluster.finish()
}

/// A cluster keeps its master key, and is told so.
#[test]
fn another_master_key_stays() -> Result<()> {
    let (cluster, _keys) =
        Cluster::with_keys(&Settings::default().conf("max_worker_processes = 24"))?;
    let other = cluster.key_file("other", "main")?.path().display().to_string();
    let arguments = ["init", "--key-file", &other, "--provider", "second", "--apply"];
    for _ in 0..2 {
        let (code, output, errors) = keyring(&cluster, "postgres", &arguments)?;
        ensure!(code == 0 && !output.contains("can encrypt"), "{code}: {output}{errors}");
        ensure!(
            output.contains(
                "Unchanged: the cluster has the master key \"main\" of provider \"local\""
            ),
            "{output}"
        );
        ensure!(output.contains("set_cluster_master_key('second', 'main')"), "{output}");
    }
    cluster.sql("SELECT pagevault.set_cluster_master_key('second', 'main')")?;
    let (_, output, _) = keyring(&cluster, "postgres", &arguments)?;
    ensure!(output.contains("Everything is there") && !output.contains("Unchanged"), "{output}");
    cluster.finish()
}

#[test]
fn what_it_prints_is_a_script() -> Result<()> {
    let cluster = Cluster::start(&Settings::default().conf("max_worker_processes = 24"))?;
    let keys = cluster.key_file("keys", "main")?.path().display().to_string();
    let arguments = ["init", "--key-file", &keys, "--provider", "it's"];
    let (_, script, _) = keyring(&cluster, "postgres", &arguments)?;
    run_script(&cluster, "postgres", &script)?;
    let (code, output, _) = keyring(&cluster, "postgres", &arguments)?;
    ensure!(code == 0 && output.contains("Everything is there"), "{script}{output}");
    ensure!(cluster.text("SELECT provider FROM pagevault.providers WHERE in_use")? == "it's");
    cluster.finish()
}

/// Runs a script by psql, as an operator would.
fn run_script(cluster: &Cluster, database: &str, script: &str) -> Result<()> {
    let path = cluster.directory().join("script.sql");
    fs::write(&path, script)?;
    cluster.installation().give(&path)?;
    let output = cluster
        .program("psql")
        .env("PGDATABASE", database)
        .args(["--no-psqlrc", "--file"])
        .arg(&path)
        .output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() && errors.is_empty(), "{script}\n{errors}");
    Ok(())
}

/// Databases, providers and keys may have any name.
#[test]
fn no_name_is_a_line_of_the_script() -> Result<()> {
    let cluster = Cluster::start(&Settings::default().conf("max_worker_processes = 24"))?;
    let mark = cluster.directory().join("mark");
    let hostile = format!("x\n\\! touch {}\n\\", mark.display());
    cluster.sql(&format!("CREATE DATABASE \"{hostile}\""))?;
    cluster.client_to(&hostile)?.batch_execute("CREATE EXTENSION pagevault")?;
    let keys = cluster.key_file("keys", "main")?.path().display().to_string();
    let dbname = format!("dbname='{}'", hostile.replace('\\', "\\\\"));
    // A key that is to be made is named in a comment.
    let none = keys.replace("/keys", "/none");
    let arguments = ["init", "--key-file", &none, "--key", &hostile, "--dbname", &dbname];
    let (code, script, errors) = keyring(&cluster, "postgres", &arguments)?;
    ensure!(code == 0, "{errors}");
    ensure!(script.contains("--key 'x\\n"), "{script}");
    ensure!(!script.contains("\n\\!"), "{script}");

    let provider = "it's \\! \u{202e}";
    let arguments = ["init", "--key-file", &keys, "--provider", provider, "--dbname", &dbname];
    let (code, script, errors) = keyring(&cluster, "postgres", &arguments)?;
    ensure!(code == 0, "{errors}");
    ensure!(script.contains("-- there: database \"x\\n"), "{script}");
    run_script(&cluster, &hostile, &script)?;
    ensure!(!mark.exists(), "{script}");
    let (code, output, errors) = keyring(&cluster, "postgres", &arguments)?;
    ensure!(code == 0 && output.contains("Everything is there"), "{output}{errors}");
    cluster.finish()
}
