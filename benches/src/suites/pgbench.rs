//! pgbench's built-in scripts: `readonly` (-S) and `readwrite` (TPC-B).

use anyhow::{Context, Result};
use pagevault_tests::installation::run;

use super::{CellPlan, Workload, named};
use crate::meter::{Meter, Outcome};
use crate::page_cache;
use crate::plan::{Length, Plan, Stratum, scale_mb};
use crate::results::Sample;
use crate::servers::{Side, Sides, output};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Script {
    SelectOnly,
    TpcB,
}

/// One cell of pgbench, with all parameters.
#[derive(Clone, Debug)]
pub(crate) struct Pgbench {
    pub(crate) suite: String,
    pub(crate) script: Script,
    pub(crate) scale: u32,
    pub(crate) clients: u32,
    pub(crate) stratum: Stratum,
    /// MB, if not determined by the stratum.
    pub(crate) shared_buffers: Option<u64>,
    pub(crate) synchronous_commit: bool,
    pub(crate) length: Length,
    pub(crate) protocol: String,
}

impl Pgbench {
    pub(crate) fn new(plan: &Plan, suite: &str, script: Script) -> Pgbench {
        Pgbench {
            suite: suite.to_owned(),
            script,
            scale: 1,
            clients: 1,
            stratum: Stratum::Shared,
            shared_buffers: None,
            synchronous_commit: true,
            length: plan.length,
            protocol: plan.protocol.clone(),
        }
    }

    pub(crate) fn cell(mut self, plan: &Plan) -> CellPlan {
        if plan.existing {
            (self.stratum, self.shared_buffers) = (Stratum::AsIs, None);
        }
        let buffers = self
            .shared_buffers
            .unwrap_or_else(|| self.stratum.shared_buffers(scale_mb(self.scale)));
        let script = match self.script {
            Script::SelectOnly => "select-only",
            Script::TpcB => "tpcb-like",
        };
        let mut parameters = named([
            ("script", script.to_owned()),
            ("scale", self.scale.to_string()),
            ("clients", self.clients.to_string()),
            ("stratum", self.stratum.name().to_owned()),
        ]);
        let on_off = if self.synchronous_commit { "on" } else { "off" };
        let mut settings = named([]);
        if !plan.existing {
            parameters.insert("shared_buffers_mb".into(), buffers.to_string());
            parameters.insert("synchronous_commit".into(), on_off.into());
            settings.insert("shared_buffers".into(), format!("{buffers}MB"));
            settings.insert("synchronous_commit".into(), on_off.into());
        }
        CellPlan {
            id: self.id(script),
            suite: self.suite.clone(),
            unit: "transaction",
            parameters,
            settings,
            rounds: plan.rounds,
            seconds: plan.round_seconds() + 0.7,
            workload: Box::new(self),
        }
    }

    fn id(&self, script: &str) -> String {
        let mut id =
            format!("{}/s{}/c{}/{}", self.suite, self.scale, self.clients, self.stratum.name());
        if self.suite.starts_with("preset") {
            id = format!("{id}/{script}");
        }
        if let Some(buffers) = self.shared_buffers {
            id = format!("{id}/sb{buffers}");
        }
        if !self.synchronous_commit {
            id.push_str("/async");
        }
        id
    }

    fn run(&self, side: &Side, length: Length, seed: usize) -> Result<Outcome> {
        let (clients, seed) = (self.clients.to_string(), seed.to_string());
        let threads = self.clients.min(4).to_string();
        let amount = match length {
            Length::Seconds(number) => ["-T".to_owned(), number.to_string()],
            Length::Transactions(number) => ["-t".to_owned(), number.to_string()],
        };
        let mut arguments = vec![
            "-n",
            "-c",
            &clients,
            "-j",
            &threads,
            "-M",
            &self.protocol,
            "--random-seed",
            &seed,
        ];
        arguments.extend(amount.iter().map(String::as_str));
        if self.script == Script::SelectOnly {
            arguments.push("-S");
        }
        parse(&output(side, "pgbench", &arguments)?)
    }
}

impl Workload for Pgbench {
    fn load(&mut self, sides: &mut Sides) -> Result<()> {
        let scale = self.scale.to_string();
        for side in &mut sides.all {
            side.dataset(&format!("pgbench {scale}"), "pgbench_accounts", |side| {
                // VACUUM sets no hint bits for an asynchronous commit that is not yet on disk
                // (heapam_visibility.c, SetHintBits); the measured reads would set and log them.
                let mut pgbench = side.program("pgbench");
                pgbench.env("PGOPTIONS", "-c synchronous_commit=on");
                run(pgbench.args(["-i", "-q", "-I", "dtGvp", "-s", &scale])).map(drop)
            })?;
            match (self.stratum, side.cluster()) {
                (Stratum::Shared, _) => prewarm(side)?,
                (Stratum::Cache, Some(cluster)) => page_cache::fill(&cluster.data_directory())?,
                _ => {}
            }
            self.run(side, Length::Seconds(1), 0)?;
        }
        Ok(())
    }

    fn round(&mut self, sides: &mut Sides, contender: usize, round: usize) -> Result<Sample> {
        let side = &sides.all[contender];
        if self.script == Script::TpcB || self.stratum == Stratum::Disk {
            side.sql("CHECKPOINT")?;
        }
        if let (Stratum::Disk, Some(cluster)) = (self.stratum, side.cluster()) {
            page_cache::empty(&cluster.data_directory())?;
        }
        let mut meter = Meter::start(side)?;
        // All contenders of a round access the same accounts.
        let outcome = self.run(side, self.length, round + 1)?;
        if self.script == Script::TpcB {
            meter.checkpoint()?;
        }
        meter.finish(side, outcome)
    }

