//! The key of a group is away for good, and recovery needs it.

use super::*;

const GIVE_UP: &str = "pagevault.give_up_key_groups";

/// A standby whose primary is gone, and that waits for the key of a group: of rows of that group,
/// and of others that come later.
fn orphaned(cluster: &mut Cluster) -> Result<(Cluster, KeyFile)> {
    let late = cluster.key_file("late", "main")?;
    tables(cluster)?;
    let mut standby = standby_of(cluster, &[])?;
    for text in ["key group", "recovery waits", "did not promote within"] {
        standby.allow_log(text);
    }
    wait_for(&standby, cluster)?;
    standby.stop(StopMode::Fast)?;
    cluster.sql(&late.add_provider("late"))?;
    cluster.sql("SELECT pagevault.create_key_group('late')")?;
    cluster.sql("SELECT pagevault.set_key_group_master_key('late', 'late', 'main')")?;
    cluster.sql(
        "CREATE SCHEMA late;
         SECURITY LABEL FOR pagevault ON SCHEMA late IS 'encrypted key_group=late';
         CREATE TABLE late.t AS SELECT i AS id, 'x' AS name FROM generate_series(1, 1000) i;
         CREATE INDEX ON late.t (id);
         INSERT INTO umbrella.t (name) VALUES ('late')",
    )?;
    late.take_away()?;
    standby.start_server()?;
    standby.eventually_logs("recovery waits for a key")?;
    cluster.kill()?;
    Ok((standby, late))
}

fn ask_for_promotion(standby: &Cluster) -> Result<()> {
    ensure!(standby.text("SELECT pg_promote(true, 2)")? == "f", "it is promoted");
    Ok(())
}

/// A restart does not find the key either. It is not new any more then: redo waits at a page.
fn restart_waiting(standby: &Cluster) -> Result<()> {
    standby.stop(StopMode::Fast)?;
    let waits = || standby.log().matches("recovery waits for a key").count();
    let so_far = waits();
    standby.start_server()?;
    standby.eventually_that("it waits again", || {
        ensure!(waits() > so_far, "{}", waits());
        Ok(())
    })
}

/// A promotion goes on waiting, and the standby goes on serving queries. It ends when the key is
/// back.
#[test]
fn a_promotion_waits_for_the_key_of_a_group() -> Result<()> {
    let (mut cluster, _keys) = with_groups(&Settings::default())?;
    let (standby, late) = orphaned(&mut cluster)?;
    ask_for_promotion(&standby)?;
    let before = count(&standby, "umbrella.t")?;
    ensure!(count(&standby, "acme.t")? == before);
    restart_waiting(&standby)?;
    ensure!(count(&standby, "umbrella.t")? == before);
    ask_for_promotion(&standby)?;
    late.bring_back()?;
    standby.sql("SELECT pagevault.unlock()")?;
    standby.eventually("SELECT pg_is_in_recovery()", "f")?;
    ensure!(count(&standby, "late.t")? == "1000 1000");
    ensure!(count(&standby, "umbrella.t")? != before, "rows are missing");
    standby.sql("CHECKPOINT")?;
    standby.finish()
}

/// Or when the group is given up: it is destroyed then, for good, and all others are whole.
#[test]
fn a_promotion_gives_up_a_group() -> Result<()> {
    gives_up(false)
}

/// The same at a page, where a standby waits that was restarted.
#[test]
fn a_promotion_gives_up_a_group_at_a_page() -> Result<()> {
    gives_up(true)
}

fn gives_up(at_page: bool) -> Result<()> {
    let (mut cluster, _keys) = with_groups(&Settings::default())?;
    let (standby, late) = orphaned(&mut cluster)?;
    if at_page {
        restart_waiting(&standby)?;
    }
    let before = count(&standby, "umbrella.t")?;
    ask_for_promotion(&standby)?;
    // Another group's name does not end the wait, nor does a part of its own.
    standby.set(&[(GIVE_UP, "lat, umbrella")])?;
    ensure!(standby.text("SELECT pg_is_in_recovery()")? == "t");
    standby.set(&[(GIVE_UP, "umbrella, late")])?;
    standby.eventually("SELECT pg_is_in_recovery()", "f")?;
    standby.eventually_logs("key group \"late\" is given up")?;
    ensure!(standby.log().contains("\"action\":\"give_up_key_group\",\"by\":\"recovery\""));
    let is_whole = |standby: &Cluster| -> Result<()> {
        let error = standby.error(&format!("{COUNT} late.t"))?;
        ensure!(error.text().contains("were destroyed"), "{error}");
        ensure!(count(standby, "umbrella.t")? != before, "rows are missing");
        ensure!(standby.text("SELECT count(*) FROM umbrella.t WHERE name = 'late'")? == "1");
        ensure!(standby.text("SELECT count(*) FROM acme.t")? == "300");
        Ok(())
    };
    is_whole(&standby)?;
    standby.sql("CHECKPOINT; CREATE TABLE umbrella.u AS SELECT 1 AS id")?;
    // It does not come back with its key. Nobody makes another one that would be given up.
    late.bring_back()?;
    let error = standby.error("SELECT pagevault.create_key_group('late')")?;
    ensure!(error.sqlstate == "55000" && error.text().contains("is to be given up"), "{error}");
    ensure!(error.detail.contains(GIVE_UP) && error.hint.contains("Remove it"), "{error}");
    standby.crash()?;
    is_whole(&standby)?;
    standby.set(&[(GIVE_UP, "")])?;
    standby.restart()?;
    is_whole(&standby)?;
    standby.sql("SELECT pagevault.create_key_group('late'); DROP TABLE late.t")?;
    let groups = "SELECT string_agg(key_group, ',' ORDER BY key_group) FROM pagevault.key_groups";
    ensure!(standby.text(groups)? == "acme,late,umbrella", "{}", standby.text(groups)?);
    standby.finish()
}

