//! `pagevault-powercut`: simulated power cuts. See docs/testing.md.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use pagevault_powercut::campaign::{Campaign, Verdict, try_cut};
use pagevault_powercut::catalogue;
use pagevault_powercut::recording::{Cut, Recorded};
use pagevault_powercut::scenarios::Scenario;
use pagevault_powercut_disk::Survival;
use pagevault_tests::Installation;
use pagevault_tests::choice::{self, Choice};

/// Records servers at work, cuts their power at places chosen by a seed, and judges what is left.
/// The PostgreSQL under test is that of PAGEVAULT_PG_CONFIG.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(flatten)]
    choice: Choice,
    /// Cuts for each recording
    #[arg(long, default_value_t = 50)]
    images: usize,
    /// By which cuts and loads are chosen
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Recordings of each scenario
    #[arg(long, default_value_t = 1)]
    rounds: u64,
    /// Servers at once
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Syncs below this directory do nothing: as a control
    #[arg(long, value_parser = ["pagevault", "base", "pg_wal"])]
    ignore: Option<String>,
    /// One of so many cuts is judged by standbys and restores as well; 0: none
    #[arg(long, default_value_t = 6)]
    witnesses: usize,
    /// Where recordings with failures go
    #[arg(long, default_value = "/tmp/powercut")]
    keep: PathBuf,
    /// A kept recording, of which cuts are repeated instead of making another
    #[arg(long)]
    repeat: Option<PathBuf>,
    /// With --repeat: the place of one cut
    #[arg(long, requires_all = ["repeat", "cut_seed"])]
    place: Option<u64>,
    /// And its seed
    #[arg(long, requires = "place")]
    cut_seed: Option<u64>,
    /// With --repeat: what survives is torn, as after pages without WAL
    #[arg(long, requires = "place")]
    torn: bool,
    /// With --repeat: another cut comes within recovery
    #[arg(long, requires = "place")]
    twice: bool,
    /// With --repeat: shows what was done to a block, as in base/5/16384:7, instead
    #[arg(long, requires = "place")]
    history: Option<String>,
}

fn main() -> ExitCode {
    choice::end("pagevault-powercut", "cuts", run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<usize> {
    let wanted = arguments.choice.of(catalogue::ALL)?;
    let ignore: Option<&'static [u8]> = match arguments.ignore.as_deref() {
        Some("pagevault") => Some(b"pagevault"),
        Some("base") => Some(b"base"),
        Some("pg_wal") => Some(b"pg_wal"),
        _ => None,
    };
    if let (Some(kept), Some(place), Some(seed)) =
        (&arguments.repeat, arguments.place, arguments.cut_seed)
    {
        let [scenario] = wanted.as_slice() else { bail!("name the scenario of the recording") };
        let recorded = Recorded::load(kept)?;
        if let Some(history) = &arguments.history {
            let (path, block) = history.split_once(':').context("a path and a block")?;
            eprintln!("{}", recorded.history(path, block.parse()?, place)?);
            return Ok(0);
        }
        eprintln!("{}", recorded.around(place));
        let survival = arguments.torn.then_some(Survival::Some { percent: 50, sector: Some(512) });
        let verdict = try_cut(
            scenario,
            &recorded,
            Cut { place, seed, survival, twice: arguments.twice },
            ignore,
            arguments.witnesses == 1,
        )?;
        eprintln!("{verdict:?}");
        return Ok(0);
    }
    eprintln!("{}", Installation::get()?.version);
    let mut failures = 0;
    for round in 0..arguments.rounds {
        for scenario in &wanted {
            let seed = arguments.seed + round;
            let campaign = Campaign {
                seed,
                images: arguments.images,
                jobs: arguments.jobs,
                ignore,
                witnesses: arguments.witnesses,
            };
            let recorded = match &arguments.repeat {
                Some(kept) => Recorded::load(kept)?,
                None => scenario.record(seed, arguments.witnesses > 0)?,
            };
            failures += report(&campaign, scenario, &recorded, &arguments.keep)?;
        }
    }
    Ok(failures)
}

fn report(
    campaign: &Campaign,
    scenario: &Scenario,
    recorded: &Recorded,
    keep: &std::path::Path,
) -> Result<usize> {
    let cuts = campaign.cuts(recorded);
    let bar = ProgressBar::new(cuts.len() as u64);
    bar.set_style(ProgressStyle::with_template("{prefix} {bar:30} {pos}/{len} {msg}")?);
    bar.set_prefix(scenario.name);
    let (failed, known) = (AtomicUsize::new(0), Mutex::new(BTreeMap::<String, usize>::new()));
    let interim = AtomicUsize::new(0);
    let failures = campaign.run(scenario, recorded, &cuts, |_, verdict| {
        match verdict {
            None => bar.set_message(format!("{} failed", failed.fetch_add(1, Relaxed) + 1)),
            Some(Verdict::Good) => {}
            Some(Verdict::GoodInOutage) => drop(interim.fetch_add(1, Relaxed)),
            Some(Verdict::Known(what)) => {
                let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
                *known.entry(what.clone()).or_default() += 1;
            }
        }
        bar.inc(1);
    });
    bar.finish();
    eprintln!(
        "{} seed {}: {} operations, {} cuts, {} failed",
        scenario.name,
        campaign.seed,
        recorded.places().len(),
        cuts.len(),
        failures.len()
    );
    if interim.load(Relaxed) > 0 {
        eprintln!("  {} with pages under interim keys", interim.load(Relaxed));
    }
    for (what, times) in known.into_inner().unwrap_or_default() {
        eprintln!("  {times} as PostgreSQL itself is known to: {what}");
    }
    if failures.is_empty() {
        return Ok(0);
    }
    let directory =
        keep.join(format!("{}-{}-{}", scenario.name, campaign.seed, std::process::id()));
    recorded.save(&directory)?;
    for failure in &failures {
        eprintln!(
            "--- pagevault-powercut {} --repeat {} {}\n{:#}\n{}",
            scenario.name,
            directory.display(),
            failure.cut,
            failure.error,
            failure.around
        );
    }
    Ok(failures.len())
}
