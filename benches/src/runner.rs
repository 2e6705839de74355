//! Runs all cells one after the other. Each round of a cell measures all contenders in turn.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use pagevault_tests::Installation;

use crate::interrupt;
use crate::plan::Plan;
use crate::results::{Cell, Contender, Results, SCHEMA, Sample};
use crate::servers::Sides;
use crate::suites::{CellPlan, Suite};
use crate::variants::Variant;

/// The servers to measure.
pub(crate) enum Target {
    Own { installation: &'static Installation, variants: Vec<Variant> },
    Existing { connection: String, installation: Option<&'static Installation> },
}

pub(crate) struct Request {
    pub(crate) target: Target,
    pub(crate) suites: Vec<Suite>,
    pub(crate) plan: Plan,
    pub(crate) profile: String,
    pub(crate) directory: PathBuf,
    /// Written after each cell, so that an interrupted run keeps its results.
    pub(crate) json: Option<PathBuf>,
}

/// Refuses an installation without the extension, with a readable error.
pub(crate) fn check_extension(installation: &Installation) -> Result<()> {
    let library = installation.library_directory().join("pagevault.so");
    let helper = installation.program("pagevault-keyring");
    ensure!(
        installation.has_extension("pagevault") && library.exists() && helper.exists(),
        "pagevault is not installed in this {} ({} and {} are wanted); from a checkout of the sources: \
         make install PG={} PG_CONFIG=/path/to/its/pg_config",
        installation.version,
        library.display(),
        helper.display(),
        installation.major
    );
    Ok(())
}

pub(crate) fn run(mut request: Request) -> Result<Results> {
    interrupt::install()?;
    let mut cells = Vec::new();
    for suite in &request.suites {
        let own = matches!(request.target, Target::Own { .. });
        if !own && !suite.fits_existing() {
            let note = format!("suite {} needs servers of its own: skipped", suite.name());
            request.plan.notes.push(note);
            continue;
        }
        cells.extend(suite.cells(&mut request.plan));
    }
    // Reductions may have made cells equal.
    let mut seen = std::collections::BTreeSet::new();
    cells.retain(|cell| seen.insert(cell.id.clone()));
    // The keys of dropped tables stay in the keystore, so cells with many keys come last.
    cells.sort_by_key(|cell| cell.parameters.get("keys").and_then(|keys| keys.parse::<u32>().ok()));
    ensure!(!cells.is_empty(), "nothing to measure: {}", request.plan.notes.join("; "));

    let bar = ProgressBar::new(0);
    bar.set_style(ProgressStyle::with_template("{bar:24} {percent:>3} %  {msg}")?);
    bar.set_message("starting servers");
    let mut sides = match &request.target {
        Target::Own { installation, variants } => {
            check_extension(installation)?;
            Sides::own(variants, &request.directory, |name| {
                bar.set_message(format!("starting server {name}"));
            })?
        }
        Target::Existing { connection, installation } => {
            Sides::existing(connection, *installation)?
        }
    };
    let side = &sides.all[0];
    let mut results = Results {
        schema: SCHEMA,
        program: env!("CARGO_PKG_VERSION").into(),
        taken: side.text("SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI')")?,
        postgres: side.text("SELECT version()")?,
        major: side.text("SELECT current_setting('server_version_num')::int / 10000")?.parse()?,
        machine: request.plan.machine.clone(),
        profile: request.profile,
        notes: request.plan.notes.clone(),
        instructions: std::collections::BTreeMap::new(),
        cells: Vec::new(),
    };
    if !sides.are_own() {
        results.notes.push(
            "existing cluster: settings, caches and WAL encryption are as they are there, and other sessions \
             count in processor time, WAL and the extension's counters"
                .into(),
        );
    }

    let mut progress = Progress::new(bar, &cells, &sides);
    for cell in cells {
        let id = cell.id.clone();
        match measure(cell, &mut sides, &mut progress) {
            Ok(cell) => results.cells.push(cell),
            Err(error) => {
                let note = format!("{id} FAILED: {error:#}");
                progress.bar.println(&note);
                results.notes.push(note);
            }
        }
        if let Some(json) = &request.json {
            results.write(json)?;
        }
    }
    progress.bar.finish_and_clear();
    results.notes.extend(sides.finish());
    Ok(results)
}

/// Finished and total work in expected seconds; the actual time so far corrects the estimate.
struct Progress {
    bar: ProgressBar,
    done: f64,
    total: f64,
    started: std::time::Instant,
}

/// Seconds to load a data set and restart all servers before the rounds of a cell.
const PREPARING: f64 = 4.0;

impl Progress {
    fn new(bar: ProgressBar, cells: &[CellPlan], sides: &Sides) -> Progress {
        let total = cells.iter().map(|cell| expected(cell, sides)).sum();
        bar.set_length(1000);
        Progress { bar, done: 0.0, total, started: std::time::Instant::now() }
    }

    fn show(&mut self, what: &str, seconds: f64) {
        self.done += seconds;
        let share = self.done / self.total;
        let elapsed = self.started.elapsed().as_secs_f64();
        // At the beginning there is no measured time yet: use the plan's estimate.
        let left = if share > 0.02 { elapsed / share - elapsed } else { self.total - self.done };
        self.bar.set_position((share * 1000.0) as u64);
        self.bar.set_message(format!("{} left  {what}", minutes(left)));
        if self.bar.is_hidden() {
            eprintln!("pagevault-bench: {:>3.0} %, {} left: {what}", share * 100.0, minutes(left));
        }
    }
}

fn expected(cell: &CellPlan, sides: &Sides) -> f64 {
    PREPARING + cell.seconds * (cell.rounds * cell.workload.contenders(sides).len()) as f64
}

fn minutes(seconds: f64) -> String {
    let seconds = seconds.max(0.0).round() as u64;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{} h {:02} min", seconds / 3600, seconds / 60 % 60),
    }
}

fn measure(mut plan: CellPlan, sides: &mut Sides, progress: &mut Progress) -> Result<Cell> {
    let names = plan.workload.contenders(sides);
    let end = progress.done + expected(&plan, sides);
    progress.show(&format!("{}: making ready", plan.id), 0.0);
    let result = rounds(&mut plan, &names, sides, progress);
    progress.done = end;
    let samples = result?;
    let contenders = names
        .iter()
        .zip(&samples)
        .map(|(name, rounds)| Contender::new(name, rounds.clone(), &samples[0]))
        .collect();
    Ok(Cell {
        notes: plan.workload.notes(&samples),
        id: plan.id,
        suite: plan.suite,
        unit: plan.unit.into(),
        parameters: plan.parameters,
        contenders,
    })
}

fn rounds(
    plan: &mut CellPlan,
    names: &[String],
    sides: &mut Sides,
    progress: &mut Progress,
) -> Result<Vec<Vec<Sample>>> {
    for side in &mut sides.all {
        side.configure(&plan.settings)?;
    }
    plan.workload.load(sides).context("making ready")?;
    progress.done += PREPARING;
    let mut samples = vec![Vec::with_capacity(plan.rounds); names.len()];
    for round in 0..plan.rounds {
        for contender in order(round, names.len()) {
            let what = format!(
                "{}: round {} of {}, {}",
                plan.id,
                round + 1,
                plan.rounds,
                names[contender]
            );
            progress.show(&what, 0.0);
            let sample = plan
                .workload
                .round(sides, contender, round)
                .with_context(|| format!("round {} of {}", round + 1, names[contender]))?;
            samples[contender].push(sample);
            progress.done += plan.seconds;
        }
    }
    Ok(samples)
}

/// The order of the contenders in a round. It varies, so that none always profits from its
/// predecessor: each round begins with another contender, and every second one goes backwards.
fn order(round: usize, contenders: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..contenders).map(|place| (place + round) % contenders).collect();
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_round_has_each_contender_once_in_varying_order() {
        let mut first = std::collections::BTreeSet::new();
        for round in 0..8 {
            let mut order = order(round, 4);
            first.insert(order[0]);
            order.sort_unstable();
            assert_eq!(order, [0, 1, 2, 3]);
        }
        assert!(first.len() >= 2, "{first:?}");
    }

    #[test]
    fn time_left_is_readable() {
        assert_eq!(minutes(7.4), "7 s");
        assert_eq!(minutes(125.0), "2 min 05 s");
        assert_eq!(minutes(7384.0), "2 h 03 min");
        assert_eq!(minutes(-3.0), "0 s");
    }
}
