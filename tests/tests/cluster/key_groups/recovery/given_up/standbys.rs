//! A standby without a group that its primary still has.

use anyhow::bail;
use pagevault_tests::installation::run;
use pagevault_tests::standby::rewind;

use super::*;

/// Waits until the standby has replayed what the primary has written. It admits nobody meanwhile.
fn passes(standby: &Cluster, primary: &Cluster) -> Result<()> {
    await_replay(primary)?;
    let Err(error) = standby.client() else { bail!("the standby admits sessions") };
    let error = format!("{error:?}");
    ensure!(error.contains("accepts no connections until recovery has ended"), "{error}");
    Ok(())
}

/// Without a session.
fn promote(standby: &Cluster) -> Result<()> {
    let mut program = standby.program("pg_ctl");
    run(program.args(["promote", "--wait", "--pgdata"]).arg(standby.data_directory()))?;
    standby.eventually_that("the end is logged", || {
        ensure!(!marker(standby).exists());
        Ok(())
    })
}

/// A primary with its standby, which does not get the key of "acme" any more, and was stopped
/// before the primary has changed relations of the group, made others, and rotated its key.
fn without_key() -> Result<(Cluster, Cluster, [KeyFile; 3])> {
    let (mut cluster, keys) = with_groups(&Settings::default())?;
    allow(&mut cluster);
    changed(&cluster)?;
    let mut standby = standby_of(&cluster, &[])?;
    allow(&mut standby);
    standby.allow_log("recovery waits");
    wait_for(&standby, &cluster)?;
    standby.kill()?;
    cluster.sql(
        "INSERT INTO acme.t (name) SELECT name FROM public.t; UPDATE acme.u SET name = 'w';
         INSERT INTO umbrella.t (name) VALUES ('later'); INSERT INTO public.t (name) VALUES ('later')",
    )?;
    cluster.sql("SELECT pagevault.rotate_key_group_key('acme')")?;
    cluster.sql(
        "CREATE TABLE acme.v AS SELECT i AS id, repeat('secret-of-a-tenant', 9) AS name FROM generate_series(1, 2000) i;
         CREATE INDEX ON acme.v (name); TRUNCATE acme.u; INSERT INTO acme.u SELECT 1, 'x'",
    )?;
    cluster.sql("VACUUM acme.t")?;
    keys[1].take_away()?;
    Ok((cluster, standby, keys))
}

/// It goes on, refuses the group whatever the primary does with it, and ends it when it is
/// promoted.
#[test]
fn a_standby_goes_on_without_the_key_and_is_promoted() -> Result<()> {
    let (cluster, standby, keys) = without_key()?;
    give_up(&standby)?;
    kill_in_start(&standby, "redo.keys_in_file")?;
    standby.start_server()?;
    passes(&standby, &cluster)?;
    cluster.sql(
        "CREATE TABLE acme.w AS SELECT i AS id, repeat('secret-of-a-tenant', 9) AS name FROM generate_series(1, 2000) i;
         UPDATE acme.t SET name = 'v'; INSERT INTO umbrella.t (name) VALUES ('x')",
    )?;
    cluster.sql("VACUUM (TRUNCATE) acme.t")?;
    cluster.sql("CHECKPOINT")?;
    passes(&standby, &cluster)?;
    // Neither the key nor a restart changes that.
    keys[1].bring_back()?;
    standby.kill()?;
    standby.start_server()?;
    cluster.sql("DELETE FROM acme.w WHERE id % 2 = 0; INSERT INTO acme.w SELECT 0, 'x'")?;
    passes(&standby, &cluster)?;
    // A copy of it starts as it is.
    let mut copy = Cluster::from_files_for(standby.installation(), |target| {
        standby.base_backup_with(target, &[])
    })?;
    allow(&mut copy);
    ensure!(marker(&copy).exists(), "the backup does not have the file");
    copy.append_conf("primary_conninfo = ''")?;
    copy.allow_log("specified neither");
    copy.start_server()?;
    promote(&copy)?;
    are_destroyed(&copy, &["acme.t", "acme.w"])?;
    ensure!(count(&copy, "umbrella.t")? == count(&cluster, "umbrella.t")?);
    copy.finish()?;
    // The key of its own group is nobody's business.
    let expected = count(&cluster, "umbrella.t")?;
    cluster.kill()?;
    promote(&standby)?;
    are_destroyed(&standby, &["acme.t", "acme.u", "acme.v", "acme.w"])?;
    ensure!(standby.text(GROUPS)? == "umbrella");
    standby.sql("CHECKPOINT")?;
    ensure!(!is_below(&standby.data_directory().join("base"), "secret-of-a-tenant")?);
    standby.crash()?;
    are_destroyed(&standby, &["acme.t", "acme.u", "acme.v", "acme.w"])?;
    ensure!(count(&standby, "umbrella.t")? == expected);
    standby.sql("DROP TABLE acme.t, acme.u, acme.v, acme.w")?;
    standby.finish()?;
    cluster.start_server()?;
    ensure!(count(&cluster, "acme.v")? != "");
    cluster.finish()
}

