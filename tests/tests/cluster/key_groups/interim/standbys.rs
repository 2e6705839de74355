//! Standbys to which a group is locked.

use pagevault_tests::standby::{allow_what_failovers_say, rewind};

use super::*;

/// A standby starts again without the key, and follows whatever the primary does with the group,
/// also a new key of it. It is promoted with the key, or before it gets that.
#[test]
fn a_standby_goes_on_without_the_key() -> Result<()> {
    for is_locked_at_promotion in [false, true] {
        let (cluster, keys, _) = changed(&Settings::default())?;
        let mut standby = standby_of(&cluster, &[])?;
        standby.allow_log("key group");
        standby.allow_log("could not");
        standby.allow_log("terminating walreceiver");
        standby.stop(StopMode::Fast)?;
        cluster.sql("UPDATE acme.t SET name = 'again ' || name WHERE id % 3 = 0")?;
        cluster.sql(
            "SELECT pagevault.rotate_key_group_key('acme');
             TRUNCATE acme.born; INSERT INTO acme.born SELECT * FROM acme.t;
             CREATE TABLE acme.late AS SELECT * FROM acme.t; CREATE INDEX ON acme.late (id);
             INSERT INTO umbrella.t (name) VALUES ('later')",
        )?;
        keys[1].take_away()?;
        standby.start_server()?;
        wait_for(&standby, &cluster)?;
        are_locked(&standby, &others(&cluster)?)?;
        is_locked(&standby, "acme.late", "acme")?;
        // A restart point, and a start from there.
        cluster.sql("UPDATE acme.t SET name = 'c' || name WHERE id % 5 = 0; CHECKPOINT")?;
        wait_for(&standby, &cluster)?;
        standby.sql("CHECKPOINT")?;
        standby.kill()?;
        cluster.sql("DELETE FROM acme.t WHERE id % 13 = 0")?;
        cluster.sql("VACUUM acme.t")?;
        standby.start_server()?;
        wait_for(&standby, &cluster)?;
        are_locked(&standby, &others(&cluster)?)?;
        ensure!(!interim_files(&standby)?.is_empty(), "nothing is under an interim key");
        if !is_locked_at_promotion {
            keys[1].bring_back()?;
            standby.sql("SELECT pagevault.unlock()")?;
            is_whole(&standby, &looks(&cluster)?)?;
            cluster.sql("UPDATE acme.t SET name = 'd' || name WHERE id % 2 = 0")?;
            wait_for(&standby, &cluster)?;
            is_whole(&standby, &looks(&cluster)?)?;
        }
        let all = looks(&cluster)?;
        cluster.kill()?;
        standby.promote()?;
        if is_locked_at_promotion {
            is_locked(&standby, "acme.t", "acme")?;
            keys[1].bring_back()?;
            standby.sql("SELECT pagevault.unlock()")?;
        }
        is_whole(&standby, &all)?;
        rekeyed(&standby)?;
        is_whole(&standby, &all)?;
        standby.finish()?;
    }
    Ok(())
}

/// A standby that has the key of a group waits for the next one, as for that of a database: it may
/// have to read pages whose data keys the next one wraps.
#[test]
fn a_standby_with_the_key_waits_for_the_next_one() -> Result<()> {
    let (cluster, keys, _) = changed(&Settings::default())?;
    let mut standby = standby_of(&cluster, &["shared_buffers = 1MB"])?;
    standby.allow_log("key group");
    standby.allow_log("recovery waits");
    wait_for(&standby, &cluster)?;
    cluster.sql("CHECKPOINT; UPDATE acme.t SET name = 'again ' || name")?;
    wait_for(&standby, &cluster)?;
    standby.sql("SELECT pg_wal_replay_pause()")?;
    cluster.sql("SELECT pagevault.rotate_key_group_key('acme')")?;
    cluster.sql("UPDATE acme.t SET name = 'and ' || name")?;
    let all = looks(&cluster)?;
    keys[1].take_away()?;
    standby.sql("SELECT pg_wal_replay_resume()")?;
    standby.eventually_logs("recovery waits for a new key")?;
    ensure!(standby.text("SELECT count(*) FROM public.t")? != "0");
    keys[1].bring_back()?;
    standby.sql("SELECT pagevault.unlock()")?;
    wait_for(&standby, &cluster)?;
    is_whole(&standby, &all)?;
    standby.finish()?;
    cluster.finish()
}

