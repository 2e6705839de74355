//! Groups that are given up: their keys are gone for ever, recovery needs them, and
//! `pagevault-keyring give-up-key-group` destroys what is in them while the server is down.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use pagevault_tests::standby::allow_what_failovers_say;

use super::*;

mod standbys;
mod together;

/// `pagevault-keyring give-up-key-group` for the group "acme", with more options. Its output, and
/// whether it succeeds.
fn command(server: &Cluster, options: &[&str]) -> Result<(String, bool)> {
    let mut program = server.program("pagevault-keyring");
    program.arg("give-up-key-group").arg("--data-directory").arg(server.data_directory());
    let output = program.args(["--key-group", "acme"]).args(options).output()?;
    let said = [output.stdout, output.stderr].concat();
    Ok((String::from_utf8_lossy(&said).into_owned(), output.status.success()))
}

/// The group "acme" is given up, although nobody says that its key is gone.
fn give_up(server: &Cluster) -> Result<String> {
    let (said, well) = command(server, &["--confirm", "acme", "--without-answer"])?;
    ensure!(well && said.contains("is destroyed in this data directory"), "{said}");
    Ok(said)
}

/// It is refused, and changes nothing.
fn refused(server: &Cluster, options: &[&str], words: &[&str]) -> Result<()> {
    let (said, well) = command(server, options)?;
    ensure!(!well, "{options:?}: {said}");
    for word in words {
        ensure!(said.contains(word), "{options:?}: {word}: {said}");
    }
    ensure!(!marker(server).exists(), "{options:?}: the group is given up");
    Ok(())
}

fn marker(server: &Cluster) -> PathBuf {
    server.data_directory().join("pagevault").join("given_up")
}

/// The texts that servers log whose groups are locked and given up.
fn allow(cluster: &mut Cluster) {
    for text in ["key group", "FATAL", "startup process", "were destroyed"] {
        cluster.allow_log(text);
    }
}

fn are_destroyed(server: &Cluster, tables: &[&str]) -> Result<()> {
    for table in tables {
        let error = server.error(&format!("{COUNT} {table}"))?;
        ensure!(error.text().contains("were destroyed"), "{table}: {error}");
    }
    Ok(())
}

const GROUPS: &str =
    "SELECT string_agg(key_group, ',' ORDER BY key_group) FROM pagevault.key_groups";

/// Tables that have left the group: before the last checkpoint, and after it.
const LEFT: [&str; 2] = ["left_before", "left_after"];

/// The group has ended, and everything else is whole.
fn is_whole(server: &Cluster, all: &str) -> Result<()> {
    are_destroyed(server, &["acme.t", "acme.u"])?;
    ensure!(count(server, "umbrella.t")? == all, "{}", count(server, "umbrella.t")?);
    ensure!(count(server, "public.t")? == all, "{}", count(server, "public.t")?);
    for table in LEFT {
        let query = format!("SELECT string_agg(DISTINCT name, '') || count(*) FROM {table}");
        ensure!(server.text(&query)? == "y1000", "{table}: {}", server.text(&query)?);
    }
    ensure!(server.text(GROUPS)? == "umbrella", "{}", server.text(GROUPS)?);
    Ok(())
}

/// Tables of three owners, changed after the last checkpoint. What the count of the whole ones is.
fn changed(cluster: &Cluster) -> Result<String> {
    tables(cluster)?;
    for table in LEFT {
        cluster.sql(&format!(
            "CREATE TABLE {table} AS SELECT i AS id, 'x' AS name FROM generate_series(1, 1000) i"
        ))?;
        label(cluster, table, "acme")?;
    }
    leave(cluster, LEFT[0])?;
    cluster.sql("CHECKPOINT")?;
    leave(cluster, LEFT[1])?;
    cluster.sql(
        "INSERT INTO acme.t (name) VALUES ('late'); UPDATE acme.t SET name = 'z' WHERE id < 9;
         DELETE FROM acme.t WHERE id > 200;
         CREATE TABLE acme.u AS SELECT i AS id, 'x' AS name FROM generate_series(1, 1000) i;
         CREATE INDEX ON acme.u (id);
         INSERT INTO umbrella.t (name) VALUES ('late'); INSERT INTO public.t (name) VALUES ('late')",
    )?;
    cluster.sql("VACUUM acme.t")?;
    count(cluster, "umbrella.t")
}

