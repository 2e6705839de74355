//! What keys cost: creating an encrypted table beside a plain one, and opening one of many, with 10 keys
//! and with 100,000. Run by `tools/bench`; `PAGEVAULT_BENCH_KEYS` changes the larger number.

#![allow(clippy::print_stdout, reason = "a program that prints a table")]

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::{Cluster, Settings};
use postgres::Client;

/// Median times of creating one plain and one encrypted table, taken in turns so that both meet the
/// same machine.
fn medians(client: &mut Client, rounds: u32) -> Result<(Duration, Duration)> {
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        for (kind, setting) in ["off", "on"].into_iter().enumerate() {
            run_sql(client, &format!("SET pagevault.default_encryption = {setting}"))?;
            let started = Instant::now();
            run_sql(client, &format!("CREATE TABLE timed_{kind}_{round} (id int)"))?;
            times[kind].push(started.elapsed());
        }
    }
    run_sql(
        client,
        "DO $$ DECLARE name text; BEGIN
            FOR name IN SELECT relname FROM pg_class WHERE relname LIKE 'timed%' LOOP
                EXECUTE format('DROP TABLE %I', name);
            END LOOP; END $$",
    )?;
    let [mut plain, mut encrypted] = times;
    plain.sort();
    encrypted.sort();
    Ok((plain[plain.len() / 2], encrypted[encrypted.len() / 2]))
}

fn report(client: &mut Client, keys: u32) -> Result<()> {
    let (plain, encrypted) = medians(client, 200)?;
    let added = encrypted.as_secs_f64() - plain.as_secs_f64();
    println!(
        "{keys:>7} keys   CREATE TABLE (median of 200, in turns): plain {plain:?}, encrypted \
         {encrypted:?}, difference {:+.3} ms",
        added * 1e3
    );
    Ok(())
}

/// Makes encrypted tables until there are `keys` of them; each has no column, so one file and key.
fn make_tables(client: &mut Client, keys: u32) -> Result<()> {
    run_sql(
        client,
        "CREATE OR REPLACE PROCEDURE make(keys int) LANGUAGE plpgsql AS $$ BEGIN
            SET pagevault.default_encryption = on;
            FOR i IN 1..keys LOOP
                EXECUTE format('CREATE TABLE many_%s (id int)', i);
                EXECUTE format('INSERT INTO many_%s VALUES (%s)', i, i);
                IF i % 500 = 0 THEN COMMIT; END IF;
            END LOOP; END $$",
    )?;
    run_sql(client, &format!("CALL make({keys})"))
}

/// Durable for real: the promise includes the write of the key.
fn settings() -> Settings {
    Settings::default().conf("fsync = on").conf("max_locks_per_transaction = 256")
}

fn main() -> Result<()> {
    let many = match std::env::var("PAGEVAULT_BENCH_KEYS") {
        Ok(number) => number.parse()?,
        Err(_) => 100_000,
    };
    let (cluster, _keys) = Cluster::with_keys(&settings())?;
    let mut client = cluster.client()?;
    report(&mut client, 10)?;
    let started = Instant::now();
    make_tables(&mut client, many)?;
    println!("{many:>7} keys   made in {:.1?}", started.elapsed());
    report(&mut client, many)?;
    drop(client);

    let started = Instant::now();
    cluster.restart()?;
    println!("{many:>7} keys   server restart in {:.1?}", started.elapsed());
    let mut client = cluster.client()?;
    // The first access reads catalogs too; those are warm then.
    run_sql(&mut client, "SELECT count(*) FROM pg_class; SELECT count(*) FROM pg_attribute")?;
    for table in [3, many / 2, many - 3] {
        let started = Instant::now();
        let id = text(&mut client, &format!("SELECT id FROM many_{table}"))?;
        println!("{many:>7} keys   first access to table {table}: {:.2?}", started.elapsed());
        ensure!(id == table.to_string(), "many_{table} holds {id}");
    }
    drop(client);
    cluster.finish()
}
