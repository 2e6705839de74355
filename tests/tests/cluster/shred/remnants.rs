//! Remnants of a shredded table's statistics: in rows, in deleted rows, and in free space of pages.

use pagevault_tests::backup::Backup;
use pagevault_tests::witnesses::Witnesses;

use super::*;

/// Occurs in every sampled value.
const CANARY: &str = "kanarienvogel";

/// Places of sampled values, each with its TOAST table for values too long for a row.
const PLACES: [&str; 4] = [
    "pg_catalog.pg_statistic",
    "pg_toast.pg_toast_2619",
    "pg_catalog.pg_statistic_ext_data",
    "pg_toast.pg_toast_3429",
];

/// Analyzed repeatedly, so that replaced rows exist, before and after VACUUM. Long values are
/// random letters, so that statistics are stored uncompressed in TOAST tables; short ones are
/// stored in rows.
const SAMPLES: &str = "ALTER TABLE t ADD a text, ADD b text, ADD c text, ADD d text;
    UPDATE t SET a = 'kanarienvogel' || md5(id::text) || md5(name) || md5(random()::text),
        b = 'kanarienvogel' ||
            (SELECT string_agg(md5(id % 50 || '-' || k), '') FROM generate_series(1, 15) k),
        c = 'kanarienvogel' || id % 2,
        d = 'kanarienvogel' || id % 3;
    CREATE STATISTICS pair (mcv) ON b, c FROM t; CREATE STATISTICS short (mcv) ON c, d FROM t;
    CREATE EXTENSION pageinspect";

fn sampled(conf: &str) -> Result<(Cluster, pagevault_tests::KeyFile)> {
    sampled_with(
        &Settings::default().conf("checkpoint_timeout = 1h").conf("wal_keep_size = 1GB").conf(conf),
    )
}

fn sampled_with(settings: &Settings) -> Result<(Cluster, pagevault_tests::KeyFile)> {
    let (mut cluster, keys) = Cluster::with_keys(&settings.clone().conf("autovacuum = off"))?;
    cluster.sql(TABLES)?;
    cluster.allow_log("were destroyed");
    cluster.sql(SAMPLES)?;
    for _ in 0..3 {
        cluster.sql("UPDATE t SET a = a || md5(a); ANALYZE")?;
        cluster.sql("VACUUM pg_statistic")?;
        cluster.sql("VACUUM pg_statistic_ext_data")?;
        cluster.sql("ANALYZE t")?;
    }
    for place in PLACES {
        ensure!(pages_with_canary(&cluster, place)? > 0, "no page of {place} has it");
    }
    Ok((cluster, keys))
}

/// Number of pages that contain the canary anywhere, including free space.
fn pages_with_canary(cluster: &Cluster, place: &str) -> Result<i64> {
    let query = format!(
        "SELECT count(*) FROM generate_series(0, pg_relation_size('{place}') / 8192 - 1) AS block
          WHERE position('{CANARY}'::bytea IN get_raw_page('{place}', block::int)) > 0"
    );
    Ok(cluster.text(&query)?.parse()?)
}

/// In shared buffers, and on disk.
fn ensure_no_canary(cluster: &Cluster) -> Result<()> {
    for place in PLACES {
        let pages = pages_with_canary(cluster, place)?;
        ensure!(pages == 0, "{pages} pages of {place} still have it");
    }
    Ok(())
}

/// The rows of the proof about statistics: object, number of keys, status.
fn told(cluster: &Cluster, shred: &str) -> Result<Vec<(String, String, String)>> {
    let mut client = cluster.client()?;
    let rows = client.simple_query(shred)?;
    let rows = rows.iter().filter_map(|message| match message {
        postgres::SimpleQueryMessage::Row(row) if row.get(0) == Some("statistics") => Some(row),
        _ => None,
    });
    let text = |row: &postgres::SimpleQueryRow, at| row.get(at).unwrap_or_default().to_owned();
    Ok(rows.map(|row| (text(row, 1), text(row, 3), text(row, 4))).collect())
}

/// All wrapped keys of the files of statistics.
fn statistics_keys(cluster: &Cluster) -> Result<Vec<Vec<u8>>> {
    let mut keys = Vec::new();
    for place in PLACES {
        let found = wrapped_keys(cluster, "postgres", place)?;
        ensure!(!found.is_empty(), "no key of {place} in the keystore");
        keys.extend(found);
    }
    Ok(keys)
}

