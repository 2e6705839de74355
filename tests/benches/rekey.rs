//! What rekeying costs: its speed beside VACUUM FULL of the same table, WAL for each megabyte, and what pgbench
//! loses meanwhile at the default throttle. Run by `tools/bench`; `PAGEVAULT_BENCH_MB` changes the size of the
//! table, `PAGEVAULT_BENCH_SECONDS` the length of a pgbench run.

#![allow(clippy::print_stdout, reason = "a program that prints a table")]

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, Settings};

const MB: f64 = 1_048_576.0;
const ROUNDS: usize = 3;

fn number(variable: &str, default: u32) -> Result<u32> {
    std::env::var(variable).map_or(Ok(default), |text| Ok(text.parse()?))
}

fn main() -> Result<()> {
    let settings = Settings::default()
        .conf("fsync = on")
        .conf("shared_buffers = 128MB")
        .conf("autovacuum = off")
        .conf("checkpoint_timeout = 1h");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    speed(&cluster, number("PAGEVAULT_BENCH_MB", 512)?)?;
    slowdown(&cluster, number("PAGEVAULT_BENCH_SECONDS", 15)?)?;
    cluster.finish()
}

/// A row of the first table: seconds and bytes of WAL.
struct Cost {
    seconds: f64,
    wal: f64,
}

fn measured(cluster: &Cluster, work: impl FnOnce() -> Result<()>) -> Result<Cost> {
    const WAL: &str = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')";
    cluster.sql("CHECKPOINT")?;
    let before: f64 = cluster.text(WAL)?.parse()?;
    let start = Instant::now();
    work()?;
    let seconds = start.elapsed().as_secs_f64();
    let after: f64 = cluster.text(WAL)?.parse()?;
    Ok(Cost { seconds, wal: after - before })
}

fn wait_for(cluster: &Cluster, statement: &str) -> Result<()> {
    cluster.sql(statement)?;
    let done = cluster.text("SELECT pagevault.rekey_wait('t'::regclass)")?;
    ensure!(done == "t", "{statement}: the job did not end");
    Ok(())
}

/// VACUUM FULL, encrypting, new data keys, decrypting, in turns; the median of each.
fn speed(cluster: &Cluster, megabytes: u32) -> Result<()> {
    cluster.set(&[("pagevault.rekey_rate", "0")])?;
    cluster.sql(&format!(
        "CREATE TABLE t (id int, filler text);
         INSERT INTO t SELECT i, repeat(md5(i::text), 31) FROM generate_series(1, {megabytes} * 1000) i"
    ))?;
    let size: f64 = cluster.text("SELECT pg_table_size('t')")?.parse()?;
    let work: [(&str, &dyn Fn() -> Result<()>); 4] = [
        ("VACUUM FULL, plain", &|| cluster.sql("VACUUM FULL t")),
        ("encrypt", &|| {
            wait_for(cluster, "SECURITY LABEL FOR pagevault ON TABLE t IS 'encrypted'")
        }),
        ("new data key", &|| wait_for(cluster, "SELECT pagevault.rotate_data_key('t')")),
        ("decrypt", &|| wait_for(cluster, "SECURITY LABEL FOR pagevault ON TABLE t IS 'plain'")),
    ];
    let mut costs: Vec<Vec<Cost>> = work.iter().map(|_| Vec::new()).collect();
    for _ in 0..ROUNDS {
        for ((_, work), costs) in work.iter().zip(&mut costs) {
            costs.push(measured(cluster, work)?);
        }
    }
    println!("{:.0} MB, median of {ROUNDS}, in turns, fsync on", size / MB);
    let base = median(costs[0].iter().map(|cost| cost.seconds))?;
    for ((name, _), costs) in work.iter().zip(&costs) {
        let seconds = median(costs.iter().map(|cost| cost.seconds))?;
        let wal = median(costs.iter().map(|cost| cost.wal))?;
        println!(
            "  {name:<20} {:>7.1} MB/s   {:>5.2} of the time of VACUUM FULL   {:>5.2} MB of WAL per MB",
            size / MB / seconds,
            seconds / base,
            wal / size
        );
    }
    Ok(())
}

/// pgbench with and without a job at the default throttle, in turns.
fn slowdown(cluster: &Cluster, seconds: u32) -> Result<()> {
    cluster.sql("ALTER SYSTEM RESET pagevault.rekey_rate")?;
    cluster.sql("SELECT pg_reload_conf()")?;
    let rate = cluster.text("SHOW pagevault.rekey_rate")?;
    cluster.sql("SELECT pagevault.encrypt('t')")?;
    ensure!(cluster.text("SELECT pagevault.rekey_wait('t'::regclass)")? == "t");
    run(cluster.program("pgbench").args(["-i", "-q", "-s", "10", "postgres"]))?;
    let transactions = || -> Result<f64> {
        let text = run(cluster.program("pgbench").args([
            "-n",
            "-c",
            "2",
            "-T",
            &seconds.to_string(),
            "postgres",
        ]))?;
        let tps = text.lines().find_map(|line| line.strip_prefix("tps = "));
        Ok(tps.and_then(|rest| rest.split(' ').next()).context("no tps")?.parse()?)
    };
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        cluster.sql("CHECKPOINT")?;
        alone.push(transactions()?);
        cluster.sql("CHECKPOINT")?;
        let job = cluster.text("SELECT pagevault.rotate_data_key('t')")?;
        beside.push(transactions()?);
        let state = format!("SELECT state FROM pagevault.rekey_progress WHERE job = {job}");
        println!("  the job was {} when pgbench ended", cluster.text(&state)?);
        cluster.sql(&format!("SELECT pagevault.rekey_wait({job})"))?;
    }
    let (alone, beside) = (median(alone.into_iter())?, median(beside.into_iter())?);
    println!(
        "pgbench, 2 clients, {seconds} s, median of {ROUNDS}, in turns: {alone:.0} TPS alone, {beside:.0} beside a job at \
         {rate} MB/s: {:+.1} %",
        (beside / alone - 1.0) * 100.0
    );
    Ok(())
}

fn median(values: impl Iterator<Item = f64>) -> Result<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().context("no value")
}
