//! The cost of a round of work to the server.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use postgres::Client;

use crate::accounts::Spent;
use crate::processes::traffic;
use crate::results::{Counters, Sample};
use crate::servers::Side;

/// Work and time of a round, as reported by the workload.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) work: f64,
    pub(crate) seconds: f64,
    pub(crate) latency_ms: Option<f64>,
    pub(crate) p95_ms: Option<f64>,
}

/// A running measurement.
pub(crate) struct Meter {
    monitor: Client,
    before: Snapshot,
}

struct Snapshot {
    spent: Option<Spent>,
    /// Bytes read from and written to disks.
    traffic: Option<[f64; 2]>,
    wal: f64,
    hit: f64,
    read: f64,
    cipher: Option<BTreeMap<String, Counters>>,
}

impl Meter {
    pub(crate) fn start(side: &Side) -> Result<Meter> {
        let mut monitor = side.client()?;
        let mut before = snapshot(side, &mut monitor)?;
        before.traffic = side.postmaster().and_then(traffic);
        before.spent = side.spent();
        Ok(Meter { monitor, before })
    }

    /// Writes the dirty pages in shared buffers now, so that they count, but not as elapsed time.
    pub(crate) fn checkpoint(&mut self) -> Result<()> {
        Ok(self.monitor.batch_execute("CHECKPOINT")?)
    }

    pub(crate) fn finish(mut self, side: &Side, outcome: Outcome) -> Result<Sample> {
        let spent = self.before.spent.zip(side.spent());
        let io = self.before.traffic.zip(side.postmaster().and_then(traffic));
        let after = snapshot(side, &mut self.monitor)?;
        let cipher = after.cipher.zip(self.before.cipher).map(|(after, before)| {
            after
                .into_iter()
                .map(|(kind, now)| {
                    let earlier = before.get(&kind).copied().unwrap_or_default();
                    (kind, now.since(&earlier))
                })
                .collect()
        });
        Ok(Sample {
            work: outcome.work,
            seconds: outcome.seconds,
            latency_ms: outcome.latency_ms,
            p95_ms: outcome.p95_ms,
            cpu_seconds: spent.map(|(before, after)| after.cpu_seconds - before.cpu_seconds),
            instructions: spent
                .and_then(|(before, after)| Some(after.instructions? - before.instructions?)),
            blocks_hit: Some(after.hit - self.before.hit),
            blocks_read: Some(after.read - self.before.read),
            wal_bytes: Some(after.wal - self.before.wal),
            read_bytes: io.map(|(before, after)| after[0] - before[0]),
            written_bytes: io.map(|(before, after)| after[1] - before[1]),
            cipher,
        })
    }
}

impl Counters {
    fn since(&self, earlier: &Counters) -> Counters {
        Counters {
            sealed: self.sealed - earlier.sealed,
            opened: self.opened - earlier.opened,
            bytes_sealed: self.bytes_sealed - earlier.bytes_sealed,
            bytes_opened: self.bytes_opened - earlier.bytes_opened,
            seal_ms: self.seal_ms - earlier.seal_ms,
            open_ms: self.open_ms - earlier.open_ms,
        }
    }
}

fn snapshot(side: &Side, monitor: &mut Client) -> Result<Snapshot> {
    let row = monitor
        .query_one(
            "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8,
                    sum(blks_hit)::float8, sum(blks_read)::float8
             FROM pg_stat_database WHERE datname = current_database()",
            &[],
        )
        .context("read the server's statistics")?;
    let cipher = if side.variant.has_library() { counters(monitor)? } else { None };
    Ok(Snapshot {
        spent: None,
        traffic: None,
        wal: row.get(0),
        hit: row.get(1),
        read: row.get(2),
        cipher,
    })
}

/// Rows of `pagevault.stats`; `None` if the installed version has no such view.
fn counters(monitor: &mut Client) -> Result<Option<BTreeMap<String, Counters>>> {
    let there: bool =
        monitor.query_one("SELECT to_regclass('pagevault.stats') IS NOT NULL", &[])?.get(0);
    if !there {
        return Ok(None);
    }
    let rows = monitor.query(
        "SELECT kind, pages_encrypted::float8, pages_decrypted::float8, bytes_encrypted::float8, bytes_decrypted::float8,
                encrypt_time_ms::float8, decrypt_time_ms::float8 FROM pagevault.stats",
        &[],
    )?;
    let counters = |row: &postgres::Row| Counters {
        sealed: row.get(1),
        opened: row.get(2),
        bytes_sealed: row.get(3),
        bytes_opened: row.get(4),
        seal_ms: row.get(5),
        open_ms: row.get(6),
    };
    Ok(Some(rows.iter().map(|row| (row.get(0), counters(row))).collect()))
}
