//! Switchover and failover under load, and `pg_rewind` of the old primary.

use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Result, ensure};
use pagevault_tests::cluster::run_sql;
use pagevault_tests::installation::run;
use pagevault_tests::standby::wait_for;
use pagevault_tests::{Cluster, Settings, Standby, StopMode};

use super::{BALANCED, CONTENT, everything, rotate_all};
use crate::wal::{assert_hidden, insert};

const NOISE: [&str; 6] = [
    "terminating walreceiver process",
    "could not receive data from WAL stream",
    "could not connect to the primary server",
    "could not send",
    "connection to client lost",
    "not properly shut down",
];

/// Inserts rows one by one, each acknowledged, until the server stops.
fn write_until_the_end(server: &Cluster, acknowledged: &AtomicU64) -> Result<()> {
    let mut client = server.client()?;
    loop {
        let next = acknowledged.load(Ordering::Relaxed) + 1;
        if run_sql(&mut client, &format!("INSERT INTO ledger VALUES ({next}, md5('{next}'))"))
            .is_err()
        {
            return Ok(());
        }
        acknowledged.store(next, Ordering::Relaxed);
    }
}

/// Runs `end` while rows are inserted and pgbench runs. Returns the number of acknowledged rows.
fn under_load(server: &Cluster, from: u64, end: impl FnOnce() -> Result<()>) -> Result<u64> {
    let acknowledged = AtomicU64::new(from);
    let mut load = server.pgbench_in_background(&["-n", "-c", "2", "-T", "600"])?;
    let ended = std::thread::scope(|scope| {
        let writer = scope.spawn(|| write_until_the_end(server, &acknowledged));
        let enough = server.eventually(&format!("SELECT count(*) >= {from} + 50 FROM ledger"), "t");
        // Otherwise the writers would never stop.
        let ended = enough.and_then(|()| end());
        if ended.is_err() {
            let _ = server.kill();
        }
        writer.join().map_err(|_| anyhow::anyhow!("the writer panicked"))??;
        ended
    });
    let _ = load.kill();
    load.wait()?;
    ended?;
    Ok(acknowledged.into_inner())
}

/// Checks that no acknowledged row is lost. Returns the number of rows, which may be one more.
fn check(server: &Cluster, acknowledged: u64) -> Result<u64> {
    let rows: u64 = server.text("SELECT count(*) FROM ledger")?.parse()?;
    ensure!(rows == acknowledged || rows == acknowledged + 1, "{rows} rows of {acknowledged}");
    let wrong = server.text("SELECT count(*) FROM ledger WHERE digest <> md5(id::text)")?;
    ensure!(wrong == "0", "{wrong} rows are wrong");
    ensure!(server.text(BALANCED)? == "t", "balances differ");
    Ok(rows)
}

/// `a` and `b` change roles, by failover and by switchover, twice; `c` follows the primary.
#[test]
fn servers_change_roles_under_load() -> Result<()> {
    let settings = Settings::default().conf("wal_keep_size = 1GB");
    let (mut a, _keys) = everything(settings)?;
    a.sql("CREATE TABLE ledger (id bigint PRIMARY KEY, digest text)")?;
    a.pgbench(&["-i", "-q", "-s", "1"])?;
    let replica = Standby::default().named("b").conf("synchronous_standby_names = ''");
    let mut b = replica.start(&a)?;
    let mut c = Standby::default().named("c").start(&a)?;
    for server in [&mut a, &mut b, &mut c] {
        NOISE.iter().for_each(|text| server.allow_log(text));
        server.allow_log("terminating connection");
    }
    let mut rows = 0;
    for _ in 0..2 {
        // Failover: everything that was acknowledged is on b.
        a.append_conf("synchronous_standby_names = 'b'\nsynchronous_commit = on")?;
        a.sql("SELECT pg_reload_conf()")?;
        a.eventually("SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'", "1")?;
        let acknowledged = under_load(&a, rows, || {
            // If c had more WAL than b, it could not follow b.
            c.stop(StopMode::Fast)?;
            rotate_all(&a)?;
            a.kill()
        })?;
        b.promote()?;
        rows = check(&b, acknowledged)?;
        rotate_all(&b)?;
        insert(&b, "drossel", 100)?;
        // c follows the new timeline.
        Standby::default().named("c").follow(&c, &b)?;
        c.start_server()?;
        wait_for(&c, &b)?;
        check(&c, acknowledged)?;

        // The old primary has continued for a while, and has its own keys.
        a.append_conf("synchronous_standby_names = ''")?;
        a.start_server()?;
        rotate_all(&a)?;
        insert(&a, "fink", 100)?;
        a.stop(StopMode::Fast)?;
        b.sql("CHECKPOINT")?;
        let mut rewind = a.program("pagevault-keyring");
        rewind.args(["exec", "--", "pg_rewind", "--target-pgdata"]).arg(a.data_directory()).arg(
            format!(
                "--source-server=host={} user=postgres dbname=postgres",
                b.directory().display()
            ),
        );
        run(&mut rewind)?;
        Standby::default().named("a").conf("synchronous_standby_names = ''").follow(&a, &b)?;
        a.start_server()?;
        wait_for(&a, &b)?;
        ensure!(a.text(CONTENT)? == b.text(CONTENT)?, "contents differ after pg_rewind");

        // Switchover: the primary sends all its WAL before it stops, and can follow without
        // pg_rewind.
        let acknowledged = under_load(&b, rows, || b.stop(StopMode::Fast))?;
        a.promote()?;
        rows = check(&a, acknowledged)?;
        replica.follow(&b, &a)?;
        b.start_server()?;
        c.stop(StopMode::Fast)?;
        Standby::default().named("c").follow(&c, &a)?;
        c.start_server()?;
        rotate_all(&a)?;
        insert(&a, "meise", 100)?;
        for standby in [&b, &c] {
            wait_for(standby, &a)?;
            ensure!(standby.text(CONTENT)? == a.text(CONTENT)?, "contents differ");
            check(standby, acknowledged)?;
            assert_hidden(standby, "meise")?;
        }
    }
    for server in [&a, &b, &c] {
        server.sql("CHECKPOINT")?;
        crate::assert_sealed(&server.family_files("ledger")?)?;
    }
    for server in [c, b, a] {
        server.stop(StopMode::Fast)?;
        server.pg_checksums()?;
        server.without_witness("pg_rewind has copied files");
        server.finish()?;
    }
    Ok(())
}