/// Moves a table to a group, at once.
fn label(cluster: &Cluster, table: &str, group: &str) -> Result<()> {
    cluster.sql(&format!(
        "SECURITY LABEL FOR pagevault ON TABLE {table} IS 'encrypted key_group={group}'"
    ))?;
    let under = cluster.text(&format!(
        "SELECT key_group FROM pagevault.relations WHERE relation = '{table}'::regclass"
    ))?;
    ensure!(under == group, "{table} is in {under}");
    Ok(())
}

fn leave(cluster: &Cluster, table: &str) -> Result<()> {
    label(cluster, table, "umbrella")?;
    cluster.sql(&format!("UPDATE {table} SET name = 'y'"))
}

/// Waits until the standby of a primary has replayed its WAL, without a session of the standby.
fn await_replay(primary: &Cluster) -> Result<()> {
    let end = primary.text("SELECT pg_current_wal_flush_lsn()")?;
    let replayed = "SELECT coalesce(bool_or(replay_lsn >= 'END'), false) FROM pg_stat_replication";
    primary.eventually(&replayed.replace("END", &end), "t")
}

/// A tenant destroys its key, and the server crashes before a checkpoint. It starts when the group
/// is given up, all else is whole, and standbys learn of it; whenever it is killed in between.
#[test]
fn a_crash_is_recovered_without_the_key() -> Result<()> {
    let (mut cluster, keys) = with_groups(&Settings::default())?;
    allow(&mut cluster);
    let mut standby = standby_of(&cluster, &[])?;
    allow_what_failovers_say(&mut standby);
    standby.allow_log("were destroyed");
    let all = changed(&cluster)?;
    wait_for(&standby, &cluster)?;
    cluster.kill()?;
    keys[1].take_away()?;
    let said = give_up(&cluster)?;
    ensure!(said.contains("no answer from master key \"main\" of provider \"of_acme\""), "{said}");
    cluster.expect_verified(&cluster.data_directory(), 0, &["No damage found."])?;
    // The file counts until WAL has what it says.
    for point in ["given_up.taking_in", "redo.keys_in_file", "given_up.announcing"] {
        kill_in_start(&cluster, point)?;
        ensure!(marker(&cluster).exists(), "{point}");
    }
    cluster.stop_at("given_up.announced")?;
    cluster.start_server()?;
    is_whole(&cluster, &all)?;
    cluster.stopped_at("given_up.announced")?;
    ensure!(marker(&cluster).exists());
    cluster.kill()?;
    cluster.resume();
    cluster.start_server()?;
    is_whole(&cluster, &all)?;
    cluster.eventually_that("the end is logged", || {
        ensure!(!marker(&cluster).exists());
        Ok(())
    })?;
    // The standby has the key, and follows nevertheless. The end of the group ends sessions.
    await_replay(&cluster)?;
    is_whole(&standby, &all)?;
    keys[1].bring_back()?;
    cluster.crash()?;
    is_whole(&cluster, &all)?;
    standby.promote()?;
    is_whole(&standby, &all)?;
    standby.sql("SELECT pagevault.create_key_group('acme')")?;
    standby.finish()?;
    cluster.sql("CHECKPOINT; DROP TABLE acme.u, acme.t")?;
    cluster.finish()
}

/// The server has gone on without the key, and has pages of the group under interim keys.
#[test]
fn a_group_with_interim_pages_is_given_up() -> Result<()> {
    let (mut cluster, keys) = with_groups(&Settings::default())?;
    allow(&mut cluster);
    let all = changed(&cluster)?;
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    is_locked(&cluster, "acme.t", "acme")?;
    cluster.kill()?;
    give_up(&cluster)?;
    cluster.expect_verified(&cluster.data_directory(), 0, &["No damage found."])?;
    cluster.start_server()?;
    is_whole(&cluster, &all)?;
    keys[1].bring_back()?;
    cluster.crash()?;
    is_whole(&cluster, &all)?;
    cluster.sql("DROP TABLE acme.u, acme.t; CHECKPOINT")?;
    no_marks(&cluster)?;
    cluster.finish()
}