/// Records that remove entries from overflow pages of a hash index have redo lock its primary
/// bucket page, of which WAL has no image. Recovery does without it.
#[test]
fn a_page_that_redo_only_locks() -> Result<()> {
    let (mut cluster, keys) =
        with_groups(&Settings::default().conf("autovacuum = off\nshared_buffers = 1MB"))?;
    let mut standby = standby_of(&cluster, &["shared_buffers = 1MB"])?;
    for server in [&mut cluster, &mut standby] {
        for text in ["key group", "could not", "terminating walreceiver"] {
            server.allow_log(text);
        }
    }
    cluster.sql(
        "CREATE TABLE acme.h AS SELECT i % 3 AS k, i AS id FROM generate_series(1, 9000) i;
         CREATE INDEX ON acme.h USING hash (k)",
    )?;
    wait_for(&standby, &cluster)?;
    cluster.sql("CHECKPOINT")?;
    wait_for(&standby, &cluster)?;
    standby.sql("CHECKPOINT")?;
    standby.kill()?;
    cluster.sql("DELETE FROM acme.h WHERE id % 4 > 0 AND id > 3000")?;
    cluster.sql("VACUUM acme.h")?;
    // It flushes no WAL by itself.
    cluster.sql("CREATE TABLE public.late (id int)")?;
    let look =
        "SET enable_seqscan = off; SELECT count(*) || ' ' || sum(id) FROM acme.h WHERE k = 1";
    let all = cluster.text(look)?;
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    is_locked_by(&cluster, "SELECT count(*) FROM acme.h")?;
    standby.start_server()?;
    wait_for(&standby, &cluster)?;
    is_locked_by(&standby, "SELECT count(*) FROM acme.h")?;
    keys[1].bring_back()?;
    for server in [&cluster, &standby] {
        server.sql("SELECT pagevault.unlock()")?;
        wait_for(&standby, &cluster)?;
        let found = server.text(look)?;
        ensure!(found == all, "{found}, not {all}");
    }
    standby.finish()?;
    cluster.finish()
}

fn is_locked_by(cluster: &Cluster, query: &str) -> Result<()> {
    let error = cluster.error(query)?;
    ensure!(error.sqlstate == "55000" && error.text().contains("locked"), "{error}");
    Ok(())
}

/// `pg_rewind` replaces the marks by those of its source. Pages that it does not copy are still
/// under interim keys.
#[test]
fn a_rewound_server_reads_its_interim_pages() -> Result<()> {
    let (mut cluster, keys, _) = changed(&Settings::default())?;
    let mut standby = standby_of(&cluster, &[])?;
    for server in [&mut cluster, &mut standby] {
        server.allow_log("key group");
        allow_what_failovers_say(server);
    }
    cluster.without_witness("its WAL is lost");
    cluster.sql("CHECKPOINT")?;
    cluster.sql("UPDATE acme.t SET name = 'again ' || name WHERE id % 3 = 0")?;
    wait_for(&standby, &cluster)?;
    standby.promote()?;
    cluster
        .sql("UPDATE acme.t SET name = 'lost'; INSERT INTO umbrella.t (name) VALUES ('lost')")?;
    keys[1].take_away()?;
    cluster.kill()?;
    cluster.start_server()?;
    cluster.sql("CHECKPOINT")?;
    ensure!(!interim_files(&cluster)?.is_empty(), "nothing is under an interim key");
    cluster.stop(StopMode::Fast)?;
    standby.sql("UPDATE acme.born SET name = 'there' WHERE id % 9 = 0; CHECKPOINT")?;
    rewind(&cluster, &standby)?;
    wait_for(&cluster, &standby)?;
    is_locked(&cluster, "acme.t", "acme")?;
    keys[1].bring_back()?;
    cluster.sql("SELECT pagevault.unlock()")?;
    is_whole(&cluster, &looks(&standby)?)?;
    standby.sql("UPDATE acme.t SET name = 'new ' || name WHERE id % 4 = 0")?;
    wait_for(&cluster, &standby)?;
    let all = looks(&standby)?;
    is_whole(&cluster, &all)?;
    standby.kill()?;
    cluster.promote()?;
    is_whole(&cluster, &all)?;
    cluster.eventually_that("no interim pages", || {
        ensure!(interim_files(&cluster)?.is_empty());
        Ok(())
    })?;
    is_whole(&cluster, &all)?;
    cluster.finish()
}

/// Another data key has the same interim version as an earlier one. Which one a page is under
/// depends on the data keys that were replayed, not on what a process has cached.
#[test]
fn many_rotations_while_a_group_is_locked_to_a_standby() -> Result<()> {
    let (cluster, keys) = with_groups(&Settings::default().conf("autovacuum = off"))?;
    cluster.sql("CREATE TABLE acme.r AS SELECT i AS id, md5(i::text) AS name FROM generate_series(1, 300) i")?;
    let mut standby = standby_of(&cluster, &["shared_buffers = 1MB"])?;
    for text in ["key group", "could not", "terminating walreceiver"] {
        standby.allow_log(text);
    }
    standby.kill()?;
    cluster.sql("UPDATE acme.r SET name = 'a' || name")?;
    keys[1].take_away()?;
    standby.start_server()?;
    wait_for(&standby, &cluster)?;
    standby.sql("CHECKPOINT")?;
    for round in 1..=257 {
        let job = cluster.text("SELECT pagevault.rotate_data_key('acme.r')")?;
        ensure!(cluster.text(&format!("SELECT pagevault.wait_for_rekey({job}, '60s')"))? == "t");
        if round % 64 == 0 {
            wait_for(&standby, &cluster)?;
            standby.sql("CHECKPOINT")?;
        }
    }
    cluster.sql("UPDATE acme.r SET name = 'b' || name")?;
    wait_for(&standby, &cluster)?;
    standby.sql("CHECKPOINT")?;
    let look = "SELECT count(*) || ' ' || sum(hashtext(name)) FROM acme.r";
    let all = cluster.text(look)?;
    keys[1].bring_back()?;
    standby.sql("SELECT pagevault.unlock()")?;
    ensure!(standby.text(look)? == all);
    cluster.kill()?;
    standby.promote()?;
    ensure!(standby.text(look)? == all);
    standby.finish()
}
