//! Which cuts are tried.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use anyhow::{Context, Result};
use pagevault_powercut_disk::{Ignore, Random, Survival};
use pagevault_tests::Cluster;

pub use crate::judge::Verdict;
use crate::judge::{end_of_log, judge};
use crate::known;
use crate::ledger::Ledger;
use crate::outage::Outage;
use crate::recording::{Cut, Recorded, Recording};
use crate::scenarios::{Scenario, Tenants};
use crate::witnesses;

/// A cut after which something was wrong.
#[derive(Debug)]
pub struct Failure {
    /// Which one.
    pub cut: Cut,
    /// What was wrong.
    pub error: anyhow::Error,
    /// What the server had been doing.
    pub around: String,
}

/// How a recording is tried.
#[derive(Clone, Copy, Debug)]
pub struct Campaign {
    /// By which cuts are chosen.
    pub seed: u64,
    /// How many.
    pub images: usize,
    /// Servers that run at once.
    pub jobs: usize,
    /// Syncs that are not made.
    pub ignore: Ignore,
    /// One of so many cuts is judged by other servers as well; 0: none.
    pub witnesses: usize,
}

impl Campaign {
    /// The cuts that are tried: of seven two anywhere, two at what is done to the keystore, one
    /// after a page changed without WAL, one at what is done to prepared transactions in a
    /// checkpoint, and one that is followed by another one within recovery.
    #[must_use]
    pub fn cuts(&self, recorded: &Recorded) -> Vec<Cut> {
        let anywhere = recorded.places();
        let prepared = recorded.places_at(b"pg_twophase");
        let keystore = recorded.places_at(b"pagevault");
        let without_wal = recorded.places_without_wal();
        let mut random = Random::new(self.seed);
        let mut one = |n: usize| {
            let kinds =
                [&anywhere, &keystore, &anywhere, &without_wal, &keystore, &anywhere, &prepared];
            let places = Some(kinds[n % 7]).filter(|places| !places.is_empty());
            let places = places.unwrap_or(&anywhere);
            let torn = Survival::Some { percent: 50, sector: Some(512) };
            Cut {
                place: places[random.below(places.len() as u64) as usize],
                seed: random.number(),
                survival: (n % 7 == 3).then_some(torn),
                twice: n % 7 == 5,
            }
        };
        (0..self.images).map(&mut one).collect()
    }

    /// Tries them all; tells each that was tried.
    #[must_use]
    pub fn run(
        &self,
        scenario: &Scenario,
        recorded: &Recorded,
        cuts: &[Cut],
        tried: impl Fn(Cut, Option<&Verdict>) + Sync,
    ) -> Vec<Failure> {
        let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            for _ in 0..self.jobs {
                scope.spawn(|| {
                    loop {
                        let n = next.fetch_add(1, Relaxed);
                        let Some(cut) = cuts.get(n) else { break };
                        let witnesses = self.witnesses > 0 && n % self.witnesses == 0;
                        let result = try_cut(scenario, recorded, *cut, self.ignore, witnesses);
                        tried(*cut, result.as_ref().ok());
                        if let Err(error) = result
                            && let Ok(mut failures) = failures.lock()
                        {
                            let around = recorded.around(cut.place);
                            failures.push(Failure { cut: *cut, error, around });
                        }
                    }
                });
            }
        });
        failures.into_inner().unwrap_or_default()
    }
}

/// Judges a server that was stopped in good order, and then spoilt: its files, or what is in it.
/// As a control of the judges.
///
/// # Errors
/// When something is wrong, as it should be.
pub fn judge_spoilt(
    scenario: &Scenario,
    recorded: &Recorded,
    files: impl FnOnce(&Path) -> Result<()>,
    contents: impl FnOnce(&Cluster) -> Result<()>,
) -> Result<Verdict> {
    let place = recorded.stopped().context("it was never stopped")?;
    let cut = Cut { place, seed: 0, survival: Some(Survival::Everything), twice: false };
    let mut cluster = recorded.cluster_after(cut, None)?;
    files(&cluster.data_directory())?;
    cluster.start_server().context("the first start")?;
    contents(&cluster)?;
    let ledger = Ledger::of(recorded.marks(u64::MAX), place);
    judge(&mut cluster, scenario, &ledger, scenario.log, |_| Ok(()))
}

/// Makes the cut, and judges what it leaves. Where a cut within recovery comes is chosen by the
/// seed, but what that recovery had done by then is not.
///
/// # Errors
/// When something is wrong.
pub fn try_cut(
    scenario: &Scenario,
    recorded: &Recorded,
    cut: Cut,
    ignore: Ignore,
    with_others: bool,
) -> Result<Verdict> {
    let ledger = Ledger::of(recorded.marks(u64::MAX), cut.place);
    let outage =
        (scenario.tenants == Tenants::Away).then(|| Outage::begin(recorded)).transpose()?;
    let first = recorded.cluster_after(cut, ignore)?;
    let within;
    let mut cluster = if cut.twice {
        let recording = Recording::begin(first).context("the start that is cut short")?;
        recording.cluster().sql("CHECKPOINT")?;
        if !known::lost(recording.cluster())?.is_empty() {
            return Ok(Verdict::Known(known::PREPARED.to_owned()));
        }
        within = recording.end()?;
        let places = within.places();
        let mut random = Random::new(cut.seed).of(2);
        let place = places[random.below(places.len() as u64) as usize];
        within.cluster_after(
            Cut { place, seed: random.number(), survival: None, twice: false },
            ignore,
        )?
    } else {
        first
    };
    let mut may_say = scenario.log.to_vec();
    let started = cluster.start_after_crash().context("the first start");
    if matches!(started, Ok(true)) {
        may_say.push("File exists");
    }
    let others = |server: &Cluster| match with_others {
        true => witnesses::judge(recorded, cut.place, scenario, server),
        false => Ok(()),
    };
    let outlived = started.and_then(|_| match &outage {
        Some(outage) => {
            let lost = known::lost(&cluster)?;
            let again = lost.is_empty() && Random::new(cut.seed).of(3).percent(50);
            let interim = outage.judge(&cluster, &ledger.without(&lost), again)?;
            outage.end(&cluster).map(|()| interim)
        }
        None => Ok(false),
    });
    let judged = outlived.and_then(|interim| {
        match judge(&mut cluster, scenario, &ledger, &may_say, others)? {
            Verdict::Good if interim => Ok(Verdict::GoodInOutage),
            verdict => Ok(verdict),
        }
    });
    judged.with_context(|| end_of_log(&cluster))
}
