//! What exec refuses, with an error and without side effects.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use anyhow::{Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Installation, Settings, StopMode};

use super::{directory, exec, exec_with_keystore, failure, insert, sealing};

#[test]
fn programs_that_cannot_load_the_library_are_not_run() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default())?;
    let tools = directory(&cluster, "tools")?;
    let place = |name: &str| tools.join(name).to_string_lossy().into_owned();
    // Linked statically in every Debian.
    let linked = ["/usr/sbin/ldconfig", "/sbin/ldconfig"]
        .into_iter()
        .find(|p| fs::exists(p).unwrap_or(false));
    if let Some(linked) = linked {
        fs::copy(linked, place("pg_waldump"))?;
        let error = failure(&mut exec_with_keystore(&cluster, &place("pg_waldump")))?;
        ensure!(error.contains("the library was not loaded into"), "{error}");
    }
    fs::write(place("pg_resetwal"), "#!/bin/sh\necho has run\n")?;
    fs::set_permissions(place("pg_resetwal"), fs::Permissions::from_mode(0o755))?;
    let error = failure(&mut exec_with_keystore(&cluster, &place("pg_resetwal")))?;
    ensure!(error.contains("is a script, not a program"), "{error}");
    for mode in [0o4755, 0o2755] {
        fs::copy(cluster.installation().program("pg_receivewal"), place("pg_receivewal"))?;
        cluster.installation().give(&tools.join("pg_receivewal"))?;
        fs::set_permissions(place("pg_receivewal"), fs::Permissions::from_mode(mode))?;
        let error = failure(&mut exec_with_keystore(&cluster, &place("pg_receivewal")))?;
        ensure!(error.contains("is setuid or setgid"), "{error}");
    }
    let error = failure(&mut exec_with_keystore(&cluster, "/bin/cat"))?;
    ensure!(error.contains("is not supported"), "{error}");
    let mut wrong = exec(&cluster, &["--library", "/nonexistent.so"], "pg_waldump");
    let error = failure(wrong.arg(cluster.data_directory().join("pg_wal")))?;
    ensure!(error.contains("is not installed"), "{error}");
    // The dynamic linker ignores a file that is not a library.
    let mut wrong = exec(&cluster, &["--library", "/etc/passwd"], "pg_waldump");
    let error = failure(wrong.arg("-p").arg(cluster.data_directory().join("pg_wal")))?;
    ensure!(error.contains("the library was not loaded into"), "{error}");
    cluster.finish()
}

/// Patroni runs `pg_rewind --help` to find out whether the program exists.
#[test]
fn help_and_version_need_no_keys() -> Result<()> {
    let installation = Installation::get()?;
    for program in ["pg_rewind", "pg_waldump", "pg_receivewal", "pg_upgrade"] {
        for option in ["--help", "-?", "--version", "-V"] {
            let mut command = installation.command("pagevault-keyring");
            let output = run(command.args(["exec", "--", program, option]))?;
            ensure!(output.contains(program), "{program} {option}: {output}");
        }
    }
    Ok(())
}

#[test]
fn a_keystore_with_wal_keys_and_its_provider_are_required() -> Result<()> {
    let (cluster, keys) = Cluster::with_keys(&Settings::default())?;
    let wal = cluster.data_directory().join("pg_wal");
    let dump = || {
        let mut command = exec(&cluster, &[], "pg_waldump");
        command.arg("-p").arg(&wal).env("PGDATA", cluster.data_directory());
        command
    };
    let error = failure(&mut dump())?;
    ensure!(error.contains("WAL was never encrypted"), "{error}");
    super::switch(&cluster, true)?;
    insert_something(&cluster)?;
    keys.take_away()?;
    let error = failure(&mut dump())?;
    ensure!(error.contains("master key \"main\" of provider \"local\""), "{error}");
    keys.bring_back()?;
    let elsewhere = directory(&cluster, "elsewhere")?;
    let error = failure(exec(&cluster, &[], "pg_waldump").arg("-p").arg(&elsewhere))?;
    ensure!(error.contains("could not determine which keystore"), "{error}");
    cluster.stop(StopMode::Fast)?;
    cluster.finish()
}

/// Users with write permission in a directory above a file must not be able to choose the keys and
/// programs that are used.
#[test]
fn keystores_in_parent_directories_are_not_used() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default())?;
    insert(&cluster, "drossel", 10)?;
    let wal = cluster.data_directory().join("pg_wal");
    let segment = cluster.text("SELECT pg_walfile_name(pg_current_wal_insert_lsn())")?;
    // The segment's own data directory, and one around a copy of it.
    for place in [wal.join(&segment), wal.clone()] {
        let mut dump = exec(&cluster, &[], "pg_waldump");
        let error = failure(dump.env_remove("PGDATA").arg("-n").arg("1").arg(&place))?;
        ensure!(error.contains("could not determine which keystore"), "{error}");
    }
    let mut dump = exec(&cluster, &[], "pg_waldump");
    let output = run(dump
        .env("PGDATA", cluster.data_directory())
        .args(["-n", "1"])
        .arg(wal.join(&segment)))?;
    ensure!(output.contains("rmgr"), "{output}");
    // A keystore that belongs to another user is refused, even if named.
    if rustix::process::geteuid().is_root() {
        let keystore = directory(&cluster, "keystore")?;
        run(cluster
            .installation()
            .command("/bin/cp")
            .arg("-r")
            .arg(cluster.data_directory().join("pagevault"))
            .arg(&keystore))?;
        let mut dump = exec(&cluster, &["--keystore", &keystore.to_string_lossy()], "pg_waldump");
        run(dump.args(["-n", "1"]).arg(wal.join(&segment)))?;
        std::os::unix::fs::chown(&keystore, Some(65534), None)?;
        let mut dump = exec(&cluster, &["--keystore", &keystore.to_string_lossy()], "pg_waldump");
        let error = failure(dump.args(["-n", "1"]).arg(wal.join(&segment)))?;
        ensure!(error.contains("belongs to another user"), "{error}");
        std::os::unix::fs::chown(&keystore, Some(0), None)?;
    }
    cluster.stop(StopMode::Fast)?;
    cluster.finish()
}

/// A link in a directory that others can write to may lead elsewhere tomorrow.
#[test]
fn the_target_of_pg_rewind_is_not_taken_by_any_link() -> Result<()> {
    let (cluster, _keys) = sealing(&Settings::default())?;
    insert(&cluster, "drossel", 10)?;
    cluster.stop(StopMode::Fast)?;
    let open = directory(&cluster, "open")?;
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777))?;
    let link = open.join("link");
    std::os::unix::fs::symlink(cluster.data_directory(), &link)?;
    let mut rewind = exec(&cluster, &[], "pg_rewind");
    rewind.arg("-D").arg(&link).arg("--source-server=host=/nonexistent");
    let error = failure(&mut rewind)?;
    ensure!(error.contains("is not safe for a keystore"), "{error}");
    cluster.finish()
}

fn insert_something(cluster: &Cluster) -> Result<()> {
    cluster.sql("CREATE TABLE t (id serial PRIMARY KEY, name text)")?;
    insert(cluster, "drossel", 10)
}
