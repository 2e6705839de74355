//! PostgreSQL 18's methods of asynchronous reads; older versions read synchronously.

use anyhow::{Result, ensure};
use pagevault_tests::{Cluster, Installation, Settings};

/// Reads a table that is much larger than the buffers: long runs, short runs, single blocks, and
/// reads that end within a run because some of its blocks are already in buffers.
fn read_in_every_way(settings: &Settings) -> Result<()> {
    let settings = settings
        .clone()
        .conf("shared_buffers = 1MB")
        .conf("max_connections = 20")
        .conf("pagevault.default_encryption = on");
    let (cluster, _keys) = Cluster::with_keys(&settings)?;
    cluster.sql(
        "CREATE TABLE t (id int PRIMARY KEY, name text);
         INSERT INTO t SELECT i, repeat(md5(i::text), 8) FROM generate_series(1, 60000) i",
    )?;
    cluster.sql("VACUUM (FREEZE, ANALYZE) t")?;
    cluster.restart()?;
    let whole = "SELECT count(*) || ' ' || sum(id) || ' ' || max(name) FROM t";
    let expected = cluster.text(whole)?;
    ensure!(expected.starts_with("60000 1800030000 "), "{expected}");
    let readers: Vec<_> = (0..4)
        .map(|reader| -> Result<_> {
            let mut client = cluster.client()?;
            let expected = expected.clone();
            Ok(std::thread::spawn(move || -> Result<()> {
                for round in 0..6 {
                    let got = pagevault_tests::cluster::text(&mut client, whole)?;
                    ensure!(got == expected, "reader {reader}, round {round}: {got}");
                    // Scattered pages, so that later runs are interrupted by buffered ones.
                    pagevault_tests::cluster::text(
                        &mut client,
                        "SET enable_seqscan = off;
                         SELECT count(length(name)) FROM t WHERE id % 97 = 3 AND id < 30000",
                    )?;
                    pagevault_tests::cluster::run_sql(&mut client, "RESET enable_seqscan")?;
                }
                Ok(())
            }))
        })
        .collect::<Result<_>>()?;
    for reader in readers {
        reader.join().map_err(|_| anyhow::anyhow!("a reader panicked"))??;
    }
    cluster.finish()
}

#[test]
fn io_method_sync() -> Result<()> {
    let settings = Settings::default();
    read_in_every_way(&if Installation::get()?.major >= 18 {
        settings.conf("io_method = sync")
    } else {
        settings
    })
}

#[test]
fn io_method_worker() -> Result<()> {
    if Installation::get()?.major < 18 {
        eprintln!("skipped: io_method is new in PostgreSQL 18");
        return Ok(());
    }
    let workers = match Installation::get()?.major {
        18 => "io_workers = 2",
        _ => "io_max_workers = 2",
    };
    read_in_every_way(&Settings::default().conf("io_method = worker").conf(workers))
}

#[test]
fn io_method_io_uring() -> Result<()> {
    if Installation::get()?.major < 18 {
        eprintln!("skipped: io_method is new in PostgreSQL 18");
        return Ok(());
    }
    let settings = Settings::default().conf("io_method = io_uring");
    // Not every build supports io_uring and not every kernel permits it; a stock server shows
    // whether it works.
    let plain = Cluster::create(&settings.clone().without_preload())?;
    if plain.start_server().is_err() {
        eprintln!("skipped: this server or this kernel has no io_uring");
        return Ok(());
    }
    plain.finish()?;
    read_in_every_way(&settings)
}
