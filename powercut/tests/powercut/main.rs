//! Some power cuts, and the proof that the judges would see a defect. The long form is `make
//! powercut`.

mod controls;
mod received;

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use anyhow::{Result, ensure};
use pagevault_powercut::campaign::{Campaign, Verdict};
use pagevault_powercut::catalogue::ALL;
use pagevault_tests::choice::named;

const QUICK: Campaign = Campaign { seed: 1, images: 12, jobs: 2, ignore: None, witnesses: 6 };

fn good(name: &str) -> Result<()> {
    verdicts(name, QUICK).map(drop)
}

/// Of each cut; none has failed.
fn verdicts(name: &str, quick: Campaign) -> Result<Vec<Verdict>> {
    let scenario = named(ALL, name)?;
    let recorded = scenario.record(quick.seed, true)?;
    let cuts = quick.cuts(&recorded);
    let verdicts = Mutex::new(Vec::new());
    let failures = quick.run(scenario, &recorded, &cuts, |_, verdict| {
        let mut verdicts = verdicts.lock().unwrap_or_else(PoisonError::into_inner);
        verdicts.extend(verdict.cloned());
    });
    if !failures.is_empty() {
        let kept = std::env::temp_dir().join(format!("powercut-{name}-{}", std::process::id()));
        recorded.save(&kept)?;
        let list: Vec<_> = failures
            .iter()
            .map(|failure| {
                format!(
                    "pagevault-powercut {name} --repeat {} {}\n{:#}\n{}",
                    kept.display(),
                    failure.cut,
                    failure.error,
                    failure.around
                )
            })
            .collect();
        anyhow::bail!("{} of {} cuts:\n{}", failures.len(), cuts.len(), list.join("\n"));
    }
    Ok(verdicts.into_inner().unwrap_or_else(PoisonError::into_inner))
}

#[test]
fn rekeying_survives_power_cuts() -> Result<()> {
    good("rekey")
}

#[test]
fn rekeying_without_checksums_survives_power_cuts() -> Result<()> {
    good("rekey-without-checksums")
}

#[test]
fn key_groups_survive_power_cuts_and_outages() -> Result<()> {
    good("groups")?;
    let verdicts = verdicts("groups-away", Campaign { images: 7, ..QUICK })?;
    ensure!(verdicts.contains(&Verdict::GoodInOutage), "nothing is under an interim key");
    Ok(())
}

#[test]
fn stock_postgresql_survives_power_cuts() -> Result<()> {
    good("stock")
}

#[test]
fn prepared_transactions_survive_power_cuts() -> Result<()> {
    good("prepared")
}

#[test]
fn a_keystore_that_is_not_synced_is_caught() -> Result<()> {
    let scenario = named(ALL, "rekey")?;
    let recorded = scenario.record(7, false)?;
    let careless =
        Campaign { images: 16, ignore: Some(b"pagevault"), seed: 7, witnesses: 0, ..QUICK };
    let tried = AtomicUsize::new(0);
    let failures = careless.run(scenario, &recorded, &careless.cuts(&recorded), |_, _| {
        tried.fetch_add(1, Relaxed);
    });
    ensure!(!failures.is_empty(), "{} cuts were judged good", tried.into_inner());
    Ok(())
}
