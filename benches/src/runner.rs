//! Runs all cells one after the other. Each round of a cell measures all contenders in turn.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use pagevault_tests::Installation;

use crate::interrupt;
use crate::plan::{Enough, Plan};
use crate::results::{Cell, Contender, Results, SCHEMA, Sample};
use crate::servers::{Side, Sides};
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
    let mut seen = BTreeSet::new();
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

    let sources: BTreeSet<_> = sides.all.iter().filter_map(Side::source).collect();
    for source in sources {
        results.notes.push(format!("processor time: from {source}"));
    }

    let mut progress = Progress::new(bar, &cells, &sides, request.plan.enough);
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
    enough: Enough,
    done: f64,
    total: f64,
    started: Instant,
}

/// Seconds to load a data set and restart all servers before the rounds of a cell.
const PREPARING: f64 = 4.0;

impl Progress {
    fn new(bar: ProgressBar, cells: &[CellPlan], sides: &Sides, enough: Enough) -> Progress {
        bar.set_length(1000);
        let mut progress = Progress { bar, enough, done: 0.0, total: 0.0, started: Instant::now() };
        progress.total = cells.iter().map(|cell| progress.expected(cell, sides)).sum();
        progress
    }

    /// Seconds that a cell takes if its intervals stay wide.
    fn expected(&self, cell: &CellPlan, sides: &Sides) -> f64 {
        let least = (cell.rounds * cell.workload.contenders(sides).len()) as f64 * cell.seconds;
        PREPARING + least.max(self.enough.budget)
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
    let end = progress.done + progress.expected(&plan, sides);
    progress.show(&format!("{}: making ready", plan.id), 0.0);
    let result = rounds(&mut plan, &names, sides, progress);
    progress.done = end;
    let samples = result?;
    let contenders = contenders(&names, &samples);
    let mut notes = plan.workload.notes(&samples);
    notes.extend(ended(&contenders, progress.enough));
    Ok(Cell {
        notes,
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
    let started = Instant::now();
    // Looking after each round would favour a chance that makes an interval narrow.
    let mut next_look = plan.rounds;
    for round in 0.. {
        let spent = started.elapsed().as_secs_f64() >= progress.enough.budget;
        if round >= plan.rounds && spent {
            break;
        }
        if round >= next_look {
            let widest = widest(&contenders(names, &samples));
            if widest.is_some_and(|width| width <= progress.enough.precision) {
                break;
            }
            next_look = round * 3 / 2;
        }
        for contender in order(round, names.len()) {
            let what = format!("{}: round {}, {}", plan.id, round + 1, names[contender]);
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

fn contenders(names: &[String], samples: &[Vec<Sample>]) -> Vec<Contender> {
    names
        .iter()
        .zip(samples)
        .map(|(name, rounds)| Contender::new(name, rounds.clone(), &samples[0]))
        .collect()
}

/// How far the intervals of processor time reach from their ratios, the widest of a cell; `None` if
/// there is no such interval.
fn widest(contenders: &[Contender]) -> Option<f64> {
    let ratios = contenders.iter().skip(1).map(|contender| contender.ratio("cpu_us"));
    ratios.map(|ratio| Some(ratio?.reach())).try_fold(0.0, |most: f64, one| Some(most.max(one?)))
}

/// Says why a cell with several contenders had no more rounds, unless their number was given.
fn ended(contenders: &[Contender], enough: Enough) -> Option<String> {
    let open = contenders.len() > 1 && enough.budget > 0.0;
    let reach = open.then(|| widest(contenders)).flatten()?;
    let rounds = contenders[0].rounds.len();
    Some(if reach <= enough.precision {
        format!("{rounds} rounds: intervals of CPU within {:.1} %", enough.precision * 100.0)
    } else {
        format!("{rounds} rounds, no time for more: intervals of CPU up to {:.1} %", reach * 100.0)
    })
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
        let mut first = BTreeSet::new();
        for round in 0..8 {
            let mut order = order(round, 4);
            first.insert(order[0]);
            order.sort_unstable();
            assert_eq!(order, [0, 1, 2, 3]);
        }
        assert!(first.len() >= 2, "{first:?}");
    }

    #[test]
    fn the_widest_interval_decides_and_is_named() {
        let enough = |precision| Enough { precision, budget: 60.0 };
        let mut contenders = crate::results::tests::example().cells.remove(0).contenders;
        assert_eq!(
            ended(&contenders, enough(0.01)).as_deref(),
            Some("3 rounds: intervals of CPU within 1.0 %")
        );
        let ratios = &mut contenders[1].ratios;
        ratios.entry("cpu_us".into()).and_modify(|estimate| estimate.high = 1.26);
        assert!(widest(&contenders).is_some_and(|reach| (reach - 0.05).abs() < 1e-9));
        assert_eq!(
            ended(&contenders, enough(0.01)).as_deref(),
            Some("3 rounds, no time for more: intervals of CPU up to 5.0 %")
        );
        let fixed = Enough { budget: 0.0, ..enough(0.01) };
        assert_eq!(ended(&contenders, fixed), None);
        contenders[1].ratios.clear();
        assert_eq!(ended(&contenders, enough(0.01)), None);
    }

    #[test]
    fn time_left_is_readable() {
        assert_eq!(minutes(7.4), "7 s");
        assert_eq!(minutes(125.0), "2 min 05 s");
        assert_eq!(minutes(7384.0), "2 h 03 min");
        assert_eq!(minutes(-3.0), "0 s");
    }
}
