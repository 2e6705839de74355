//! Programs that nobody runs by exec, with the library named in the environment.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};
use pagevault_tests::Cluster;
use pagevault_tests::installation::run;

use super::rewind::{change, content, follow, pair, rotate, server};
use super::{directory, failure};

/// A program of PostgreSQL, as it is, with the library.
fn stock(cluster: &Cluster, program: &str, library: &Path) -> Command {
    let mut command = cluster.installation().command(program);
    command.env("LD_PRELOAD", library);
    command
}

fn installed(cluster: &Cluster) -> PathBuf {
    cluster.installation().library_directory().join("pagevault_preload.so")
}

fn rewind(target: &Cluster, source: &Cluster, library: &Path) -> Command {
    let mut command = stock(target, "pg_rewind", library);
    command.arg("--target-pgdata").arg(target.data_directory()).args(server(source));
    command
}

#[test]
fn pg_rewind_gets_keys_by_itself() -> Result<()> {
    let (a, b, keys) = pair()?;
    let library = installed(&a);
    b.sql("SELECT pg_promote()")?;
    b.eventually("SELECT pg_is_in_recovery()", "f")?;
    b.sql("CHECKPOINT")?;
    rotate(&a)?;
    change(&a, "drossel", 5000)?;
    rotate(&b)?;
    change(&b, "fink", 5000)?;
    // It runs a server for a single user, which has the library too and needs no help.
    a.kill()?;
    let control = a.data_directory().join("global/pg_control");
    keys.take_away()?;
    let before = fs::read(&control)?;
    let away = failure(&mut rewind(&a, &b, &library))?;
    ensure!(away.starts_with("pagevault-keyring: "), "{away}");
    ensure!(fs::read(&control)? == before, "something was changed");
    keys.bring_back()?;
    // Others' libraries stay.
    let mut list = library.clone().into_os_string();
    list.push(":");
    let output = rewind(&a, &b, Path::new(&list)).output()?;
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    ensure!(output.status.success() && said.contains("Done!"), "{said}");
    follow(&a, &b)?;
    ensure!(content(&a)? == content(&b)?, "the tables differ");
    b.finish()?;
    a.without_witness("pg_rewind has copied files");
    a.finish()
}

/// The helper beside another library is used only if nobody else could have put it there.
#[test]
fn a_helper_that_others_can_change_is_not_run() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let (a, b, _keys) = pair()?;
    let place = directory(&a, "image")?;
    for name in ["lib", "bin"] {
        fs::create_dir(place.join(name))?;
    }
    let library = place.join("lib/pagevault_preload.so");
    fs::copy(installed(&a), &library)?;
    let helper = place.join("bin/pagevault-keyring");
    fs::write(&helper, "#!/bin/sh\necho has run\n")?;
    fs::set_permissions(&helper, fs::Permissions::from_mode(0o777))?;
    let mut alone = rewind(&a, &b, &library);
    let refused = failure(alone.env("PATH", "/nonexistent"))?;
    ensure!(refused.contains("is refused: other users can write to"), "{refused}");
    ensure!(!refused.contains("has run"), "{refused}");
    fs::set_permissions(&helper, fs::Permissions::from_mode(0o755))?;
    let ran = run(rewind(&a, &b, &library).env("PATH", "/nonexistent"))?;
    ensure!(ran == "has run\n", "{ran}");
    b.finish()?;
    a.finish()
}