/// One file of the group cannot be written. The server starts, and the group ends for others when
/// the file has been overwritten.
#[test]
fn a_file_that_cannot_be_written_keeps_no_server_from_starting() -> Result<()> {
    let (mut cluster, keys) = with_groups(&Settings::default())?;
    allow(&mut cluster);
    cluster.allow_log("could not");
    let all = changed(&cluster)?;
    let table = cluster.data_directory().join(cluster.relation_path("acme.t")?);
    // PostgreSQL does not start when its own redo cannot open a file.
    cluster.sql("CHECKPOINT; CREATE TABLE public.other (id int)")?;
    cluster.kill()?;
    keys[1].take_away()?;
    give_up(&cluster)?;
    fs::set_permissions(&table, Permissions::from_mode(0o400))?;
    cluster.start_server()?;
    cluster.sql("INSERT INTO public.other VALUES (1)")?;
    cluster.eventually_that("it is tried again", || {
        ensure!(cluster.log().matches("could not write file").count() > 1);
        Ok(())
    })?;
    ensure!(marker(&cluster).exists(), "the group has ended");
    fs::set_permissions(&table, Permissions::from_mode(0o600))?;
    cluster.eventually_that("the end is logged", || {
        ensure!(!marker(&cluster).exists());
        Ok(())
    })?;
    is_whole(&cluster, &all)?;
    cluster.finish()
}

/// It is given up after a recovery that has written interim pages was killed.
#[test]
fn a_group_is_given_up_in_the_middle_of_a_locked_recovery() -> Result<()> {
    let settings = Settings::default().conf("shared_buffers = 1MB\nautovacuum = off");
    let (mut cluster, keys) = with_groups(&settings)?;
    allow(&mut cluster);
    let all = changed(&cluster)?;
    cluster.sql("UPDATE acme.t SET name = repeat('again', 20) || name")?;
    keys[1].take_away()?;
    cluster.kill()?;
    kill_in_start(&cluster, "interim.redone")?;
    give_up(&cluster)?;
    cluster.start_server()?;
    is_whole(&cluster, &all)?;
    keys[1].bring_back()?;
    cluster.crash()?;
    is_whole(&cluster, &all)?;
    cluster.finish()
}

/// A table was leaving the group for another one, which is locked, too: what is under interim keys
/// of that is not destroyed.
#[test]
fn interim_pages_of_another_group_are_kept() -> Result<()> {
    let (mut cluster, keys) = with_groups(&Settings::default().conf("shared_buffers = 1MB"))?;
    allow(&mut cluster);
    tables(&cluster)?;
    cluster.sql("INSERT INTO acme.t (name) SELECT name FROM acme.t, generate_series(1, 9)")?;
    label(&cluster, "acme.t", "acme")?;
    let all = count(&cluster, "acme.t")?;
    label(&cluster, "acme.t", "umbrella")?;
    cluster.sql("CHECKPOINT; UPDATE acme.t SET name = name")?;
    keys[1].take_away()?;
    keys[2].take_away()?;
    cluster.kill()?;
    kill_in_start(&cluster, "interim.redone")?;
    give_up(&cluster)?;
    cluster.start_server()?;
    keys[2].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    ensure!(count(&cluster, "acme.t")? == all, "{}", count(&cluster, "acme.t")?);
    cluster.finish()
}

