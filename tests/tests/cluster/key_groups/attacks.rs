//! What others can do while a key group is shredded, and what it says when it cannot end.

use super::*;

const SHRED: &str = "SELECT pagevault.shred_key_group('acme', 'acme')";

/// Starts to shred the group, and returns when it has reached the point. The handle gives what it
/// said, if it failed.
fn shred_until(cluster: &Cluster, point: &str) -> Result<std::thread::JoinHandle<Option<String>>> {
    cluster.stop_at(point)?;
    let mut client = cluster.client()?;
    let shredding = std::thread::spawn(move || {
        let error = client.batch_execute(SHRED).err()?;
        Some(error.to_string())
    });
    cluster.stopped_at(point)?;
    Ok(shredding)
}

fn groups(cluster: &Cluster) -> Result<String> {
    cluster.text("SELECT string_agg(key_group, ',' ORDER BY 1) FROM pagevault.key_groups")
}

/// A relation has moved to another group, and has pages under its former key. A copy of its files
/// needs that key; it was left out, since no key could be made in the group at that moment.
#[test]
fn a_raw_copy_is_not_made_without_former_keys() -> Result<()> {
    let settings = Settings::default()
        .conf("pagevault.rekey_threshold = 0")
        .conf("pagevault.rekey_rate = 8kB");
    let (cluster, _keys) = with_groups(&settings)?;
    cluster.sql("CREATE DATABASE src")?;
    let mut src = cluster.client_to("src")?;
    run_sql(
        &mut src,
        &format!(
            "CREATE EXTENSION pagevault; CREATE SCHEMA acme;
             SECURITY LABEL FOR pagevault ON SCHEMA acme IS 'encrypted key_group=acme';
             CREATE TABLE acme.t (id int, name text); INSERT INTO acme.t {ROWS}"
        ),
    )?;
    run_sql(&mut src, "CHECKPOINT")?;
    let moves = "SECURITY LABEL FOR pagevault ON TABLE acme.t IS 'encrypted key_group=umbrella'";
    run_sql(&mut src, moves)?;
    let kept = "SELECT count(*) FROM pagevault.rekey_jobs WHERE state = 'running'";
    cluster.eventually_that("a running job", || {
        ensure!(text(&mut cluster.client_to("src")?, kept)? == "1");
        Ok(())
    })?;
    run_sql(&mut src, "SELECT pagevault.pause_rekey(job) FROM pagevault.rekey_jobs")?;
    let query = format!("{COUNT} acme.t");
    let before = text(&mut src, &query)?;
    drop(src);
    let shredding = shred_until(&cluster, "shred.group_begun")?;
    let error = cluster.error("CREATE DATABASE copy TEMPLATE src STRATEGY file_copy")?;
    ensure!(error.sqlstate == "55006" && error.text().contains("is being shredded"), "{error}");
    cluster.resume();
    ensure!(shredding.join().ok().flatten().is_some(), "it was not refused");
    cluster.sql("CREATE DATABASE copy TEMPLATE src STRATEGY file_copy")?;
    for name in ["src", "copy"] {
        let found = text(&mut cluster.client_to(name)?, &query)?;
        ensure!(found == before, "{name}: {found} instead of {before}");
    }
    cluster.finish()
}

/// A dropped relation of the group is on a file system that is not mounted.
#[test]
fn what_is_away_is_noticed_before_anything_is_destroyed() -> Result<()> {
    let (cluster, _keys) = with_groups(&Settings::default())?;
    tables(&cluster)?;
    let place = cluster.make_tablespace("ts")?;
    cluster.sql("CREATE TABLE acme.old TABLESPACE ts AS SELECT 1 AS id; DROP TABLE acme.old")?;
    let before = count(&cluster, "acme.t")?;
    let away = place.with_extension("away");
    fs::rename(&place, &away)?;
    let error = cluster.error(SHRED)?;
    ensure!(error.text().contains("Nothing was destroyed"), "{error}");
    ensure!(count(&cluster, "acme.t")? == before, "the relations are destroyed");
    fs::rename(&away, &place)?;
    cluster.sql(SHRED)?;
    ensure!(groups(&cluster)? == "umbrella");
    cluster.finish()
}

