//! Clients that note what they were told.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::Result;
use pagevault_powercut_disk::Random;
use pagevault_tests::Cluster;
use pagevault_tests::cluster::{run_sql, text};
use postgres::Client;

use crate::ledger::{is_prepared, is_rolled_back};
use crate::recording::Journal;

/// Rows of each table of the workload.
const ROWS: u64 = 300;

/// Tables whose sums are equal to the number of rows in the ledger.
pub(crate) const TABLES: [&str; 3] = ["t1", "t2", "t3"];

/// Tables of the workload, in plaintext: scenarios encrypt them as they like.
pub(crate) fn tables() -> String {
    let mut sql = String::from(
        "CREATE TABLE ledger (client int, n int, PRIMARY KEY (client, n));
         CREATE TABLE points (n int);\n",
    );
    for table in TABLES {
        sql += &format!(
            "CREATE TABLE {table} (id int PRIMARY KEY, v int NOT NULL, pad text);
             CREATE INDEX {table}_v ON {table} (v);
             ALTER TABLE {table} ALTER pad SET STORAGE EXTERNAL;
             INSERT INTO {table} SELECT i, 0, repeat(md5(i::text), CASE WHEN i % 20 = 0 THEN 90 ELSE 4 END)
                 FROM generate_series(1, {ROWS}) i;\n"
        );
    }
    sql
}

/// One client, until it is told to stop or the server is gone.
pub(crate) struct Worker<'r> {
    pub(crate) number: u64,
    pub(crate) cluster: &'r Cluster,
    pub(crate) journal: &'r Journal,
    pub(crate) stop: &'r AtomicBool,
    pub(crate) random: Random,
    /// The transaction that it begins with.
    pub(crate) first: u64,
    pub(crate) prepares: bool,
}

impl Worker<'_> {
    /// Returns the number of the next transaction.
    pub(crate) fn run(mut self) -> Result<u64> {
        let mut n = self.first;
        let mut client = self.cluster.client()?;
        run_sql(&mut client, "SET deadlock_timeout = '100ms'")?;
        while !self.stop.load(Relaxed) {
            match self.transaction(&mut client, n) {
                Ok(()) => {}
                Err(error) if is_deadlock(&error) => run_sql(&mut client, "ROLLBACK")?,
                Err(error) => return Err(error),
            }
            n += 1;
            // So that a journal holds as much of the scenario as of the load.
            std::thread::sleep(Duration::from_millis(3));
        }
        Ok(n)
    }

    fn transaction(&mut self, client: &mut Client, n: u64) -> Result<()> {
        let Worker { number, journal, random, .. } = self;
        let mut sql = format!("BEGIN; INSERT INTO ledger VALUES ({number}, {n});");
        for table in TABLES {
            let id = random.below(ROWS) + 1;
            let pad = [2, 4, 90][random.below(3) as usize];
            sql += &format!(
                "UPDATE {table} SET v = v + 1, pad = repeat(md5('{n}'), {pad}) WHERE id = {id};"
            );
        }
        journal.mark(&format!("b {number} {n}"))?;
        if is_rolled_back(n) {
            return run_sql(client, &format!("{sql} ROLLBACK"));
        }
        if self.prepares && is_prepared(n) {
            let prepare =
                format!("{sql} SELECT txid_current(); PREPARE TRANSACTION '{number}-{n}'");
            let xid = text(client, &prepare)?;
            journal.mark(&format!("p {number} {n} {xid}"))?;
            if random.percent(30) {
                // A checkpoint may come by.
                std::thread::sleep(Duration::from_millis(20));
            }
            // Repeated, because nothing else may end it.
            run_sql(client, &format!("COMMIT PREPARED '{number}-{n}'"))?;
        } else {
            run_sql(client, &format!("{sql} COMMIT"))?;
        }
        journal.mark(&format!("c {number} {n}"))?;
        if random.percent(5) {
            // Hint bits, and nothing else.
            run_sql(client, "SELECT count(*) FROM t1; SELECT sum(v) FROM t2")?;
        }
        Ok(())
    }
}

/// Not what anybody intends, but it happens to clients that lock rows in any order.
pub(crate) fn is_deadlock(error: &anyhow::Error) -> bool {
    error.to_string().starts_with("40P01")
}
