//! What keys cost: creating an encrypted table takes at most 1 ms more than a plain one, with 10
//! keys and with 100,000.

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

fn assert_cheap(client: &mut Client, keys: u32) -> Result<()> {
    let (plain, encrypted) = medians(client, 100)?;
    let added = encrypted.saturating_sub(plain);
    eprintln!("{keys} keys: plain {plain:?}, encrypted {encrypted:?}, added {added:?}");
    ensure!(added < Duration::from_millis(1), "with {keys} keys {added:?} more");
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

#[test]
fn creating_a_table_costs_less_than_a_millisecond_more_with_10_keys() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&settings())?;
    let mut client = cluster.client()?;
    make_tables(&mut client, 10)?;
    assert_cheap(&mut client, 10)?;
    drop(client);
    cluster.finish()
}

#[test]
fn creating_and_opening_stay_cheap_with_100_000_keys() -> Result<()> {
    let (cluster, _keys) = Cluster::with_keys(&settings())?;
    let mut client = cluster.client()?;
    let started = Instant::now();
    make_tables(&mut client, 100_000)?;
    eprintln!("100,000 encrypted tables made in {:?}", started.elapsed());
    assert_cheap(&mut client, 100_000)?;
    drop(client);

    let started = Instant::now();
    cluster.restart()?;
    eprintln!("restart with 100,000 keys: {:?}", started.elapsed());
    let mut client = cluster.client()?;
    // The first access reads catalogs too; a plain table of the same age shows what that costs.
    run_sql(&mut client, "SELECT count(*) FROM pg_class; SELECT count(*) FROM pg_attribute")?;
    let mut times = Vec::new();
    for table in [3, 50_003, 99_997] {
        let started = Instant::now();
        let id = text(&mut client, &format!("SELECT id FROM many_{table}"))?;
        times.push(started.elapsed());
        ensure!(id == table.to_string(), "many_{table} holds {id}");
    }
    eprintln!("first access: {times:?}");
    times.sort();
    ensure!(times[1] < Duration::from_millis(20), "first access takes {times:?}");
    drop(client);
    cluster.crash()?;
    ensure!(cluster.text("SELECT id FROM many_77777")? == "77777", "a table after a crash");
    cluster.finish()
}
