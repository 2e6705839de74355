//! A session that gets no more memory fails alone.

use anyhow::{Result, ensure};
use pagevault_tests::cluster::{run_sql, text};
use pagevault_tests::{Cluster, Settings};

use super::long_texts::session_with_room;

/// It collects its rows in an allocation that is larger than what the server needs meanwhile.
const STATEMENT: &str = "SELECT count(*) FROM pagevault.relation_rows()";

/// Locks of processes that do not exist.
const LEFT: &str = "SELECT count(*) FROM pg_locks l WHERE pid IS NOT NULL
    AND NOT EXISTS (SELECT FROM pg_stat_get_activity(l.pid))";

/// Where a session may not end alone, the server restarts, as after any crash: while it has locked
/// shared memory, or uses state of its own without which it would leave locks. It depends on the
/// machine which allocation is the one that fails.
#[test]
fn a_session_without_memory_ends_alone() -> Result<()> {
    let settings = Settings::default().conf("pagevault.default_encryption = on");
    let (mut cluster, _keys) = Cluster::with_keys(&settings)?;
    // The second is a PANIC, and known: pgrx's guard copies an ERROR by a call that may itself fail
    // for want of memory, until the server's stack of errors is full (`errstart`, elog.c). See
    // extension/src/pg/memory.rs.
    for expected in
        ["out of memory", "ERRORDATA_STACK_SIZE", "by signal 6", "terminating connection"]
    {
        cluster.allow_log(expected);
    }
    cluster.sql(
        "CREATE ROLE bob SUPERUSER; CREATE TABLE held (id int);
         DO $$ BEGIN
             FOR i IN 1..300 LOOP
                 EXECUTE 'CREATE TABLE t' || i || ' (id int)';
             END LOOP;
         END $$",
    )?;
    let mut other = cluster.client()?;
    let mut done = 0;
    for room in (0..96).map(|step| step * (16 << 10)) {
        let mut client = session_with_room(&cluster, room)?;
        let result = run_sql(&mut client, "BEGIN; LOCK TABLE held")
            .and_then(|()| run_sql(&mut client, STATEMENT));
        done += u32::from(result.is_ok());
        drop(client);
        if other.is_closed() || text(&mut other, "SELECT 1").is_err() {
            cluster.eventually("SELECT 1", "1")?;
            other = cluster.client()?;
        }
        cluster.eventually(LEFT, "0")?;
    }
    let alone = cluster.log().matches("pagevault failed on request of size").count();
    ensure!(done > 0 && alone > 0, "{done} were done, {alone} ended alone");
    cluster.sql("DROP TABLE held")?;
    cluster.finish()
}
