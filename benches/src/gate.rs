//! The regression gate: figures of a run against the bands of a committed baseline.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::results::Results;

const SCHEMA: u32 = 1;

/// Bands, by name of the figure; see [`figures`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Baseline {
    schema: u32,
    bands: BTreeMap<String, Band>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Band {
    low: f64,
    high: f64,
}

pub(crate) struct Verdict {
    pub(crate) passed: bool,
    pub(crate) text: String,
}

/// Counts per unit of work that do not depend on the speed of the machine.
const COUNTS: [&str; 2] = ["pages_sealed", "pages_opened"];

const INSTRUCTIONS: &str = "instructions ";

/// Those that a statement has besides PostgreSQL's.
const STATEMENT: &str = " statement ";

/// All figures that can have a band. Elapsed time cannot, because it depends on the load of the
/// machine. Names are `CELL CONTENDER FIGURE`, with the ratio of processor time as `cpu_us-ratio`,
/// `instructions ARCHITECTURE BACKEND OPERATION CIPHER`, and `instructions ARCHITECTURE statement
/// STATEMENT`.
fn figures(results: &Results) -> BTreeMap<String, f64> {
    let mut found = BTreeMap::new();
    for cell in &results.cells {
        for contender in cell.contenders.iter().skip(1) {
            let prefix = format!("{} {}", cell.id, contender.name);
            if let Some(ratio) = contender.ratio("cpu_us") {
                found.insert(format!("{prefix} cpu_us-ratio"), ratio.ratio);
            }
            for figure in COUNTS {
                if let Some(count) = contender.figure(figure) {
                    found.insert(format!("{prefix} {figure}"), count);
                }
            }
        }
    }
    let instructions = results.instructions.iter();
    found.extend(instructions.map(|(name, count)| (format!("{INSTRUCTIONS}{name}"), *count)));
    found
}

/// The band around a value: wide for figures that depend on time, narrow for those that depend on
/// code only.
fn band_around(name: &str, value: f64) -> Band {
    let (below, above, slack) = if name.contains(STATEMENT) {
        // A statement of PostgreSQL's has tens of thousands; so this is below 1 %.
        (0.9, 1.1, 150.0)
    } else if name.starts_with(INSTRUCTIONS) {
        (0.97, 1.03, 0.0)
    } else if name.ends_with("cpu_us-ratio") {
        let noise = value.max(1.0) / value;
        (0.40, 2.50 * noise, 0.0)
    } else {
        // The number of written pages depends slightly on when the background writer and autovacuum
        // run.
        (0.70, 1.30, 0.1)
    };
    let round =
        |value: f64| if value.abs() < 100.0 { (value * 1e4).round() / 1e4 } else { value.round() };
    Band { low: round((value * below - slack).max(0.0)), high: round(value * above + slack) }
}

impl Baseline {
    pub(crate) fn read(path: &Path) -> Result<Baseline> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
        let baseline: Baseline =
            serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        ensure!(baseline.schema == SCHEMA, "{}: unknown schema", path.display());
        Ok(baseline)
    }

    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
    }

    /// A baseline with bands around these results.
    pub(crate) fn around(results: &Results) -> Baseline {
        let bands = figures(results)
            .into_iter()
            .map(|(name, value)| {
                let band = band_around(&name, value);
                (name, band)
            })
            .collect();
        Baseline { schema: SCHEMA, bands }
    }

    /// A figure that is outside its band or was not measured fails the gate. Instruction counts of
    /// code paths that this machine does not use are skipped, and named.
    pub(crate) fn judge(&self, results: &Results) -> Verdict {
        let found = figures(results);
        let mut passed = true;
        let mut text = String::new();
        let mut complain = |complaint: String| {
            passed = false;
            let _ = writeln!(text, "OUT OF BAND  {complaint}");
        };
        let mut elsewhere = Vec::new();
        for (name, band) in &self.bands {
            match found.get(name) {
                Some(value) if (band.low..=band.high).contains(value) => {}
                Some(value) => {
                    let side = if *value > band.high { "above" } else { "below" };
                    complain(format!(
                        "{name}: {value:.4} is {side} the band {} to {}",
                        band.low, band.high
                    ));
                }
                None if name.starts_with(INSTRUCTIONS) => elsewhere.push(name.as_str()),
                None => complain(format!("{name}: was not measured")),
            }
        }
        for note in results.notes.iter().filter(|note| note.contains("FAILED")) {
            complain(note.clone());
        }
        for name in elsewhere {
            let _ =
                writeln!(text, "not judged here: {name} (another processor, or no --page-path)");
        }
        for name in found.keys().filter(|name| !self.bands.contains_key(*name)) {
            let _ = writeln!(text, "has no band: {name}");
        }
        let _ = writeln!(
            text,
            "{} figures, {}",
            found.len(),
            if passed {
                "all within their bands"
            } else {
                "the gate FAILS; if the change is wanted: pagevault-bench gate --bless, and say why in the commit"
            }
        );
        Verdict { passed, text }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::example;

    #[test]
    fn results_of_the_baseline_pass() {
        let verdict = Baseline::around(&example()).judge(&example());
        assert!(verdict.passed, "{}", verdict.text);
    }

    #[test]
    fn a_ratio_out_of_its_band_fails_and_is_named() {
        let baseline = Baseline::around(&example());
        let mut slow = example();
        let ratios = &mut slow.cells[0].contenders[1].ratios;
        ratios.entry("cpu_us".into()).and_modify(|estimate| estimate.ratio *= 3.0);
        let verdict = baseline.judge(&slow);
        assert!(!verdict.passed);
        assert!(
            verdict.text.contains("OUT OF BAND  readonly/s10/c4 relations cpu_us-ratio"),
            "{}",
            verdict.text
        );
    }

    #[test]
    fn one_more_page_per_transaction_fails() {
        let baseline = Baseline::around(&example());
        let mut more = example();
        more.cells[0].contenders[1].figures.insert("pages_opened".into(), 2.0);
        assert!(!baseline.judge(&more).passed);
    }

    #[test]
    fn five_percent_more_instructions_fail_and_other_processors_do_not() {
        let baseline = Baseline::around(&example());
        let mut more = example();
        more.instructions.insert("seal aes-256-xts".into(), 9450.0);
        assert!(!baseline.judge(&more).passed);
        more.instructions.clear();
        let verdict = baseline.judge(&more);
        assert!(verdict.passed && verdict.text.contains("not judged here"), "{}", verdict.text);
    }

    #[test]
    fn five_hundred_more_instructions_of_each_statement_fail() {
        let name = "x86_64 statement nothing";
        let mut results = example();
        results.instructions.insert(name.into(), 400.0);
        let baseline = Baseline::around(&results);
        results.instructions.insert(name.into(), 500.0);
        assert!(baseline.judge(&results).passed);
        results.instructions.insert(name.into(), 900.0);
        assert!(!baseline.judge(&results).passed);
    }

    #[test]
    fn a_cell_that_was_not_measured_fails() {
        let baseline = Baseline::around(&example());
        let mut less = example();
        less.cells.clear();
        let verdict = baseline.judge(&less);
        assert!(!verdict.passed && verdict.text.contains("was not measured"), "{}", verdict.text);
        let mut failed = example();
        failed.notes.push("gate/x FAILED: no".into());
        assert!(!baseline.judge(&failed).passed);
    }
}
