//! Remnants of a shredded table's statistics: in rows, in deleted rows, and in free space of pages.

mod recovery;

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
fn reported(cluster: &Cluster, shred: &str) -> Result<Vec<(String, String, String)>> {
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

    let reported = reported(&cluster, SHRED)?;
    ensure_no_canary(&cluster)?;
    ensure_gone(&cluster, &keys)?;
    for place in PLACES {
        let row = reported.iter().find(|(object, _, _)| object == place);
        let (_, keys, detail) = row.with_context(|| format!("{reported:?}"))?;
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
    let first = reported(&cluster, SHRED)?;
    let kept = first.iter().find(|(object, _, _)| object == PLACES[0]);
    let (_, keys, detail) = kept.context("no row")?;
    ensure!(keys == "1" && detail.contains("other sessions kept in use"), "{detail}");
    ensure!(pages_with_canary(&cluster, PLACES[0])? == 1, "more than the page in use");
    for (object, _, detail) in first.iter().filter(|(object, _, _)| object != PLACES[0]) {
        ensure!(!detail.contains("in use"), "{object}: {detail}");
    }
    run_sql(&mut reader, "COMMIT")?;
    let again = reported(&cluster, SHRED)?;
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
    let first = reported(&cluster, SHRED)?;
    let (_, keys, detail) =
        first.iter().find(|(object, _, _)| object == PLACES[0]).context("no row")?;
    ensure!(keys.is_empty() && detail.contains("other sessions had it locked"), "{detail}");
    ensure!(pages_with_canary(&cluster, PLACES[0])? > 0, "it was cleared");
    run_sql(&mut other, "COMMIT")?;
    let again = reported(&cluster, SHRED)?;
    ensure!(!again.iter().any(|(_, _, detail)| detail.contains("locked")), "{again:?}");
    ensure_no_canary(&cluster)?;
    cluster.finish()
}

/// Statistics that are not sealed are cleared too; the proof claims no more than that.
#[test]
fn statistics_in_plaintext() -> Result<()> {
    let (cluster, _keys) = sampled("pagevault.data_catalog_encryption = off")?;
    let reported = reported(&cluster, SHRED)?;
    for place in PLACES {
        let row = reported.iter().find(|(object, _, _)| object == place);
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
    let reported = reported(&cluster, "SELECT * FROM pagevault.shred_former_files('postgres')")?;
    ensure!(reported.len() == PLACES.len(), "{reported:?}");
    ensure_no_canary(&cluster)?;
    cluster.finish()
}

/// A parent keeps what it has sampled of a child that is detached, and nothing says whose that is.
#[test]
fn what_may_have_sampled_a_former_child_is_reported() -> Result<()> {
    let settings = Settings::default().conf("autovacuum = off");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql(
        "CREATE EXTENSION pageinspect; SET pagevault.default_encryption = on;
         CREATE TABLE p (id int, name text) PARTITION BY LIST (id);
         CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1);
         CREATE TABLE p2 PARTITION OF p FOR VALUES IN (2);
         CREATE TABLE p3 PARTITION OF p FOR VALUES IN (3);
         INSERT INTO p SELECT 1, 'kanarienvogel' FROM generate_series(1, 500);
         INSERT INTO p SELECT 2, 'zeisig' FROM generate_series(1, 500)",
    )?;
    let shred = "SELECT * FROM pagevault.shred('p1', confirm => 'public.p1')";
    let of_parents = || -> Result<Vec<String>> {
        let rows = reported(&cluster, shred)?.into_iter();
        let of_parents = rows.filter(|(_, _, detail)| detail.contains("all their children"));
        Ok(of_parents.map(|(object, _, _)| object).collect())
    };
    cluster.sql("ANALYZE p")?;
    cluster.sql("ALTER TABLE p DETACH PARTITION p1")?;
    let found = of_parents()?;
    ensure!(found == ["public.p"], "{found:?}");
    ensure!(pages_with_canary(&cluster, PLACES[0])? > 0, "the parent has no value of it");
    // As the row says.
    cluster.sql("ANALYZE p")?;
    cluster.sql(shred)?;
    ensure_no_canary(&cluster)?;
    // Of a child that is dropped, too.
    cluster.sql("DROP TABLE p2")?;
    let former = "SELECT * FROM pagevault.shred_former_files(confirm => 'postgres')";
    let rows = reported(&cluster, former)?;
    let is_it = |(object, _, detail): &(String, String, String)| {
        object == "public.p" && detail.contains("all their children")
    };
    ensure!(rows.iter().any(is_it), "{rows:?}");
    // The statistics of a parent that is shredded itself are deleted.
    cluster.sql("SELECT * FROM pagevault.shred('p', confirm => 'public.p')")?;
    let found = of_parents()?;
    ensure!(found.is_empty(), "{found:?}");
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
    let first = reported(&cluster, SHRED)?;
    for place in PLACES {
        let row = first.iter().find(|(object, _, _)| object == place);
        let (_, keys, detail) = row.context("no row")?;
        ensure!(keys.is_empty() && detail.contains("It has no new key: all 1000"), "{detail}");
    }
    ensure_no_canary(&cluster)?;
    cluster.append_conf("pagevault.max_data_keys = 2000")?;
    cluster.restart()?;
    let again = reported(&cluster, SHRED)?;
    ensure!(again.iter().filter(|(_, keys, _)| keys == "1").count() == PLACES.len(), "{again:?}");
    ensure_no_canary(&cluster)?;
    cluster.finish()
}
