//! A standby without a group that its primary still has.

use super::*;

/// What the standby shows, wherever the primary is.
fn shows(standby: &Cluster, tables: &[&str], primary: &Cluster) -> Result<()> {
    wait_for(standby, primary)?;
    are_destroyed(standby, tables)?;
    for table in ["umbrella.t", "public.t"] {
        ensure!(count(standby, table)? == count(primary, table)?, "{table}");
    }
    Ok(())
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
    shows(&standby, &["acme.t", "acme.u", "acme.v"], &cluster)?;
    cluster.sql(
        "CREATE TABLE acme.w AS SELECT i AS id, repeat('secret-of-a-tenant', 9) AS name FROM generate_series(1, 2000) i;
         UPDATE acme.t SET name = 'v'; INSERT INTO umbrella.t (name) VALUES ('x')",
    )?;
    cluster.sql("VACUUM (TRUNCATE) acme.t")?;
    cluster.sql("CHECKPOINT")?;
    shows(&standby, &["acme.t", "acme.u", "acme.v", "acme.w"], &cluster)?;
    standby.sql("CHECKPOINT")?;
    // Neither the key nor a restart changes that.
    keys[1].bring_back()?;
    standby.kill()?;
    standby.start_server()?;
    cluster.sql("DELETE FROM acme.w WHERE id % 2 = 0; INSERT INTO acme.w SELECT 0, 'x'")?;
    shows(&standby, &["acme.t", "acme.w"], &cluster)?;
    // A copy of it starts as it is.
    let mut copy = Cluster::from_files_for(standby.installation(), |target| {
        standby.base_backup_with(target, &[])
    })?;
    allow(&mut copy);
    ensure!(marker(&copy).exists(), "the backup does not have the file");
    copy.append_conf("primary_conninfo = ''")?;
    copy.allow_log("neither primary_conninfo nor restore_command");
    copy.start_server()?;
    are_destroyed(&copy, &["acme.t", "acme.w"])?;
    ensure!(count(&copy, "umbrella.t")? == count(&cluster, "umbrella.t")?);
    copy.finish()?;
    // The key of its own group is nobody's business.
    let expected = count(&cluster, "umbrella.t")?;
    cluster.kill()?;
    standby.promote()?;
    standby.eventually_that("the end is logged", || {
        ensure!(!marker(&standby).exists());
        Ok(())
    })?;
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
    shows(&standby, &["acme.t", "moving"], &cluster)?;
    leave(&cluster, "moving")?;
    cluster.sql("UPDATE moving SET name = 'z'")?;
    wait_for(&standby, &cluster)?;
    let error = standby.error(&format!("{COUNT} moving"))?;
    ensure!(error.text().contains("may lack pages until recovery has ended"), "{error}");
    ensure!(error.sqlstate == "55000" && error.hint.contains("After a promotion"), "{error}");
    cluster.sql("VACUUM FULL moving")?;
    wait_for(&standby, &cluster)?;
    ensure!(count(&standby, "moving")? == count(&cluster, "moving")?);
    // The primary does not end the group while it has former keys under it.
    LEFT.iter().try_for_each(|table| cluster.sql(&format!("VACUUM FULL {table}")))?;
    cluster.sql("SELECT * FROM pagevault.shred_key_group('acme', 'acme')")?;
    cluster.sql("INSERT INTO umbrella.t (name) VALUES ('x')")?;
    shows(&standby, &["acme.t", "acme.v"], &cluster)?;
    let expected = count(&cluster, "umbrella.t")?;
    standby.kill()?;
    standby.start_server()?;
    shows(&standby, &["acme.t", "acme.v"], &cluster)?;
    cluster.kill()?;
    standby.promote()?;
    are_destroyed(&standby, &["acme.t", "acme.v"])?;
    ensure!(count(&standby, "umbrella.t")? == expected);
    standby.finish()?;
    cluster.start_server()?;
    cluster.finish()
}
