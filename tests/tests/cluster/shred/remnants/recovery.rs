//! Remnants and recovery: older pages, crashes, standbys and backups.

use pagevault_tests::backup::Backup;
use pagevault_tests::witnesses::Witnesses;

use super::*;

/// Shreds, and has the server start with the pages of statistics from before, which were on disk.
fn shred_under_older_pages(cluster: &Cluster) -> Result<()> {
    cluster.restart()?;
    let mut before = Vec::new();
    for place in PLACES {
        for file in cluster.files(place)? {
            before.push((file.path.clone(), file.bytes()?));
        }
    }
    cluster.sql(SHRED)?;
    cluster.stop(StopMode::Fast)?;
    for (path, bytes) in &before {
        std::fs::write(path, bytes)?;
    }
    cluster.start_server()
}

/// An older page decrypts to an empty page, both in its original data directory and when it is
/// restored.
#[test]
fn older_pages_decrypt_to_empty_pages() -> Result<()> {
    let (cluster, _keys) = sampled("")?;
    let u = cluster.text(U)?;
    shred_under_older_pages(&cluster)?;
    ensure_no_canary(&cluster)?;
    let rows = "SELECT count(*) FROM pg_statistic";
    ensure!(cluster.text(rows)? == "0", "{}", cluster.text(rows)?);
    let state = "SELECT string_agg(DISTINCT state, ' ') FROM pagevault.verify('pg_statistic')
        WHERE relation = 'pg_statistic'::regclass AND fork = 'main'";
    ensure!(cluster.text(state)? == "destroyed", "{}", cluster.text(state)?);
    // Queries are planned without statistics, and ANALYZE creates them again.
    ensure_shredded(&cluster, &u)?;
    cluster.sql("ANALYZE u")?;
    let of_u = "SELECT count(*) FROM pg_stats WHERE tablename = 'u'";
    ensure!(cluster.text(of_u)? == "2", "ANALYZE");
    cluster.crash()?;
    ensure!(cluster.text(of_u)? == "2", "ANALYZE, after a crash");
    ensure_shredded(&cluster, &u)?;
    cluster.finish()
}

/// Where pages become empty, older index entries must not find rows of other columns: the planner
/// would take numbers for texts.
#[test]
fn rows_added_in_place_of_older_pages() -> Result<()> {
    let (cluster, _keys) = sampled("")?;
    let columns = |value: &str| -> String {
        (1..=60).map(|column| format!("{value} AS c{column}")).collect::<Vec<_>>().join(", ")
    };
    cluster.sql(&format!(
        "CREATE TABLE texts AS SELECT {} FROM generate_series(1, 100) i;
         CREATE TABLE numbers AS SELECT {} FROM generate_series(1, 100) i;
         ANALYZE texts",
        columns("'zeisig' || i % 3"),
        columns("i % 3"),
    ))?;
    shred_under_older_pages(&cluster)?;
    for statement in
        ["VACUUM pg_statistic", "ANALYZE numbers", "VACUUM pg_statistic", "ANALYZE texts"]
    {
        cluster.sql(statement)?;
        for column in 1..=60 {
            let plan = format!("EXPLAIN SELECT * FROM texts WHERE c{column} = 'zeisig1'");
            cluster.sql(&plan).with_context(|| format!("after {statement}"))?;
        }
    }
    cluster.sql("VACUUM FULL pg_statistic")?;
    cluster.finish()
}

/// A snapshot of a running server with the later keystore: its WAL ends before the tombstone. No
/// page may be written with an LSN beyond the end of WAL.
#[test]
fn a_snapshot_with_the_later_keystore() -> Result<()> {
    let images = Settings::default().conf("full_page_writes = on");
    let none = Settings::default().conf("full_page_writes = off");
    for settings in
        [images.clone(), none.clone(), images.without_checksums(), none.without_checksums()]
    {
        let conf = format!("{settings:?}");
        let (cluster, _keys) = sampled_with(&settings)?;
        let u = cluster.text(U)?;
        cluster.sql("VACUUM pg_statistic")?;
        cluster.sql("CHECKPOINT")?;
        cluster.sql(&analyzed_tables("x"))?;
        cluster.sql("DELETE FROM pg_statistic WHERE starelid = 'x1'::regclass")?;
        cluster.sql("VACUUM pg_statistic")?;
        cluster.sql(&analyzed_tables("w"))?;
        cluster.kill()?;
        let copy = cluster.directory().join("copy");
        super::crashes::copy_tree(&cluster.data_directory(), &copy)?;
        cluster.start_server()?;
        cluster.sql(SHRED)?;
        cluster.stop(StopMode::Fast)?;
        std::fs::remove_dir_all(copy.join("pagevault"))?;
        super::crashes::copy_tree(
            &cluster.data_directory().join("pagevault"),
            &copy.join("pagevault"),
        )?;
        if copy.join("postmaster.pid").exists() {
            std::fs::remove_file(copy.join("postmaster.pid"))?;
        }
        let mut restored = Cluster::from_files(|data| Ok(std::fs::rename(&copy, data)?))?;
        // WAL contains an image of the visibility map page, but only a change of the heap page.
        restored.allow_log("page is not marked all-visible but visibility map bit is set");
        for _ in 0..2 {
            restored.start_server().with_context(|| conf.clone())?;
            restored.sql(&U.replace("SELECT", "EXPLAIN SELECT"))?;
            restored.sql("ANALYZE u")?;
            for statement in ["VACUUM pg_statistic", "ANALYZE u", "CHECKPOINT"] {
                restored.sql(statement).with_context(|| format!("{conf}: {statement}"))?;
            }
            ensure_shredded(&restored, &u)?;
            restored.kill()?;
        }
        restored.start_server()?;
        restored.finish()?;
        cluster.start_server()?;
        cluster.finish()?;
    }
    Ok(())
}

