//! sysbench's OLTP workloads, threads swept.

use std::process::Command;

use anyhow::{Context, Result};
use pagevault_tests::installation::run;

use super::{CellPlan, Workload, named};
use crate::meter::{Meter, Outcome};
use crate::plan::{Plan, Stratum};
use crate::results::Sample;
use crate::servers::{Side, Sides};

const WORKLOADS: [&str; 5] = [
    "oltp_read_only",
    "oltp_read_write",
    "oltp_write_only",
    "oltp_update_index",
    "oltp_point_select",
];

const TABLES: &str = "--tables=4";

struct Sysbench {
    workload: &'static str,
    rows: u64,
    threads: u32,
    seconds: u32,
}

pub(super) fn cells(plan: &mut Plan) -> Vec<CellPlan> {
    if Command::new("sysbench").arg("--version").output().is_err() {
        plan.notes.push(
            "sysbench is not installed: its suite was SKIPPED (Debian: apt install sysbench)"
                .into(),
        );
        return Vec::new();
    }
    let rows = plan.sysbench_rows;
    // A row takes some 250 bytes with its indexes.
    let data_mb = rows * 4 * 250 / 1_000_000;
    let buffers = Stratum::Cache.shared_buffers(data_mb);
    let mut cells = Vec::new();
    for workload in WORKLOADS {
        for threads in plan.clients.clone() {
            let seconds = plan.round_seconds().min(60.0) as u32;
            cells.push(CellPlan {
                id: format!("sysbench/{workload}/t{threads}"),
                suite: "sysbench".into(),
                unit: "transaction",
                parameters: named([
                    ("workload", workload.into()),
                    ("clients", threads.to_string()),
                    ("rows", format!("4 x {rows}")),
                    ("shared_buffers_mb", buffers.to_string()),
                ]),
                settings: named([("shared_buffers", format!("{buffers}MB"))]),
                rounds: plan.rounds,
                seconds: f64::from(seconds) + 1.0,
                workload: Box::new(Sysbench { workload, rows, threads, seconds }),
            });
        }
    }
    cells
}

impl Sysbench {
    fn sysbench(&self, side: &Side, what: &[String]) -> Result<String> {
        let address = side.address();
        let mut command = Command::new("sysbench");
        command
            .args([self.workload, "--db-driver=pgsql", TABLES])
            .arg(format!("--table-size={}", self.rows))
            .arg(format!("--pgsql-host={}", address.host))
            .arg(format!("--pgsql-port={}", address.port))
            .arg(format!("--pgsql-user={}", address.user))
            .arg(format!("--pgsql-db={}", address.database))
            .args(what);
        if let Some(password) = address.password {
            command.env("PGPASSWORD", password);
        }
        run(&mut command)
    }
}

impl Workload for Sysbench {
    fn load(&mut self, sides: &mut Sides) -> Result<()> {
        for side in &mut sides.all {
            side.dataset(&format!("sysbench {}", self.rows), "sbtest1", |side| {
                self.sysbench(side, &["prepare".into()])?;
                side.sql("VACUUM ANALYZE")
            })?;
            self.sysbench(
                side,
                &["--time=1".into(), format!("--threads={}", self.threads), "run".into()],
            )?;
        }
        Ok(())
    }

    fn round(&mut self, sides: &mut Sides, contender: usize, round: usize) -> Result<Sample> {
        let side = &sides.all[contender];
        side.sql("CHECKPOINT")?;
        let mut meter = Meter::start(side)?;
        let report = self.sysbench(
            side,
            &[
                format!("--time={}", self.seconds),
                format!("--threads={}", self.threads),
                format!("--rand-seed={}", round + 1),
                "run".into(),
            ],
        )?;
        meter.checkpoint()?;
        meter.finish(side, parse(&report)?)
    }
}

/// Parses sysbench's report.
fn parse(report: &str) -> Result<Outcome> {
    let number = |prefix: &str| -> Option<f64> {
        let rest = report.lines().find_map(|line| line.trim().strip_prefix(prefix))?;
        rest.trim().split([' ', 's']).next()?.parse().ok()
    };
    let context = || format!("understand sysbench's report:\n{report}");
    Ok(Outcome {
        work: number("transactions:").with_context(context)?,
        seconds: number("total time:").with_context(context)?,
        latency_ms: number("avg:"),
        p95_ms: number("95th percentile:"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_sysbench_is_parsed() {
        let report = "SQL statistics:
    queries performed:
        read:                            2310
    transactions:                        165    (164.31 per sec.)
General statistics:
    total time:                          1.0032s
Latency (ms):
         min:                                    4.99
         avg:                                    6.07
         95th percentile:                        7.98
";
        let outcome = parse(report).expect("a report");
        assert_eq!(outcome.work, 165.0);
        assert_eq!(outcome.seconds, 1.0032);
        assert_eq!((outcome.latency_ms, outcome.p95_ms), (Some(6.07), Some(7.98)));
    }
}