/// A tenant destroys its key, and the server crashes before a checkpoint. The server starts without
/// the group if that is given up, and standbys follow. Relations that have left the group are
/// whole.
#[test]
fn a_crash_gives_up_a_group() -> Result<()> {
    let (mut cluster, keys) = with_groups(&Settings::default())?;
    for text in ["key group", "recovery needs", "FATAL", "startup process", "were destroyed"] {
        cluster.allow_log(text);
    }
    tables(&cluster)?;
    for table in ["left_before", "left_after"] {
        cluster.sql(&format!(
            "CREATE TABLE {table} AS SELECT i AS id, 'x' AS name FROM generate_series(1, 1000) i;
             SECURITY LABEL FOR pagevault ON TABLE {table} IS 'encrypted key_group=acme'"
        ))?;
    }
    let leave = |table: &str| {
        cluster.sql(&format!(
            "SECURITY LABEL FOR pagevault ON TABLE {table} IS 'encrypted key_group=umbrella';
             UPDATE {table} SET name = 'y'"
        ))
    };
    leave("left_before")?;
    let mut standby = standby_of(&cluster, &[])?;
    standby.allow_log("were destroyed");
    cluster.sql("CHECKPOINT")?;
    leave("left_after")?;
    cluster.sql(
        "INSERT INTO acme.t (name) VALUES ('late'); UPDATE acme.t SET name = 'z' WHERE id < 9;
         CREATE TABLE acme.u AS SELECT 'x' AS name;
         INSERT INTO umbrella.t (name) VALUES ('late')",
    )?;
    cluster.sql("VACUUM acme.t")?;
    wait_for(&standby, &cluster)?;
    let all = count(&cluster, "umbrella.t")?;
    cluster.kill()?;
    keys[1].take_away()?;
    ensure!(cluster.start_server().is_err(), "it has started without the key");
    let log = cluster.log();
    for text in ["needs the key of key group \"acme\"", "key provider \"of_acme\"", GIVE_UP] {
        ensure!(log.contains(text), "the log does not have {text}");
    }
    cluster.append_conf(&format!("{GIVE_UP} = 'acme'"))?;
    cluster.start_server()?;
    ensure!(cluster.log().contains("key group \"acme\" is given up"), "it does not say so");
    ensure!(cluster.log().contains("\"action\":\"give_up_key_group\",\"by\":\"start\""));
    let is_whole = |server: &Cluster| -> Result<()> {
        for table in ["acme.t", "acme.u"] {
            let error = server.error(&format!("{COUNT} {table}"))?;
            ensure!(error.text().contains("were destroyed"), "{table}: {error}");
        }
        ensure!(count(server, "umbrella.t")? == all);
        for table in ["left_before", "left_after"] {
            ensure!(
                server.text(&format!(
                    "SELECT string_agg(DISTINCT name, '') || count(*) FROM {table}"
                ))? == "y1000"
            );
        }
        Ok(())
    };
    is_whole(&cluster)?;
    cluster.sql("CHECKPOINT")?;
    keys[1].bring_back()?;
    is_whole(&cluster)?;
    // The standby has the key, and follows nevertheless.
    standby.eventually("SELECT count(*) FROM pagevault.key_groups", "1")?;
    is_whole(&standby)?;
    cluster.append_conf(&format!("{GIVE_UP} = ''"))?;
    cluster.crash()?;
    is_whole(&cluster)?;
    standby.promote()?;
    is_whole(&standby)?;
    cluster.sql("DROP TABLE acme.u; TRUNCATE public.t")?;
    standby.finish()?;
    cluster.finish()
}

/// A group that is named and whose key is there is not given up, nor is any after a clean shutdown.
#[test]
fn only_locked_groups_are_given_up_in_recovery() -> Result<()> {
    let (mut cluster, keys) = with_groups(&Settings::default().conf(&format!("{GIVE_UP} = ''")))?;
    cluster.allow_log("key group");
    tables(&cluster)?;
    cluster.append_conf(&format!("{GIVE_UP} = 'acme,umbrella'"))?;
    cluster.crash()?;
    let all = count(&cluster, "acme.t")?;
    ensure!(count(&cluster, "umbrella.t")? == all);
    ensure!(cluster.log().contains("pagevault.give_up_key_groups names key group \"acme\""));
    cluster.stop(StopMode::Fast)?;
    keys[1].take_away()?;
    cluster.start_server()?;
    is_locked(&cluster, "acme.t", "acme")?;
    keys[1].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    ensure!(count(&cluster, "acme.t")? == all);
    ensure!(!cluster.log().contains("is given up"), "given up");
    cluster.finish()
}
