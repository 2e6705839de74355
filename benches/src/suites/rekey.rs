//! Rekeying: its speed and WAL compared with VACUUM FULL of the same table, and how much a job at
//! the default throttle slows pgbench. All of it runs on the server `relations`, and on
//! `relations-xts` if that is compared, too; the contenders are the operations on each.

use std::time::Instant;

use anyhow::{Result, bail, ensure};

use super::{CellPlan, Workload, named};
use crate::meter::{Meter, Outcome};
use crate::plan::{Plan, Stratum};
use crate::results::Sample;
use crate::servers::{Side, Sides, output};

pub(super) fn cells(plan: &mut Plan) -> Vec<CellPlan> {
    let megabytes = plan.rekey_mb;
    let scale = plan.capped_scale(plan.scales[0], Stratum::Cache);
    let settings = named([("shared_buffers", "128MB".into())]);
    let seconds = (plan.round_seconds() as u32).clamp(2, 60);
    vec![
        CellPlan {
            id: format!("rekey/speed/{megabytes}MB"),
            suite: "rekey".into(),
            unit: "MB",
            parameters: named([("table_mb", megabytes.to_string())]),
            settings: settings.clone(),
            rounds: plan.rounds.min(6),
            seconds: megabytes as f64 / 60.0 + 0.5,
            workload: Box::new(Speed { megabytes }),
        },
        CellPlan {
            id: format!("rekey/beside-pgbench/{megabytes}MB"),
            suite: "rekey".into(),
            unit: "transaction",
            parameters: named([
                ("table_mb", megabytes.to_string()),
                ("scale", scale.to_string()),
                ("clients", "2".into()),
            ]),
            settings,
            rounds: plan.rounds.min(6),
            seconds: f64::from(seconds) + 2.0,
            workload: Box::new(Beside { megabytes, scale, seconds, unfinished: 0, jobs: 0 }),
        },
    ]
}

fn make_table(side: &Side, megabytes: u64) -> Result<()> {
    side.sql(&format!(
        "CREATE TABLE rekeyed (id int, filler text);
         SECURITY LABEL FOR pagevault ON TABLE rekeyed IS 'plaintext';
         INSERT INTO rekeyed SELECT i, repeat(md5(i::text), 31) FROM generate_series(1, {megabytes} * 1000) i"
    ))
}

fn wait_for(side: &Side, statement: &str) -> Result<()> {
    side.sql(statement)?;
    let done = side.text("SELECT pagevault.wait_for_rekey('rekeyed'::regclass)")?;
    ensure!(done == "t", "{statement}: the job did not end");
    Ok(())
}

/// These operations on each server, named by both if there are several. Those of a server come
/// after each other.
fn on_each(sides: &Sides, operations: &[&str]) -> Vec<String> {
    // Without such a server `load` fails, and says so.
    let places = sides.sealing_relations().unwrap_or_default();
    let names = places.iter().flat_map(|&place| {
        let server = sides.all[place].variant.name();
        operations.iter().map(move |operation| format!("{operation} {server}"))
    });
    if places.len() > 1 {
        names.collect()
    } else {
        operations.iter().map(ToString::to_string).collect()
    }
}

/// The server and the number of the operation of a contender of [`on_each`].
fn of_contender<'a>(
    sides: &'a Sides,
    operations: &[&str],
    contender: usize,
) -> Result<(&'a Side, usize)> {
    let places = sides.sealing_relations()?;
    let side = &sides.all[places[contender / operations.len()]];
    Ok((side, contender % operations.len()))
}

struct Speed {
    megabytes: u64,
}

/// In this order the table goes from plaintext to plaintext.
const OPERATIONS: [&str; 4] = ["vacuum-full", "encrypt", "new-data-key", "decrypt"];

impl Workload for Speed {
    fn contenders(&self, sides: &Sides) -> Vec<String> {
        on_each(sides, &OPERATIONS)
    }

    fn load(&mut self, sides: &mut Sides) -> Result<()> {
        let megabytes = self.megabytes;
        for place in sides.sealing_relations()? {
            let side = &mut sides.all[place];
            side.forget_dataset();
            side.dataset("rekey speed", "", |side| make_table(side, megabytes))?;
            side.own_cluster()?.set(&[("pagevault.rekey_rate", "0")])?;
        }
        Ok(())
    }

