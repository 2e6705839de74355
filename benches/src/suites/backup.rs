//! pg_basebackup of a cluster with pgbench's tables, with verification of pages. The client
//! discards the backup.

use std::process::Stdio;
use std::time::Instant;

use anyhow::{Result, ensure};

use super::{CellPlan, Workload, named};
use crate::meter::{Meter, Outcome};
use crate::plan::{Plan, Stratum};
use crate::results::Sample;
use crate::servers::{Sides, output};

struct Backup {
    scale: u32,
}

pub(super) fn cells(plan: &mut Plan) -> Vec<CellPlan> {
    let scale = plan.capped_scale(plan.scales[plan.scales.len() - 1], Stratum::Cache);
    vec![CellPlan {
        id: format!("backup/base-backup/s{scale}"),
        suite: "backup".into(),
        unit: "MB",
        parameters: named([
            ("statement", "base-backup".into()),
            ("scale", scale.to_string()),
            ("shared_buffers_mb", "64".into()),
        ]),
        settings: named([("shared_buffers", "64MB".into())]),
        rounds: plan.rounds,
        seconds: 0.5 + f64::from(scale) * 0.02,
        workload: Box::new(Backup { scale }),
    }]
}

impl Workload for Backup {
    fn load(&mut self, sides: &mut Sides) -> Result<()> {
        let scale = self.scale.to_string();
        for side in &mut sides.all {
            side.own_cluster()?;
            side.dataset(&format!("pgbench {scale}"), "pgbench_accounts", |side| {
                output(side, "pgbench", &["-i", "-q", "-I", "dtGvp", "-s", &scale]).map(drop)
            })?;
        }
        Ok(())
    }

    fn round(&mut self, sides: &mut Sides, contender: usize, _round: usize) -> Result<Sample> {
        let side = &sides.all[contender];
        let size: f64 = side.text("SELECT sum(pg_database_size(oid)) FROM pg_database")?.parse()?;
        let meter = Meter::start(side)?;
        let started = Instant::now();
        let status = side
            .program("pg_basebackup")
            .args([
                "--checkpoint=fast",
                "--format=tar",
                "--wal-method=none",
                "--no-manifest",
                "-D",
                "-",
            ])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()?;
        ensure!(status.success(), "pg_basebackup: {status}");
        let seconds = started.elapsed().as_secs_f64();
        meter.finish(side, Outcome { work: size / 1e6, seconds, ..Outcome::default() })
    }
}
