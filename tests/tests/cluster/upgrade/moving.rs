//! Successful upgrades, in each of pg_upgrade's modes of transferring files.

use anyhow::{Result, bail, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Installation, Settings, StopMode};

use super::scene::Scene;
use super::{alone, new_cluster, old_cluster, upgrading};
use crate::labels::{expect, label};

#[test]
fn files_are_copied() -> Result<()> {
    let (scene, new) = upgraded(&["--copy"])?;
    scene.look_at_files(&new)?;
    new.start_server()?;
    scene.check_all(&new)?;
    scene.use_it(&new)?;
    scene.check(&new)?;
    // Both clusters can be used: they are independent.
    scene.check_old()?;
    new.stop(StopMode::Fast)?;
    scene.look_at_files(&new)?;
    new.finish()
}

#[test]
fn files_are_linked() -> Result<()> {
    let (scene, new) = upgraded(&["--link"])?;
    scene.look_at_files(&new)?;
    new.start_server()?;
    scene.check_all(&new)?;
    scene.use_it(&new)?;
    scene.check(&new)?;
    new.finish()
}

/// Modes that not every version or file system supports; only in `make test-upgrade`.
#[test]
fn other_modes_of_transfer() -> Result<()> {
    if std::env::var_os("PAGEVAULT_UPGRADE_ALL_WAYS").is_none() {
        return Ok(());
    }
    let help = run(Installation::get()?.command("pg_upgrade").arg("--help"))?;
    for way in ["--swap", "--clone", "--copy-file-range"] {
        if !help.contains(way) {
            continue;
        }
        match upgraded(&[way]) {
            Ok((scene, new)) => {
                new.start_server()?;
                scene.check_all(&new)?;
                scene.use_it(&new)?;
                new.finish()?;
                eprintln!("{way}: works");
            }
            Err(error) if format!("{error:#}").contains("not supported") => {
                eprintln!("{way}: not on this file system");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn upgraded(ways: &[&str]) -> Result<(Scene, Cluster)> {
    let scene = Scene::make()?;
    let new = new_cluster()?;
    // As operators do.
    let checked = run(upgrading(&scene.old, &new).arg("--check"))?;
    ensure!(checked.contains("Clusters are compatible"), "{checked}");
    ensure!(!new.data_directory().join("pagevault/cluster.keys").exists(), "--check brings keys");
    // The default mode differs between versions, and not all have --copy.
    let mut command = upgrading(&scene.old, &new);
    command.args(ways.iter().filter(|way| **way != "--copy"));
    match run(&mut command) {
        Ok(output) => ensure!(output.contains("Upgrade Complete"), "{output}"),
        Err(error) => bail!("{error:#}"),
    }
    new.without_witness("pg_upgrade begins other WAL");
    Ok((scene, new))
}

/// Without a key there is nothing to transfer: pg_upgrade works alone, and with exec.
#[test]
fn a_plain_cluster_with_labels() -> Result<()> {
    let settings = Settings::default().on(Installation::to_upgrade_from()?);
    for with_exec in [false, true] {
        let old = Cluster::start(&settings)?;
        old.sql("CREATE EXTENSION pagevault; CREATE SCHEMA app")?;
        old.sql("CREATE TABLE app.t AS SELECT i AS id FROM generate_series(1, 1000) i")?;
        old.sql(&label("SCHEMA app", "'plaintext'"))?;
        old.stop(StopMode::Fast)?;
        let new = Cluster::create(&Settings::default().conf("pagevault.enforce_encryption = on"))?;
        run(&mut if with_exec { upgrading(&old, &new) } else { alone(&old, &new) })?;
        new.start_server()?;
        ensure!(new.text("SELECT sum(id) FROM app.t")? == "500500", "rows");
        expect(&new, "app.t", "plain")?;
        ensure!(new.text("SELECT data_keys FROM pagevault.status")? == "0", "keys were made");
        old.finish()?;
        new.finish()?;
    }
    Ok(())
}

/// An unfinished job continues in the new cluster.
#[test]
fn jobs_continue() -> Result<()> {
    let (old, _keys) = old_cluster("pagevault.rekey_rate = 1MB")?;
    old.sql("CREATE TABLE big AS SELECT i AS id, repeat('x', 500) AS v FROM generate_series(1, 30000) i")?;
    old.sql("SET pagevault.rekey_threshold = 0; SECURITY LABEL FOR pagevault ON TABLE big IS 'encrypted'")?;
    old.eventually("SELECT pages_done > 0 FROM pagevault.rekey_jobs", "t")?;
    old.stop(StopMode::Fast)?;
    let new = new_cluster()?;
    run(&mut upgrading(&old, &new))?;
    new.start_server()?;
    ensure!(new.text("SELECT count(*) || ' ' || sum(id) FROM big")? == "30000 450015000", "rows");
    new.sql("SELECT pagevault.wait_for_rekey('big'::regclass, '120 s')")?;
    ensure!(new.text("SELECT pagevault.is_encrypted('big')")? == "t", "the job did not end");
    old.finish()?;
    new.finish()
}
