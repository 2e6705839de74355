//! Speed of WAL replay: after a crash, and from an archive on top of a base backup.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::{Cluster, process};

use super::{CellPlan, Workload, named};
use crate::accounts::since_start;
use crate::interrupt;
use crate::plan::{Plan, Stratum};
use crate::processes::traffic;
use crate::results::Sample;
use crate::servers::{Side, Sides, output};

const LSN: &str = "pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')";

pub(super) fn cells(plan: &mut Plan) -> Vec<CellPlan> {
    let scale = plan.capped_scale(plan.scales[0], Stratum::Cache);
    let transactions = plan.recovery;
    let cell = |name: &str, workload: Box<dyn Workload>, archive: bool, seconds: f64| CellPlan {
        id: format!("recovery/{name}/s{scale}"),
        suite: "recovery".into(),
        unit: "MB",
        parameters: named([
            ("kind", name.to_owned()),
            ("scale", scale.to_string()),
            ("transactions", transactions.to_string()),
        ]),
        settings: named([
            ("shared_buffers", "128MB".into()),
            ("synchronous_commit", "off".into()),
            ("max_wal_size", "16GB".into()),
            ("archive_mode", if archive { "on" } else { "off" }.into()),
            ("archive_command", if archive { "cp %p ../archive/%f" } else { "" }.into()),
        ]),
        rounds: plan.rounds.min(6),
        seconds,
        workload,
    };
    let work = f64::from(transactions) / 2000.0;
    vec![
        cell("crash", Box::new(Crash { scale, transactions }), false, 2.0 + 2.0 * work),
        cell(
            "archive",
            Box::new(Archive { scale, transactions, replayed: Vec::new() }),
            true,
            3.0 + work,
        ),
    ]
}

fn load_pgbench(side: &mut Side, scale: u32) -> Result<()> {
    let scale = scale.to_string();
    side.dataset(&format!("pgbench {scale}"), "pgbench_accounts", |side| {
        output(side, "pgbench", &["-i", "-q", "-I", "dtGvp", "-s", &scale]).map(drop)
    })
}

fn write_wal(side: &Side, transactions: u32, seed: usize) -> Result<()> {
    let each = (transactions / 4).to_string();
    let seed = seed.to_string();
    let arguments = ["-n", "-c", "4", "-j", "2", "-t", &each, "--random-seed", &seed];
    output(side, "pgbench", &arguments).map(drop)
}

fn lsn(side: &Side) -> Result<f64> {
    Ok(side.text(&format!("SELECT {LSN}"))?.parse()?)
}

/// All servers run the same transactions, are killed, and start again.
struct Crash {
    scale: u32,
    transactions: u32,
}

impl Workload for Crash {
    fn load(&mut self, sides: &mut Sides) -> Result<()> {
        for side in &mut sides.all {
            side.own_cluster()?;
            load_pgbench(side, self.scale)?;
        }
        Ok(())
    }

    fn round(&mut self, sides: &mut Sides, contender: usize, round: usize) -> Result<Sample> {
        let side = &sides.all[contender];
        side.sql("CHECKPOINT")?;
        let before = lsn(side)?;
        write_wal(side, self.transactions, round + 1)?;
        let wal = lsn(side)? - before;
        let cluster = side.own_cluster()?;
        cluster.kill()?;
        let started = Instant::now();
        cluster.start_server()?;
        let seconds = started.elapsed().as_secs_f64();
        side.text("SELECT 1")?;
        let postmaster = side.postmaster();
        let io = postmaster.and_then(traffic);
        Ok(Sample {
            work: wal / 1e6,
            seconds,
            cpu_seconds: postmaster.and_then(since_start),
            wal_bytes: Some(wal),
            read_bytes: io.map(|io| io[0]),
            written_bytes: io.map(|io| io[1]),
            ..Sample::default()
        })
    }
}

/// A base backup and archived transactions. In each round a server replays them on a copy of the
/// backup.
struct Archive {
    scale: u32,
    transactions: u32,
    /// Bytes of WAL for each side.
    replayed: Vec<f64>,
}

fn backup_of(cluster: &Cluster) -> PathBuf {
    cluster.directory().join("backup")
}

impl Workload for Archive {
    fn load(&mut self, sides: &mut Sides) -> Result<()> {
        self.replayed.clear();
        for side in &mut sides.all {
            load_pgbench(side, self.scale)?;
            let cluster = side.own_cluster()?;
            let archive = cluster.directory().join("archive");
            for made in [&archive, &backup_of(cluster)] {
                if made.exists() {
                    std::fs::remove_dir_all(made)?;
                }
            }
            std::fs::create_dir(&archive)?;
            cluster.installation().give(&archive)?;
            run(side
                .program("pg_basebackup")
                .args(["--checkpoint=fast", "--wal-method=none", "--no-manifest", "-D"])
                .arg(backup_of(cluster)))?;
            let before = lsn(side)?;
            write_wal(side, self.transactions, 1)?;
            self.replayed.push(lsn(side)? - before);
            let last = side.text("SELECT pg_walfile_name(pg_switch_wal())")?;
            cluster.eventually(
                &format!("SELECT last_archived_wal >= '{last}' FROM pg_stat_archiver"),
                "t",
            )?;
        }
        Ok(())
    }

    fn round(&mut self, sides: &mut Sides, contender: usize, _round: usize) -> Result<Sample> {
        let side = &sides.all[contender];
        let source = side.own_cluster()?;
        let restored = Cluster::from_files(|data| {
            run(source
                .installation()
                .command("/bin/cp")
                .arg("-a")
                .arg(backup_of(source))
                .arg(data))?;
            for name in ["recovery.signal", "bench.conf"] {
                std::fs::write(data.join(name), "")?;
                source.installation().give(&data.join(name))?;
            }
            Ok(())
        })?;
        interrupt::watch(restored.directory());
        restored.append_conf(&format!(
            "archive_mode = off\nmax_wal_size = '16GB'\nshared_buffers = '128MB'\nrestore_command = 'cp {}/%f %p'",
            source.directory().join("archive").display()
        ))?;
        let started = Instant::now();
        restored.start_server()?;
        restored.eventually("SELECT pg_is_in_recovery()", "f")?;
        let seconds = started.elapsed().as_secs_f64();
        let postmaster = process::postmaster(&restored.data_directory());
        let used = postmaster.and_then(since_start);
        let wal = *self.replayed.get(contender).context("the archive was not made")?;
        let rows = restored.text("SELECT count(*) > 0 FROM pgbench_history")?;
        ensure!(rows == "t", "the archive was not replayed");
        restored.finish()?;
        Ok(Sample {
            work: wal / 1e6,
            seconds,
            cpu_seconds: used,
            wal_bytes: Some(wal),
            ..Sample::default()
        })
    }
}