    fn notes(&self, samples: &[Vec<Sample>]) -> Vec<String> {
        let all = || samples.iter().flatten();
        let wanted: f64 = all().filter_map(|sample| sample.blocks_read).sum::<f64>() * 8192.0;
        let read: f64 = all().filter_map(|sample| sample.read_bytes).sum();
        if self.stratum == Stratum::Disk && wanted > 0.0 && read < wanted / 10.0 {
            vec!["the page cache could not be emptied here: pages did not come from disk".into()]
        } else {
            Vec::new()
        }
    }
}

/// Brings all tables of pgbench into shared buffers.
fn prewarm(side: &Side) -> Result<()> {
    let tables =
        "'pgbench_accounts'), ('pgbench_accounts_pkey'), ('pgbench_branches'), ('pgbench_tellers'";
    let by_extension = side.sql("CREATE EXTENSION IF NOT EXISTS pg_prewarm").and_then(|()| {
        side.sql(&format!("SELECT pg_prewarm(name::regclass) FROM (VALUES ({tables})) t (name)"))
    });
    // Without pg_prewarm: no plain scan, because it would use only the few buffers of a ring.
    by_extension.or_else(|_| {
        side.sql(
            "SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_indexonlyscan = off;
             SELECT sum(abalance) FROM pgbench_accounts WHERE aid > 0",
        )
    })
}

/// Parses pgbench's report.
pub(super) fn parse(report: &str) -> Result<Outcome> {
    let number = |prefix: &str| -> Option<f64> {
        let rest = report.lines().find_map(|line| line.strip_prefix(prefix))?;
        rest.trim().split([' ', '/']).next()?.parse().ok()
    };
    let context = || format!("understand pgbench's report:\n{report}");
    let work = number("number of transactions actually processed:").with_context(context)?;
    let rate = number("tps =").with_context(context)?;
    Ok(Outcome {
        work,
        seconds: work / rate,
        latency_ms: number("latency average ="),
        p95_ms: None,
    })
}

/// Strata by scale and clients, then the sweep of shared_buffers.
pub(super) fn readonly(plan: &mut Plan) -> Vec<CellPlan> {
    let mut cells = swept(plan, "readonly", Script::SelectOnly, &plan.strata.clone(), &[true]);
    for buffers in plan.shared_buffers.clone() {
        let mut bench = Pgbench::new(plan, "readonly", Script::SelectOnly);
        bench.scale = plan.capped_scale(plan.scales[0], Stratum::Cache);
        bench.clients = plan.clients[plan.clients.len() / 2];
        bench.stratum = Stratum::Cache;
        bench.shared_buffers = Some(buffers);
        cells.push(bench.cell(plan));
    }
    cells
}

/// Strata by scale, clients and synchronous_commit.
pub(super) fn readwrite(plan: &mut Plan) -> Vec<CellPlan> {
    let commits: &[bool] = if plan.existing { &[true] } else { &[true, false] };
    swept(plan, "readwrite", Script::TpcB, &plan.write_strata.clone(), commits)
}

fn swept(
    plan: &mut Plan,
    suite: &str,
    script: Script,
    strata: &[Stratum],
    commits: &[bool],
) -> Vec<CellPlan> {
    let mut cells = Vec::new();
    for wanted in plan.scales.clone() {
        for &stratum in strata {
            let scale = plan.capped_scale(wanted, stratum);
            for &synchronous_commit in commits {
                for clients in plan.clients.clone() {
                    let mut bench = Pgbench::new(plan, suite, script);
                    (bench.scale, bench.clients, bench.stratum) = (scale, clients, stratum);
                    bench.synchronous_commit = synchronous_commit;
                    cells.push(bench.cell(plan));
                }
            }
        }
    }
    cells
}

/// Short runs of a fixed number of transactions, so that the number of pages does not depend on the
/// machine.
pub(super) fn gate(plan: &mut Plan) -> Vec<CellPlan> {
    [
        (Script::SelectOnly, "select", Stratum::Shared, 10_000),
        (Script::SelectOnly, "select", Stratum::Cache, 5_000),
        (Script::TpcB, "tpcb", Stratum::Cache, 1_000),
    ]
    .map(|(script, name, stratum, transactions)| {
        let mut bench = Pgbench::new(plan, &format!("gate-{name}"), script);
        bench.scale = 5;
        bench.stratum = stratum;
        bench.synchronous_commit = false;
        bench.length = Length::Transactions(transactions);
        let mut cell = bench.cell(plan);
        // When autovacuum runs depends on the speed of the machine.
        cell.settings.insert("autovacuum".into(), "off".into());
        cell
    })
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "pgbench (15.18)
transaction type: <builtin: select only>
number of clients: 4
number of transactions actually processed: 61012
number of failed transactions: 0 (0.000%)
latency average = 0.131 ms
initial connection time = 4.1 ms
tps = 30506.000000 (without initial connection time)
";

    #[test]
    fn a_report_of_pgbench_is_parsed() {
        let outcome = parse(REPORT).expect("a report");
        assert_eq!(outcome.work, 61012.0);
        assert_eq!(outcome.latency_ms, Some(0.131));
        assert!((outcome.seconds - 2.0).abs() < 1e-9);
        assert!(parse("pgbench: error").is_err());
    }

    #[test]
    fn transactions_of_a_fixed_number_are_reported_with_a_slash() {
        let report = REPORT.replace("61012", "100/100");
        assert_eq!(parse(&report).expect("a report").work, 100.0);
    }
}
