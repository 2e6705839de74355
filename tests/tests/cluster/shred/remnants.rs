//! What sampling has left of a shredded table: in rows of statistics, in rows that were deleted, and in space that nobody uses
//! any more.

use super::*;

/// Stands in every value that is sampled.
const CANARY: &str = "kanarienvogel";

/// Where sampled values are, and behind each a word for those too long for a row.
const PLACES: [&str; 4] = [
    "pg_catalog.pg_statistic",
    "pg_toast.pg_toast_2619",
    "pg_catalog.pg_statistic_ext_data",
    "pg_toast.pg_toast_3429",
];

/// Sampled again and again, so that there are rows that were replaced, before VACUUM and after. Values are long, and of random
/// letters, so that statistics are stored beside their rows and not compressed; some are short, so that they are in them.
const SAMPLES: &str = "ALTER TABLE t ADD a text, ADD b text, ADD c text, ADD d text;
    UPDATE t SET a = 'kanarienvogel' || md5(id::text) || md5(name) || md5(random()::text),
        b = 'kanarienvogel' || (SELECT string_agg(md5(id % 50 || '-' || k), '') FROM generate_series(1, 15) k), c = 'kanarienvogel' || id % 2,
        d = 'kanarienvogel' || id % 3;
    CREATE STATISTICS pair (mcv) ON b, c FROM t; CREATE STATISTICS short (mcv) ON c, d FROM t;
    CREATE EXTENSION pageinspect";

fn sampled(conf: &str) -> Result<(Cluster, pagevault_tests::KeyFile)> {
    let (mut cluster, keys) = cluster(&format!("autovacuum = off\n{conf}"))?;
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

/// How many pages hold it anywhere, in free space as well.
fn pages_with_canary(cluster: &Cluster, place: &str) -> Result<i64> {
    let query = format!(
        "SELECT count(*) FROM generate_series(0, pg_relation_size('{place}') / 8192 - 1) AS block
          WHERE position('{CANARY}'::bytea IN get_raw_page('{place}', block::int)) > 0"
    );
    Ok(cluster.text(&query)?.parse()?)
}

/// In shared buffers, and from disk.
fn ensure_no_canary(cluster: &Cluster) -> Result<()> {
    for place in PLACES {
        let pages = pages_with_canary(cluster, place)?;
        ensure!(pages == 0, "{pages} pages of {place} still have it");
    }
    Ok(())
}

/// What the proof says of statistics: whose file, how many keys, what.
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

/// Nobody's snapshot holds it up: not that of the statement, nor an older one.
#[test]
fn no_page_keeps_a_sampled_value() -> Result<()> {
    let (cluster, _keys) = sampled("")?;
    let keys = statistics_keys(&cluster)?;
    let mut older = cluster.client()?;
    run_sql(&mut older, "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class")?;
    let u = cluster.text(U)?;
    let of_u = "SELECT count(*) || ' ' || sum(hashtext(histogram_bounds::text)) FROM pg_stats WHERE tablename = 'u'";
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
    // Others are as they were, and who could see the rows before sees rows without values.
    ensure!(cluster.text(of_u)? == of_u_before, "statistics of another table");
    let values = "SELECT count(*) FROM pg_stats WHERE tablename = 't' AND
        (most_common_vals IS NOT NULL OR histogram_bounds IS NOT NULL OR most_common_freqs IS NOT NULL)";
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