/// The primary shreds the group itself later. Tables come and go between groups meanwhile.
#[test]
fn a_standby_replays_what_the_primary_does_with_the_group() -> Result<()> {
    let (cluster, standby, keys) = without_key()?;
    give_up(&standby)?;
    standby.start_server()?;
    keys[1].bring_back()?;
    cluster.sql(
        "CREATE TABLE moving AS SELECT i AS id, 'x' AS name FROM generate_series(1, 1000) i",
    )?;
    label(&cluster, "moving", "acme")?;
    cluster.sql("UPDATE moving SET name = 'y'")?;
    leave(&cluster, "moving")?;
    cluster.sql("UPDATE moving SET name = 'z'")?;
    passes(&standby, &cluster)?;
    cluster.sql("VACUUM FULL moving")?;
    let expected_of_moving = count(&cluster, "moving")?;
    // The primary does not end the group while it has former keys under it.
    LEFT.iter().try_for_each(|table| cluster.sql(&format!("VACUUM FULL {table}")))?;
    cluster.sql("SELECT * FROM pagevault.shred_key_group('acme', 'acme')")?;
    cluster.sql("INSERT INTO umbrella.t (name) VALUES ('x')")?;
    passes(&standby, &cluster)?;
    let expected = count(&cluster, "umbrella.t")?;
    standby.kill()?;
    standby.start_server()?;
    passes(&standby, &cluster)?;
    cluster.kill()?;
    promote(&standby)?;
    ensure!(count(&standby, "moving")? == expected_of_moving);
    are_destroyed(&standby, &["acme.t", "acme.v"])?;
    ensure!(count(&standby, "umbrella.t")? == expected);
    standby.finish()?;
    cluster.start_server()?;
    cluster.finish()
}

/// The standby is promoted, and rewound to its primary, which still has the group. Pages that it
/// has passed over do not come back with the key.
#[test]
fn a_rewound_server_does_not_serve_what_it_has_passed_over() -> Result<()> {
    let (cluster, standby, keys) = without_key()?;
    cluster.sql("ALTER SYSTEM SET wal_keep_size = '1GB'")?;
    cluster.sql("SELECT pg_reload_conf()")?;
    give_up(&standby)?;
    standby.start_server()?;
    passes(&standby, &cluster)?;
    // What was changed before is not copied by pg_rewind.
    cluster.sql("CHECKPOINT")?;
    passes(&standby, &cluster)?;
    promote(&standby)?;
    are_destroyed(&standby, &["acme.t", "acme.v"])?;
    standby.sql("INSERT INTO public.t (name) VALUES ('elsewhere')")?;
    keys[1].bring_back()?;
    cluster.sql("UPDATE acme.t SET name = 'n' WHERE id = 1")?;
    standby.stop(StopMode::Fast)?;
    rewind(&standby, &cluster)?;
    wait_for(&standby, &cluster)?;
    for table in ["umbrella.t", "public.t"] {
        ensure!(count(&standby, table)? == count(&cluster, table)?, "{table}");
    }
    let mut refused = 0;
    for table in ["acme.t", "acme.u", "acme.v"] {
        let expected = count(&cluster, table)?;
        for path in ["SET enable_seqscan = on", "SET enable_seqscan = off"] {
            let mut client = standby.client()?;
            client.batch_execute(path)?;
            match text(&mut client, &format!("{COUNT} {table} WHERE name >= ''")) {
                Ok(found) => ensure!(found == expected, "{table}: {found}, not {expected}"),
                Err(_) => refused += 1,
            }
        }
    }
    ensure!(refused > 0, "the test shows nothing");
    cluster.finish()
}

/// A session of a healthy standby reads a relation of the group that its primary gives up.
#[test]
fn a_cursor_does_not_hold_up_the_replay() -> Result<()> {
    let (mut cluster, keys) = with_groups(&Settings::default())?;
    allow(&mut cluster);
    changed(&cluster)?;
    let mut standby = standby_of(&cluster, &["max_standby_streaming_delay = 1s"])?;
    allow(&mut standby);
    allow_what_failovers_say(&mut standby);
    standby.allow_log("canceling statement due to conflict with recovery");
    standby.allow_log("terminating connection due to conflict with recovery");
    wait_for(&standby, &cluster)?;
    let mut reader = standby.client()?;
    reader.batch_execute("BEGIN; DECLARE c CURSOR FOR SELECT * FROM acme.t; FETCH 1 FROM c")?;
    cluster.kill()?;
    keys[1].take_away()?;
    give_up(&cluster)?;
    cluster.start_server()?;
    cluster.eventually_that("the end is logged", || {
        ensure!(!marker(&cluster).exists());
        Ok(())
    })?;
    await_replay(&cluster)?;
    are_destroyed(&standby, &["acme.t"])?;
    ensure!(reader.batch_execute("FETCH 1 FROM c").is_err(), "the reader goes on");
    // A restore from before needs it.
    keys[1].bring_back()?;
    standby.finish()?;
    cluster.finish()
}

/// Of a table that is decrypted out of the group each page comes with an image, whatever the
/// standby could do with those before.
#[test]
fn a_table_that_is_decrypted_is_whole() -> Result<()> {
    let (cluster, standby, keys) = without_key()?;
    give_up(&standby)?;
    standby.start_server()?;
    keys[1].bring_back()?;
    cluster.sql(
        "CREATE TABLE half AS SELECT i AS id, 'x' AS name FROM generate_series(1, 100000) i",
    )?;
    label(&cluster, "half", "acme")?;
    cluster.sql("CHECKPOINT")?;
    cluster.sql("DELETE FROM half WHERE id % 8 = 0")?;
    passes(&standby, &cluster)?;
    cluster.stop_at("rekey.switched")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLE half IS 'plaintext'")?;
    cluster.stopped_at("rekey.switched")?;
    cluster.sql("DELETE FROM half WHERE id % 8 = 1")?;
    cluster.resume();
    cluster.text("SELECT pagevault.wait_for_rekey('half'::regclass)")?;
    passes(&standby, &cluster)?;
    let expected = count(&cluster, "half")?;
    cluster.kill()?;
    promote(&standby)?;
    ensure!(count(&standby, "half")? == expected);
    standby.finish()?;
    cluster.start_server()?;
    cluster.finish()
}
