//! Reports to read.

pub(crate) mod html;
mod markdown;
mod plots;
pub(crate) mod terminal;

use std::path::Path;

use anyhow::{Context, Result};

use crate::results::{Contender, Results};
use crate::statistics::Estimate;

/// Writes `report.md` and `report.html`.
pub(crate) fn write(results: &[Results], directory: &Path) -> Result<()> {
    std::fs::create_dir_all(directory)?;
    for (name, text) in
        [("report.md", markdown::report(results)), ("report.html", html::report(results)?)]
    {
        let path = directory.join(name);
        std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

/// Headings of the table of cells, the same in all reports.
pub(crate) const HEADINGS: [&str; 13] = [
    "variant",
    "rate",
    "rate, ratio",
    "CPU µs",
    "CPU, ratio",
    "instructions, ratio",
    "latency ms",
    "p95 ms",
    "hit ratio",
    "pages sealed",
    "pages opened",
    "cipher µs",
    "WAL bytes",
];

/// One row of that table.
pub(crate) fn row(contender: &Contender) -> [String; HEADINGS.len()] {
    let figure = |name: &str| contender.figure(name).map_or_else(|| "-".into(), significant);
    let hit = contender.figure("hit_ratio").map_or_else(|| "-".into(), |hit| format!("{hit:.4}"));
    [
        contender.name.clone(),
        figure("rate"),
        contender.ratio("rate").map_or_else(|| "-".into(), interval),
        figure("cpu_us"),
        contender.ratio("cpu_us").map_or_else(|| "-".into(), interval),
        contender.ratio("instructions").map_or_else(|| "-".into(), interval),
        figure("latency_ms"),
        figure("p95_ms"),
        hit,
        figure("pages_sealed"),
        figure("pages_opened"),
        figure("cipher_us"),
        figure("wal_bytes"),
    ]
}

/// `0.987 [0.981, 0.994]`; just 1 for the baseline itself.
fn interval(estimate: Estimate) -> String {
    if [estimate.ratio, estimate.low, estimate.high] == [1.0; 3] {
        return "1".into();
    }
    format!("{:.3} [{:.3}, {:.3}]", estimate.ratio, estimate.low, estimate.high)
}

/// Four significant digits, or all digits before the point.
pub(crate) fn significant(value: f64) -> String {
    let digits = match value.abs() {
        0.0..0.0005 => return "0".into(),
        size if size < 1.0 => 4,
        size if size < 10.0 => 3,
        size if size < 100.0 => 2,
        size if size < 1000.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$}")
}

/// How to read the intervals of these results.
pub(crate) fn method(results: &[Results]) -> String {
    let rounds = results
        .iter()
        .flat_map(|results| &results.cells)
        .flat_map(|cell| &cell.contenders)
        .filter_map(|contender| contender.ratio("rate"));
    let (mut least, mut most) = (1.0_f64, 0.0_f64);
    for estimate in rounds {
        least = least.min(estimate.confidence);
        most = most.max(estimate.confidence);
    }
    let confidence = if most - least < 0.005 {
        format!("{:.1} %", most * 100.0)
    } else {
        format!("{:.1} to {:.1} %", least * 100.0, most * 100.0)
    };
    format!(
        "Ratios are to the first row of each cell, from rounds in which all take turns: Hodges-Lehmann estimate, \
         interval of Wilcoxon's signed-rank test (confidence {confidence}). Rates are work per second. CPU is the \
         time of all server processes for one unit of work, the checkpoint that follows included. Pages, cipher \
         time and WAL are per unit of work."
    )
}

#[cfg(test)]
mod tests {
    use super::significant;

    #[test]
    fn numbers_keep_four_digits() {
        let shown: Vec<_> =
            [0.0, 0.01234, 1.23456, 12.3456, 123.456, 12345.6].map(significant).into();
        assert_eq!(shown, ["0", "0.0123", "1.235", "12.35", "123.5", "12346"]);
    }
}
