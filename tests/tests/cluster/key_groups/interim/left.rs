//! What is left under interim keys when data keys are destroyed, because of a crash or an error.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::Context;

use super::*;

/// Pages of the group under interim keys that are there still.
pub(super) fn bodies(cluster: &Cluster) -> Result<usize> {
    interim_files(cluster)?.iter().map(bodies_of).sum()
}

/// Such pages of one file.
pub(super) fn bodies_of(file: &DataFile) -> Result<usize> {
    let mut found = 0;
    for (block, state) in file.states()?.iter().enumerate() {
        let page = file.read_page(block as u32)?;
        found += usize::from(is_interim(state) && page[24..].iter().any(|byte| *byte != 0));
    }
    Ok(found)
}

/// What a server says of a group that is locked, or was destroyed in part.
pub(super) fn allow_what_is_said(cluster: &mut Cluster) {
    // The last one if a worker tries to write a page while its directory is away.
    let texts = ["key group", "were destroyed", "could not", "destroyed, but", "cannot be written"];
    for text in texts {
        cluster.allow_log(text);
    }
}

/// With pages under interim keys on disk.
fn away(settings: &Settings) -> Result<(Cluster, [KeyFile; 3])> {
    let (mut cluster, keys, _) = changed(settings)?;
    allow_what_is_said(&mut cluster);
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    cluster.sql("CHECKPOINT")?;
    ensure!(bodies(&cluster)? > 0, "nothing is under an interim key");
    Ok((cluster, keys))
}

pub(super) const SHRED: &str = "SELECT * FROM pagevault.shred_key_group('acme', 'acme')";

const UMBRELLA_REKEYED: &str = "SELECT count(*) > 0 FROM pagevault.rekey_jobs
    WHERE relation = 'umbrella.t'::regclass AND state = 'done'";

pub(super) fn shred_stops(cluster: &Cluster, meanwhile: impl FnOnce() -> Result<()>) -> Result<()> {
    cluster.stop_at("shred.destroyed")?;
    std::thread::scope(|scope| {
        let shredding = scope.spawn(|| cluster.sql(SHRED));
        cluster.stopped_at("shred.destroyed")?;
        meanwhile()?;
        cluster.resume();
        ensure!(shredding.join().is_ok_and(|result| result.is_err()), "it was shredded");
        Ok(())
    })
}

fn minimal() -> Settings {
    Settings::default().conf("wal_level = minimal").conf("max_wal_senders = 0")
}

/// A crash comes before they are overwritten, and after a checkpoint. With `wal_level = minimal`
/// no record follows that, so there is no redo.
#[test]
fn after_a_crash_without_redo_the_server_overwrites_them() -> Result<()> {
    let (cluster, _keys) = away(&minimal())?;
    shred_stops(&cluster, || {
        cluster.sql("CHECKPOINT")?;
        ensure!(bodies(&cluster)? > 0, "the test shows nothing");
        cluster.kill()
    })?;
    cluster.start_server()?;
    ensure!(cluster.log().contains("redo is not required"), "there was redo");
    cluster.sql(SHRED)?;
    ensure!(bodies(&cluster)? == 0, "{} pages are left", bodies(&cluster)?);
    no_marks(&cluster)?;
    cluster.finish()
}

/// They cannot be written at first.
#[test]
fn after_an_error_the_server_overwrites_them() -> Result<()> {
    let (cluster, _keys) = away(&Settings::default())?;
    let path = cluster.relation_path("acme.t")?;
    let file = interim_files(&cluster)?.into_iter().map(|file| file.path);
    let Some(file) = file.into_iter().find(|file| file.ends_with(&path)) else {
        anyhow::bail!("the table has no interim page")
    };
    let allow = |mode| fs::set_permissions(&file, fs::Permissions::from_mode(mode));
    shred_stops(&cluster, || Ok(allow(0o400)?))?;
    ensure!(cluster.log().contains("pages under interim keys are left"), "another error");
    let error = cluster.error(SHRED)?;
    ensure!(error.text().contains("could not write file"), "{error}");
    ensure!(bodies(&cluster)? > 0, "the test shows nothing");
    allow(0o600)?;
    cluster.sql(SHRED)?;
    ensure!(bodies(&cluster)? == 0, "{} pages are left", bodies(&cluster)?);
    no_marks(&cluster)?;
    cluster.finish()
}

