//! Two runs side by side.

use std::fmt::Write;

use crate::results::{COMPARED, Contender, Results};
use crate::statistics::Estimate;

/// Changes between two runs, for each contender of each cell that both contain. Absolute figures of
/// different machines cannot be compared; ratios to the baseline of the same run can.
pub(crate) fn table(before: &Results, after: &Results) -> String {
    let mut text = String::new();
    for (name, results) in [("before", before), ("after", after)] {
        let _ = writeln!(
            text,
            "{name:<7} {}  {}  {}",
            results.taken,
            short(&results.postgres),
            results.machine.cpu
        );
    }
    if before.machine.cpu != after.machine.cpu || before.machine.cores != after.machine.cores {
        text.push_str("The machines differ: compare the ratios, not the rates.\n");
    }
    let _ = writeln!(
        text,
        "\n{:<46} {:<11} {:<7} {:>8} {:>8}  {:<24}",
        "cell", "contender", "ratio", "before", "after", ""
    );
    let mut alone = Vec::new();
    for cell in &before.cells {
        let Some(other) = after.cells.iter().find(|other| other.id == cell.id) else {
            alone.push(format!("only before: {}", cell.id));
            continue;
        };
        for contender in cell.contenders.iter().skip(1) {
            let Some(now) = other.contenders.iter().find(|now| now.name == contender.name) else {
                continue;
            };
            for figure in COMPARED {
                row(&mut text, &cell.id, contender, now, figure);
            }
        }
    }
    let known = |id: &str| before.cells.iter().any(|cell| cell.id == id);
    alone.extend(
        after
            .cells
            .iter()
            .filter(|cell| !known(&cell.id))
            .map(|cell| format!("only after: {}", cell.id)),
    );
    for (operation, count) in &after.instructions {
        if let Some(earlier) = before.instructions.get(operation) {
            let _ = writeln!(
                text,
                "instructions {operation}: {earlier:.0} before, {count:.0} after ({:+.1} %)",
                (count / earlier - 1.0) * 100.0
            );
        }
    }
    for line in alone {
        let _ = writeln!(text, "{line}");
    }
    text
}

fn row(text: &mut String, cell: &str, before: &Contender, after: &Contender, figure: &str) {
    let (Some(old), Some(new)) = (before.ratio(figure), after.ratio(figure)) else { return };
    let name = if figure == "rate" { "rate" } else { "CPU" };
    let _ = writeln!(
        text,
        "{cell:<46} {:<11} {name:<7} {:>8.3} {:>8.3}  {}",
        after.name,
        old.ratio,
        new.ratio,
        verdict(old, new, figure == "rate")
    );
}

/// The conclusion: only disjoint intervals show a change.
fn verdict(old: Estimate, new: Estimate, more_is_better: bool) -> &'static str {
    let higher = new.low > old.high;
    let lower = new.high < old.low;
    match (higher, lower) {
        (false, false) => "",
        (higher, _) if higher == more_is_better => "better",
        _ => "WORSE",
    }
}

fn short(version: &str) -> &str {
    version.split(" on ").next().unwrap_or(version)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::example;

    fn estimate(low: f64, high: f64) -> Estimate {
        Estimate { ratio: f64::midpoint(low, high), low, high, confidence: 0.95, rounds: 6 }
    }

    #[test]
    fn only_intervals_apart_are_a_change() {
        let old = estimate(0.90, 0.95);
        assert_eq!(verdict(old, estimate(0.94, 0.99), true), "");
        assert_eq!(verdict(old, estimate(0.96, 0.99), true), "better");
        assert_eq!(verdict(old, estimate(0.80, 0.89), true), "WORSE");
        assert_eq!(verdict(old, estimate(0.96, 0.99), false), "WORSE");
        assert_eq!(verdict(old, estimate(0.80, 0.89), false), "better");
    }

    #[test]
    fn cells_are_matched_by_name_and_the_others_named() {
        let before = example();
        let mut after = example();
        after.cells[0].contenders[1].ratios.insert("rate".into(), estimate(0.5, 0.6));
        let mut other = after.cells[0].clone();
        other.id = "readonly/new".into();
        after.cells.push(other);
        let text = table(&before, &after);
        let line = text
            .lines()
            .find(|line| line.contains("rate") && line.starts_with("readonly/s10/c4"))
            .unwrap_or_default();
        assert!(
            line.contains("0.900") && line.contains("0.550") && line.contains("WORSE"),
            "{text}"
        );
        assert!(text.contains("only after: readonly/new"), "{text}");
    }
}