/// No snapshot delays it: neither that of the statement nor an older one.
#[test]
fn no_page_keeps_a_sampled_value() -> Result<()> {
    let (cluster, _keys) = sampled("")?;
    let keys = statistics_keys(&cluster)?;
    let mut older = cluster.client()?;
    run_sql(&mut older, "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class")?;
    let u = cluster.text(U)?;
    let of_u = "SELECT count(*) || ' ' || sum(hashtext(histogram_bounds::text)) FROM pg_stats
        WHERE tablename = 'u'";
    let mut of_u_before = cluster.text(of_u)?;

    let told = told(&cluster, SHRED)?;
    ensure_no_canary(&cluster)?;
    ensure_gone(&cluster, &keys)?;
    for place in PLACES {
        let row = told.iter().find(|(object, _, _)| object == place);
        let (_, keys, detail) = row.with_context(|| format!("{told:?}"))?;
        ensure!(keys == "1", "{keys} keys of {place}");
        ensure!(detail.contains("overwritten with zeros"), "{detail}");
        assert_sealed(&cluster.files(place)?)?;
    }
    // Other rows are unchanged. A snapshot that could see the deleted rows sees them without
    // values.
    ensure!(cluster.text(of_u)? == of_u_before, "statistics of another table");
    let values = "SELECT count(*) FROM pg_stats WHERE tablename = 't' AND
        (most_common_vals IS NOT NULL OR histogram_bounds IS NOT NULL
         OR most_common_freqs IS NOT NULL)";
    ensure!(text(&mut older, values)? == "0", "values in an old snapshot");
    run_sql(&mut older, "SELECT * FROM pg_stats; SELECT * FROM pg_stats_ext; COMMIT")?;
    for _ in 0..2 {
        cluster.crash()?;
        ensure_no_canary(&cluster)?;
        ensure!(cluster.text(of_u)? == of_u_before, "statistics of another table");
        ensure_shredded(&cluster, &u)?;
        for statement in ["ANALYZE u", "VACUUM pg_statistic", "VACUUM pg_statistic_ext_data"] {
            cluster.sql(statement)?;
        }
        of_u_before = cluster.text(of_u)?;
        cluster.sql("CHECKPOINT")?;
    }
    cluster.sql("VACUUM FULL pg_statistic")?;
    ensure!(cluster.text(of_u)? == of_u_before, "statistics of another table");
    cluster.finish()
}

/// A page that is being read keeps the values of its deleted rows, and the proof reports that.
/// Shredding does not wait for readers indefinitely.
#[test]
fn pages_in_use_are_reported() -> Result<()> {
    let (cluster, _keys) = sampled("")?;
    let mut reader = cluster.client()?;
    run_sql(
        &mut reader,
        "BEGIN; DECLARE c CURSOR FOR SELECT ctid FROM pg_statistic; FETCH 1 FROM c",
    )?;
    let first = told(&cluster, SHRED)?;
    let kept = first.iter().find(|(object, _, _)| object == PLACES[0]);
    let (_, keys, detail) = kept.context("no row")?;
    ensure!(keys == "1" && detail.contains("other sessions kept in use"), "{detail}");
    ensure!(pages_with_canary(&cluster, PLACES[0])? == 1, "more than the page in use");
    for (object, _, detail) in first.iter().filter(|(object, _, _)| object != PLACES[0]) {
        ensure!(!detail.contains("in use"), "{object}: {detail}");
    }
    run_sql(&mut reader, "COMMIT")?;
    let again = told(&cluster, SHRED)?;
    ensure!(!again.iter().any(|(_, _, detail)| detail.contains("in use")), "{again:?}");
    ensure_no_canary(&cluster)?;
    cluster.finish()
}

/// Nor for VACUUM, other sessions with its lock mode, or a rekey job.
#[test]
fn locked_files_are_reported() -> Result<()> {
    let (cluster, _keys) = sampled("")?;
    let mut other = cluster.client()?;
    let lock = "BEGIN; LOCK TABLE pg_statistic IN SHARE UPDATE EXCLUSIVE MODE";
    run_sql(&mut other, lock)?;
    let first = told(&cluster, SHRED)?;
    let (_, keys, detail) =
        first.iter().find(|(object, _, _)| object == PLACES[0]).context("no row")?;
    ensure!(keys.is_empty() && detail.contains("other sessions had it locked"), "{detail}");
    ensure!(pages_with_canary(&cluster, PLACES[0])? > 0, "it was cleared");
    run_sql(&mut other, "COMMIT")?;
    let again = told(&cluster, SHRED)?;
    ensure!(!again.iter().any(|(_, _, detail)| detail.contains("locked")), "{again:?}");
    ensure_no_canary(&cluster)?;
    cluster.finish()
}