/// Nor is there when the group is given up.
#[test]
fn giving_the_group_up_overwrites_them_without_redo() -> Result<()> {
    let (cluster, _keys) = away(&minimal())?;
    cluster.sql("CHECKPOINT")?;
    cluster.kill()?;
    let mut program = cluster.program("pagevault-keyring");
    program.arg("give-up-key-group").arg("--data-directory").arg(cluster.data_directory());
    program.args(["--key-group", "acme", "--confirm", "acme", "--without-answer"]);
    ensure!(program.output()?.status.success(), "the group was not given up");
    cluster.start_server()?;
    ensure!(cluster.log().contains("redo is not required"), "there was redo");
    ensure!(bodies(&cluster)? == 0, "{} pages are left", bodies(&cluster)?);
    no_marks(&cluster)?;
    cluster.finish()
}

/// Only jobs that replace interim keys run outside of the window.
#[test]
fn other_jobs_wait_for_their_window() -> Result<()> {
    let settings = Settings::default().conf("pagevault.rekey_rate = 64kB");
    let (cluster, keys, all) = changed(&settings)?;
    cluster.set(&[("pagevault.rotate_data_key_after", "1s")])?;
    let jobs = |state: &str| {
        format!("SELECT count(*) > 0 FROM pagevault.rekey_jobs WHERE state = '{state}'")
    };
    cluster.eventually(&jobs("running"), "t")?;
    let closed = cluster.text(
        "SELECT to_char(now() AT TIME ZONE current_setting('log_timezone') + interval '3 days', 'Dy')",
    )?;
    cluster.set(&[
        ("pagevault.rotation_window", &closed),
        ("pagevault.rotate_data_key_after", "0"),
        ("pagevault.rekey_rate", "0"),
    ])?;
    cluster.eventually(&jobs("running"), "f")?;
    let by_age = "SELECT count(*) FROM pagevault.rekey_jobs
        WHERE state = 'waiting' AND requested_by = 'pagevault.rotate_data_key_after'
          AND relation::text NOT LIKE 'acme.%'";
    let waiting = cluster.text(by_age)?;
    ensure!(waiting != "0", "the test shows nothing");
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    cluster.sql("CHECKPOINT")?;
    ensure!(bodies(&cluster)? > 0, "nothing is under an interim key");
    keys[1].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    rekeyed(&cluster)?;
    let asked = "SELECT DISTINCT requested_by FROM pagevault.rekey_jobs WHERE state = 'done'";
    ensure!(cluster.text(asked)? == "interim keys", "{}", cluster.text(asked)?);
    ensure!(cluster.text(by_age)? == waiting, "jobs did not wait: {}", cluster.text(by_age)?);
    is_whole(&cluster, &all)?;
    cluster.finish()
}

/// Nobody can connect to a database that has some.
#[test]
fn a_database_that_allows_no_connections_keeps_them() -> Result<()> {
    let (mut cluster, keys, all) = changed(&Settings::default())?;
    cluster.allow_log("key group");
    cluster.allow_log("relations in database \"closed\"");
    let mut elsewhere = cluster.client_to("template1")?;
    run_sql(&mut elsewhere, "CREATE DATABASE closed TEMPLATE postgres")?;
    let mut closed = cluster.client_to("closed")?;
    run_sql(&mut closed, "CHECKPOINT; UPDATE acme.t SET name = 'closed ' || name")?;
    drop(closed);
    run_sql(&mut elsewhere, "ALTER DATABASE closed ALLOW_CONNECTIONS false")?;
    drop(elsewhere);
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    cluster.sql("CHECKPOINT")?;
    keys[1].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    cluster.eventually_that("a warning", || {
        ensure!(cluster.log().contains("relations in database \"closed\" have pages"));
        Ok(())
    })?;
    is_whole(&cluster, &all)?;
    cluster.sql("ALTER DATABASE closed ALLOW_CONNECTIONS true")?;
    rekeyed(&cluster)?;
    let mut closed = cluster.client_to("closed")?;
    let kept = text(
        &mut closed,
        "SELECT count(*) = count(*) FILTER (WHERE name LIKE 'closed %') FROM acme.t",
    )?;
    ensure!(kept == "t", "rows are lost");
    drop(closed);
    cluster.finish()
}

