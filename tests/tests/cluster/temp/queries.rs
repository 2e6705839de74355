//! All executor nodes that write temporary files.

use std::fs;

use anyhow::{Context, Result, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::{Cluster, Settings};

use super::{CANARY, LITTLE_MEMORY, check, cluster, files_below, held, spilled};

/// Kinds of plans: settings, a query that calls `hold`, and a required part of its plan.
const PLANS: [(&str, &str, &str); 9] = [
    // Sort
    (
        "",
        "SELECT md5(string_agg(hold(t), ',')) FROM (SELECT t FROM data ORDER BY t DESC) s",
        "Sort",
    ),
    // Hash Join
    (
        "SET enable_mergejoin = off; SET enable_nestloop = off",
        "SELECT count(*) || ' ' || sum(hashtext(hold(a.t) || b.t)) FROM data a JOIN data b USING (id)",
        "Hash Join",
    ),
    // HashAggregate
    (
        "SET enable_sort = off",
        "SELECT sum(hashtext(hold(t)) + n) FROM (SELECT t, count(*) n FROM data GROUP BY t OFFSET 0) s",
        "HashAggregate",
    ),
    // Merge Join, which restores marked positions in the sorted file
    (
        "SET enable_hashjoin = off; SET enable_nestloop = off",
        "SELECT count(*) || ' ' || sum(hashtext(hold(a.t) || b.t))
         FROM data a JOIN data b ON a.id / 3 = b.id / 5",
        "Merge Join",
    ),
    // Materialize, read twice
    (
        "SET enable_hashjoin = off; SET enable_mergejoin = off; SET seq_page_cost = 0",
        "SELECT count(*) || ' ' || sum(hashtext(CASE x WHEN 1 THEN d.t ELSE hold(d.t) END))
         FROM (VALUES (1), (7000)) v (x) LEFT JOIN data d ON d.id > v.x AND md5(d.t) > ''",
        "Materialize",
    ),
    // WindowAgg, which reads its rows again much later
    (
        "",
        "SELECT count(b) || ' ' || sum(n + hashtext(hold(a || coalesce(b, ''))))
         FROM (SELECT t a, lag(t, 3000) OVER () b, count(*) OVER () n FROM data) s",
        "WindowAgg",
    ),
    // CTE Scan
    (
        "",
        "WITH s AS MATERIALIZED (SELECT t FROM data)
         SELECT count(*) || ' ' || sum(hashtext(t))
         FROM (SELECT t FROM s UNION ALL SELECT hold(t) FROM s) u",
        "CTE Scan",
    ),
    // A set-returning function
    (
        "CREATE OR REPLACE FUNCTION pg_temp.rows() RETURNS SETOF text LANGUAGE plpgsql AS
         $$ BEGIN RETURN QUERY SELECT t FROM data; END $$",
        "SELECT md5(string_agg(hold(t), ',')) FROM pg_temp.rows() t",
        "Function Scan",
    ),
    // Parallel Hash Join: a file set written and read by several processes
    (
        "SET enable_mergejoin = off; SET enable_nestloop = off;
         SET max_parallel_workers_per_gather = 2; SET min_parallel_table_scan_size = 0;
         SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0",
        "SELECT count(*) || ' ' || sum(hashtext(hold(a.t) || b.t)) FROM data a JOIN data b USING (id)",
        "Parallel Hash Join",
    ),
];

#[test]
fn queries_answer_the_same_and_leave_no_plaintext() -> Result<()> {
    let cluster = cluster(&Settings::default())?;
    let mut expected = Vec::new();
    for (settings, query, node) in PLANS {
        let mut client = cluster.client()?;
        run_sql(&mut client, LITTLE_MEMORY)?;
        run_sql(&mut client, settings)?;
        let plan = pagevault_tests::cluster::column(&mut client, &format!("EXPLAIN {query}"))?;
        ensure!(plan.iter().any(|line| line.contains(node)), "no {node} in {plan:#?}");
        run_sql(&mut client, "SET work_mem = '64MB'")?;
        expected.push(text(&mut client, query)?);
        ensure!(spilled(&cluster).is_empty(), "{node} spills with much memory");
    }
    for sealed in [false, true] {
        let setting = if sealed { "auto" } else { "off" };
        cluster.set(&[("pagevault.temp_encryption", setting)])?;
        for ((settings, query, node), expected) in PLANS.iter().zip(&expected) {
            let mut client = cluster.client()?;
            run_sql(&mut client, LITTLE_MEMORY)?;
            run_sql(&mut client, settings)?;
            let look = || check(&spilled(&cluster), sealed);
            let answer = held(&cluster, &mut client, query, look)
                .with_context(|| format!("{node}, {setting}"))?;
            ensure!(answer == *expected, "{node}, {setting}: {answer}, not {expected}");
            ensure!(spilled(&cluster).is_empty(), "{node}, {setting}: files are left");
        }
    }
    cluster.finish()
}

#[test]
fn a_cursor_that_outlives_its_transaction_is_sealed() -> Result<()> {
    let cluster = cluster(&Settings::default())?;
    for sealed in [false, true] {
        let setting = if sealed { "on" } else { "off" };
        cluster.set(&[("pagevault.temp_encryption", setting)])?;
        let mut client = cluster.client()?;
        run_sql(&mut client, LITTLE_MEMORY)?;
        run_sql(
            &mut client,
            "BEGIN; DECLARE c SCROLL CURSOR WITH HOLD FOR SELECT t FROM data ORDER BY id; COMMIT",
        )?;
        check(&spilled(&cluster), sealed)?;
        let rows = |client: &mut _, fetch| pagevault_tests::cluster::column(client, fetch);
        let expected = rows(&mut client, "SELECT t FROM data ORDER BY id")?;
        ensure!(rows(&mut client, "FETCH ALL FROM c")? == expected, "{setting}: other rows");
        let mut backward = rows(&mut client, "FETCH BACKWARD ALL FROM c")?;
        backward.reverse();
        ensure!(backward == expected, "{setting}: other rows backward");
    }
    cluster.finish()
}

#[test]
fn temporary_tablespaces_are_sealed() -> Result<()> {
    let cluster = cluster(&Settings::default())?;
    let space = cluster.make_tablespace("space")?;
    let (_, sort, _) = PLANS[0];
    let expected = cluster.text(sort)?;
    for sealed in [false, true] {
        let setting = if sealed { "on" } else { "off" };
        cluster.set(&[("pagevault.temp_encryption", setting)])?;
        let mut client = cluster.client()?;
        run_sql(&mut client, LITTLE_MEMORY)?;
        run_sql(&mut client, "SET temp_tablespaces = space")?;
        let look = || {
            ensure!(spilled(&cluster).is_empty(), "files in base/pgsql_tmp");
            check(&files_below(&space), sealed)
        };
        ensure!(held(&cluster, &mut client, sort, look)? == expected, "another order");
    }
    cluster.finish()
}

/// The workers always write sorted runs to files. These exist only briefly, so the build is
/// repeated until they were found.
#[test]
fn a_parallel_index_build_is_sealed() -> Result<()> {
    let cluster = cluster(&Settings::default())?;
    cluster.sql("INSERT INTO data SELECT id + 8000 * i, t FROM data, generate_series(1, 7) i")?;
    cluster.sql("ALTER TABLE data SET (parallel_workers = 2)")?;
    for sealed in [false, true] {
        let setting = if sealed { "on" } else { "off" };
        cluster.set(&[("pagevault.temp_encryption", setting)])?;
        seen(&cluster, sealed).with_context(|| setting)?;
        ensure!(
            cluster.text("SET enable_seqscan = off; SELECT count(*) FROM data WHERE t > ''")?
                == "64000",
            "{setting}: the index is not whole"
        );
    }
    cluster.finish()
}

fn seen(cluster: &Cluster, sealed: bool) -> Result<()> {
    let mut files = Vec::new();
    for _ in 0..20 {
        std::thread::scope(|scope| {
            let build = scope.spawn(|| {
                cluster.sql(
                    "SET maintenance_work_mem = '128MB'; SET max_parallel_maintenance_workers = 2;
                     DROP INDEX IF EXISTS data_t; CREATE INDEX data_t ON data (t);",
                )
            });
            while !build.is_finished() {
                files.extend(spilled(cluster));
            }
            match build.join() {
                Ok(done) => done,
                Err(_) => anyhow::bail!("the thread of the index build panicked"),
            }
        })?;
        if files.iter().any(|file| file.bytes.len() > 100_000) {
            return check(&files, sealed);
        }
        files.clear();
    }
    anyhow::bail!("no file was seen")
}

/// A file exported by a user is not encrypted.
#[test]
fn exported_files_stay_as_they_are() -> Result<()> {
    let cluster = cluster(&Settings::default())?;
    let path = cluster.directory().join("export");
    cluster.sql(&format!("COPY data TO '{}'", path.display()))?;
    ensure!(fs::read_to_string(&path)?.contains(CANARY), "COPY wrote something else");
    let back = cluster.text(&format!(
        "CREATE TABLE back (LIKE data); COPY back FROM '{}';
         SELECT count(*) FROM back JOIN data USING (id, t)",
        path.display()
    ))?;
    ensure!(back == "8000", "COPY read something else");
    cluster.finish()
}