/// What the command destroys, and for whom it does not.
#[test]
fn only_a_group_whose_key_is_gone_is_given_up() -> Result<()> {
    let (mut cluster, keys) = with_groups(&Settings::default())?;
    allow(&mut cluster);
    changed(&cluster)?;
    let confirmed = ["--confirm", "acme"];
    refused(&cluster, &confirmed, &["a server is running", "Stop the server"])?;
    cluster.kill()?;
    refused(&cluster, &["--confirm", "acm"], &["--confirm differs"])?;
    refused(&cluster, &[], &["--confirm <NAME>"])?;
    // A later --key-group would be an error; so this is another program.
    let mut other = cluster.program("pagevault-keyring");
    other.arg("give-up-key-group").arg("--data-directory").arg(cluster.data_directory());
    let output = other.args(["--key-group", "a", "--confirm", "a"]).output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(said.contains("key group \"a\" does not exist, or has ended"), "{said}");
    // Not even if nobody needs to answer.
    for options in [&confirmed[..], &["--confirm", "acme", "--without-answer"]] {
        refused(&cluster, options, &["can be had", "provider \"of_acme\"", "Start the server"])?;
    }
    keys[1].take_away()?;
    refused(&cluster, &confirmed, &["not known whether", "No answer from", "--without-answer"])?;
    // Key files that are there and do not have the key: the right one may not be mounted.
    let other = cluster.key_file("other", "another")?;
    fs::rename(other.path(), keys[1].path())?;
    let words = ["not known whether", "has no key \"main\"; another copy", "--without-answer"];
    refused(&cluster, &confirmed, &words)?;
    keys[1].add_key("main")?;
    refused(&cluster, &confirmed, &["cannot be unwrapped with key file", "; another copy"])?;
    let confirmed = ["--confirm", "acme", "--without-answer"];
    // A command that was killed has left this, which says nothing, or has done all.
    let half = marker(&cluster).with_extension("new");
    fs::write(&half, b"pvgiven1")?;
    cluster.installation().give(&half)?;
    let before = fs::read(cluster.data_directory().join("pagevault/cluster.keys"))?;
    let (said, well) = command(&cluster, &["--dry-run", "--without-answer"])?;
    ensure!(well && said.contains("Nothing was changed."), "{said}");
    ensure!(said.contains("Key group \"acme\" (key group 100)"), "{said}");
    ensure!(said.contains("database 5: ") && said.contains("  tablespace 1663, relfilenumber "));
    ensure!(!marker(&cluster).exists());
    let (said, well) = command(&cluster, &confirmed)?;
    ensure!(well && said.contains("is destroyed in this data directory"), "{said}");
    ensure!(!half.exists(), "it is left over");
    ensure!(fs::read(cluster.data_directory().join("pagevault/cluster.keys"))? == before);
    let (said, well) = command(&cluster, &confirmed)?;
    ensure!(!well && said.contains("does not exist, or has ended"), "{said}");
    let shown = cluster
        .program("pagevault-keyring")
        .arg("inspect")
        .arg(cluster.data_directory())
        .output()?;
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    ensure!(shown.contains("key groups given up, which the server has not logged yet"), "{shown}");
    let audit = fs::read_to_string(cluster.data_directory().join("pagevault/audit.tools"))?;
    for outcome in ["attempted", "ok"] {
        let line = audit.lines().find(|line| line.contains(&format!("\"outcome\":\"{outcome}\"")));
        let line = line.unwrap_or_default();
        ensure!(
            line.contains("\"action\":\"give_up_key_group\"")
                && line.contains("\"object\":\"acme\""),
            "{audit}"
        );
    }
    ensure!(audit.contains("\"mac\":"), "{audit}");
    fs::remove_file(keys[1].path())?;
    keys[1].bring_back()?;
    cluster.start_server()?;
    are_destroyed(&cluster, &["acme.t", "acme.u"])?;
    cluster.sql("CHECKPOINT")?;
    cluster.eventually_that("the end is logged", || {
        ensure!(!marker(&cluster).exists());
        Ok(())
    })?;
    // The lines go on.
    let trail = cluster
        .program("pagevault-keyring")
        .args(["audit", "verify", "-D"])
        .arg(cluster.data_directory())
        .arg(cluster.directory().join("log"))
        .output()?;
    let said = [trail.stdout, trail.stderr].concat();
    ensure!(trail.status.success(), "{}", String::from_utf8_lossy(&said));
    // What does not need the key has another way.
    cluster.stop(StopMode::Fast)?;
    let mut umbrella = cluster.program("pagevault-keyring");
    umbrella.arg("give-up-key-group").arg("--data-directory").arg(cluster.data_directory());
    let output = umbrella.args(["--key-group", "umbrella", "--confirm", "umbrella"]).output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(said.contains("was shut down cleanly") && said.contains("shred_key_group()"), "{said}");
    cluster.start_server()?;
    cluster.finish()
}