/// A file of one tenant that cannot be written holds up neither the jobs of another one, nor the
/// end of that one's group.
#[test]
fn a_file_that_cannot_be_overwritten_holds_up_nobody_else() -> Result<()> {
    let (mut cluster, keys) = with_groups(&Settings::default().conf("autovacuum = off"))?;
    allow_what_is_said(&mut cluster);
    tables(&cluster)?;
    cluster.sql("CREATE TABLE acme.born (id int)")?;
    cluster.sql("CHECKPOINT")?;
    cluster
        .sql("UPDATE acme.t SET name = 'a' || name; UPDATE umbrella.t SET name = 'a' || name")?;
    for key in &keys[1..] {
        key.take_away()?;
    }
    cluster.kill()?;
    cluster.start_server()?;
    cluster.sql("CHECKPOINT")?;
    let file = cluster.data_directory().join(cluster.relation_path("acme.t")?);
    let allow = |mode| fs::set_permissions(&file, fs::Permissions::from_mode(mode));
    shred_stops(&cluster, || Ok(allow(0o400)?))?;
    keys[2].bring_back()?;
    // The other key is still away.
    cluster.error("SELECT pagevault.unlock()")?;
    cluster.eventually(UMBRELLA_REKEYED, "t")?;
    cluster.sql("SELECT * FROM pagevault.shred_key_group('umbrella', 'umbrella')")?;
    ensure!(bodies(&cluster)? > 0, "the test shows nothing");
    allow(0o600)?;
    cluster.sql(SHRED)?;
    ensure!(bodies(&cluster)? == 0, "{} pages are left", bodies(&cluster)?);
    no_marks(&cluster)?;
    cluster.finish()
}

/// A crash has left a file that no relation has. It stays marked until it is overwritten, and
/// delays no job of a group that is unlocked later.
#[test]
fn a_file_that_no_relation_has_is_overwritten() -> Result<()> {
    let (mut cluster, keys) = with_groups(&Settings::default().conf("autovacuum = off"))?;
    allow_what_is_said(&mut cluster);
    tables(&cluster)?;
    cluster.sql("CHECKPOINT")?;
    cluster
        .sql("UPDATE acme.t SET name = 'a' || name; UPDATE umbrella.t SET name = 'a' || name")?;
    let mut client = cluster.client()?;
    run_sql(&mut client, &format!("BEGIN; CREATE TABLE acme.left_it (id, name) AS {ROWS}"))?;
    let path = text(&mut client, "SELECT pg_relation_filepath('acme.left_it')")?;
    let path = Path::new(&path);
    let marks = cluster.data_directory().join("pagevault/interim");
    let is_marked = |path: &Path| {
        let number = path.file_name().unwrap_or_default().to_string_lossy();
        let mut marks = fs::read_dir(&marks)?.filter_map(Result::ok);
        anyhow::Ok(marks.any(|mark| mark.file_name().to_string_lossy().ends_with(&*number)))
    };
    let table = cluster.relation_path("acme.t")?;
    // What is in WAL so far gets to the disk.
    cluster.sql("SELECT pg_switch_wal()")?;
    for key in &keys[1..] {
        key.take_away()?;
    }
    cluster.kill()?;
    drop(client);
    cluster.start_server()?;
    cluster.sql("CHECKPOINT")?;
    ensure!(is_marked(path)? && is_marked(&table)?, "nothing is under an interim key");
    keys[1].bring_back()?;
    // The other key is still away.
    cluster.error("SELECT pagevault.unlock()")?;
    cluster.eventually_that("a job for the table", || {
        ensure!(!is_marked(&table)?, "it is marked");
        Ok(())
    })?;
    ensure!(is_marked(path)?, "its mark is gone, and not its pages");
    let file = DataFile::find(&cluster.data_directory().join(path))?.swap_remove(0);
    ensure!(bodies_of(&file)? > 0, "the test shows nothing");
    keys[2].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    cluster.eventually(UMBRELLA_REKEYED, "t")?;
    shred_stops(&cluster, || cluster.kill())?;
    cluster.start_server()?;
    cluster.sql(SHRED)?;
    ensure!(bodies_of(&file)? == 0, "{} pages are left", bodies_of(&file)?);
    cluster.finish()
}

