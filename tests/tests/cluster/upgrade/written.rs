//! However the arguments of pg_upgrade are written: what is prepared is what it does.

use anyhow::{Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Settings, StopMode};

use super::{arguments, new_cluster, old_cluster, upgrading};

/// A check brings no keys, and may be made while the old server runs.
#[test]
fn a_check_changes_nothing() -> Result<()> {
    let (old, _keys) = old_cluster("")?;
    old.sql("CREATE TABLE t AS SELECT 7 AS id; SELECT pagevault.encrypt('t')")?;
    let new = new_cluster()?;
    let brought = || new.data_directory().join("pagevault/cluster.keys").exists();
    run(upgrading(&old, &new).arg("-vc"))?;
    old.stop(StopMode::Fast)?;
    for check in ["--check", "--chec", "-vc"] {
        run(upgrading(&old, &new).arg(check))?;
        ensure!(!brought(), "{check} has brought keys");
    }
    // Others' directories are in the environment.
    let other = new_cluster()?;
    let mut upgrade = new.installation().command("pagevault-keyring");
    upgrade.args(["exec", "--", "pg_upgrade", "-U", "postgres", "-b"]);
    upgrade.arg(old.installation().program("")).arg("-B").arg(new.installation().program(""));
    upgrade.arg("-s").arg(new.directory()).current_dir(new.directory());
    upgrade.arg(format!("--old-d={}", old.data_directory().display()));
    upgrade.arg("-vD").arg(new.data_directory());
    upgrade.env("PGDATANEW", other.data_directory()).env("PGDATAOLD", other.data_directory());
    run(&mut upgrade)?;
    ensure!(brought() && !other.data_directory().join("pagevault/cluster.keys").exists());
    new.start_server()?;
    ensure!(new.text("SELECT id FROM t")? == "7", "the table");
    new.finish()?;
    old.finish()
}

/// Where the environment names the library, clusters without keys are upgraded as always; and by
/// exec, the library does nothing more.
#[test]
fn the_library_in_the_environment() -> Result<()> {
    let plain = Settings::default().conf("shared_preload_libraries = ''");
    let (a, b) = (Cluster::create(&plain)?, Cluster::create(&plain)?);
    let library = b.installation().library_directory().join("pagevault_preload.so");
    let mut upgrade = b.installation().command("pg_upgrade");
    upgrade.env("LD_PRELOAD", &library).current_dir(b.directory());
    upgrade.arg("-b").arg(a.installation().program(""));
    upgrade.arg("-B").arg(b.installation().program(""));
    upgrade.args(["-U", "postgres", "-s"]).arg(b.directory()).arg("-ckd").arg(a.data_directory());
    upgrade.arg("-D").arg(b.data_directory()).arg(format!("-O{}", "-c work_mem=5MB"));
    let said = run(&mut upgrade)?;
    ensure!(said.contains("compatible"), "{said}");

    let (old, _keys) = old_cluster("")?;
    old.stop(StopMode::Fast)?;
    let new = new_cluster()?;
    let mut upgrade = new.installation().command("pagevault-keyring");
    upgrade.args(["exec", "--", "pg_upgrade", "--check"]);
    arguments(&mut upgrade, &old, &new);
    // They would be refused.
    upgrade.env("LD_PRELOAD", &library).env("PAGEVAULT_EXEC_OPTIONS", "--nonsense");
    run(&mut upgrade)?;
    old.start_server()?;
    old.finish()
}