    fn round(&mut self, sides: &mut Sides, contender: usize, _round: usize) -> Result<Sample> {
        let (side, operation) = of_contender(sides, &OPERATIONS, contender)?;
        let operation = OPERATIONS[operation];
        // Contenders come in any order, so first bring the table into the state that the operation
        // needs.
        let sealed = side.text("SELECT pagevault.is_encrypted('rekeyed')")? == "t";
        let wanted = matches!(operation, "new-data-key" | "decrypt");
        let label = |sealed: bool| {
            let to = if sealed { "encrypted" } else { "plaintext" };
            format!("SECURITY LABEL FOR pagevault ON TABLE rekeyed IS '{to}'")
        };
        if sealed != wanted {
            wait_for(side, &label(wanted))?;
        }
        side.sql("CHECKPOINT")?;
        let size: f64 = side.text("SELECT pg_table_size('rekeyed')")?.parse()?;
        let meter = Meter::start(side)?;
        let started = Instant::now();
        match operation {
            "vacuum-full" => side.sql("VACUUM FULL rekeyed")?,
            "encrypt" => wait_for(side, &label(true))?,
            "new-data-key" => wait_for(side, "SELECT pagevault.rotate_data_key('rekeyed')")?,
            "decrypt" => wait_for(side, &label(false))?,
            other => bail!("{other} is no operation"),
        }
        let seconds = started.elapsed().as_secs_f64();
        meter.finish(side, Outcome { work: size / 1e6, seconds, ..Outcome::default() })
    }
}

struct Beside {
    megabytes: u64,
    scale: u32,
    seconds: u32,
    /// Rounds in which the job took longer than pgbench, and all rounds with a job.
    unfinished: u32,
    jobs: u32,
}

const BESIDE: [&str; 2] = ["alone", "beside-a-job"];

impl Workload for Beside {
    fn contenders(&self, sides: &Sides) -> Vec<String> {
        on_each(sides, &BESIDE)
    }

    fn load(&mut self, sides: &mut Sides) -> Result<()> {
        let (megabytes, scale) = (self.megabytes, self.scale.to_string());
        for place in sides.sealing_relations()? {
            let side = &mut sides.all[place];
            side.forget_dataset();
            side.dataset("rekey beside", "pgbench_accounts", |side| {
                make_table(side, megabytes)?;
                output(side, "pgbench", &["-i", "-q", "-I", "dtGvp", "-s", &scale])?;
                side.sql("ALTER SYSTEM RESET pagevault.rekey_rate")?;
                side.sql("SELECT pg_reload_conf()")
            })?;
            let label = "SECURITY LABEL FOR pagevault ON TABLE rekeyed IS 'encrypted'";
            let result = wait_for(side, label);
            side.forget_dataset();
            result?;
        }
        Ok(())
    }

    fn round(&mut self, sides: &mut Sides, contender: usize, round: usize) -> Result<Sample> {
        let (side, operation) = of_contender(sides, &BESIDE, contender)?;
        side.sql("CHECKPOINT")?;
        let job = match BESIDE[operation] {
            "alone" => None,
            _ => Some(side.text("SELECT pagevault.rotate_data_key('rekeyed')")?),
        };
        let meter = Meter::start(side)?;
        let (seconds, seed) = (self.seconds.to_string(), (round + 1).to_string());
        let report =
            output(side, "pgbench", &["-n", "-c", "2", "-T", &seconds, "--random-seed", &seed])?;
        let sample = meter.finish(side, super::pgbench::parse(&report)?)?;
        if let Some(job) = job {
            let state = format!("SELECT state FROM pagevault.rekey_jobs WHERE job = {job}");
            self.jobs += 1;
            self.unfinished += u32::from(side.text(&state)? == "running");
            side.sql(&format!("SELECT pagevault.wait_for_rekey({job})"))?;
        }
        Ok(sample)
    }

    fn notes(&self, _samples: &[Vec<Sample>]) -> Vec<String> {
        vec![format!(
            "the job went on for the whole run in {} of {} rounds",
            self.unfinished, self.jobs
        )]
    }
}