/// Each group under whose interim keys a file may have pages is in its mark.
#[test]
fn marks_name_the_groups_of_a_relation_that_moves() -> Result<()> {
    let (cluster, keys, _) = changed(&Settings::default())?;
    let mut standby = standby_of(&cluster, &[])?;
    allow_what_is_said(&mut standby);
    standby.stop(StopMode::Fast)?;
    for key in &keys[1..] {
        key.take_away()?;
    }
    standby.start_server()?;
    let change = || {
        cluster.sql("UPDATE acme.t SET name = name")?;
        wait_for(&standby, &cluster)?;
        standby.sql("CHECKPOINT")
    };
    change()?;
    cluster
        .sql("SECURITY LABEL FOR pagevault ON TABLE acme.t IS 'encrypted key_group=umbrella'")?;
    cluster.sql("SELECT pagevault.wait_for_rekey('acme.t'::regclass)")?;
    change()?;
    let number = cluster.text("SELECT pg_relation_filenode('acme.t')")?;
    let marks = fs::read_dir(standby.data_directory().join("pagevault/interim"))?;
    let mut marks = marks.filter_map(Result::ok).map(|mark| mark.path());
    let mark = marks.find(|mark| mark.to_string_lossy().ends_with(&format!("_{number}")));
    let groups = fs::read_to_string(mark.context("no mark")?)?;
    ensure!(groups == "00100\n00101\n", "{groups:?}");
    standby.finish()?;
    cluster.finish()
}

/// While the destruction of a database is replayed, the keystore may know of keys that its files
/// got later: these files are not destroyed.
#[test]
fn a_table_that_comes_into_a_group_after_its_database_was_shredded() -> Result<()> {
    let (mut cluster, keys) = with_groups(&Settings::default().conf("autovacuum = off"))?;
    cluster.allow_log("key group");
    cluster.sql("CREATE DATABASE app")?;
    let mut app = cluster.client_to("app")?;
    run_sql(
        &mut app,
        "CREATE EXTENSION pagevault;
         CREATE TABLE gone AS SELECT 1 AS id; SELECT pagevault.encrypt('gone');
         CREATE TABLE late (id int, name text) WITH (fillfactor = 30);
         INSERT INTO late SELECT i, 'a' FROM generate_series(1, 20) i; CHECKPOINT",
    )?;
    run_sql(&mut app, "UPDATE late SET name = 'b' WHERE id = 1")?;
    drop(app);
    cluster.sql("SELECT * FROM pagevault.shred_database('app', 'app')")?;
    let mut app = cluster.client_to("app")?;
    run_sql(&mut app, "UPDATE late SET name = 'c' WHERE id = 2")?;
    run_sql(&mut app, "SECURITY LABEL FOR pagevault ON TABLE late IS 'encrypted key_group=acme'")?;
    run_sql(&mut app, "SELECT pagevault.wait_for_rekey('late'::regclass)")?;
    run_sql(&mut app, "UPDATE late SET name = 'd' WHERE id = 3")?;
    drop(app);
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    keys[1].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    let look = "SELECT count(*) || ' ' || string_agg(name, '' ORDER BY id) FROM late WHERE id < 5";
    let found = text(&mut cluster.client_to("app")?, look)?;
    ensure!(found == "4 bcda", "{found}");
    cluster.finish()
}