/// Statistics that are not sealed are cleared too; the proof claims no more than that.
#[test]
fn statistics_in_plaintext() -> Result<()> {
    let (cluster, _keys) = sampled("pagevault.data_catalog_encryption = off")?;
    let told = told(&cluster, SHRED)?;
    for place in PLACES {
        let row = told.iter().find(|(object, _, _)| object == place);
        let (_, keys, detail) = row.context("no row")?;
        ensure!(keys.is_empty() && detail.contains("is in plaintext"), "{place}: {detail}");
        for file in cluster.files(place)? {
            ensure!(!file.contains_text(CANARY)?, "{} has it", file.path.display());
        }
    }
    ensure_no_canary(&cluster)?;
    cluster.crash()?;
    ensure_no_canary(&cluster)?;
    cluster.finish()
}

/// Dropped tables have left values too.
#[test]
fn former_files_and_their_statistics() -> Result<()> {
    let (cluster, _keys) = sampled("")?;
    cluster.sql("DROP TABLE t CASCADE")?;
    for place in PLACES {
        ensure!(pages_with_canary(&cluster, place)? > 0, "no page of {place} has it");
    }
    let told = told(&cluster, "SELECT * FROM pagevault.shred_former_files('postgres')")?;
    ensure!(told.len() == PLACES.len(), "{told:?}");
    ensure_no_canary(&cluster)?;
    cluster.finish()
}

/// An older page decrypts to an empty page, both in its original data directory and when it is
/// restored.
#[test]
fn older_pages_decrypt_to_empty_pages() -> Result<()> {
    let (cluster, _keys) = sampled("")?;
    let u = cluster.text(U)?;
    cluster.stop(StopMode::Fast)?;
    let mut before = Vec::new();
    cluster.start_server()?;
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
    cluster.start_server()?;
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
    cluster.start_server()?;
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
    let (cluster, _keys) = cluster("autovacuum = off")?;
    let space = cluster.directory().join("space");
    std::fs::create_dir(&space)?;
    cluster.installation().give(&space)?;
    cluster.sql(&format!("CREATE TABLESPACE space LOCATION '{}'", space.display()))?;
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

/// Shredding does not wait indefinitely for sessions that block the deletion of statistics rows.
#[test]
fn rows_that_cannot_be_deleted() -> Result<()> {
    let (mut cluster, _keys) = sampled("")?;
    cluster.allow_log("canceling statement due to lock timeout");
    let mut other = cluster.client()?;
    run_sql(&mut other, "BEGIN; LOCK TABLE pg_statistic IN SHARE MODE")?;
    let error = cluster.error(SHRED)?;
    ensure!(error.sqlstate == "55000", "{error}");
    ensure!(error.message.ends_with("rows of statistics could not be deleted"), "{error}");
    ensure!(error.detail.contains("Nothing was destroyed."), "{error}");
    ensure!(cluster.text("SELECT count(*) FROM t")? == "1000");
    run_sql(&mut other, "COMMIT")?;
    cluster.sql(SHRED)?;
    ensure_no_canary(&cluster)?;
    cluster.finish()
}

/// A full key directory does not prevent shredding; the consequences are reported.
#[test]
fn no_room_for_new_keys() -> Result<()> {
    let (cluster, _keys) = sampled("pagevault.max_data_keys = 1000")?;
    let error = cluster.error(
        "SET pagevault.default_encryption = on;
         DO $$ BEGIN FOR i IN 1..1001 LOOP
             EXECUTE format('CREATE TABLE f%s (id int)', i);
         END LOOP; END $$",
    )?;
    ensure!(error.text().contains("data keys are in use"), "{error}");
    let first = told(&cluster, SHRED)?;
    for place in PLACES {
        let row = first.iter().find(|(object, _, _)| object == place);
        let (_, keys, detail) = row.context("no row")?;
        ensure!(keys.is_empty() && detail.contains("It has no new key: all 1000"), "{detail}");
    }
    ensure_no_canary(&cluster)?;
    cluster.append_conf("pagevault.max_data_keys = 2000")?;
    cluster.restart()?;
    let again = told(&cluster, SHRED)?;
    ensure!(again.iter().filter(|(_, keys, _)| keys == "1").count() == PLACES.len(), "{again:?}");
    ensure_no_canary(&cluster)?;
    cluster.finish()
}