/// The statistics of a database in its former tablespace had keys that are now destroyed.
#[test]
fn a_database_moves_and_is_copied_afterwards() -> Result<()> {
    let (mut cluster, _keys) = cluster("autovacuum = off")?;
    // The move deletes the former directory before it writes the record of that (movedb,
    // dbcommands.c), which a crash loses, or keeps if the WAL writer was faster.
    cluster.allow_log("could not open directory");
    cluster.allow_log("some useless files may be left behind in old database directory");
    cluster.make_tablespace("space")?;
    cluster.sql("CREATE DATABASE app")?;
    let mut app = cluster.client_to("app")?;
    for statement in ["CREATE EXTENSION IF NOT EXISTS pagevault", TABLES, "ANALYZE"] {
        run_sql(&mut app, statement)?;
    }
    drop(app);
    let of_u = text(&mut cluster.client_to("app")?, OF_U)?;
    for statement in [
        "ALTER DATABASE app SET TABLESPACE space",
        "CREATE DATABASE copy TEMPLATE app STRATEGY file_copy",
    ] {
        cluster.sql(statement)?;
    }
    for statement in [SHRED, "DROP TABLE t CASCADE"] {
        run_sql(&mut cluster.client_to("app")?, statement)?;
    }
    for statement in [
        "CREATE DATABASE later TEMPLATE app STRATEGY file_copy",
        "ALTER DATABASE app SET TABLESPACE pg_default",
        "ALTER DATABASE app SET TABLESPACE space",
    ] {
        cluster.sql(statement)?;
        cluster.crash()?;
    }
    for database in ["app", "copy", "later"] {
        let found = text(&mut cluster.client_to(database)?, OF_U)?;
        ensure!(found == of_u, "{database}: {found}");
        run_sql(&mut cluster.client_to(database)?, "ANALYZE u")?;
    }
    cluster.finish()
}

/// Statistics of the remaining table, returned by each server that has them.
const OF_U: &str = "SELECT string_agg(attname || md5(histogram_bounds::text), ' ' ORDER BY attname)
    FROM pg_stats WHERE tablename = 'u'";

/// Killed at each step: nothing is destroyed before the end, statistics of other tables stay, and
/// repeating it completes it. A standby and backups from before and during it agree.
#[test]
fn killed_at_each_step() -> Result<()> {
    let (cluster, _keys) = sampled("fsync = on")?;
    let u = cluster.text(U)?;
    let of_u = cluster.text(OF_U)?;
    let mut witnesses = Witnesses::with(&cluster, &["fsync = off", "shared_buffers = 512kB"])?;
    let rows = cluster.text("SELECT count(*) FROM t")?;
    for step in [
        "shred.forgotten",
        "rekey.switched",
        "remnants.page_cleared",
        "remnants.synced",
        "remnants.cleared",
        "shred.decided",
    ] {
        cluster.stop_at(step)?;
        let mut client = cluster.client()?;
        let session = std::thread::spawn(move || run_sql(&mut client, SHRED));
        cluster.stopped_at(step)?;
        if ["remnants.page_cleared", "remnants.cleared"].contains(&step) {
            witnesses.back_up(&cluster, step)?;
        }
        cluster.kill()?;
        cluster.resume();
        cluster.start_server()?;
        ensure!(session.join().is_ok_and(|ended| ended.is_err()), "{step}: it ended");
        ensure!(cluster.text("SELECT count(*) FROM t")? == rows, "{step}: the table");
        ensure!(cluster.text(OF_U)? == of_u, "{step}: statistics of another table");
    }
    let keys = statistics_keys(&cluster)?;
    cluster.sql("CHECKPOINT")?;
    // It has the earlier keystore and later pages.
    let backup = Backup::begin(&cluster)?;
    cluster.sql(SHRED)?;
    let restored = backup.end()?;
    cluster.crash()?;
    let is_clean = |server: &Cluster| -> Result<()> {
        ensure_no_canary(server)?;
        ensure!(server.text(OF_U)? == of_u, "statistics of another table");
        ensure_shredded(server, &u)?;
        for key in &keys {
            ensure!(!holds(&keystore(server)?, key), "a former key of statistics");
        }
        Ok(())
    };
    is_clean(&cluster)?;
    restored.start_server()?;
    is_clean(&restored)?;
    restored.finish()?;
    witnesses.judge_and(&cluster, &[U, OF_U], &["u", "pg_statistic"], is_clean)?;
    cluster.finish()
}

