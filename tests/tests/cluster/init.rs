//! `pagevault-keyring init`: from a stock server to an encrypted table, and nothing twice.

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

    // The name belongs to another file.
    let other = cluster.key_file("other", "main")?.path().display().to_string();
    let (code, _, errors) =
        keyring(&cluster, "postgres", &["init", "--key-file", &other, "--apply"])?;
    ensure!(code == 1 && errors.contains("another provider called \"local\""), "{errors}");
    let (code, _, errors) = keyring(&cluster, "postgres", &["init", "--apply"])?;
    ensure!(code == 1 && errors.contains("no provider is given"), "{errors}");
    cluster.finish()
}

#[test]
fn what_it_prints_is_a_script() -> Result<()> {
    let cluster = Cluster::start(&Settings::default().conf("max_worker_processes = 24"))?;
    let keys = cluster.key_file("keys", "main")?.path().display().to_string();
    let arguments = ["init", "--key-file", &keys, "--provider", "it's"];
    let (_, script, _) = keyring(&cluster, "postgres", &arguments)?;
    for line in script.lines().filter(|line| !line.starts_with("--")) {
        cluster.sql(line)?;
    }
    let (code, output, _) = keyring(&cluster, "postgres", &arguments)?;
    ensure!(code == 0 && output.contains("Everything is there"), "{script}{output}");
    ensure!(cluster.text("SELECT provider FROM pagevault.providers WHERE in_use")? == "it's");
    cluster.finish()
}
