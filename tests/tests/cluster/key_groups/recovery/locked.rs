//! Standbys to which a group is locked that has no interim keys, because only the database has a
//! master key, not the cluster. They must be able to replay whatever needs none of its keys.

use super::*;

/// A primary with the group "acme" in the database `postgres`, or another one, and the group's key
/// file.
fn without_interim_keys(database: &str) -> Result<(Cluster, [KeyFile; 2])> {
    let settings = Settings::default().without_checksums().conf("autovacuum = off");
    let settings = settings.conf("bgwriter_lru_maxpages = 0");
    let primary = Cluster::start(&settings)?;
    let keys = [primary.key_file("acme", "main")?, primary.key_file("database", "main")?];
    primary.sql("CREATE EXTENSION pagevault")?;
    primary.sql(&keys[0].add_provider("of_acme"))?;
    primary.sql(&keys[1].add_provider("of_database"))?;
    if database != "postgres" {
        primary.sql(&format!("CREATE DATABASE {database}"))?;
        run_sql(&mut primary.client_to(database)?, "CREATE EXTENSION pagevault")?;
    }
    run_sql(
        &mut primary.client_to(database)?,
        "SELECT pagevault.set_database_master_key('of_database', 'main');
         SELECT pagevault.create_key_group('acme');
         SELECT pagevault.set_key_group_master_key('acme', 'of_acme', 'main');
         CREATE TABLE t (id int, name text);
         SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted key_group=acme';
         INSERT INTO t SELECT i, 'some' FROM generate_series(1, 10) i",
    )?;
    Ok((primary, keys))
}

fn standby(primary: &Cluster) -> Result<Cluster> {
    let mut standby = standby_of(primary, &["bgwriter_lru_maxpages = 0"])?;
    for text in ["key group", "were destroyed", "could not", "terminating walreceiver"] {
        standby.allow_log(text);
    }
    wait_for(&standby, primary)?;
    Ok(standby)
}

/// A standby replays changes of a group whose key is away, and then its destruction.
#[test]
fn the_group_ends() -> Result<()> {
    let (primary, [acme, _database]) = without_interim_keys("postgres")?;
    let standby = standby(&primary)?;
    standby.kill()?;
    primary.sql("CHECKPOINT")?;
    primary.sql("UPDATE t SET name = 'other'")?;
    acme.take_away()?;
    primary.sql("SELECT * FROM pagevault.shred_key_group('acme', 'acme')")?;
    standby.start_server()?;
    wait_for(&standby, &primary)?;
    let error = standby.error(&format!("{COUNT} t"))?;
    ensure!(error.text().contains("were destroyed"), "{error}");
    standby.finish()?;
    primary.finish()
}

/// The same with the whole database.
#[test]
fn the_database_is_shredded() -> Result<()> {
    let (primary, [acme, _database]) = without_interim_keys("app")?;
    let standby = standby(&primary)?;
    standby.kill()?;
    primary.sql("CHECKPOINT")?;
    run_sql(&mut primary.client_to("app")?, "UPDATE t SET name = 'other'")?;
    acme.take_away()?;
    primary.sql("SELECT * FROM pagevault.shred_database('app', 'app')")?;
    standby.start_server()?;
    wait_for(&standby, &primary)?;
    let error = expect_error(&mut standby.client_to("app")?, &format!("{COUNT} t"))?;
    ensure!(error.text().contains("were destroyed"), "{error}");
    standby.finish()?;
    primary.finish()
}

/// Pages in plaintext, from before the table was encrypted, do not stay on the standby's disk.
#[test]
fn former_plaintext_is_overwritten() -> Result<()> {
    let (primary, [acme, _database]) = without_interim_keys("postgres")?;
    primary.sql(
        "CREATE TABLE late AS SELECT 'rohrdommel ' || i AS name FROM generate_series(1, 1000) i",
    )?;
    let standby = standby(&primary)?;
    standby.sql("CHECKPOINT")?;
    let file = standby.data_directory().join(primary.relation_path("late")?);
    let has_rows = || Ok::<_, anyhow::Error>(holds(&fs::read(&file)?, b"rohrdommel"));
    ensure!(has_rows()?, "the test shows nothing");
    standby.stop(StopMode::Fast)?;
    acme.take_away()?;
    standby.start_server()?;
    primary.sql("SECURITY LABEL FOR pagevault ON TABLE late IS 'encrypted key_group=acme'")?;
    primary.sql("SELECT pagevault.wait_for_rekey('late'::regclass)")?;
    primary.sql("SELECT * FROM pagevault.shred_key_group('acme', 'acme')")?;
    wait_for(&standby, &primary)?;
    standby.sql("CHECKPOINT")?;
    ensure!(!has_rows()?, "the rows are on the standby's disk");
    standby.finish()?;
    primary.finish()
}

/// Only a free space map that the standby has made itself is under the group's key still when the
/// table has left the group.
#[test]
fn a_table_leaves_the_group() -> Result<()> {
    let (primary, [acme, _database]) = without_interim_keys("postgres")?;
    let standby = standby(&primary)?;
    primary.sql(
        "CREATE TABLE left_it (id int, name text);
         SECURITY LABEL FOR pagevault ON TABLE left_it IS 'encrypted key_group=acme';
         INSERT INTO left_it SELECT i, repeat('x', 500) FROM generate_series(1, 14) i",
    )?;
    primary.sql("CHECKPOINT")?;
    wait_for(&standby, &primary)?;
    standby.sql("CHECKPOINT")?;
    let map = format!("{}_fsm", primary.relation_path("left_it")?.display());
    let has_map = |server: &Cluster| server.data_directory().join(&map).exists();
    ensure!(has_map(&standby) && !has_map(&primary), "the test shows nothing");
    standby.stop(StopMode::Fast)?;
    acme.take_away()?;
    standby.start_server()?;
    primary.sql("SECURITY LABEL FOR pagevault ON TABLE left_it IS 'encrypted'")?;
    primary.sql("SELECT pagevault.wait_for_rekey('left_it'::regclass)")?;
    wait_for(&standby, &primary)?;
    ensure!(standby.text("SELECT count(*) FROM left_it")? == "14", "rows are missing");
    standby.finish()?;
    primary.finish()
}