/// It starts again from an earlier point, with a keystore that no longer contains the former keys.
/// WAL contains a full-page image of each page, including those that the primary had written under
/// the new key before it cleared them.
#[test]
fn a_standby_that_restarts_from_an_earlier_point() -> Result<()> {
    let (primary, _keys) = sampled("full_page_writes = off")?;
    let u = primary.text(U)?;
    // The last pages contain free space and nothing to clear.
    primary.sql("VACUUM FULL pg_statistic")?;
    primary.sql(&analyzed_tables("x"))?;
    let mut standby = standby_of(&primary, &["shared_buffers = 512kB"])?;
    standby.allow_log("canceling statement due to conflict with recovery");
    primary.sql("CHECKPOINT")?;
    primary.stop_at("remnants.page_cleared")?;
    let mut client = primary.client()?;
    let shredding = std::thread::spawn(move || run_sql(&mut client, SHRED));
    primary.stopped_at("remnants.page_cleared")?;
    primary.sql(&analyzed_tables("w"))?;
    for statement in ["ANALYZE u", "CHECKPOINT"] {
        primary.sql(statement)?;
    }
    primary.resume();
    ensure!(shredding.join().is_ok_and(|ended| ended.is_ok()), "it failed");
    let all = "SELECT count(*) || ' ' ||
        sum(hashtext(concat(tablename, attname, n_distinct, histogram_bounds::text)))
        FROM pg_stats";
    let wanted = primary.text(all)?;
    wait_for(&standby, &primary)?;
    for _ in 0..2 {
        ensure_no_canary(&standby)?;
        ensure!(standby.text(all)? == wanted, "{} for {wanted}", standby.text(all)?);
        standby.kill()?;
        standby.start_server()?;
        wait_for(&standby, &primary)?;
    }
    standby.promote()?;
    ensure!(standby.text(all)? == wanted, "{} for {wanted}", standby.text(all)?);
    ensure_no_canary(&standby)?;
    ensure_shredded(&standby, &u)?;
    standby.finish()?;
    primary.finish()
}

/// Creates tables whose statistics take some pages.
fn analyzed_tables(name: &str) -> String {
    format!(
        "DO $$ BEGIN FOR i IN 1..20 LOOP
             EXECUTE format('CREATE TABLE {name}%s AS
                 SELECT i, i %% 5 AS j FROM generate_series(1, 100) i; ANALYZE {name}%s', i, i);
         END LOOP; END $$"
    )
}

/// The keystore was copied after the former keys were destroyed, and all pages before that. A
/// restore reads pages that it cannot open, and has a full-page image of each.
#[test]
fn a_backup_with_the_later_keystore() -> Result<()> {
    let (cluster, _keys) = sampled("")?;
    let u = cluster.text(U)?;
    let mut session = cluster.client()?;
    run_sql(&mut session, "SELECT pg_backup_start('a backup', true)")?;
    let copy = cluster.directory().join("copy");
    super::crashes::copy_tree(&cluster.data_directory(), &copy)?;
    // Pages are changed and written under the new key before they are cleared.
    cluster.stop_at("remnants.page_cleared")?;
    let mut client = cluster.client()?;
    let shredding = std::thread::spawn(move || run_sql(&mut client, SHRED));
    cluster.stopped_at("remnants.page_cleared")?;
    let changed = "CREATE TABLE w AS SELECT i, i % 5 AS j FROM generate_series(1, 100) i; \
        ANALYZE w; ANALYZE u; CHECKPOINT";
    for statement in changed.split("; ") {
        cluster.sql(statement)?;
    }
    cluster.resume();
    ensure!(shredding.join().is_ok_and(|ended| ended.is_ok()), "it failed");
    let of_u_now = cluster.text(OF_U)?;
    let of_w = "SELECT count(*) FROM pg_stats WHERE tablename = 'w'";
    ensure!(cluster.text(of_w)? == "2", "statistics of a new table");
    for part in ["pagevault", "pg_wal"] {
        std::fs::remove_dir_all(copy.join(part))?;
        let label = (part == "pg_wal")
            .then(|| text(&mut session, "SELECT labelfile FROM pg_backup_stop(false)"));
        if let Some(label) = label {
            std::fs::write(copy.join("backup_label"), label?)?;
        }
        super::crashes::copy_tree(&cluster.data_directory().join(part), &copy.join(part))?;
    }
    cluster.installation().give(&copy.join("backup_label"))?;
    std::fs::remove_file(copy.join("postmaster.pid"))?;
    let restored = Cluster::from_files(|data| Ok(std::fs::rename(&copy, data)?))?;
    for _ in 0..2 {
        restored.start_server()?;
        ensure_no_canary(&restored)?;
        ensure!(restored.text(OF_U)? == of_u_now, "statistics of another table");
        ensure!(restored.text(of_w)? == "2", "statistics of a new table");
        ensure_shredded(&restored, &u)?;
        restored.sql("CHECKPOINT")?;
        restored.kill()?;
    }
    restored.start_server()?;
    restored.finish()?;
    cluster.finish()
}