/// Nothing but the file says that a group without relations was given up.
#[test]
fn the_end_of_an_empty_group_is_logged() -> Result<()> {
    let (mut cluster, keys) = with_groups(&Settings::default())?;
    allow(&mut cluster);
    let mut standby = standby_of(&cluster, &[])?;
    allow_what_failovers_say(&mut standby);
    cluster.kill()?;
    keys[1].take_away()?;
    give_up(&cluster)?;
    cluster.start_server()?;
    standby.eventually(GROUPS, "umbrella")?;
    ensure!(cluster.text(GROUPS)? == "umbrella");
    keys[1].bring_back()?;
    standby.finish()?;
    cluster.finish()
}

/// A table was leaving the group, page by page, when the server crashed. The pages that had left
/// are there. Reading another one is an error, and never an empty page.
#[test]
fn a_page_that_had_not_left_the_group_is_an_error() -> Result<()> {
    half_left(&Settings::default(), "id < 1000")
}

/// The same if redo has read these pages, without images in WAL to put in their place.
#[test]
fn a_page_that_redo_could_not_change_is_an_error() -> Result<()> {
    half_left(&Settings::default().conf("full_page_writes = off"), "true")
}

/// From PostgreSQL 18 on the server reports errors of asynchronous reads itself.
fn says_lost(error: &str) -> bool {
    error.contains("is lost") || error.contains("Required key not available")
}

/// `which`: rows of which some are deleted before.
fn half_left(settings: &Settings, which: &str) -> Result<()> {
    let (mut cluster, keys) = with_groups(settings)?;
    allow(&mut cluster);
    cluster.allow_log("is lost");
    cluster.allow_log("Required key not available");
    cluster.sql(
        "CREATE TABLE half AS SELECT i AS id, i AS number FROM generate_series(1, 200000) i",
    )?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE half IS 'encrypted key_group=acme'")?;
    ensure!(cluster.text("SELECT pagevault.wait_for_rekey('half'::regclass)")? == "t");
    cluster.sql("VACUUM half")?;
    cluster.sql("CHECKPOINT")?;
    cluster.sql(&format!("DELETE FROM half WHERE id % 8 = 0 AND {which}"))?;
    cluster.stop_at("rekey.page_done")?;
    cluster.sql("BEGIN; SECURITY LABEL FOR pagevault ON TABLE half IS 'encrypted key_group=umbrella'; COMMIT")?;
    cluster.stopped_at("rekey.page_done")?;
    cluster.sql("INSERT INTO half SELECT 1, 2")?;
    cluster.kill()?;
    cluster.resume();
    keys[1].take_away()?;
    give_up(&cluster)?;
    cluster.start_server()?;
    let pages: u32 = cluster.text("SELECT pg_relation_size('half') / 8192")?.parse()?;
    let (mut whole, mut lost) = (0, 0);
    for block in (0..pages).step_by(100) {
        let rows =
            format!("SELECT count(*) FROM half WHERE ctid = '({block},1)' OR ctid = '({block},2)'");
        match cluster.client()?.query_one(&rows, &[]) {
            Ok(row) => {
                ensure!(row.get::<_, i64>(0) >= 1, "block {block} is empty");
                whole += 1;
            }
            Err(error) => {
                let error = format!("{error:?}");
                ensure!(says_lost(&error), "block {block}: {error}");
                lost += 1;
            }
        }
    }
    ensure!(whole > 0 && lost > 0, "{whole} pages are whole, {lost} are lost");
    let error = cluster.error("SELECT sum(number) FROM half")?;
    ensure!(says_lost(&error.text()), "{error}");
    if error.text().contains("is lost") {
        ensure!(error.sqlstate == "XX001" && !error.detail.is_empty(), "{error}");
        ensure!(error.hint.contains("TRUNCATE"), "{error}");
    }
    // Neither a checkpoint nor another crash makes it a page that can be read.
    cluster.sql("CHECKPOINT")?;
    cluster.crash()?;
    let error = cluster.error("SELECT sum(number) FROM half")?;
    ensure!(says_lost(&error.text()), "{error}");
    keys[1].bring_back()?;
    cluster.sql("TRUNCATE half; INSERT INTO half SELECT 1, 2")?;
    cluster.finish()
}