/// What is destroyed stays destroyed, so the rest follows.
#[test]
fn a_cancelled_session_finishes() -> Result<()> {
    let (cluster, _keys) = with_groups(&Settings::default())?;
    tables(&cluster)?;
    for how in ["pg_cancel_backend", "pg_terminate_backend"] {
        let shredding = shred_until(&cluster, "shred.group_relations_destroyed")?;
        let asks = "FROM pg_stat_activity WHERE query LIKE 'SELECT pagevault.shred_key%'";
        cluster.sql(&format!("SELECT {how}(pid) {asks}"))?;
        cluster.resume();
        shredding.join().ok();
        cluster.eventually(&format!("SELECT count(*) {asks} AND state = 'active'"), "0")?;
        ensure!(groups(&cluster)? == "umbrella", "{how}: the group is still there");
        // Once more.
        cluster.sql("DROP SCHEMA acme CASCADE")?;
        cluster.sql(
            "SELECT pagevault.create_key_group('acme');
             SELECT pagevault.set_key_group_master_key('acme', 'of_acme', 'main');
             CREATE SCHEMA acme;
             SECURITY LABEL FOR pagevault ON SCHEMA acme IS 'encrypted key_group=acme';
             CREATE TABLE acme.t (id int)",
        )?;
    }
    cluster.finish()
}

/// Owners of tables, here in another database, whose labels have nothing to do with key groups.
#[test]
fn labels_of_others_do_not_hold_it_up() -> Result<()> {
    let (cluster, _keys) = with_groups(&Settings::default().conf("max_prepared_transactions = 2"))?;
    tables(&cluster)?;
    cluster.sql("CREATE ROLE mallory LOGIN")?;
    cluster.sql("CREATE DATABASE other OWNER mallory")?;
    let mut other = cluster.client_to("other")?;
    run_sql(&mut other, "CREATE EXTENSION pagevault; SET ROLE mallory; CREATE SCHEMA m")?;
    run_sql(
        &mut other,
        "CREATE TABLE m.mine (); BEGIN; SECURITY LABEL FOR pagevault ON TABLE m.mine IS NULL;
         PREPARE TRANSACTION 'forever'",
    )?;
    cluster.sql(SHRED)?;
    ensure!(groups(&cluster)? == "umbrella");
    run_sql(&mut other, "RESET ROLE")?;
    run_sql(&mut other, "ROLLBACK PREPARED 'forever'")?;
    drop(other);
    cluster.finish()
}

/// The label of a tablespace counts in all databases.
#[test]
fn what_is_not_moved_in_another_database_is_noticed() -> Result<()> {
    let (cluster, _keys) = with_groups(&Settings::default())?;
    tables(&cluster)?;
    cluster.make_tablespace("ts")?;
    cluster.sql("CREATE DATABASE other")?;
    let mut other = cluster.client_to("other")?;
    run_sql(&mut other, "CREATE EXTENSION pagevault; CREATE TABLE t TABLESPACE ts AS SELECT 1")?;
    cluster.sql("SECURITY LABEL FOR pagevault ON TABLESPACE ts IS 'encrypted key_group=acme'")?;
    let error = cluster.error(SHRED)?;
    ensure!(error.text().contains("database \"other\" has files there"), "{error}");
    ensure!(error.text().contains("Nothing was destroyed"), "{error}");
    count(&cluster, "acme.t")?;
    run_sql(&mut other, "DROP TABLE t")?;
    drop(other);
    cluster.sql(SHRED)?;
    ensure!(groups(&cluster)? == "umbrella");
    cluster.finish()
}
